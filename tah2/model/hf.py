"""The Hugging Face face of a looped model: `LoopedForCausalLM` and generation.

`input_ids` `[B, T]` with an optional padding mask become flat tokens, the loop runs, and logits go back to
`[B, T, V]`. The cache keeps the keys and values of every executed entry, whatever its depth.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import AutoConfig, AutoModelForCausalLM, GenerationMixin, PreTrainedModel
from transformers.utils import ModelOutput

from tah2.model.folder import add_notes, check_folder, refuse_mismatch, whole_folder
from tah2.model.hf_batch import Grid, LoopCache, kept_columns
from tah2.model.hf_config import LoopedConfig as LoopedConfig
from tah2.model.loop import LoopedDecoder, LoopSettings, Thresholded
from tah2.model.scoring import Scores, score


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
        kwargs.update(use_safetensors=True, ignore_mismatched_sizes=True)  # a mismatch is told below, by name
        model, info = super().from_pretrained(pretrained_model_name_or_path, *args, output_loading_info=True, **kwargs)
        misshapen = [str(entry[0] if isinstance(entry, tuple) else entry) for entry in info["mismatched_keys"]]
        refuse_mismatch(info["missing_keys"], info["unexpected_keys"], misshapen)
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
        **others: Any,
    ) -> LoopedOutput | tuple[Any, ...]:
        """`prefill` marks the tokens as a prompt, which some kinds run to the ceiling whatever their gate says."""
        _refuse_unknown(others)
        grid = Grid.of(input_ids, attention_mask, position_ids, past_key_values)
        ceiling = self.model.ceiling(max_depth)
        keep = kept_columns(input_ids, logits_to_keep if labels is None else 0)
        settings = LoopSettings(
            router=None if exit_threshold is None else Thresholded(exit_threshold),
            max_depth=max_depth,
            run_all=torch.ones_like(grid.tokens.ids, dtype=torch.bool)
            if prefill and self.model.kind.prefill_runs_all
            else None,
        )
        store = None if past_key_values is None else past_key_values.store.copy()
        scores = score(self.model, grid.tokens, keep[grid.real], settings, store, every_depth=output_depth_logprobs)
        logits = grid.scatter(scores.logits, keep)
        cache = None
        if use_cache or (use_cache is None and past_key_values is not None):
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
            continue_probs=grid.full(_continue_probabilities(scores, ceiling), float("nan")),
            depth_logprobs=grid.scatter(_depth_logprobs(scores, ceiling), keep, float("nan"))
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
        fresh = input_ids[:, seen:]
        return {
            "input_ids": fresh,
            "attention_mask": attention_mask,
            "past_key_values": LoopCache() if use_cache and past_key_values is None else past_key_values,
            "use_cache": use_cache,
            "prefill": seen == 0 or fresh.shape[1] > 1,
            "logits_to_keep": kwargs.get("logits_to_keep") or 1,
            "exit_threshold": kwargs.get("exit_threshold"),
            "max_depth": kwargs.get("max_depth"),
        }


def _refuse_unknown(arguments: dict[str, Any]) -> None:
    """Arguments of other models may be passed as None or False, and mean nothing then."""
    wanted = [name for name, value in arguments.items() if value is not None and value is not False]
    if wanted:
        raise TypeError(f"Looped models do not take {', '.join(wanted)}.")


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
