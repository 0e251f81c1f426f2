"""Answers from any OpenAI-compatible server: many requests in flight, retried, each failing for itself.

    config = EndpointConfig("http://localhost:8000/v1", in_flight=64)
    request = EndpointRequest(messages=[{"role": "user", "content": "2 + 2?"}], options={"temperature": 0.6, "seed": 7})
    for key, answer in ask_all(config, [("first", request)]):
        print(key, answer.error or answer.choices[0].text)

What goes wrong is one of three things:

- *passing*: no connection, a timeout, 408, 409, 425, 429, any 5xx, or a 200 that holds no answer. Tried again after a
  wait that doubles, or the one that `Retry-After` asks for.
- *this request's*: another 4xx (a prompt too long, a field refused), or tries used up. `Answer.error` says so in a
  sentence; other requests go on.
- *everybody's*: 401 to 404, no server at all at the start, or `give_up_after` requests in a row that used up their
  tries. `ConfigError` stops the run; answers that came before it have been handed out.
"""

from __future__ import annotations

import asyncio
import os
import random
import time
from collections.abc import AsyncIterator, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from email.utils import parsedate_to_datetime
from types import TracebackType
from typing import Any, NamedTuple, TypeVar

from tah2.config.strict import ConfigError

Key = TypeVar("Key", bound=Hashable)

PASSING = frozenset({408, 409, 425, 429})
FATAL = frozenset({401, 402, 403, 404})
SHOWN_ERROR = 300
FINDING_TRIES = 3


@dataclass(frozen=True)
class EndpointConfig:
    """Where the server is, and how hard to press it."""

    url: str
    """The base of the API, ending in `/v1` as a rule."""
    model: str = ""
    """Empty: the one model that the server lists."""
    api_key_env: str = "OPENAI_API_KEY"
    """The environment variable that holds the key; without it requests carry none."""
    in_flight: int = 64
    timeout: float = 3600.0
    """Seconds for one try of one request, from sending it to its last byte."""
    retries: int = 6
    """Further tries after the first."""
    first_wait: float = 1.0
    longest_wait: float = 60.0
    """Seconds between tries; also the longest wait that a server may ask for."""
    give_up_after: int = 50
    """So many requests in a row that used up their tries mean that the server is gone."""

    def __post_init__(self) -> None:
        if not self.url.startswith(("http://", "https://")):
            raise ConfigError(f"The server's 'url' must begin with http:// or https://, not {self.url!r}.")
        if self.in_flight < 1 or self.retries < 0 or self.give_up_after < 1:
            raise ConfigError("'in_flight' and 'give_up_after' must be at least 1, and 'retries' at least 0.")
        if not self.timeout > 0 or not 0 <= self.first_wait <= self.longest_wait:
            raise ConfigError("'timeout' must be positive, and 'first_wait' between 0 and 'longest_wait'.")

    def address(self, route: str) -> str:
        return f"{self.url.rstrip('/')}/{route}"


@dataclass(frozen=True)
class EndpointRequest:
    """A chat (`messages`) or a plain continuation (`prompt`: text or token ids)."""

    messages: Sequence[Mapping[str, Any]] | None = None
    prompt: str | Sequence[int] | None = None
    tools: Sequence[Mapping[str, Any]] = ()
    options: Mapping[str, Any] = field(default_factory=dict)
    """Sent as they are: temperature, top_p, top_k, min_p, max_tokens, seed, n, stop, chat_template_kwargs,
    return_token_ids, return_depths, max_depth, exit_threshold, ..."""

    def __post_init__(self) -> None:
        if (self.messages is None) == (self.prompt is None):
            raise ConfigError("A request needs either 'messages' or a 'prompt'.")

    @property
    def route(self) -> str:
        return "completions" if self.messages is None else "chat/completions"

    def body(self, model: str) -> dict[str, Any]:
        content: dict[str, Any] = {"model": model}
        if self.messages is None:
            content["prompt"] = self.prompt if isinstance(self.prompt, str) else list(self.prompt or ())
        else:
            content["messages"] = [dict(message) for message in self.messages]
            if self.tools:
                content["tools"] = [dict(tool) for tool in self.tools]
        return content | dict(self.options)


@dataclass(frozen=True)
class Choice:
    """One of the `n` answers to a request."""

    text: str
    finish_reason: str | None
    reasoning: str = ""
    """The thinking that the server split off the text, if it does."""
    tool_calls: tuple[dict[str, Any], ...] = ()
    token_ids: tuple[int, ...] | None = None
    """None where the server gives none; ask with the option `return_token_ids`."""
    depths: tuple[int, ...] | None = None
    """Iterations per output token; ask with the option `return_depths`."""
    raw: Mapping[str, Any] = field(default_factory=dict, repr=False)


