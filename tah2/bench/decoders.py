"""Contenders of the decode benchmark: engines over one set of packed weights, and peers on the same weights."""

from __future__ import annotations

import gc
import math
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tah2.bench.steps import SHAPES, weights_of
from tah2.config.backbone import BackboneConfig
from tah2.config.loop import LoopConfig
from tah2.engine.config import EngineConfig
from tah2.engine.engine import Engine
from tah2.engine.outputs import CompletionOutput
from tah2.engine.paged import PassPlan
from tah2.engine.params import SamplingParams
from tah2.engine.scheduler import Pass, Scheduler
from tah2.engine.weights import ModelWeights, Weights, choose_weights
from tah2.model.checkpoint import load, run_conversion
from tah2.model.gate import Decider, Gate
from tah2.model.loop import LoopedDecoder
from tah2.model.reentry import Predicted, Reentry
from tah2.model.start import StartConfig, calibration_text

Ids = list[list[int]]
START = StartConfig(updater="embedding")
SHARPNESS = 8.0
"""Scale of random models' last states: their predictions are then about as sure as a language model's."""


class Uncertain(Gate):
    """A decider whose answer is known: g = 1 - (the largest probability), so a threshold chooses the share of tokens
    that continue, and they are the hard ones. The learned decider runs too, because its time counts."""

    def __init__(self, decider: Decider) -> None:
        torch.nn.Module.__init__(self)
        self.decider, self.top_k = decider, decider.top_k

    def forward(self, embedding: Tensor, state: Tensor, top_probabilities: Tensor | None) -> Tensor:
        assert top_probabilities is not None
        learned: Tensor = self.decider(embedding, state, top_probabilities)
        return torch.logit(1 - top_probabilities[:, 0], eps=1e-6).add_(learned, alpha=0.0)

    @staticmethod
    def continues(probability: Tensor, survival: Tensor, threshold: Tensor | float) -> Tensor:
        return Decider.continues(probability, survival, threshold)


class Repeating(Reentry):
    """An updater whose answer is known: depth 2 reads the token's own embedding again, so that it nearly repeats
    depth 1's prediction, as a trained loop's does. The learned updater runs too, because its time counts."""

    def __init__(self, updater: Reentry) -> None:
        torch.nn.Module.__init__(self)
        self.updater, self.top_k = updater, updater.top_k

    def forward(self, anchor: Tensor, state: Tensor, predicted: Predicted | None, embedding: Tensor) -> Tensor:
        learned: Tensor = self.updater(anchor, state, predicted, embedding)
        return anchor + 0.0 * learned


