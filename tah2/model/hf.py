"""The Hugging Face face of a looped model: `LoopedConfig`, `LoopedForCausalLM` and generation.

`input_ids` `[B, T]` with an optional padding mask become flat tokens, the loop runs, and logits go back to
`[B, T, V]`. The cache keeps the keys and values of every executed entry, whatever its depth.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from huggingface_hub.dataclasses import strict
from torch import Tensor
from torch.nn import functional as F
from transformers import AutoConfig, AutoModelForCausalLM, GenerationMixin, PreTrainedConfig, PreTrainedModel
from transformers.utils import ModelOutput

from tah2.config import strict as strict_config
from tah2.config.backbone import BackboneConfig
from tah2.config.loop import LoopConfig
from tah2.config.strict import ConfigError
from tah2.model.folder import add_notes, check_folder, refuse_mismatch, whole_folder
from tah2.model.loop import LoopedDecoder, LoopSettings, Thresholded, Tokens
from tah2.model.scoring import Scores, score
from tah2.model.store import LoopStore

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


@dataclass
class LoopedOutput(ModelOutput):
    """`logits` is the logarithm of the mixed distribution (up to a constant where one depth alone speaks)."""

    loss: Tensor | None = None
    logits: Tensor | None = None
    past_key_values: Any = None
    hidden_states: tuple[Tensor, ...] | None = None
    """The state that the LM head reads after each token's last depth, `[B, T, d]`, as a tuple of one."""
    depths: Tensor | None = None
    """Executed iterations, long `[B, T]`; 0 at padding."""
    continue_probs: Tensor | None = None
    """The gate's probabilities, fp32 `[B, T, M - 1]`; NaN where a token did not get that far."""
    depth_logprobs: Tensor | None = None
    """On request: log-probabilities of every executed depth, fp32 `[B, kept, M, V]`; NaN where not executed."""


