"""The Hugging Face configuration of a looped model: `model_type: looped`."""

from __future__ import annotations

from typing import Any

from huggingface_hub.dataclasses import strict
from transformers import PreTrainedConfig

from tah2.config import strict as strict_config
from tah2.config.backbone import BackboneConfig
from tah2.config.loop import LoopConfig
from tah2.config.strict import ConfigError

_MIRRORED = {
    "vocab_size": "vocab_size",
    "hidden_size": "hidden_size",
    "intermediate_size": "intermediate_size",
    "num_hidden_layers": "num_layers",
    "num_attention_heads": "num_heads",
    "num_key_value_heads": "num_kv_heads",
    "head_dim": "head_dim",
    "max_position_embeddings": "max_position_embeddings",
    "tie_word_embeddings": "tie_word_embeddings",
}
"""What generic tools look for at the top level of a config, by the backbone field that holds it."""


@strict
class LoopedConfig(PreTrainedConfig):
    """`backbone` is the pretrained model's own `config.json`; `loop` holds the fields of `LoopConfig`."""

    model_type = "looped"
    keys_to_ignore_at_inference = ("past_key_values",)

    backbone: dict[str, Any] | None = None
    loop: dict[str, Any] | None = None

    def __post_init__(self, **kwargs: Any) -> None:
        if self.backbone is not None:
            shape = self.backbone_config
            for theirs, ours in _MIRRORED.items():
                setattr(self, theirs, getattr(shape, ours))
                kwargs.pop(theirs, None)
            for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
                if getattr(self, name, None) is None and kwargs.get(name) is None:
                    kwargs[name] = self.backbone.get(name)
            _ = self.loop_config
        super().__post_init__(**kwargs)

    @property
    def backbone_config(self) -> BackboneConfig:
        if self.backbone is None:
            raise ConfigError("A looped config needs the backbone's own config under 'backbone'.")
        return BackboneConfig.from_hf(self.backbone)

    @property
    def loop_config(self) -> LoopConfig:
        return strict_config.build(LoopConfig, self.loop or {}, "loop")
