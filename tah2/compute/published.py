"""The paper's tables, and ours beside them.

The tables rest on inputs that they do not print: mean visible keys, training tokens and the share of continuing
tokens. The constants below are values that reproduce the rows of Standard and of TaH2 at M = 2. With them every row
agrees within rounding or 0.1e18 FLOPs, except decoding of TaH2-fixed (14.12 against 14.09 GFLOPs per token), which
would need a mean context of 15.62K.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from tah2.compute.decode import decode_per_token
from tah2.compute.parameters import parameter_counts
from tah2.compute.percall import per_call
from tah2.compute.train import train_flops
from tah2.config.backbone import preset
from tah2.config.loop import LoopConfig

DECODE_MEAN_KEYS = 15_691
DECODE_CONTINUE = 0.1925
TRAIN_TOKENS = 3.3e9
TRAIN_MEAN_KEYS = 3406
TRAIN_CONTINUE = 0.449

PER_CALL = {"backbone": 2.819, "head": 0.622, "attention_per_key": 2.29e-4, "reentry": 0.042, "gate": 0.050}
PARAMETERS = {
    "qwen3-1.7b": (1720.57, 20.98, 25.18, 46.16, 2.61),
    "qwen3-4b": (4022.47, 32.78, 39.33, 72.11, 1.76),
    "qwen3-8b": (8190.74, 83.90, 100.68, 184.59, 2.20),
}
DECODE = (("standard", 1, (), 7.04), ("tah2-fixed", 2, (), 14.09), ("tah2", 2, (DECODE_CONTINUE,), 8.59))
TRAIN = (
    ("standard", 1, (), 41.8, 0.0),
    ("huginn", 3, (), 77.7, 0.0),
    ("huginn", 7, (), 149.3, 0.0),
    ("ouro", 2, (), 83.6, 0.0),
    ("ouro", 4, (), 167.1, 0.0),
    ("tah2-fixed", 2, (), 84.0, 0.0),
    ("tah2-fixed", 4, (), 168.4, 0.0),
    ("tah2", 2, (TRAIN_CONTINUE,), 62.8, 15.2),
)


@dataclass(frozen=True)
class Row:
    table: str
    name: str
    unit: str
    published: float
    ours: float


def rows() -> Iterator[Row]:
    """Every published number that needs no unpublished depth profile, next to ours."""
    yield from _parameters()
    yield from _per_call()
    yield from _decode()
    yield from _train()


def _parameters() -> Iterator[Row]:
    for name, published in PARAMETERS.items():
        ours = parameter_counts(preset(name), LoopConfig("tah2"))
        values = [ours.backbone, *ours.added.values(), ours.added_total]
        for what, theirs, value in zip(("backbone", "updater", "decider", "added"), published, values, strict=False):
            yield Row("parameters", f"{name} {what}", "M", theirs, value / 1e6)
        yield Row("parameters", f"{name} share", "%", published[-1], 100 * ours.fraction)


def _per_call() -> Iterator[Row]:
    price = per_call(preset("qwen3-1.7b"), LoopConfig("tah2"))
    for name, published in PER_CALL.items():
        yield Row("per call", name.replace("_", " "), "GFLOPs", published, getattr(price, name) / 1e9)
    adapter = per_call(preset("qwen3-1.7b"), LoopConfig("huginn")).reentry
    yield Row("per call", "input adapter", "GFLOPs", 0.008, adapter / 1e9)


def _decode() -> Iterator[Row]:
    for kind, depth, fractions, published in DECODE:
        ours = decode_per_token(preset("qwen3-1.7b"), LoopConfig(kind, depth), fractions, DECODE_MEAN_KEYS)
        yield Row("decode, per token", f"{kind} M={depth}", "GFLOPs", published, ours.total / 1e9)


def _train() -> Iterator[Row]:
    for kind, depth, fractions, forward_backward, label in TRAIN:
        ours = train_flops(preset("qwen3-1.7b"), LoopConfig(kind, depth), fractions, TRAIN_MEAN_KEYS, TRAIN_TOKENS)
        yield Row("training", f"{kind} M={depth}", "EFLOPs", forward_backward, ours.forward_backward / 1e18)
        if label:
            yield Row("training", f"{kind} M={depth} label", "EFLOPs", label, ours.label_paper / 1e18)