class LoopCache:
    """Executed entries of earlier calls; one document per row of the batch."""

    is_compileable = False

    def __init__(self) -> None:
        self.store = LoopStore()
        self.columns = 0
        """Columns of `input_ids` seen so far, padding included."""
        self.lengths: Tensor | None = None
        """Real tokens of each row so far, long `[B]`."""

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self.columns

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Row b continues what row `beam_idx[b]` has executed (beam search)."""
        self.store = self.store.rows(beam_idx)
        if self.lengths is not None:
            self.lengths = self.lengths[beam_idx]

    def batch_repeat_interleave(self, repeats: int) -> None:
        if self.lengths is not None:
            self.reorder_cache(torch.arange(len(self.lengths)).repeat_interleave(repeats))

    def batch_select_indices(self, indices: Tensor) -> None:
        self.reorder_cache(indices)


class LoopedForCausalLM(PreTrainedModel, GenerationMixin):
    config_class = LoopedConfig
    base_model_prefix = "model"
    main_input_name = "input_ids"
    _no_split_modules = ("Block",)
    _tied_weights_keys: dict[str, str] = {}  # noqa: RUF012 - read by transformers as a class attribute
    _supports_sdpa = True

    def __init__(self, config: LoopedConfig) -> None:
        super().__init__(config)
        self.model = LoopedDecoder(config.backbone_config, config.loop_config)
        self.post_init()

    def _init_weights(self, module: torch.nn.Module) -> None:
        """transformers calls this per module; the decoder knows how its parts start."""
        if module is self.model:
            self.model.reset()

    def get_input_embeddings(self) -> torch.nn.Module:
        return self.model.embed_tokens

    def get_output_embeddings(self) -> torch.nn.Module | None:
        return self.model.lm_head

    @classmethod
    def _supports_default_dynamic_cache(cls) -> bool:
        return False

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path: Any, *args: Any, **kwargs: Any) -> Any:
        """As transformers', but strict: a missing or unexpected tensor is an error, and pickles are refused."""
        if isinstance(pretrained_model_name_or_path, (str, Path)) and Path(pretrained_model_name_or_path).is_dir():
            check_folder(Path(pretrained_model_name_or_path))
        wants_info = kwargs.pop("output_loading_info", False)
        kwargs["use_safetensors"] = True
        model, info = super().from_pretrained(pretrained_model_name_or_path, *args, output_loading_info=True, **kwargs)
        refuse_mismatch(info["missing_keys"], info["unexpected_keys"])
        return (model, info) if wants_info else model

    def save_pretrained(self, save_directory: Any, *args: Any, **kwargs: Any) -> None:
        """As transformers', but whole or not at all (see `folder.whole_folder`)."""
        with whole_folder(save_directory) as folder:
            self.write(folder, *args, **kwargs)

    def write(self, folder: Path, *args: Any, **kwargs: Any) -> None:
        """Write weights, config and the notes for readers without this package into a folder not yet in use."""
        super().save_pretrained(folder, *args, **kwargs)
        add_notes(folder)

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: LoopCache | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        exit_threshold: float | None = None,
        max_depth: int | None = None,
        prefill: bool = False,
        output_depth_logprobs: bool = False,
        output_hidden_states: bool | None = None,
        return_dict: bool | None = None,
        **ignored: Any,
    ) -> LoopedOutput:
        """`prefill` marks the tokens as a prompt, which some kinds run to the ceiling whatever their gate says."""
        grid = _Grid.of(input_ids, attention_mask, position_ids, past_key_values)
        keep = _kept_columns(input_ids, logits_to_keep if labels is None else 0)
        loop = self.config.loop_config
        settings = LoopSettings(
            router=Thresholded(loop.exit_threshold if exit_threshold is None else exit_threshold),
            max_depth=max_depth,
            run_all=torch.ones_like(grid.tokens.ids, dtype=torch.bool)
            if prefill and self.model.kind.prefill_runs_all
            else None,
        )
        store = LoopStore() if past_key_values is None else past_key_values.store
        scores = score(self.model, grid.tokens, keep[grid.real], settings, store, every_depth=output_depth_logprobs)
        logits = grid.scatter(scores.logits, keep)
        cache = None
        if use_cache:
            cache = past_key_values or LoopCache()
            cache.store = scores.run.store.settled(scores.depths)
            cache.columns += input_ids.shape[1]
            cache.lengths = grid.lengths
        output = LoopedOutput(
            loss=None if labels is None else _next_token_loss(logits, labels),
            logits=logits,
            past_key_values=cache,
            hidden_states=(grid.full(scores.run.final_state),) if output_hidden_states else None,
            depths=grid.full(scores.depths),
            continue_probs=grid.full(_continue_probabilities(scores, self.model.ceiling(max_depth))),
            depth_logprobs=grid.scatter(_depth_logprobs(scores, self.model.ceiling(max_depth)), keep, float("nan"))
            if output_depth_logprobs
            else None,
        )
        return output if return_dict is not False else output.to_tuple()

    def prepare_inputs_for_generation(
        self,
        input_ids: Tensor,
        past_key_values: LoopCache | None = None,
        attention_mask: Tensor | None = None,
        **kwargs: Any,
    ) -> dict[str, Any]:
        use_cache = kwargs.get("use_cache") is not False
        if not use_cache and self.model.kind.prefill_runs_all:
            raise ValueError(
                f"Generation with loop {self.model.kind.name!r} needs use_cache=True: "
                "without a cache the prompt, which runs to the ceiling, cannot be told from the response."
            )
        seen = 0 if past_key_values is None else past_key_values.columns
        return {
            "input_ids": input_ids[:, seen:],
            "attention_mask": attention_mask,
            "past_key_values": LoopCache() if use_cache and past_key_values is None else past_key_values,
            "use_cache": use_cache,
            "prefill": seen == 0,
            "logits_to_keep": kwargs.get("logits_to_keep") or 1,
            "exit_threshold": kwargs.get("exit_threshold"),
            "max_depth": kwargs.get("max_depth"),
        }


