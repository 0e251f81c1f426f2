"""What the front and its worker tell each other: msgpack frames with a length before each, over one socket."""

from __future__ import annotations

import struct
from collections.abc import Iterator

import msgspec

from tah2.engine.params import SamplingParams

HEADER = struct.Struct("<I")


class Scored(msgspec.Struct, array_like=True):
    """A token and its log-probability."""

    token: int
    logprob: float
    rank: int
    """1 for the most probable token."""


class Add(msgspec.Struct, tag="add", array_like=True):
    id: str
    prompt: list[int]
    params: SamplingParams
    continue_probs: bool = False
    """Report the gate's probabilities of every token."""


class Abort(msgspec.Struct, tag="abort", array_like=True):
    id: str


class Stop(msgspec.Struct, tag="stop", array_like=True):
    pass


Command = Add | Abort | Stop


class PromptReport(msgspec.Struct, array_like=True):
    """What is known of a prompt once it has run."""

    depths: list[int]
    cached: int
    """Tokens that came from the prefix cache."""
    logprobs: list[list[Scored] | None] | None


class Ending(msgspec.Struct, array_like=True):
    """How a sample ended."""

    reason: str
    stop: int | str | None
    error: str | None
    decode_flops: int
    plain_flops: int
    """What the same tokens would have cost at depth 1."""
    queued: float
    """Seconds before the first pass."""
    drafted: int
    agreed: int


class Delta(msgspec.Struct, array_like=True):
    """News of one sample: everything here is what one step added."""

    id: str
    index: int
    text: str
    tokens: list[int]
    depths: list[int]
    """Iterations spent to predict each token."""
    logprobs: list[list[Scored]] | None = None
    """Per token: the chosen one, then the most probable ones, best first."""
    continue_probs: list[list[float]] | None = None
    depth_logprobs: list[list[list[Scored]]] | None = None
    """Per token and executed depth, in the same order as `logprobs`."""
    prompt: PromptReport | None = None
    """With the first news of sample 0."""
    ending: Ending | None = None
    costs: tuple[int, int] | None = None
    """FLOPs of the sample so far and those of the plain model, where the gate's probabilities were asked for."""


class Counters(msgspec.Struct, array_like=True):
    """The engine's state after a step; counts grow from the worker's start."""

    running: int = 0
    waiting: int = 0
    kv_used: int = 0
    """Slots that requests hold; those that only the prefix cache keeps count as free."""
    kv_cached: int = 0
    kv_slots: int = 0
    steps: int = 0
    entries: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    decode_flops: int = 0
    preemptions: int = 0
    drafted: int = 0
    agreed: int = 0
    wasted_entries: int = 0
    failed: int = 0


class ModelFacts(msgspec.Struct):
    """What the front has to know of the loaded model."""

    max_model_len: int
    vocab_size: int
    eos_token_ids: list[int]
    loop: str
    max_depth: int
    exit_threshold: float
    gated: bool
    depth_logprobs: bool
    """Depths have predictions of their own that can be reported."""
    max_num_seqs: int
    kv_slots: int
    parameters: int


class Ready(msgspec.Struct, tag="ready", array_like=True):
    facts: ModelFacts
    pid: int


class Broken(msgspec.Struct, tag="broken", array_like=True):
    """The worker cannot start."""

    message: str


class Accepted(msgspec.Struct, tag="accepted", array_like=True):
    id: str


class Refused(msgspec.Struct, tag="refused", array_like=True):
    id: str
    message: str


class News(msgspec.Struct, tag="news", array_like=True):
    """Everything that one step brought."""

    deltas: list[Delta]
    counters: Counters


Report = Ready | Broken | Accepted | Refused | News


class Frames:
    """Cuts a stream of bytes into frames."""

    def __init__(self) -> None:
        self._bytes = bytearray()

    def feed(self, data: bytes) -> Iterator[bytes]:
        self._bytes += data
        start = 0
        while len(self._bytes) - start >= HEADER.size:
            (length,) = HEADER.unpack_from(self._bytes, start)
            end = start + HEADER.size + length
            if end > len(self._bytes):
                break
            yield bytes(self._bytes[start + HEADER.size : end])
            start = end
        del self._bytes[:start]


_ENCODER = msgspec.msgpack.Encoder()
command_of = msgspec.msgpack.Decoder(Command).decode
report_of = msgspec.msgpack.Decoder(Report).decode


def frame(message: Command | Report) -> bytes:
    body = _ENCODER.encode(message)
    return HEADER.pack(len(body)) + body
