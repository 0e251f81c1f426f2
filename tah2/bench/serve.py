"""What the server costs: the same requests through HTTP streams and through the engine in this process.

Both run the same checkpoint with the same threads. A round hands 16 prompts to the engine and steps until all have
ended, then opens 16 streams to the server and reads them to their ends; the client is this process, bare sockets and no
parsing. The server runs its own two processes (front and worker) beside it, on the same cores. `same_answers` is the
share of equal answers: arrivals differ by milliseconds, so batches and rounding do, and a close call may flip.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch

from tah2.bench.machine import describe
from tah2.bench.steps import SHAPES, weights_of
from tah2.engine.llm import LLM
from tah2.engine.params import SamplingParams
from tah2.model.checkpoint import run_conversion
from tah2.model.hf import LoopedConfig, LoopedForCausalLM
from tah2.model.start import StartConfig, calibration_text

TARGETS = {"server_over_offline_c16": "at most 1.10"}
REST = 0.3
"""Seconds between contenders: threads of the one before stop spinning."""
END = b"data: [DONE]\n\n\r\n0\r\n\r\n"
"""The last event and the last chunk of a stream."""
LOOP = {"kind": "tah2", "max_depth": 2}


@dataclass(frozen=True)
class Plan:
    """What is measured; the quick plan checks that the benchmark works, its figures say nothing."""

    rounds: int
    model: str
    streams: int
    prompt: int
    output: int


FULL = Plan(5, "smollm2-135m", 16, 32, 64)
QUICK = Plan(1, "qwen3-tiny", 16, 8, 8)


def measure(plan: Plan, threads: int | None = None, say: Callable[[str], None] = lambda line: None) -> dict[str, Any]:
    """Run the plan; `say` hears what is being measured."""
    if threads is not None:
        torch.set_num_threads(threads)
    threads = torch.get_num_threads()
    machine = describe(torch.device("cpu"))
    with tempfile.TemporaryDirectory() as scratch:
        say(f"preparing {plan.model}")
        folder = prepare(plan.model, Path(scratch) / "model")
        llm = LLM(folder, device="cpu", dtype=torch.float32)
        prompts = cut(llm.tokenizer(calibration_text(None))["input_ids"], plan)
        say("starting the server")
        with serving(folder, threads) as server:
            raw = _rounds(plan, Offline(llm, prompts, plan.output), Streams(server, prompts, plan.output), say)
    ratio = min(raw["seconds"]["server"]) / min(raw["seconds"]["offline"])
    return {
        "ratios": {"server_over_offline_c16": ratio},
        "targets": TARGETS,
        "missing": {},
        "raw": {"weights": "pretrained" if weights_of(plan.model) else "random", **raw},
        "machine": {**machine, "load_after": describe(torch.device("cpu"))["load"]},
    }


def _rounds(plan: Plan, offline: Offline, server: Streams, say: Callable[[str], None]) -> dict[str, Any]:
    pairs = list(zip(offline.tokens(), server.tokens(), strict=True))
    if any(len(one) != len(other) for one, other in pairs):
        raise RuntimeError("The server's answers are not as long as the engine's; the times would say nothing.")
    seconds: dict[str, list[float]] = {"offline": [], "server": []}
    front = server.server.front_seconds()
    for number in range(plan.rounds):
        say(f"round {number + 1} of {plan.rounds}")
        for name, contender in (("offline", offline), ("server", server)):
            time.sleep(REST)
            started = time.perf_counter()
            contender.run()
            seconds[name].append(time.perf_counter() - started)
    tokens = plan.streams * plan.output
    rounds = [a / b for a, b in zip(seconds["server"], seconds["offline"], strict=True)]
    return {
        "seconds": seconds,
        "same_answers": sum(one == other for one, other in pairs) / len(pairs),
        "server_over_offline_of_rounds": rounds,
        "server_over_offline_median": median(rounds),
        "tokens_per_second": {name: tokens / min(each) for name, each in seconds.items()},
        "front_cpu_us_per_token": 1e6 * (server.server.front_seconds() - front) / (plan.rounds * tokens),
    }


class Offline:
    """The engine in this process, stepped until all requests have ended."""

    def __init__(self, llm: LLM, prompts: list[list[int]], output: int) -> None:
        self.engine, self.prompts = llm.engine, prompts
        self.params = SamplingParams(temperature=0.0, max_tokens=output, ignore_eos=True, max_depth=1)

    def run(self) -> dict[str, list[int]]:
        for place, prompt in enumerate(self.prompts):
            self.engine.add_request(str(place), prompt, self.params)
        done: dict[str, list[int]] = {}
        while self.engine.has_unfinished_requests():
            done |= {out.request_id: out.outputs[0].token_ids for out in self.engine.step() if out.finished}
        return done

    def tokens(self) -> list[list[int]]:
        done = self.run()
        return [done[str(place)] for place in range(len(self.prompts))]


@dataclass
class Server:
    """A server's process."""

    process: subprocess.Popen[str]
    host: str
    port: int

    def front_seconds(self) -> float:
        """Processor seconds of the front so far, where the system tells."""
        path = Path(f"/proc/{self.process.pid}/stat")
        if not path.is_file():
            return 0.0
        fields = path.read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


