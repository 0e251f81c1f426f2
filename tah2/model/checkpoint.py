"""Convert a pretrained model into a looped one, and load looped checkpoints."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from tah2.config.backbone import BackboneConfig
from tah2.config.loop import LoopConfig
from tah2.config.strict import ConfigError, build, plain, read_mapping
from tah2.model.folder import MARKER, PREFIX, refuse_mismatch, whole_folder
from tah2.model.hf import LoopedForCausalLM
from tah2.model.hf_config import LoopedConfig
from tah2.model.kinds import LoopKind, kind_of
from tah2.model.source import Source, open_source
from tah2.model.start import StartConfig, start_updater

SIZES = ("updater_width", "decider_width", "decider_top_k", "embedding_top_k", "prelude_layers", "coda_layers")
"""Fields of `LoopConfig` that say how large the parts of a checkpoint are, whatever its kind."""


@dataclass(frozen=True)
class Conversion:
    """What a conversion made."""

    path: Path
    loop: LoopConfig
    backbone: BackboneConfig
    kept: tuple[str, ...]
    """Trained parts of a looped source that went over ("reentry", "gate")."""
    unexplained: float | None
    """Share of the target's variance that the updater's fit leaves unexplained; None where nothing was fitted."""


def convert(
    source: str | Path,
    out: str | Path,
    *,
    loop: str = "tah2",
    max_depth: int = 2,
    start: StartConfig | None = None,
    dtype: str | torch.dtype | None = None,
    **options: Any,
) -> Path:
    """Turn a pretrained model into a looped checkpoint at `out`.

    `source` is a local Hugging Face folder, a hub id, a GGUF file, or a looped checkpoint (to change its kind).
    `options` are further fields of `LoopConfig` (`exit_threshold`, `updater_width`, ...). The added parts begin in
    their start state; where the loop has a learned updater, it is fitted to the backbone's own predictions.
    """
    given = {"kind": loop, "max_depth": max_depth, **options}
    return run_conversion(source, out, given, start or StartConfig(), dtype).path


def run_conversion(
    source: str | Path,
    out: str | Path,
    given: Mapping[str, Any],
    start: StartConfig,
    dtype: str | torch.dtype | None = None,
) -> Conversion:
    """As `convert`; `given` are the fields of `LoopConfig` that the user set, `kind` among them."""
    build(LoopConfig, given)  # a mistake in the options is told before anything is opened
    opened = open_source(source)
    loop = _loop(opened, given)
    _refuse_unused(kind_of(loop), given)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(start.seed)
        model = looped_model(opened, loop, dtype=_dtype(dtype))
    kept = kept_parts(model, opened.weights)
    unexplained = None
    with whole_folder(out) as folder:
        opened.save_tokenizer(folder)
        if "reentry" not in kept:
            unexplained = start_updater(model.model, start, folder)
        model.write(folder)
    return Conversion(Path(out), loop, model.model.backbone, kept, unexplained)


def _loop(source: Source, given: Mapping[str, Any]) -> LoopConfig:
    """What the user gave; a looped source says the rest, its parts' sizes even where the kind changes."""
    stored: dict[str, Any] = source.config.get("loop") or {} if source.is_looped else {}
    if given["kind"] != stored.get("kind"):
        stored = {name: stored[name] for name in SIZES if name in stored}
    return build(LoopConfig, {**stored, **given})


def _refuse_unused(kind: LoopKind, given: Mapping[str, Any]) -> None:
    """An option that would change nothing is a mistake."""
    unused = [name for name in kind.unused_options() if name in given]
    if unused:
        raise ConfigError(f"Loop kind {kind.name!r} has no use for {', '.join(unused)}.")


def _dtype(name: str | torch.dtype | None) -> torch.dtype | None:
    if name is None or isinstance(name, torch.dtype):
        return name
    dtypes = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
    if name not in dtypes:
        raise ConfigError(f"dtype must be one of {', '.join(dtypes)}, not {name!r}.")
    return dtypes[name]


