"""The process that owns the engine: commands come in over a socket, the news of every step go out in one frame.

    python -m tah2.server.worker SOCKET CONFIG

It ends when the front says so, when the front is gone, or when a pass fails for everybody; the front then starts
another one.
"""

from __future__ import annotations

import json
import logging
import select
import signal
import socket
import sys
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from tah2.config.strict import ConfigError, build
from tah2.server import logs
from tah2.server.config import WorkerConfig
from tah2.server.messages import (
    Abort,
    Accepted,
    Add,
    Broken,
    Command,
    Counters,
    Delta,
    Ending,
    Frames,
    ModelFacts,
    News,
    PromptReport,
    Ready,
    Refused,
    Report,
    Scored,
    Stop,
    command_of,
    frame,
)

if TYPE_CHECKING:
    from tah2.engine.chorus import Leader
    from tah2.engine.engine import Engine
    from tah2.engine.llm import LLM
    from tah2.engine.outputs import CompletionOutput, Logprob, RequestOutput
    from tah2.server.costs import Costs

IDLE_SECONDS = 15.0
"""An idle worker looks after its engine this often."""


class Link:
    """The worker's end of the socket."""

    def __init__(self, end: socket.socket) -> None:
        self.end, self.frames = end, Frames()

    def send(self, report: Report) -> None:
        self.end.sendall(frame(report))

    def receive(self, patience: float) -> list[Command]:
        """All commands that are there; waits up to `patience` seconds for the first."""
        if not select.select([self.end], [], [], patience)[0]:
            return []
        data = self.end.recv(1 << 20)
        if not data:
            return [Stop()]
        return [command_of(body) for body in self.frames.feed(data)]


@dataclass
class Told:
    """How much of a request the front has heard."""

    add: Add
    tokens: list[int] = field(default_factory=list)
    """Per sample."""
    letters: list[int] = field(default_factory=list)
    ended: list[bool] = field(default_factory=list)
    costs: dict[int, Costs] = field(default_factory=dict)
    """By sample, where they are watched."""
    prompt: bool = False

    def __post_init__(self) -> None:
        n = self.add.params.n
        self.tokens, self.letters, self.ended = [0] * n, [0] * n, [False] * n


class Worker:
    """Runs an engine for one front."""

    def __init__(self, engine: Engine, link: Link, leader: Engine | Leader | None = None) -> None:
        self.engine, self.link, self.leader = engine, link, leader or engine
        self._told: dict[str, Told] = {}

    def run(self) -> None:
        """Until the front says stop."""
        while True:
            busy = self.leader.has_unfinished_requests()
            for command in self.link.receive(0.0 if busy else IDLE_SECONDS):
                if isinstance(command, Stop):
                    return
                self._obey(command)
            deltas = [delta for output in self.leader.step() for delta in self._deltas(output)]
            if busy or deltas:
                self.link.send(News(deltas, self.counters()))

    def _obey(self, command: Add | Abort) -> None:
        if isinstance(command, Abort):
            if self._told.pop(command.id, None) is not None:
                self.leader.abort(command.id)
                self.link.send(News([], self.counters()))
            return
        try:
            self.leader.add_request(command.id, command.prompt, command.params)
        except ConfigError as error:
            self.link.send(Refused(command.id, str(error)))
        else:
            self._told[command.id] = Told(command)
            self.link.send(Accepted(command.id))

    def _deltas(self, output: RequestOutput) -> list[Delta]:
        told = self._told[output.request_id]
        deltas = []
        for sample in output.outputs:
            index = sample.index
            new = len(sample.token_ids) > told.tokens[index] or sample.finished
            if new and not told.ended[index]:
                deltas.append(self._delta(output, sample, told))
        if output.finished:
            del self._told[output.request_id]
        return deltas

    def _delta(self, output: RequestOutput, sample: CompletionOutput, told: Told) -> Delta:
        index, first = sample.index, told.tokens[sample.index]
        delta = Delta(
            output.request_id,
            index,
            sample.text[told.letters[index] :],
            sample.token_ids[first:],
            sample.depths[first:],
        )
        if sample.logprobs is not None:
            chosen = zip(sample.token_ids[first:], sample.logprobs[first:], strict=True)
            delta.logprobs = [scored(token, row) for token, row in chosen]
        if sample.depth_logprobs is not None:
            deep = zip(sample.token_ids[first:], sample.depth_logprobs[first:], strict=True)
            delta.depth_logprobs = [[scored(token, row) for row in rows] for token, rows in deep]
        if told.add.continue_probs:
            delta.continue_probs = sample.continue_probs[first:]
            delta.costs = self._costs(output, index, told).add(delta.depths)
        if index == 0 and not told.prompt:
            told.prompt = True
            delta.prompt = _prompt_report(output)
        if sample.finished:
            delta.ending = self._ending(output, sample)
            told.ended[index] = True
        told.tokens[index], told.letters[index] = len(sample.token_ids), len(sample.text)
        return delta

    def _costs(self, output: RequestOutput, index: int, told: Told) -> Costs:
        from tah2.server.costs import Costs

        if index not in told.costs:
            decoder = self.engine.decoder
            told.costs[index] = Costs(decoder.backbone, decoder.loop, output.prompt_depths, told.add.params.max_depth)
        return told.costs[index]

    def _ending(self, output: RequestOutput, sample: CompletionOutput) -> Ending:
        from tah2.compute.decode import decode_flops
        from tah2.config.loop import LoopConfig

        metrics, plain = sample.metrics, 0
        if len(sample.token_ids) > 1:
            prompt, decoded = [1] * len(output.prompt_token_ids), [1] * (len(sample.token_ids) - 1)
            plain = decode_flops(self.engine.decoder.backbone, LoopConfig("standard"), prompt, decoded)
        started = metrics.first_scheduled_time
        return Ending(
            sample.finish_reason or "error",
            sample.stop_reason,
            sample.error,
            sample.decode_flops or 0,
            plain,
            0.0 if started is None else started - metrics.arrival_time,
            metrics.drafted_tokens,
            metrics.agreed_tokens,
        )

    def counters(self) -> Counters:
        engine, stats = self.engine, self.engine.stats
        slots = engine.pools.looped.slots
        cached = engine.prefix.idle_looped if engine.prefix is not None else 0
        return Counters(
            len(engine.scheduler.running),
            len(engine.scheduler.waiting),
            slots.capacity - slots.free - cached,
            cached,
            slots.capacity,
            stats.steps,
            stats.entries,
            stats.prompt_tokens,
            stats.cached_tokens,
            stats.output_tokens,
            stats.decode_flops,
            stats.preemptions,
            stats.drafted,
            stats.agreed,
            stats.wasted_entries,
            stats.failed_requests,
        )


