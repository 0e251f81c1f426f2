"""The four analyses by name: a subject in, plain JSON out."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from tah2.config.strict import ConfigError
from tah2.study.analyses.alignment import alignment
from tah2.study.analyses.attention import attention
from tah2.study.analyses.depths import depths
from tah2.study.analyses.gains import gains
from tah2.study.analyses.inputs import Subject
from tah2.study.analyses.measure import Progress, measure_tokens

MAPS = "attention-maps.npz"


@dataclass(frozen=True)
class Ask:
    """What an analysis is told beside its subject."""

    tokens_per_batch: int = 8192
    maps: int = 3
    """Responses to show token by token"""
    positions: int = 128
    """First response positions of attention maps"""
    progress: Progress | None = None
    folder: Path | None = None
    """Where large arrays go; without it they are not kept"""


def run_gains(subject: Subject, ask: Ask) -> dict[str, Any]:
    _refuse_single_pass(subject)
    batches = subject.batches(ask.tokens_per_batch)
    table = measure_tokens(subject.decoder, batches, run_all=True, progress=ask.progress)
    return gains(table, subject.tag_names).to_json()


def run_alignment(subject: Subject, ask: Ask) -> dict[str, Any]:
    decoder = subject.decoder
    if decoder.gate is None:
        raise ConfigError(
            f"Loop {decoder.kind.name!r} has no decider, so there is no continue probability to hold gains against."
        )
    _refuse_single_pass(subject)
    table = measure_tokens(decoder, subject.batches(ask.tokens_per_batch), progress=ask.progress)
    return alignment(table, decoder.loop.exit_threshold).to_json()


def run_depths(subject: Subject, ask: Ask) -> dict[str, Any]:
    table = measure_tokens(subject.decoder, subject.batches(ask.tokens_per_batch), progress=ask.progress)
    return depths(table, subject.words, subject.tag_names, ask.maps).to_json()


def run_attention(subject: Subject, ask: Ask) -> dict[str, Any]:
    _refuse_single_pass(subject)
    batches = subject.batches(ask.tokens_per_batch)
    found = attention(subject.decoder, batches, ask.positions, ask.progress)
    if ask.folder is not None:
        ask.folder.mkdir(parents=True, exist_ok=True)
        np.savez_compressed(ask.folder / MAPS, maps=found.maps.astype(np.float32))
    return found.to_json()


def _refuse_single_pass(subject: Subject) -> None:
    if subject.decoder.ceiling() < 2:
        raise ConfigError(f"{subject.model} runs one iteration per token; analyse a looped model.")


@dataclass(frozen=True)
class Analysis:
    summary: str
    run: Callable[[Subject, Ask], dict[str, Any]]
    passes: int = 1
    """How often it goes through the data"""


ANALYSES: dict[str, Analysis] = {
    "gains": Analysis("what looping every token does for the loss of each", run_gains),
    "alignment": Analysis("the gain of a further pass against the decider's continue probability", run_alignment),
    "depths": Analysis("which tokens take how many iterations", run_depths),
    "attention": Analysis("which iterations' keys the last iteration's queries read", run_attention, passes=2),
}


def analyse(name: str, subject: Subject, ask: Ask) -> dict[str, Any]:
    """The result with what it was made from."""
    kind = subject.decoder.kind.name
    about = {"analysis": name, "model": subject.model, "data": subject.data, "documents": len(subject.store)}
    found = ANALYSES[name].run(subject, ask)
    return {**about, "loop": kind, "max_depth": subject.decoder.ceiling(), **found}
