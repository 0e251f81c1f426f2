"""From the trained decoder, sharded or not, to a Hugging Face folder: weights, config, tokenizer, generation config."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from tah2.config.strict import ConfigError
from tah2.model.folder import PREFIX, whole_folder
from tah2.model.hf import LoopedConfig, LoopedForCausalLM
from tah2.model.loop import LoopedDecoder
from tah2.model.source import TOKENIZER_FILES
from tah2.train.lora import LoraLinear, is_adapter
from tah2.train.parallel import World, settle

_CHAT_TEMPLATES = "additional_chat_templates"


@torch.no_grad()
def export_hf(
    decoder: LoopedDecoder,
    config: LoopedConfig,
    tokenizer_folder: str | Path | None,
    generation_config: Mapping[str, Any] | None,
    out: str | Path,
    world: World | None = None,
    dtype: torch.dtype = torch.bfloat16,
) -> Path:
    """Write the folder `out`, whole or not at all, from rank 0; every rank calls this. The decoder is left as it is."""
    world = world or World()
    tensors = whole_tensors(decoder, dtype, world)
    if world.is_main:
        config = LoopedConfig.from_dict(config.to_dict())
        config.dtype = dtype
        with torch.device("meta"):
            model = LoopedForCausalLM(config).to(dtype)
        if generation_config:
            known = {key: value for key, value in generation_config.items() if not key.startswith("_")}
            model.generation_config = type(model.generation_config).from_dict(known)
        with whole_folder(out) as folder:
            if tokenizer_folder is not None:
                _copy_tokenizer(Path(tokenizer_folder), folder)
            model.write(folder, state_dict={PREFIX + name: tensor for name, tensor in tensors.items()})
    world.barrier()
    return Path(out)


def whole_tensors(decoder: LoopedDecoder, dtype: torch.dtype, world: World) -> dict[str, Tensor]:
    """Every tensor by its name, gathered on rank 0's CPU one by one (other ranks: empty); adapters are folded in.

    Products with adapters are formed in fp32, before the cast to `dtype`.
    """
    settle(decoder)
    scales = {name: module.scale for name, module in decoder.named_modules() if isinstance(module, LoraLinear)}
    tensors: dict[str, Tensor] = {}
    factors: dict[str, Tensor] = {}
    adapters_first = sorted(decoder.state_dict().items(), key=lambda item: not is_adapter(item[0]))
    for name, held in adapters_first:
        tensor = held.full_tensor() if isinstance(held, DTensor) else held
        if not world.is_main:
            continue
        module = name.rpartition(".")[0]
        if is_adapter(name):
            factors[name] = tensor.float()
            continue
        if module in scales and name.endswith(".weight"):
            update = factors.pop(f"{module}.lora_b") @ factors.pop(f"{module}.lora_a")
            tensor = tensor.float() + scales[module] * update
        tensors[name] = tensor.to("cpu", dtype, copy=True)
    return tensors


def _copy_tokenizer(source: Path, target: Path) -> None:
    copied = [shutil.copyfile(source / name, target / name) for name in TOKENIZER_FILES if (source / name).is_file()]
    if not copied:
        raise ConfigError(f"{source} holds no tokenizer files; name the folder of the model that was trained.")
    if (source / _CHAT_TEMPLATES).is_dir():
        shutil.copytree(source / _CHAT_TEMPLATES, target / _CHAT_TEMPLATES)
