"""Convert a pretrained model into a looped one, and load looped checkpoints."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tah2.config.backbone import BackboneConfig
from tah2.config.loop import LoopConfig
from tah2.config.strict import ConfigError, build, plain
from tah2.model.folder import PREFIX, refuse_mismatch, whole_folder
from tah2.model.hf import LoopedConfig, LoopedForCausalLM
from tah2.model.kinds import kind_of
from tah2.model.source import Source, open_source
from tah2.model.start import StartConfig, start_updater


def convert(
    source: str | Path,
    out: str | Path,
    *,
    loop: str = "tah2",
    max_depth: int = 2,
    start: StartConfig | None = None,
    **options: Any,
) -> Path:
    """Turn a pretrained model into a looped checkpoint at `out`.

    `source` is a local Hugging Face folder, a hub id, a GGUF file, or a looped checkpoint (to change its kind).
    `options` are further fields of `LoopConfig` (`exit_threshold`, `updater_width`, ...). The added parts begin in
    their start state; where the loop has a learned updater, it is fitted to the backbone's own predictions.
    """
    config = build(LoopConfig, {"kind": loop, "max_depth": max_depth, **options})
    kind_of(config)
    opened = open_source(source)
    model = looped_model(opened, config)
    with whole_folder(out) as folder:
        opened.save_tokenizer(folder)
        start_updater(model.model, start or StartConfig(), folder)
        model.write(folder)
    return Path(out)


def looped_model(source: Source, loop: LoopConfig) -> LoopedForCausalLM:
    """The source's weights inside a loop; parts that the source lacks begin in their start state."""
    looped = source.config.get("model_type") == "looped"
    backbone = source.config["backbone"] if looped else source.config
    shape = BackboneConfig.from_hf(backbone)
    backbone = {key: value for key, value in backbone.items() if not key.startswith("_") and key != "auto_map"}
    config = LoopedConfig(backbone=backbone, loop=plain(loop))
    model = LoopedForCausalLM(config)
    weights = source.weights if looped else _renamed(source.weights, shape)
    dtype = weights[f"{PREFIX}embed_tokens.weight"].dtype
    model = model.to(dtype)
    _load_backbone(model, weights, keep_parts=looped)
    config.dtype = dtype
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


def _load_backbone(model: LoopedForCausalLM, weights: dict[str, Tensor], keep_parts: bool) -> None:
    """Copy tensors strictly; only the loop's own parts may be absent, and only there may a name be unknown."""
    own = dict(model.state_dict())
    parts = (f"{PREFIX}reentry.", f"{PREFIX}gate.")
    model.model.reset_parts()
    missing = [name for name in own if name not in weights and not name.startswith(parts)]
    unexpected = [name for name in weights if name not in own and not (keep_parts and name.startswith(parts))]
    refuse_mismatch(missing, unexpected)
    for name, tensor in own.items():
        if name in weights:
            if weights[name].shape != tensor.shape:
                if name.startswith(parts):
                    continue
                raise ConfigError(
                    f"Tensor {name} has shape {tuple(weights[name].shape)}, the config asks for {tuple(tensor.shape)}."
                )
            with torch.no_grad():
                tensor.copy_(weights[name])


def load(
    path: str | Path, *, dtype: torch.dtype | None = None, device: str | torch.device = "cpu"
) -> LoopedForCausalLM:
    """A looped checkpoint (local folder or hub id), ready to score and generate."""
    model = LoopedForCausalLM.from_pretrained(path, **({} if dtype is None else {"dtype": dtype}))
    return model.to(device).eval()