@dataclass(frozen=True)
class _Grid:
    """Between `[B, T]` and flat tokens."""

    tokens: Tokens
    real: Tensor
    """bool `[B, T]`: this call's real (unpadded) tokens"""
    lengths: Tensor
    """long `[B]`: real tokens of each row up to and including this call"""

    @classmethod
    def of(
        cls, input_ids: Tensor, attention_mask: Tensor | None, position_ids: Tensor | None, cache: LoopCache | None
    ) -> _Grid:
        if input_ids.ndim != 2:
            raise ValueError(f"input_ids must have two dimensions (batch, tokens), not {input_ids.ndim}.")
        rows, columns = input_ids.shape
        real = torch.ones_like(input_ids, dtype=torch.bool)
        if attention_mask is not None:
            if attention_mask.ndim != 2:
                raise ValueError(
                    "Looped models take a padding mask [batch, tokens]; other attention masks are refused."
                )
            real = attention_mask[:, -columns:].bool()
        before = torch.zeros(rows, dtype=torch.long, device=input_ids.device)
        if cache is not None and cache.lengths is not None:
            before = cache.lengths.to(input_ids.device)
        position = before[:, None] + real.long().cumsum(1) - 1
        document = torch.arange(rows, device=input_ids.device)[:, None].expand(rows, columns)
        if position_ids is not None and (cache is None or cache.columns == 0):
            position = position_ids.expand(rows, columns)
            starts = (position == 0) & real
            document = document * columns + (starts.long().cumsum(1) - 1).clamp_min(0)
            if cache is not None and int(starts.sum(1).max()) > 1:
                raise ValueError("Several documents in one row (position_ids restarting at 0) cannot use a cache.")
            document = document if cache is None else document // columns
        return cls(Tokens(input_ids[real], document[real], position[real]), real, before + real.sum(1))

    def full(self, values: Tensor) -> Tensor:
        """Flat `[N, ...]` back to `[B, T, ...]`, zero at padding."""
        out = values.new_zeros(*self.real.shape, *values.shape[1:])
        out[self.real] = values
        return out

    def scatter(self, values: Tensor, keep: Tensor, fill: float = 0.0) -> Tensor:
        """Flat values of the kept tokens back to `[B, kept columns, ...]`."""
        columns = keep[0].nonzero().squeeze(-1)
        out = values.new_full((self.real.shape[0], len(columns), *values.shape[1:]), fill)
        out[self.real[:, columns]] = values
        return out


def _kept_columns(input_ids: Tensor, logits_to_keep: int | Tensor) -> Tensor:
    """bool `[B, T]`: the same columns in every row, as transformers' `logits_to_keep` means it."""
    keep = torch.zeros_like(input_ids, dtype=torch.bool)
    if isinstance(logits_to_keep, Tensor):
        keep[:, logits_to_keep] = True
    else:
        keep[:, -logits_to_keep if logits_to_keep else 0 :] = True
    return keep


def _next_token_loss(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), ignore_index=-100)


def _continue_probabilities(scores: Scores, ceiling: int) -> Tensor:
    probabilities = torch.full((len(scores.depths), ceiling - 1), float("nan"), device=scores.depths.device)
    for current in scores.run.passes:
        if current.continue_logit is not None:
            probabilities[current.index, current.depth - 1] = current.continue_logit.sigmoid()
    return probabilities


def _depth_logprobs(scores: Scores, ceiling: int) -> Tensor:
    count, vocabulary = scores.logits.shape
    out = scores.logits.new_full((count, ceiling, vocabulary), float("nan"))
    for current in scores.run.passes:
        if current.reading is None:
            raise ValueError("This loop reads its LM head only after the coda, so it has no per-depth predictions.")
        out[current.reading.rows, current.depth - 1] = current.reading.logits.float().log_softmax(-1)
    return out


def register() -> None:
    """Make transformers' auto classes know `model_type: looped`."""
    AutoConfig.register("looped", LoopedConfig, exist_ok=True)
    AutoModelForCausalLM.register(LoopedConfig, LoopedForCausalLM, exist_ok=True)
