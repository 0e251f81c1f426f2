"""Tiny random models of every loop kind, spread out enough that no decision hangs on rounding."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any

import torch

from tah2.config.backbone import BackboneConfig
from tah2.config.loop import LoopConfig
from tah2.engine.config import EngineConfig
from tah2.engine.engine import Engine
from tah2.engine.outputs import RequestOutput
from tah2.engine.params import SamplingParams
from tah2.engine.reference import ReferenceOutput, generate
from tah2.model.loop import LoopedDecoder

BACKBONE = BackboneConfig(
    family="qwen3",
    vocab_size=48,
    hidden_size=16,
    intermediate_size=24,
    num_layers=3,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    qk_norm=True,
    max_position_embeddings=256,
)

LOOPS = {
    "standard": LoopConfig("standard"),
    "tah2-2": LoopConfig("tah2", max_depth=2),
    "tah2-4": LoopConfig("tah2", max_depth=4),
    "tah2-fixed": LoopConfig("tah2-fixed", max_depth=3),
    "ouro": LoopConfig("ouro", max_depth=3),
    "ouro-adaptive": LoopConfig("ouro-adaptive", max_depth=3, exit_threshold=0.25),
    "huginn": LoopConfig("huginn", max_depth=3, prelude_layers=1, coda_layers=1),
    "top-k-embedding": LoopConfig("tah2", max_depth=3, reentry="top-k-embedding", embedding_top_k=5),
    "last-output": LoopConfig("tah2", max_depth=3, output="last"),
    "uniform-gated": LoopConfig("tah2", max_depth=3, output="uniform-mixture"),
}
KINDS = tuple(LOOPS)
LOOPS |= {
    f"huginn-{prelude}-{coda}": LoopConfig("huginn", max_depth=3, prelude_layers=prelude, coda_layers=coda)
    for prelude, coda in ((0, 0), (1, 0), (0, 1))
}


def spread(decoder: LoopedDecoder) -> None:
    """Wide logits and a gate that sends about half of the tokens on."""
    for parameter in decoder.parameters():
        if parameter.ndim == 2:
            parameter.normal_(std=0.6 * parameter.shape[1] ** -0.5)
    decoder.embed_tokens.weight.normal_(std=1.0)
    if decoder.lm_head is not None:
        decoder.lm_head.weight.normal_(std=1.0)
    if decoder.gate is not None:
        for parameter in decoder.gate.parameters():
            if parameter.shape[0] == 1:
                parameter.normal_(std=1.0)


@lru_cache
def model(name: str) -> LoopedDecoder:
    """The random model of one loop kind."""
    torch.manual_seed(len(name) + 17)
    decoder = LoopedDecoder(BACKBONE, LOOPS[name]).eval()
    decoder.reset()
    with torch.no_grad():
        spread(decoder)
    return decoder


@dataclass(frozen=True)
class Ask:
    """One request of a test."""

    prompt: tuple[int, ...]
    params: SamplingParams = field(default_factory=lambda: SamplingParams(temperature=0.0, max_tokens=8))


_expected: dict[tuple[str, str], ReferenceOutput] = {}


def expected(name: str, ask: Ask, eos: tuple[int, ...] = ()) -> ReferenceOutput:
    key = (name, f"{ask}{eos}")
    if key not in _expected:
        _expected[key] = generate(model(name), ask.prompt, ask.params, eos)
    return _expected[key]


def engine(name: str, eos: tuple[int, ...] = (), **config: object) -> Engine:
    settings: dict[str, object] = {"kv_slots": 4096, "seed": 0, "kernels": "off", **config}
    return Engine(model(name), EngineConfig(**settings), eos_token_ids=eos)  # type: ignore[arg-type]


def run(made: Engine, asks: dict[str, Ask], arrivals: dict[str, int] | None = None) -> dict[str, RequestOutput]:
    """Step until all have finished; `arrivals` says before which step a request comes."""
    finished: dict[str, RequestOutput] = {}
    waiting, step = dict(asks), 0
    while waiting or made.has_unfinished_requests():
        for name in [name for name in waiting if (arrivals or {}).get(name, 0) <= step]:
            ask = waiting.pop(name)
            made.add_request(name, ask.prompt, ask.params)
        finished.update({out.request_id: out for out in made.step() if out.finished})
        step += 1
        assert step < 5000
    return finished


def same(name: str, ask: Ask, output: RequestOutput, eos: tuple[int, ...] = ()) -> None:
    """The output is the reference's, token by token and depth by depth."""
    truth = expected(name, ask, eos)
    (completion,) = output.outputs
    assert completion.error is None
    assert completion.token_ids == truth.token_ids
    assert completion.depths == truth.depths
    assert output.prompt_depths == truth.prompt_depths
    assert completion.finish_reason == truth.finish_reason


def drained(made: Engine) -> None:
    """Nothing is left: all slots are the prefix cache's, and free once it is cleared."""
    made.check()
    assert not made.scheduler.running
    assert not made.scheduler.waiting
    if made.prefix is not None:
        assert made.prefix.idle_looped == sum(len(slots) for slots in made.prefix.owned()[0])
        made.prefix.clear()
    made.check()
    assert made.pools.looped.slots.free == made.pools.looped.slots.capacity
    if made.pools.once is not None:
        assert made.pools.once.slots.free == made.pools.once.slots.capacity


EOS = 256


@lru_cache
def byte_tokenizer() -> Any:
    """One token per byte, and an end-of-sequence token."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={letter: i for i, letter in enumerate(letters)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>")


@lru_cache
def writer() -> LoopedDecoder:
    """A TaH2 model that writes bytes."""
    torch.manual_seed(5)
    decoder = LoopedDecoder(replace(BACKBONE, vocab_size=257), LOOPS["tah2-4"]).eval()
    decoder.reset()
    with torch.no_grad():
        spread(decoder)
    return decoder