@dataclass(frozen=True)
class Answer:
    """What became of a request: choices, or an error."""

    choices: tuple[Choice, ...] = ()
    error: str | None = None
    status: int | None = None
    """The HTTP status behind `error`, where there was one."""
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    prompt_token_ids: tuple[int, ...] | None = None
    prompt_depths: tuple[int, ...] | None = None
    model: str = ""
    """The name that the server answered under."""
    seconds: float = 0.0
    """Of the try that succeeded, or of the last one."""
    tries: int = 1


class _Failure(NamedTuple):
    reason: str
    status: int | None = None
    passing: bool = True
    wait: float | None = None


class EndpointClient(AbstractAsyncContextManager["EndpointClient"]):
    """A connection pool to one server; use it in `async with`, which finds the server and its model."""

    def __init__(self, config: EndpointConfig) -> None:
        self.config, self.model = config, config.model
        self._http: Any = None
        self._in_a_row = 0

    async def __aenter__(self) -> EndpointClient:
        httpx = _httpx()
        key = os.environ.get(self.config.api_key_env, "")
        limits = httpx.Limits(max_connections=self.config.in_flight, max_keepalive_connections=self.config.in_flight)
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        self._http = httpx.AsyncClient(headers=headers, limits=limits, timeout=httpx.Timeout(None, connect=30.0))
        try:
            await self._find_server()
        except BaseException:
            await self._http.aclose()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._http.aclose()

    async def answer(self, request: EndpointRequest) -> Answer:
        """The answer to one request; raises only where every request would fail alike."""
        config, body = self.config, request.body(self.model)
        for tried in range(1, config.retries + 2):
            started = time.perf_counter()
            found = await self._try("POST", request.route, body)
            seconds = time.perf_counter() - started
            if not isinstance(found, _Failure):
                try:
                    answer = _parsed(found, seconds, tried)
                except (KeyError, TypeError, ValueError, AttributeError):
                    found = _Failure(f"sent no choices but {str(found)[:SHOWN_ERROR]}", 200)
                else:
                    self._in_a_row = 0
                    return answer
            if not found.passing:
                break
            if tried <= config.retries:
                await asyncio.sleep(self._wait(tried, found.wait))
        self._note(found)
        return Answer(error=f"{self._name} {found.reason}", status=found.status, seconds=seconds, tries=tried)

    async def answers(self, requests: Iterable[tuple[Key, EndpointRequest]]) -> AsyncIterator[tuple[Key, Answer]]:
        """Answers as they come, at most `in_flight` requests at once; `requests` is read only as places come free."""
        source, running = iter(requests), dict[asyncio.Task[Answer], Key]()
        try:
            while True:
                while len(running) < self.config.in_flight and (entry := next(source, None)) is not None:
                    running[asyncio.create_task(self.answer(entry[1]))] = entry[0]
                if not running:
                    return
                done, _ = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
                finished = [(running.pop(task), task) for task in done]
                for key, task in sorted(finished, key=lambda pair: pair[1].exception() is not None):
                    yield key, task.result()
        finally:
            for task in running:
                task.cancel()
            await asyncio.gather(*running, return_exceptions=True)

    @property
    def _name(self) -> str:
        return f"The server at {self.config.url}"

    def _note(self, failure: _Failure) -> None:
        """Count failures in a row; stop everything once the server itself is what fails."""
        if failure.status in FATAL:
            raise ConfigError(f"{self._name} {failure.reason}; {_remedy(failure.status, self.config)}.")
        self._in_a_row = self._in_a_row + 1 if failure.passing else 0
        if self._in_a_row >= self.config.give_up_after:
            raise ConfigError(
                f"{self._name} {failure.reason}, {self._in_a_row} requests in a row: look after it and run again."
            )

    async def _try(self, method: str, route: str, body: Mapping[str, Any] | None = None) -> Any:
        """The JSON object of one response, or the `_Failure` that came instead."""
        httpx = _httpx()
        try:
            async with asyncio.timeout(self.config.timeout):
                response = await self._http.request(method, self.config.address(route), json=body)
        except TimeoutError:
            return _Failure(f"did not answer within {self.config.timeout:g} s")
        except httpx.TransportError as error:
            return _Failure(f"cannot be reached ({str(error) or type(error).__name__})")
        except (httpx.InvalidURL, httpx.HTTPError) as error:
            raise ConfigError(f"Cannot send requests to {self.config.url!r}: {error}.") from None
        if response.status_code != 200:
            code = response.status_code
            reason = f"answered {code} ({_complaint(response)})"
            return _Failure(reason, code, code in PASSING or code >= 500, _retry_after(response))
        try:
            found = response.json()
        except ValueError:
            return _Failure("answered something that is not JSON", 200)
        return found if isinstance(found, dict) else _Failure("answered something that is no JSON object", 200)

    async def _find_server(self) -> None:
        """Refuse a server that is not there, and learn the name of its model unless one is given.

        A server need not list its models when the name is known, so then any response will do.
        """
        for tried in range(1, FINDING_TRIES + 1):
            found = await self._try("GET", "models")
            if not isinstance(found, _Failure) or not found.passing or tried == FINDING_TRIES:
                break
            await asyncio.sleep(self._wait(tried, found.wait))
        if isinstance(found, _Failure) and (not self.model or found.status is None or found.status in (401, 403)):
            raise ConfigError(f"{self._name} {found.reason}; {_remedy(found.status, self.config)}.")
        if self.model:
            return
        names = [str(entry["id"]) for entry in found.get("data") or () if isinstance(entry, dict) and "id" in entry]
        if len(names) != 1:
            listed = ", ".join(names) or "no model"
            raise ConfigError(f"{self._name} lists {listed}: say which 'model' to ask.")
        self.model = names[0]

    def _wait(self, tried: int, asked: float | None) -> float:
        """Seconds before the next try: what the server asked for, or a doubling wait, spread out by up to a half."""
        if asked is not None:
            return min(asked, self.config.longest_wait)
        return min(self.config.first_wait * 2 ** (tried - 1), self.config.longest_wait) * random.uniform(0.5, 1.0)