@dataclass
class Models:
    """One backbone as Standard and as TaH2 of several ceilings; the weights are the same tensors."""

    name: str
    pretrained: bool
    standard: LoopedDecoder
    loops: dict[int, LoopedDecoder]
    tokens: list[int]
    """Text to cut prompts from, or random tokens where there is no tokenizer."""

    def prompts(self, count: int, length: int) -> Ids:
        """`count` prompts of `length` tokens, from different places of the text."""
        far = max(1, (len(self.tokens) - length) // count)
        cut = [self.tokens[i * far : i * far + length] for i in range(count)]
        return [(part * length)[:length] for part in cut]


def make_models(name: str, ceilings: Sequence[int]) -> Models:
    """SmolLM2 where its weights are installed, else random weights of the shape.

    The updater is fitted onto the token's own embedding: a second pass then refines the first one's prediction, as a
    trained loop's does, while the default start would predict one token further and contradict every draft.
    """
    path = weights_of(name)
    loop = LoopConfig("tah2", max(ceilings))
    if path is not None:
        from transformers import AutoTokenizer

        with tempfile.TemporaryDirectory() as folder:
            out = Path(folder) / "tah2"
            run_conversion(path, out, {"kind": "tah2", "max_depth": loop.max_depth}, START, "float32")
            decoder: LoopedDecoder = load(out, dtype=torch.float32).model
            tokens = AutoTokenizer.from_pretrained(out)(calibration_text(None))["input_ids"]
    else:
        torch.manual_seed(0)
        decoder = LoopedDecoder(BackboneConfig.from_hf(SHAPES[name]), loop)
        decoder.reset()
        tokens = np.random.default_rng(0).integers(0, SHAPES[name]["vocab_size"], 4096).tolist()
    assert isinstance(decoder.gate, Decider)
    decoder.gate = Uncertain(decoder.gate)
    loops = {ceiling: _with_loop(decoder, LoopConfig("tah2", ceiling)) for ceiling in ceilings}
    return Models(name, path is not None, _with_loop(decoder, LoopConfig("standard", 1)), loops, tokens)


def make_random_models(name: str, ceilings: Sequence[int], device: torch.device, dtype: torch.dtype) -> Models:
    """Random weights of the shape on any device, with a decider and an updater whose answers are known."""
    torch.manual_seed(0)
    with device:
        decoder = LoopedDecoder(BackboneConfig.from_hf(SHAPES[name]), LoopConfig("tah2", max(ceilings)))
    decoder.to(dtype).reset()
    with torch.no_grad():
        decoder.norm.weight.fill_(SHARPNESS)
    assert isinstance(decoder.gate, Decider)
    decoder.gate, decoder.reentry = Uncertain(decoder.gate), Repeating(decoder.reentry)
    loops = {ceiling: _with_loop(decoder, LoopConfig("tah2", ceiling)) for ceiling in ceilings}
    tokens = np.random.default_rng(0).integers(0, SHAPES[name]["vocab_size"], 65536).tolist()
    return Models(name, False, _with_loop(decoder, LoopConfig("standard", 1)), loops, tokens)


def _with_loop(decoder: LoopedDecoder, loop: LoopConfig) -> LoopedDecoder:
    """Another loop over the same tensors."""
    with torch.device("meta"):
        other = LoopedDecoder(decoder.backbone, loop)
    for name in ("embed_tokens", "layers", "norm", "lm_head", "rotary"):
        setattr(other, name, getattr(decoder, name))
    if other.gate is not None:
        other.reentry, other.gate = decoder.reentry, decoder.gate
    return other.eval()


class Lockstep(Scheduler):
    """Everybody waits for the deepest: no token begins while another one is between two depths."""

    def _choose(self) -> Pass:
        chosen = super()._choose()
        deep = [strand for strand in chosen.strands if strand.depth > 1]
        return Pass(deep or chosen.strands, drafting=False)


class Timed:
    """Weights that sum up the seconds spent in them: what a step spends beside is the engine's overhead."""

    def __init__(self, weights: Weights) -> None:
        self.weights, self.paged, self.seconds = weights, weights.paged, 0.0

    def layers(self, x: Tensor, layers: range, cosine: Tensor, sine: Tensor, plan: PassPlan, pool_layer: int) -> Tensor:
        return self._timed(lambda: self.weights.layers(x, layers, cosine, sine, plan, pool_layer))

    def norm(self, x: Tensor) -> Tensor:
        return self._timed(lambda: self.weights.norm(x))

    def head(self, state: Tensor) -> Tensor:
        return self._timed(lambda: self.weights.head(state))

    def enter(self, anchor: Tensor) -> Tensor:
        return self._timed(lambda: self.weights.enter(anchor))

    def reenter(self, anchor: Tensor, state: Tensor, predicted: Predicted | None) -> Tensor:
        return self._timed(lambda: self.weights.reenter(anchor, state, predicted))

    def gate(self, embedding: Tensor, state: Tensor, top_probabilities: Tensor | None) -> Tensor:
        return self._timed(lambda: self.weights.gate(embedding, state, top_probabilities))

    def _timed(self, call: Callable[[], Tensor]) -> Tensor:
        started = time.perf_counter()
        result = call()
        self.seconds += time.perf_counter() - started
        return result


class Engines:
    """One engine per loop over weights that are packed once."""

    def __init__(self, models: Models, max_model_len: int, kv_memory_gib: float = 1.0, recorded: bool = True) -> None:
        """`recorded=False`: the model's own modules, without kernels and CUDA graphs."""
        self.models = models
        self.config = EngineConfig(
            max_num_seqs=16,
            max_model_len=max_model_len,
            enable_prefix_caching=False,
            kv_memory_gib=kv_memory_gib,
            kernels="auto" if recorded else "off",
            seed=0,
        )
        deepest = models.loops[max(models.loops)]
        self._packed = choose_weights(deepest, self.config)

    def standard(self) -> Engine:
        return self._engine(self.models.standard)

    def tah2(self, ceiling: int, lockstep: bool = False, wavefront: bool = True) -> Engine:
        config = self.config if wavefront and not lockstep else replace(self.config, wavefront_rows=0)
        engine = self._engine(self.models.loops[ceiling], config)
        if lockstep:
            engine.scheduler = Lockstep(config, engine.pools, None)
        return engine

    def _engine(self, decoder: LoopedDecoder, config: EngineConfig | None = None) -> Engine:
        assert isinstance(self._packed, ModelWeights)
        return Engine(decoder, config or self.config, weights=self._packed.behind(decoder))


@dataclass
class Decoded:
    """One stretch of decoding, without prefill."""

    seconds: float
    tokens: int
    mean_depth: float
    flops: float
    """Per output token, exact"""
    agreement: float | None
    """Share of wavefront drafts that turned out right"""
    overhead: float | None
    """Share of the time spent outside the model, where the weights are `Timed`"""
    continue_probs: list[float]
    """Of depth 1"""

    @property
    def per_token(self) -> float:
        return self.seconds / self.tokens


class Stretch:
    """Decoding of a full batch, step by step, from its first output tokens on (`each` per prompt on average)."""

    def __init__(
        self, engine: Engine, prompts: Ids, each: int, threshold: float | None = None, temperature: float = 0.0
    ) -> None:
        self.engine, self.names, self.wanted = engine, [str(i) for i in range(len(prompts))], each * len(prompts)
        params = SamplingParams(temperature=temperature, max_tokens=None, ignore_eos=True, exit_threshold=threshold)
        waiting = set(self.names)
        for name, prompt in zip(self.names, prompts, strict=True):
            engine.add_request(name, prompt, params)
        while waiting:
            waiting -= {output.request_id for output in engine.step()}
        self.seconds, self._inside = 0.0, self._seconds_inside()
        self._tokens, self._depths = engine.stats.output_tokens, dict(engine.stats.depths)

    def step(self) -> None:
        started = time.perf_counter()
        self.engine.step(stream=False)
        self.seconds += time.perf_counter() - started

    @property
    def tokens(self) -> int:
        return self.engine.stats.output_tokens - self._tokens

    @property
    def done(self) -> bool:
        return self.tokens >= self.wanted

    def close(self) -> Decoded:
        stats, tokens, inside = self.engine.stats, self.tokens, self._seconds_inside()
        spent = sum(depth * (count - self._depths.get(depth, 0)) for depth, count in stats.depths.items())
        drafted, agreed, flops = stats.drafted, stats.agreed, stats.decode_flops
        outputs = [output for name in self.names for output in self._end(name)]
        drafted, agreed = stats.drafted - drafted, stats.agreed - agreed
        return Decoded(
            self.seconds,
            tokens,
            spent / tokens,
            (stats.decode_flops - flops) / sum(len(output.token_ids) - 1 for output in outputs),
            agreed / drafted if drafted else None,
            None if inside is None else 1 - (inside - (self._inside or 0.0)) / self.seconds,
            [chances[0] for output in outputs for chances in output.continue_probs if chances],
        )

    def _end(self, name: str) -> list[CompletionOutput]:
        ended = self.engine.abort(name)
        assert ended is not None
        return ended.outputs

    def _seconds_inside(self) -> float | None:
        weights = self.engine.runner.weights
        return weights.seconds if isinstance(weights, Timed) else None


def decode(
    engine: Engine, prompts: Ids, each: int, threshold: float | None = None, temperature: float = 0.0
) -> Decoded:
    (run,) = side_by_side(Stretch(engine, prompts, each, threshold, temperature))
    return run


def side_by_side(*stretches: Stretch) -> list[Decoded]:
    """Their steps take turns, so that all of them meet the same moods of the machine."""
    gc.collect()
    while going := [stretch for stretch in stretches if not stretch.done]:
        min(going, key=lambda stretch: stretch.seconds).step()
    return [stretch.close() for stretch in stretches]


def threshold_of_depth(
    engine: Engine, prompts: Ids, each: int, depth: float, tries: int = 12, temperature: float = 0.0
) -> float:
    """The exit threshold under which decoding these prompts runs `depth` iterations a token, as nearly as found.

    A higher threshold stops earlier, up to noise: another route writes another text. The search keeps a bracket, tries
    the quantile of the decider's answers that would give the wanted share, and halves the bracket where that falls
    outside.
    """
    low, high = 0.0, 1.0
    best, found, threshold = math.inf, 0.5, 0.5
    for _ in range(tries):
        run = decode(engine, prompts, each, threshold, temperature)
        if abs(run.mean_depth - depth) < best:
            best, found = abs(run.mean_depth - depth), threshold
        if best < 0.01:
            break
        low, high = (threshold, high) if run.mean_depth > depth else (low, threshold)
        threshold = float(np.quantile(run.continue_probs, max(0.0, 2 - depth)))
        if not low < threshold < high:
            threshold = (low + high) / 2
    return found


class TransformersPeer:
    """transformers' `generate` on the same tensors."""

    def __init__(self, models: Models) -> None:
        from transformers import AutoConfig, AutoModelForCausalLM

        config, weight = AutoConfig.for_model(**SHAPES[models.name]), models.standard.embed_tokens.weight
        with torch.device("meta"):
            self.model = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa", dtype=weight.dtype)
        held = {f"model.{name}": tensor for name, tensor in models.standard.state_dict().items()}
        held["lm_head.weight"] = models.standard.head_weight.detach()
        wanted = {name: held[name] for name in self.model.state_dict()}
        self.model.load_state_dict(wanted, assign=True)
        self.model.tie_weights()
        rotary = type(self.model.model.rotary_emb)
        self.model.model.rotary_emb = rotary(config).to(weight.device)
        self.model.eval()

    def decode(self, prompts: Ids, each: int, beside: Stretch | None = None) -> tuple[float, Ids]:
        """Seconds for `each` tokens per prompt after the first one, and all tokens; `beside` runs in turns with it."""
        from transformers import StoppingCriteria, StoppingCriteriaList

        seconds, resumed = 0.0, math.inf

        class Turn(StoppingCriteria):
            def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
                nonlocal seconds, resumed
                seconds += max(0.0, time.perf_counter() - resumed)
                while beside is not None and not beside.done and beside.seconds < seconds:
                    beside.step()
                resumed = time.perf_counter()
                return torch.zeros(len(input_ids), dtype=torch.bool, device=input_ids.device)

        gc.collect()
        out = self._generate(prompts, each + 1, StoppingCriteriaList([Turn()]))
        while beside is not None and not beside.done:
            beside.step()
        return seconds, [row[len(prompts[0]) :] for row in out]

    def prefill(self, prompt: list[int]) -> None:
        self._generate([prompt], 1, None)

    def _generate(self, prompts: Ids, tokens: int, criteria: Any) -> Ids:
        ids = torch.tensor(prompts, device=self.model.device)
        options = {"do_sample": False, "pad_token_id": 0, "eos_token_id": None}
        rows: Ids = self.model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=tokens,
            min_new_tokens=tokens,
            stopping_criteria=criteria,
            **options,
        ).tolist()
        return rows


def prefill(engine: Engine, prompt: list[int]) -> None:
    engine.add_request("prefill", prompt, SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True))
    while engine.has_unfinished_requests():
        engine.step()
