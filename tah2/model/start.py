"""The start state of a learned updater: predict the next token's embedding.

A random updater throws depth 2 far from anything the backbone has seen; the decider then labels hard tokens
"stop" and they never train at depth 2. So the updater is first regressed, on states of the unchanged backbone,
onto the expected next-token embedding sum_v q[v] E[v], scaled to the embeddings' own root mean square. Depth 2
then starts like a pass over the token that depth 1 predicts. The backbone does not change.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tah2.config.strict import ConfigError
from tah2.model.loop import LoopedDecoder, LoopSettings, Tokens
from tah2.model.scoring import HEAD_ROWS

DOCUMENT = 256
"""Calibration text is cut into documents of this many tokens."""
DOCUMENTS = 64
"""Calibration reads at most this many documents."""
CHECK = 20
"""Steps between two looks at the held-out tokens."""
TOGETHER = 8
"""Documents of one forward pass."""

T = TypeVar("T")


@dataclass(frozen=True)
class StartConfig:
    """How a learned updater begins."""

    updater: Literal["predicted-embedding", "embedding", "random"] = "predicted-embedding"
    """Fitted onto the expected next-token embedding, onto the token's own embedding, or not at all."""
    steps: int = 300
    batch: int = 128
    learning_rate: float = 2e-3
    text: Path | None = None
    """A text file to calibrate on; a short built-in text by default."""
    seed: int = 0
    tokens: int = 4096
    """In training: so many of the run's first tokens are fitted on."""

    def __post_init__(self) -> None:
        if min(self.steps, self.batch, self.tokens) < 1:
            raise ConfigError("The updater's start needs at least one step of at least one token.")


def start_updater(decoder: LoopedDecoder, config: StartConfig, tokenizer: Path | None) -> float | None:
    """Fit the updater on calibration text read with the tokenizer in folder `tokenizer`; see `fit_updater`."""
    if config.updater == "random" or not decoder.reentry.fits_prediction:
        return None
    return fit_updater(decoder, calibration_tokens(decoder, config, tokenizer), config)


def calibration_tokens(decoder: LoopedDecoder, config: StartConfig, tokenizer: Path | None) -> Tokens:
    """The calibration text; random tokens where no tokenizer can read it."""
    ids = torch.empty(0, dtype=torch.long)
    if tokenizer is not None and any(tokenizer.glob("*token*")):
        from transformers import AutoTokenizer

        text = calibration_text(config.text)
        ids = torch.tensor(AutoTokenizer.from_pretrained(tokenizer)(text)["input_ids"], dtype=torch.long)
        if len(ids) < 2:
            raise ConfigError("The calibration text is too short; give a text file of a few pages.")
    elif config.text is not None:
        raise ConfigError("The calibration text cannot be read: the source has no tokenizer.")
    if len(ids) < 2 or int(ids.max()) >= decoder.backbone.vocab_size:
        generator = torch.Generator().manual_seed(config.seed)
        ids = torch.randint(decoder.backbone.vocab_size, (8 * DOCUMENT,), generator=generator)
    device = decoder.embed_tokens.weight.device
    return Tokens.pack([part.to(device) for part in ids.split(DOCUMENT)[:DOCUMENTS]])


def calibration_text(path: Path | None) -> str:
    if path is None:
        return (resources.files("tah2.model") / "calibration.txt").read_text(encoding="utf-8")
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"Cannot read the calibration text {path}: {error.strerror}.") from None
    except UnicodeDecodeError:
        raise ConfigError(f"The calibration text {path} is not UTF-8 text.") from None