def looped_model(source: Source, loop: LoopConfig, dtype: torch.dtype | None = None) -> LoopedForCausalLM:
    """The source's weights inside a loop; parts that the source lacks begin in their start state.

    Tensors whose dtype fits are taken over as they are (memory-mapped from a folder), not copied.
    """
    backbone = source.config["backbone"] if source.is_looped else source.config
    shape = BackboneConfig.from_hf(backbone)
    backbone = {key: value for key, value in backbone.items() if not key.startswith("_") and key != "auto_map"}
    with torch.device("meta"):
        model = LoopedForCausalLM(LoopedConfig(backbone=backbone, loop=plain(loop)))
    weights = source.weights if source.is_looped else _renamed(source.weights, shape)
    embedding = weights.get(f"{PREFIX}embed_tokens.weight")
    dtype = dtype or (torch.float32 if embedding is None else embedding.dtype)
    _take_over(model, weights, dtype)
    model.config.dtype = dtype
    if source.generation:
        known = {key: value for key, value in source.generation.items() if not key.startswith("_")}
        model.generation_config = type(model.generation_config).from_dict(known)
    return model


def _renamed(weights: dict[str, Tensor], shape: BackboneConfig) -> dict[str, Tensor]:
    """Hugging Face names to ours: only the head moves, and a tied head has no tensor of its own."""
    renamed = dict(weights)
    head = renamed.pop("lm_head.weight", None)
    if not shape.tie_word_embeddings:
        if head is None:
            raise ConfigError("The source says its LM head is untied but holds no lm_head.weight.")
        renamed[f"{PREFIX}lm_head.weight"] = head
    return {key: value for key, value in renamed.items() if not key.endswith("rotary_emb.inv_freq")}


def _parts(model: LoopedForCausalLM) -> dict[str, nn.Module]:
    parts = {"reentry": model.model.reentry, "gate": model.model.gate}
    return {name: part for name, part in parts.items() if part is not None}


def kept_parts(model: LoopedForCausalLM, weights: Mapping[str, Tensor]) -> tuple[str, ...]:
    """Learned parts of `model` that a source's `weights` hold whole, in the same shapes."""

    def held(name: str, part: nn.Module) -> bool:
        theirs = {key: weights.get(f"{PREFIX}{name}.{key}") for key in part.state_dict()}
        shapes = {key: None if tensor is None else tensor.shape for key, tensor in theirs.items()}
        return bool(shapes) and shapes == {key: tensor.shape for key, tensor in part.state_dict().items()}

    return tuple(name for name, part in _parts(model).items() if held(name, part))


def _take_over(model: LoopedForCausalLM, weights: dict[str, Tensor], dtype: torch.dtype) -> None:
    """Fill a model on the meta device: backbone tensors strictly, parts that are there whole, others at their start."""
    kept = kept_parts(model, weights)
    for name, part in _parts(model).items():
        if name not in kept:
            part.to_empty(device="cpu").to(dtype)
    model.model.reset_parts()
    wanted = {name: tensor for name, tensor in model.state_dict().items() if tensor.is_meta}
    parts = (f"{PREFIX}reentry.", f"{PREFIX}gate.")
    unexpected = [name for name in weights if name not in wanted and not name.startswith(parts)]
    refuse_mismatch([name for name in wanted if name not in weights], unexpected)
    for name, tensor in wanted.items():
        if weights[name].shape != tensor.shape:
            raise ConfigError(
                f"Tensor {name} has shape {tuple(weights[name].shape)}, the config asks for {tuple(tensor.shape)}."
            )
    taken = {name: weights[name].to(dtype) for name in wanted}
    model.load_state_dict(taken, strict=False, assign=True)


def load(
    path: str | Path, *, dtype: torch.dtype | None = None, device: str | torch.device = "cpu"
) -> LoopedForCausalLM:
    """A looped checkpoint (local folder or hub id), ready to score and generate."""
    _refuse_plain(Path(path))
    model = LoopedForCausalLM.from_pretrained(path, **({} if dtype is None else {"dtype": dtype}))
    return model.to(device).eval()


def _refuse_plain(folder: Path) -> None:
    """A pretrained model that nobody has converted is a likely mistake."""
    if not (folder / MARKER).is_file():
        return
    kind = read_mapping(folder / MARKER).get("model_type")
    if kind != LoopedConfig.model_type:
        raise ConfigError(f"{folder} holds a plain model ({kind}), not a looped one; run: tah2 convert {folder} OUT.")
