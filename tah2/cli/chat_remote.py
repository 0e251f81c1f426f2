"""Who answers in `tah2 chat --endpoint URL`: a server of `tah2 serve`, over its API."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Any

import httpx

from tah2.cli.chat_speaker import Knobs, Message, Piece, Tally, continued
from tah2.config.strict import ConfigError
from tah2.server.marks import END_THINK, THINK

KEY_VARIABLE = "OPENAI_API_KEY"
PATIENCE = httpx.Timeout(10.0, read=None)


class RemoteSpeaker:
    """Answers from the server at `url` (with or without `/v1` behind it)."""

    def __init__(self, url: str, model: str | None = None) -> None:
        if not url.startswith(("http://", "https://")):
            raise ConfigError(f"--endpoint takes a URL such as http://127.0.0.1:8000, not {url!r}.")
        key = os.environ.get(KEY_VARIABLE)
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        self.client = httpx.Client(base_url=url.rstrip("/").removesuffix("/v1"), headers=headers, timeout=PATIENCE)
        card = self._card(model)
        self.name = str(card["id"])
        self.max_depth: int | None = card["max_depth"]
        self.exit_threshold: float | None = card["exit_threshold"] if card["gated"] else None
        self.chats = bool(self._get("/tokenizer_info")["chat_template"])

    def answer(self, messages: Sequence[Message], knobs: Knobs) -> RemoteAnswer:
        body = {name: value for name, value in asdict(knobs).items() if value is not None}
        body |= {"model": self.name, "stream": True, "return_depths": True, "stream_options": {"include_usage": True}}
        if self.chats:
            return RemoteAnswer(self.client, "/v1/chat/completions", {**body, "messages": list(messages)})
        return RemoteAnswer(self.client, "/v1/completions", {**body, "prompt": continued(messages)})

    def _card(self, model: str | None) -> dict[str, Any]:
        cards: list[dict[str, Any]] = self._get("/v1/models")["data"]
        card = next((card for card in cards if model in (None, card["id"])), None)
        if card is None:
            raise ConfigError(f"The server does not serve {model!r}, but {', '.join(card['id'] for card in cards)}.")
        if "max_depth" not in card:
            raise ConfigError("The server tells nothing of depths; `tah2 chat` talks to servers of `tah2 serve`.")
        return card

    def _get(self, path: str) -> Any:
        try:
            response = self.client.get(path)
            refuse(response)
            return response.json()
        except (httpx.HTTPError, json.JSONDecodeError) as error:
            raise ConfigError(f"{self.client.base_url} does not answer as a server of tah2 ({error}).") from None


class RemoteAnswer:
    """One streamed answer; leaving the loop early closes the connection, which ends the request."""

    def __init__(self, client: httpx.Client, path: str, body: dict[str, Any]) -> None:
        self.client, self.path, self.body = client, path, body
        self._depths: list[int] = []
        self._usage: dict[str, Any] = {}
        self._finish: str | None = None
        self._thinking = False
        self._started = time.monotonic()

    def __iter__(self) -> Iterator[Piece]:
        try:
            with self.client.stream("POST", self.path, json=self.body) as response:
                if response.is_error:
                    response.read()
                refuse(response)
                for chunk in chunks(response):
                    yield from self._pieces(chunk)
        except httpx.HTTPError as error:
            raise RuntimeError(f"The connection to the server was lost ({error or type(error).__name__}).") from None

    def _pieces(self, chunk: dict[str, Any]) -> Iterator[Piece]:
        self._usage = chunk.get("usage") or self._usage
        for choice in chunk["choices"]:
            text, depths = self._text(choice), choice.get("depths") or []
            self._depths += depths
            self._finish = choice.get("finish_reason") or self._finish
            yield from (Piece("", depth) for depth in depths[:-1])
            if text or depths:
                yield Piece(text, depths[-1] if depths else 1)

    def _text(self, choice: dict[str, Any]) -> str:
        """What the model wrote: the server has taken reasoning out of its marks, here they stand around it again."""
        delta = choice.get("delta", {})
        thought, said = delta.get("reasoning_content") or "", delta.get("content") or choice.get("text") or ""
        text = (f"{THINK}\n" if thought and not self._thinking else "") + thought
        self._thinking = self._thinking or bool(thought)
        if said and self._thinking:
            self._thinking = False
            text += f"\n{END_THINK}\n\n"
        return text + said

    def tally(self) -> Tally:
        flops, plain = self._usage.get("decode_flops"), self._usage.get("plain_decode_flops")
        return Tally(self._depths, flops, plain, time.monotonic() - self._started, self._finish)


def chunks(response: httpx.Response) -> Iterator[dict[str, Any]]:
    """The events of a stream, until it says that it is done."""
    for line in response.iter_lines():
        if not line.startswith("data:"):
            continue
        data = line[len("data:") :].strip()
        if data == "[DONE]":
            return
        chunk: dict[str, Any] = json.loads(data)
        if "error" in chunk:
            raise RuntimeError(str(chunk["error"].get("message", chunk["error"])))
        yield chunk


def refuse(response: httpx.Response) -> None:
    """Raise what an error answer says."""
    if not response.is_error:
        return
    if response.status_code == 401:
        raise ConfigError(f"The server needs an API key: set {KEY_VARIABLE}.")
    try:
        said = str(response.json()["error"]["message"])
    except (ValueError, KeyError, TypeError):
        said = f"The server answered with status {response.status_code}."
    raise ConfigError(said)