class Streams:
    """One connection per prompt, all at once, each read to its end."""

    def __init__(self, server: Server, prompts: list[list[int]], output: int) -> None:
        self.server = server
        body = {"temperature": 0, "max_tokens": output, "ignore_eos": True, "max_depth": 1, "stream": True}
        self.bodies = [{**body, "prompt": prompt} for prompt in prompts]

    def run(self) -> None:
        asyncio.run(self._all(self.bodies))

    def tokens(self) -> list[list[int]]:
        """The tokens themselves, asked for once, outside of timed rounds."""
        answers = asyncio.run(self._all([{**body, "return_token_ids": True} for body in self.bodies]))
        events = [re.findall(rb"^data: (\{.*\})$", answer, re.MULTILINE) for answer in answers]
        choices = [[json.loads(event)["choices"][0] for event in each] for each in events]
        return [[token for choice in each for token in choice.get("token_ids", [])] for each in choices]

    async def _all(self, bodies: list[dict[str, Any]]) -> list[bytes]:
        return await asyncio.gather(*map(self._one, bodies))

    async def _one(self, body: dict[str, Any]) -> bytes:
        data = json.dumps(body).encode()
        reader, writer = await asyncio.open_connection(self.server.host, self.server.port)
        head = f"POST /v1/completions HTTP/1.1\r\nHost: {self.server.host}\r\nConnection: close\r\n"
        head += f"Content-Type: application/json\r\nContent-Length: {len(data)}\r\n\r\n"
        writer.write(head.encode() + data)
        answer = await reader.read(-1)
        writer.close()
        if not answer.endswith(END) or b'"finish_reason":"length"' not in answer:
            raise RuntimeError(f"A stream failed: {answer[-300:]!r}")
        return answer


@contextmanager
def serving(folder: Path, threads: int) -> Iterator[Server]:
    """`tah2 serve` on a free port of this machine."""
    command = [sys.executable, "-m", "tah2", "serve", str(folder), "--port", "0", "--threads", str(threads)]
    with tempfile.TemporaryFile("w+") as log:
        process = subprocess.Popen(
            [*command, "--device", "cpu", "--log-level", "error"], stdout=subprocess.PIPE, stderr=log, text=True
        )
        try:
            assert process.stdout is not None
            greeting = process.stdout.readline()
            found = re.search(r"API at http://([0-9.]+):(\d+)/v1", greeting)
            if found is None:
                log.seek(0)
                raise RuntimeError(f"The server did not start: {log.read()[-2000:]}")
            yield Server(process, found.group(1), int(found.group(2)))
        finally:
            process.terminate()
            try:
                process.wait(30)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def prepare(model: str, folder: Path) -> Path:
    """A looped checkpoint: SmolLM2 where its weights are installed, else random weights that write bytes."""
    path = weights_of(model)
    if path is not None:
        run_conversion(path, folder, LOOP, StartConfig(updater="random"), "float32")
        return folder
    shape = SHAPES[model]
    torch.manual_seed(0)
    LoopedForCausalLM(LoopedConfig(backbone={**shape, "eos_token_id": 256}, loop=LOOP)).save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    return folder


def byte_tokenizer() -> Any:
    """One token per byte, and an end."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    made = Tokenizer(models.BPE(vocab={letter: place for place, letter in enumerate(letters)}, merges=[]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=made, eos_token="<eos>")


def cut(tokens: list[int], plan: Plan) -> list[list[int]]:
    """Prompts from different places of a text."""
    far = max(1, (len(tokens) - plan.prompt) // plan.streams)
    return [tokens[place * far : place * far + plan.prompt] for place in range(plan.streams)]
