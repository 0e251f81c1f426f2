"""How many parameters a looped model has, and how many of them the loop added."""

from __future__ import annotations

import re
from dataclasses import dataclass

from tah2.config.backbone import BackboneConfig
from tah2.config.loop import LoopConfig
from tah2.model.kinds import kind_of


@dataclass(frozen=True)
class ParameterCounts:
    backbone: int
    added: dict[str, int]
    """Parameters of each part that the loop adds ("updater", "decider", ...); parts without any are left out."""

    @property
    def added_total(self) -> int:
        return sum(self.added.values())

    @property
    def total(self) -> int:
        return self.backbone + self.added_total

    @property
    def fraction(self) -> float:
        """Added parameters over all parameters of the looped model."""
        return self.added_total / self.total


def parameter_counts(backbone: BackboneConfig, loop: LoopConfig) -> ParameterCounts:
    kind = kind_of(loop)
    parts = [part for part in (kind.reentry, kind.gate) if part is not None]
    sizes = {_words(part.__name__): part.shapes(backbone, loop).parameters for part in parts}
    return ParameterCounts(backbone_parameters(backbone), {name: size for name, size in sizes.items() if size})


def backbone_parameters(backbone: BackboneConfig) -> int:
    """Embedding, layers, final norm and, unless tied, the LM head."""
    d, inner = backbone.hidden_size, backbone.intermediate_size
    q, kv = backbone.query_width, backbone.kv_width
    attention = d * (q + 2 * kv) + q * d
    biases = (q + 2 * kv) * backbone.qkv_bias + d * backbone.output_bias + (2 * inner + d) * backbone.mlp_bias
    norms = 2 * d + 2 * backbone.head_dim * backbone.qk_norm
    layer = attention + 3 * d * inner + biases + norms
    vocabularies = 1 if backbone.tie_word_embeddings else 2
    return vocabularies * backbone.vocab_size * d + backbone.num_layers * layer + d


def _words(name: str) -> str:
    """`InputAdapter` -> `input-adapter`."""
    return re.sub(r"(?<=[a-z])(?=[A-Z])", "-", name).lower()