def fit_updater(decoder: LoopedDecoder, tokens: Tokens, config: StartConfig) -> float:
    """Regress the updater in place; returns the share of the target's variance that it leaves unexplained.

    The last eighth of the tokens is held out: it says when further steps only learn the text by heart, and gives the
    returned share. The fit runs in fp32 on a copy, so dtype and `requires_grad` of the model stay what they are.
    """
    anchor, state, expected = regression_data(decoder, tokens)
    target = anchor if config.updater == "embedding" else expected
    updater = copy.deepcopy(decoder.reentry).float().requires_grad_(True)
    updater.start_scale(float(target.square().mean().sqrt()))
    embedding = decoder.embed_tokens.weight.detach()
    seen = max(1, len(anchor) * 7 // 8)
    held_out = torch.arange(seen if seen < len(anchor) else 0, len(anchor), device=anchor.device)
    variance = (target[held_out] - target.mean(0)).square().mean().clamp_min(1e-12)
    best, best_state = math.inf, updater.state_dict()

    def error(rows: Tensor) -> Tensor:
        return F.mse_loss(updater(anchor[rows], state[rows], None, embedding), target[rows]) / variance

    optimizer = torch.optim.Adam(updater.parameters(), lr=config.learning_rate)
    generator = torch.Generator().manual_seed(config.seed)
    for step in _shown("fitting the updater", range(1, config.steps + 1)):
        optimizer.param_groups[0]["lr"] = config.learning_rate * (1 + math.cos(math.pi * step / config.steps)) / 2
        rows = torch.randint(seen, (min(config.batch, seen),), generator=generator).to(anchor.device)
        with torch.enable_grad():
            loss = error(rows)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % CHECK == 0 or step == config.steps:
            with torch.no_grad():
                share = float(error(held_out))
            if share < best:
                best, best_state = share, copy.deepcopy(updater.state_dict())
    with torch.no_grad():
        for name, own in decoder.reentry.state_dict().items():
            own.copy_(best_state[name])
    return best


@torch.no_grad()
def regression_data(decoder: LoopedDecoder, tokens: Tokens) -> tuple[Tensor, Tensor, Tensor]:
    """Embedding, depth-1 state and expected next-token embedding of every token, fp32 `[N, d]` each."""
    table = decoder.embed_tokens.weight.float()
    groups = (tokens.document // TOGETHER).unique_consecutive(return_counts=True)[1].tolist()
    states = []
    with running_in_fp32(decoder):
        for ids, document, position in _shown(
            "reading calibration text",
            list(zip(*(x.split(groups) for x in (tokens.ids, tokens.document, tokens.position)), strict=True)),
        ):
            settings = LoopSettings(max_depth=1, attention="tiles")
            states.append(decoder(Tokens(ids, document, position), _NoReading(), settings).final_state)
    state = torch.cat(states)
    head = table if decoder.lm_head is None else decoder.lm_head.weight.float()
    expected = torch.cat([F.linear(part, head).softmax(-1) @ table for part in state.split(HEAD_ROWS)])
    scale = table.square().mean().sqrt()
    expected = expected * scale / expected.square().mean(-1, keepdim=True).sqrt().clamp_min(1e-12)
    return F.embedding(tokens.ids, table), state, expected


@contextmanager
def running_in_fp32(decoder: LoopedDecoder) -> Iterator[None]:
    """Widen each block while it runs, so that a bf16 model computes in fp32 without a second copy of itself."""
    dtype = decoder.embed_tokens.weight.dtype
    if dtype == torch.float32:
        yield
        return

    def widen(module: nn.Module, *_: Any) -> None:
        module.float()

    def narrow(module: nn.Module, *_: Any) -> None:
        module.to(dtype)

    handles = [decoder.embed_tokens.register_forward_hook(lambda module, ids, output: output.float())]
    for part in (*decoder.layers, decoder.norm, decoder.reentry):
        handles += [part.register_forward_pre_hook(widen), part.register_forward_hook(narrow)]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _shown(what: str, items: Iterable[T]) -> Iterator[T]:
    """The items, behind a progress bar with rate and remaining time where somebody watches a terminal."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    console = Console(stderr=True)
    rate = TextColumn("{task.fields[rate]}")
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), rate, TimeRemainingColumn())
    items = list(items)
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task(what, total=len(items), rate="")
        for item in items:
            yield item
            speed = progress.tasks[0].speed
            progress.update(task, advance=1, rate="" if speed is None else f"{speed:.1f}/s")


@dataclass
class _Unread:
    predicted: None = None


class _NoReading:
    """A head reader for calls that want states alone."""

    every_depth = False

    def read(self, state: Tensor, index: Tensor, depth: int, top_k: int) -> _Unread:
        return _Unread()
