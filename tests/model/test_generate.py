"""`generate` of transformers on looped models: what it returns is what our own reference returns."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from tah2.model.hf import LoopedForCausalLM
from tests.model.reference_loop import tell
from tests.model.test_hf import a_model
from tests.model.tiny import VARIANTS, random_documents

NEW = 6


def generate(model: LoopedForCausalLM, ids: Tensor, **options: Any) -> Tensor:
    everything = torch.ones_like(ids)
    defaults = {"max_new_tokens": NEW, "do_sample": False, "pad_token_id": 0, "attention_mask": everything}
    return model.generate(ids, **{**defaults, **options})


def greedy_by_reference(model: LoopedForCausalLM, ids: Tensor, threshold: float, **options: Any) -> list[int]:
    """One token after another, everything computed anew each time."""
    prompt = len(ids)
    for _ in range(NEW):
        run_all = [t < prompt and model.model.kind.prefill_runs_all for t in range(len(ids))]
        story = tell(model.model, ids, threshold, run_all=run_all, **options)[-1]
        ids = torch.cat([ids, story.mixed.argmax()[None]])
    return ids.tolist()


@pytest.mark.parametrize("variant", VARIANTS)
def test_greedy_generation_equals_the_reference(variant: str):
    model, (ids,) = a_model(variant), random_documents(5)
    assert generate(model, ids[None])[0].tolist() == greedy_by_reference(model, ids, 0.5)


@pytest.mark.parametrize(
    "options", [{"exit_threshold": 0.35}, {"exit_threshold": 0.6, "max_depth": 5}, {"max_depth": 1}]
)
@pytest.mark.parametrize("variant", ["tah2", "ouro-adaptive"])
def test_threshold_and_ceiling_are_arguments_of_generate(variant: str, options: dict[str, Any]):
    model, (ids,) = a_model(variant), random_documents(5)
    reference = dict(options)
    threshold = reference.pop("exit_threshold", 0.5)
    assert generate(model, ids[None], **options)[0].tolist() == greedy_by_reference(model, ids, threshold, **reference)


def test_threshold_and_ceiling_change_what_is_generated():
    model, prompts = a_model(), torch.stack(random_documents(5, 5, 5, 5))
    ways = ({"exit_threshold": -1.0}, {"max_depth": 1}, {"exit_threshold": 1.5})
    deep, shallow, stopped = (generate(model, prompts, **options) for options in ways)
    assert not torch.equal(deep, shallow)
    assert torch.equal(shallow, stopped)


@pytest.mark.parametrize("variant", ["tah2", "ouro-adaptive", "huginn"])
def test_a_left_padded_batch_equals_one_by_one(variant: str):
    model, documents = a_model(variant), random_documents(6, 2, 4)
    batch, mask = torch.zeros(3, 6, dtype=torch.long), torch.zeros(3, 6, dtype=torch.long)
    for row, ids in enumerate(documents):
        batch[row, -len(ids) :], mask[row, -len(ids) :] = ids, 1
    together = generate(model, batch, attention_mask=mask)[:, 6:]
    alone = [generate(model, ids[None])[0, len(ids) :] for ids in documents]
    assert torch.equal(together, torch.stack(alone))


@pytest.mark.parametrize("variant", ["tah2", "ouro", "huginn"])
def test_a_cache_changes_nothing(variant: str):
    model, (ids,) = a_model(variant), random_documents(5)
    assert torch.equal(generate(model, ids[None], use_cache=False), generate(model, ids[None]))


def test_a_prompt_that_runs_all_needs_a_cache_to_be_told_from_the_response():
    model, (ids,) = a_model("ouro-adaptive"), random_documents(5)
    with pytest.raises(ValueError, match="needs use_cache=True"):
        generate(model, ids[None], use_cache=False)


def test_beam_search_reorders_the_cache():
    """With as many beams as tokens, two steps are an exhaustive search."""
    model, (ids,) = a_model(), random_documents(4)
    out = generate(model, ids[None], num_beams=23, max_new_tokens=2, length_penalty=0.0)[0]
    pairs = torch.cartesian_prod(torch.arange(23), torch.arange(23))
    with torch.no_grad():
        logprobs = model(torch.cat([ids.expand(len(pairs), -1), pairs], dim=1)).logits.log_softmax(-1)
    rows = torch.arange(len(pairs))
    best = (logprobs[rows, 3, pairs[:, 0]] + logprobs[rows, 4, pairs[:, 1]]).argmax()
    assert torch.equal(out[4:], pairs[best])


def test_several_sequences_of_one_prompt():
    model, (ids,) = a_model(), random_documents(4)
    torch.manual_seed(0)
    out = generate(model, ids[None], do_sample=True, num_return_sequences=4, top_k=0)
    assert out.shape == (4, 10)
    assert len({tuple(row) for row in out.tolist()}) > 1
    beams = generate(model, ids[None], num_beams=3, num_return_sequences=3)
    assert torch.equal(beams[0], generate(model, ids[None], num_beams=3)[0])


@pytest.mark.parametrize("stop", [0, 1])
def test_every_end_of_sequence_id_is_honoured(stop: int):
    model, (ids,) = a_model(), random_documents(5)
    free = generate(model, ids[None])[0, 5:].tolist()
    ends = [free[2], 99] if stop == 0 else [99, free[2]]
    model.generation_config.eos_token_id = ends
    first = free.index(free[2])
    assert generate(model, ids[None])[0, 5:].tolist() == free[: first + 1]


def test_a_conversation_goes_on_from_its_cache():
    model, (ids,) = a_model("ouro-adaptive"), random_documents(5)
    first = generate(model, ids[None], return_dict_in_generate=True)
    longer = torch.cat([first.sequences, random_documents(3, seed=5)[0][None]], dim=1)
    second = generate(model, longer, past_key_values=first.past_key_values, return_dict_in_generate=True)
    assert second.sequences.shape == (1, longer.shape[1] + NEW)
    assert second.past_key_values.get_seq_length() == longer.shape[1] + NEW - 1


@pytest.mark.parametrize("mistake", ["exit_treshold", "depth", "exit_thresholds"])
def test_unknown_arguments_of_generate_are_refused_by_transformers(mistake: str):
    model, (ids,) = a_model(), random_documents(3)
    with pytest.raises(ValueError, match=f"not used by the model.*{mistake}"):
        generate(model, ids[None], **{mistake: 0.5})


def test_bf16_generates():
    model, (ids,) = a_model().bfloat16(), random_documents(4)
    assert generate(model, ids[None]).shape == (1, 4 + NEW)