def scored(chosen: int, row: dict[int, Logprob]) -> list[Scored]:
    """The chosen token, then all of the row, best first (the chosen one again)."""
    rows = [Scored(token, entry.logprob, entry.rank or 0) for token, entry in row.items()]
    own = next(entry for entry in rows if entry.token == chosen)
    return [own, *sorted(rows, key=lambda entry: entry.rank)]


def _prompt_report(output: RequestOutput) -> PromptReport:
    logprobs: list[list[Scored] | None] | None = None
    if output.prompt_logprobs is not None:
        rows = zip(output.prompt_token_ids, output.prompt_logprobs, strict=True)
        logprobs = [None if row is None else scored(token, row) for token, row in rows]
    return PromptReport(output.prompt_depths, output.metrics.num_cached_tokens, logprobs)


def facts_of(llm: LLM) -> ModelFacts:
    from tah2.model.kinds import Output

    engine, decoder = llm.engine, llm.engine.decoder
    mixes = not decoder.kind.loops_middle and decoder.kind.output is not Output.LAST
    return ModelFacts(
        max_model_len=engine.max_model_len,
        vocab_size=decoder.backbone.vocab_size,
        eos_token_ids=sorted(engine.eos_token_ids),
        loop=decoder.loop.kind,
        max_depth=decoder.loop.max_depth,
        exit_threshold=decoder.loop.exit_threshold,
        gated=decoder.gate is not None,
        depth_logprobs=mixes,
        max_num_seqs=engine.config.max_num_seqs,
        kv_slots=engine.pools.looped.slots.capacity,
        parameters=sum(parameter.numel() for parameter in decoder.parameters()),
    )


def load(config: WorkerConfig) -> LLM:
    import torch
    from transformers.utils import logging as progress

    from tah2.engine.llm import LLM

    progress.disable_progress_bar()
    if config.threads is not None:
        torch.set_num_threads(config.threads)
    on_cpu = config.device == "cpu" or (config.device is None and not torch.cuda.is_available())
    name = config.dtype or ("float32" if on_cpu else None)
    dtype = None if name is None else getattr(torch, name)
    return LLM(config.model, dtype=dtype, device=config.device, **config.engine)


def lead(config: WorkerConfig, link: Link) -> None:
    """Rank 0: load, report, serve."""
    import os

    from tah2.engine.chorus import Leader

    try:
        llm = load(config)
    except (ValueError, OSError, ImportError) as error:
        link.send(Broken(" ".join(str(error).split()) or type(error).__name__))
        return
    link.send(Ready(facts_of(llm), os.getpid()))
    leader = None if llm.engine.team.alone else Leader(llm.engine)
    Worker(llm.engine, link, leader).run()
    if leader is not None:
        leader.close()


def main() -> int:
    """Started by the front; ranks above 0 have no socket and repeat what rank 0 does."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    descriptor, text = sys.argv[1:]
    config = build(WorkerConfig, json.loads(text))
    logs.configure("info")
    if int(descriptor) < 0:
        from tah2.engine.chorus import follow

        follow(load(config).engine)
        return 0
    with socket.socket(fileno=int(descriptor)) as end:
        try:
            lead(config, Link(end))
        except (BrokenPipeError, ConnectionResetError):
            return 0
        except Exception:
            logging.getLogger("tah2.server").exception("the worker gives up")
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
