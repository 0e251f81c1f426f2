"""The start state of a learned updater: predict the next token's embedding.

A random updater throws depth 2 far from anything the backbone has seen; the decider then labels hard tokens
"stop" and they never train at depth 2. So the updater is first regressed, on states of the unchanged backbone,
onto the expected next-token embedding sum_v q[v] E[v], scaled to the embeddings' own root mean square. Depth 2
then starts like a pass over the token that depth 1 predicts. The backbone does not change.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from tah2.config.strict import ConfigError
from tah2.model.loop import LoopedDecoder, LoopSettings, Tokens
from tah2.model.reentry import Reentry
from tah2.model.scoring import HEAD_ROWS

DOCUMENT = 256
"""Calibration text is cut into documents of this many tokens."""


@dataclass(frozen=True)
class StartConfig:
    """How a learned updater begins."""

    updater: Literal["predicted-embedding", "random"] = "predicted-embedding"
    steps: int = 500
    batch: int = 256
    learning_rate: float = 2e-3
    text: Path | None = None
    """A text file to calibrate on; a short built-in text by default."""
    seed: int = 0

    def __post_init__(self) -> None:
        if self.steps < 1 or self.batch < 1:
            raise ConfigError("The updater's start needs at least one step of at least one token.")


def start_updater(decoder: LoopedDecoder, config: StartConfig, tokenizer: Path | None) -> float | None:
    """Fit the updater on calibration text read with the tokenizer in folder `tokenizer`; see `fit_updater`."""
    if config.updater == "random" or not decoder.reentry.fits_prediction:
        return None
    return fit_updater(decoder, calibration_tokens(decoder, config, tokenizer), config)


def calibration_tokens(decoder: LoopedDecoder, config: StartConfig, tokenizer: Path | None) -> Tokens:
    ids = torch.empty(0, dtype=torch.long)
    if tokenizer is not None and any(tokenizer.glob("*token*")):
        from transformers import AutoTokenizer

        ids = torch.tensor(AutoTokenizer.from_pretrained(tokenizer)(calibration_text(config.text))["input_ids"])
    if len(ids) < 2 or int(ids.max()) >= decoder.backbone.vocab_size:
        generator = torch.Generator().manual_seed(config.seed)
        ids = torch.randint(decoder.backbone.vocab_size, (8 * DOCUMENT,), generator=generator)
    device = decoder.embed_tokens.weight.device
    return Tokens.pack([part.to(device) for part in ids.split(DOCUMENT)])


def calibration_text(path: Path | None) -> str:
    if path is None:
        return (resources.files("tah2.model") / "calibration.txt").read_text(encoding="utf-8")
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"Cannot read the calibration text {path}: {error.strerror}.") from None


def fit_updater(decoder: LoopedDecoder, tokens: Tokens, config: StartConfig) -> float:
    """Regress the updater in place; returns the share of the target's variance that stays unexplained."""
    anchor, state, target = regression_data(decoder, tokens)
    scale = target.square().mean().sqrt()
    dtype = next(decoder.reentry.parameters()).dtype
    updater: Reentry = decoder.reentry.float()
    updater.start_scale(float(scale))
    optimizer = torch.optim.Adam(updater.parameters(), lr=config.learning_rate)
    generator = torch.Generator().manual_seed(config.seed)
    embedding = decoder.embed_tokens.weight.detach()
    loss = torch.tensor(math.inf)
    with torch.enable_grad():
        for step in range(config.steps):
            optimizer.param_groups[0]["lr"] = config.learning_rate * (1 + math.cos(math.pi * step / config.steps)) / 2
            rows = torch.randint(len(anchor), (min(config.batch, len(anchor)),), generator=generator).to(anchor.device)
            loss = F.mse_loss(updater(anchor[rows], state[rows], None, embedding), target[rows]) / scale**2
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    decoder.reentry.to(dtype)
    return float(loss.detach())


@torch.no_grad()
def regression_data(decoder: LoopedDecoder, tokens: Tokens) -> tuple[Tensor, Tensor, Tensor]:
    """Embedding, depth-1 state and expected next-token embedding of every token, fp32 `[N, d]` each."""
    table = decoder.embed_tokens.weight.float()
    run = decoder(tokens, _NoReading(), LoopSettings(max_depth=1, attention="tiles"))
    expected = torch.cat(
        [F.linear(part, decoder.head_weight).float().softmax(-1) @ table for part in run.final_state.split(HEAD_ROWS)]
    )
    scale = table.square().mean().sqrt()
    expected = expected * scale / expected.square().mean(-1, keepdim=True).sqrt().clamp_min(1e-12)
    return decoder.embed_tokens(tokens.ids).float(), run.final_state.float(), expected


@dataclass
class _Unread:
    predicted: None = None


class _NoReading:
    """A head reader for calls that want states alone."""

    every_depth = False

    def read(self, state: Tensor, index: Tensor, depth: int, top_k: int) -> _Unread:
        return _Unread()