def ask_all(config: EndpointConfig, requests: Iterable[tuple[Key, EndpointRequest]]) -> Iterator[tuple[Key, Answer]]:
    """`EndpointClient.answers` for programs without an event loop of their own; leaving the loop early cancels."""
    loop = asyncio.new_event_loop()
    client = EndpointClient(config)
    try:
        loop.run_until_complete(client.__aenter__())
        try:
            answers = client.answers(requests)
            try:
                while (pair := loop.run_until_complete(anext(answers, None))) is not None:
                    yield pair
            finally:
                loop.run_until_complete(answers.aclose())  # type: ignore[attr-defined]
        finally:
            loop.run_until_complete(client.__aexit__(None, None, None))
    finally:
        loop.close()


def _httpx() -> Any:
    try:
        import httpx
    except ImportError:
        raise ConfigError("Asking a server needs the library 'httpx': install tah2 with its extra 'evals'.") from None
    return httpx


def _parsed(found: Mapping[str, Any], seconds: float, tries: int) -> Answer:
    """The answer in a response; raises whatever a response without proper choices leads to."""
    ordered = sorted(found["choices"], key=lambda choice: choice.get("index") or 0)
    if not ordered:
        raise ValueError("no choices")
    usage = found.get("usage") or {}
    return Answer(
        tuple(_choice(choice) for choice in ordered),
        prompt_tokens=usage.get("prompt_tokens"),
        completion_tokens=usage.get("completion_tokens"),
        prompt_token_ids=_ints(found.get("prompt_token_ids") or ordered[0].get("prompt_token_ids")),
        prompt_depths=_ints(found.get("prompt_depths") or ordered[0].get("prompt_depths")),
        model=str(found.get("model") or ""),
        seconds=seconds,
        tries=tries,
    )


def _choice(raw: Mapping[str, Any]) -> Choice:
    message = raw.get("message") or {}
    text = message.get("content") if message else raw.get("text")
    return Choice(
        text=text if isinstance(text, str) else "",
        finish_reason=raw.get("finish_reason"),
        reasoning=message.get("reasoning_content") or message.get("reasoning") or "",
        tool_calls=tuple(message.get("tool_calls") or ()),
        token_ids=_ints(raw.get("token_ids")),
        depths=_ints(raw.get("depths")),
        raw=raw,
    )


def _ints(values: Any) -> tuple[int, ...] | None:
    return tuple(int(value) for value in values) if isinstance(values, list) else None


def _complaint(response: Any) -> str:
    """What the server says of an error, in one line: OpenAI's shape, FastAPI's, or the body's begin."""
    try:
        found = response.json()
    except ValueError:
        found = response.text
    error = found.get("error", found.get("detail", found)) if isinstance(found, dict) else found
    message = error.get("message", error) if isinstance(error, dict) else error
    return " ".join(str(message).split())[:SHOWN_ERROR].rstrip(".") or response.reason_phrase


def _retry_after(response: Any) -> float | None:
    """Seconds of the `Retry-After` header, which holds seconds or a date."""
    text = response.headers.get("retry-after", "")
    try:
        return max(0.0, float(text))
    except ValueError:
        pass
    try:
        return max(0.0, parsedate_to_datetime(text).timestamp() - time.time())
    except ValueError:
        return None


def _remedy(status: int | None, config: EndpointConfig) -> str:
    if status in (401, 402, 403):
        return f"the key that it needs is read from the environment variable {config.api_key_env}"
    if status == 404:
        return "check the 'url' (it ends in /v1 as a rule) and the 'model'"
    return "check the 'url', and that it is running"
