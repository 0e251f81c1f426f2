"""Where a pretrained backbone comes from: a local Hugging Face folder, a hub id, or a GGUF file."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from tah2.config.strict import ConfigError, read_mapping
from tah2.model.folder import MARKER

TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "vocab.json",
    "merges.txt",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "chat_template.json",
)
_WEIGHTS_INDEX = "model.safetensors.index.json"
_PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt")


@dataclass(frozen=True)
class Source:
    """A backbone to convert: its Hugging Face config, its tensors by Hugging Face name, and its tokenizer."""

    config: dict[str, Any]
    weights: dict[str, Tensor]
    save_tokenizer: Callable[[Path], None]
    generation: dict[str, Any] | None = None
    """`generation_config.json`, where the source has one"""

    @property
    def is_looped(self) -> bool:
        return self.config.get("model_type") == "looped"


def open_source(name: str | Path) -> Source:
    path = Path(name)
    if path.suffix == ".gguf":
        return _from_gguf(path)
    if path.is_dir():
        return _from_folder(path)
    if path.exists():
        raise ConfigError(f"{name} is neither a checkpoint folder nor a .gguf file.")
    return _from_folder(_download(str(name)))


def _from_folder(folder: Path) -> Source:
    if not (folder / MARKER).is_file():
        raise ConfigError(f"{folder} holds no {MARKER}: it is not a complete checkpoint.")
    config = read_mapping(folder / MARKER)
    generation = folder / "generation_config.json"

    def save_tokenizer(target: Path) -> None:
        for name in TOKENIZER_FILES:
            if (folder / name).is_file():
                shutil.copyfile(folder / name, target / name)
        if (folder / "additional_chat_templates").is_dir():
            shutil.copytree(folder / "additional_chat_templates", target / "additional_chat_templates")
        name_tokenizer_class(target)

    return Source(
        config,
        read_safetensors(folder),
        save_tokenizer,
        json.loads(generation.read_text(encoding="utf-8")) if generation.is_file() else None,
    )


def read_safetensors(folder: Path) -> dict[str, Tensor]:
    """Every tensor of a folder's safetensors files (memory-mapped); pickled weights are refused."""
    index = folder / _WEIGHTS_INDEX
    if index.is_file():
        placed: dict[str, str] = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        files = sorted({folder / name for name in placed.values()})
    else:
        files = sorted(folder.glob("*.safetensors"))
    missing = [file.name for file in files if not file.is_file()]
    if missing:
        raise ConfigError(f"{folder} is incomplete: {', '.join(missing)} is listed in {_WEIGHTS_INDEX} but absent.")
    if not files:
        pickled = [file.name for pattern in _PICKLES for file in folder.glob(pattern)]
        if pickled:
            raise ConfigError(
                f"{folder} holds pickled weights ({pickled[0]}), which can run code when opened; "
                "save the model as safetensors first."
            )
        raise ConfigError(f"{folder} holds no *.safetensors weights.")
    tensors: dict[str, Tensor] = {}
    for file in files:
        try:
            with safe_open(file, framework="pt") as handle:
                tensors.update({key: handle.get_tensor(key) for key in handle.keys()})  # noqa: SIM118
        except Exception as error:
            raise ConfigError(f"{file} is not a whole safetensors file ({error}); download or save it again.") from None
    return tensors


def name_tokenizer_class(folder: Path) -> None:
    """Make a folder's tokenizer load without its model's class: `AutoTokenizer` then needs no code of ours."""
    config = folder / "tokenizer_config.json"
    if not (folder / "tokenizer.json").is_file():
        return
    fields: dict[str, Any] = json.loads(config.read_text(encoding="utf-8")) if config.is_file() else {}
    if not fields.get("tokenizer_class"):
        fields["tokenizer_class"] = "PreTrainedTokenizerFast"
        config.write_text(json.dumps(fields, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def _from_gguf(path: Path) -> Source:
    """Dequantise to fp32 through transformers' GGUF reader."""
    if not path.is_file():
        raise ConfigError(f"{path} does not exist.")
    try:
        import accelerate  # noqa: F401
        import gguf  # noqa: F401
    except ImportError:
        raise ConfigError("Reading GGUF files needs two more packages: install tah2 with its 'gguf' extra.") from None
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder, name = str(path.parent), path.name
    model = AutoModelForCausalLM.from_pretrained(folder, gguf_file=name, dtype=torch.float32)
    config = model.config.to_dict()
    config.pop("quantization_config", None)

    def save_tokenizer(target: Path) -> None:
        AutoTokenizer.from_pretrained(folder, gguf_file=name).save_pretrained(target)
        name_tokenizer_class(target)

    generation = model.generation_config.to_diff_dict()
    return Source(
        config, {key: value.detach() for key, value in model.state_dict().items()}, save_tokenizer, generation
    )


def _download(name: str) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError, RepositoryNotFoundError

    try:
        folder = snapshot_download(name, allow_patterns=["*.json", "*.safetensors", "*.txt", "*.model", "*.jinja"])
    except (HFValidationError, RepositoryNotFoundError) as error:
        raise ConfigError(f"{name!r} is neither a local folder nor a model on the hub.") from error
    except Exception as error:
        raise ConfigError(
            f"{name!r} is not a local folder, and the hub could not be reached ({type(error).__name__}); "
            "check the path or the network."
        ) from error
    return Path(folder)
