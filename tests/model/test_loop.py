"""The loop over packed passes computes what the token-by-token reference computes, for every kind and option."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tah2.config.strict import ConfigError
from tah2.model.loop import LoopedDecoder, LoopSettings, Thresholded, Tokens
from tah2.model.scoring import Scores, score
from tah2.model.store import LoopStore
from tests.model.reference_loop import Told, by_threshold, tell
from tests.model.tiny import VARIANTS, random_documents, random_tokens, tiny_loop, tiny_model

LENGTHS = (5, 1, 7)
variants = pytest.mark.parametrize("variant", VARIANTS)
gated = pytest.mark.parametrize("variant", ["tah2", "ouro-adaptive"])


def model_of(variant: str, **backbone: object) -> LoopedDecoder:
    return tiny_model(tiny_loop(**VARIANTS[variant]), **backbone)


def middle_threshold(model: LoopedDecoder, tokens: Tokens) -> float:
    """A threshold that about half of the tokens pass at depth 1."""
    run = score(model, tokens, settings=LoopSettings(router=Thresholded(-1.0), attention="dense")).run
    if run.passes[0].continue_logit is None:
        return 0.5
    return float(run.passes[0].continue_logit.sigmoid().quantile(0.55))


def assert_tells_the_same(scores: Scores, stories: list[Told]) -> None:
    """Depths, gate, per-depth and mixed predictions, and the final state."""
    assert scores.depths.tolist() == [story.depth for story in stories]
    expected = torch.stack([story.mixed for story in stories]).float()
    torch.testing.assert_close(scores.logits.log_softmax(-1), expected, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(
        scores.run.final_state, torch.stack([story.state for story in stories]), rtol=1e-4, atol=1e-4
    )
    for current in scores.run.passes:
        index = current.index.tolist()
        if current.continue_logit is not None:
            probabilities = torch.tensor([stories[i].continue_probs[current.depth - 1] for i in index])
            torch.testing.assert_close(current.continue_logit.sigmoid(), probabilities, rtol=1e-4, atol=1e-4)
        if current.reading is not None:
            logprobs = torch.stack([stories[i].logprobs[current.depth - 1] for i in index])
            torch.testing.assert_close(current.reading.logits.log_softmax(-1), logprobs, rtol=1e-4, atol=1e-4)


@variants
@torch.no_grad()
def test_a_packed_run_equals_the_reference(variant: str):
    model, tokens = model_of(variant), random_tokens(*LENGTHS)
    threshold = middle_threshold(model, tokens)
    scores = score(model, tokens, settings=LoopSettings(router=Thresholded(threshold)), every_depth=True)
    stories = [story for ids in random_documents(*LENGTHS) for story in tell(model, ids, threshold)]
    assert_tells_the_same(scores, stories)
    if model.gate is not None:
        assert len(set(scores.depths.tolist())) > 1, "the test wants tokens of several depths"


@variants
@torch.no_grad()
@pytest.mark.parametrize("ceiling", [1, 2, 5])
def test_the_inference_ceiling_may_be_lower_or_higher_than_the_trained_one(variant: str, ceiling: int):
    model, tokens = model_of(variant), random_tokens(*LENGTHS)
    settings = LoopSettings(max_depth=ceiling, router=Thresholded(0.3))
    scores = score(model, tokens, settings=settings)
    stories = [story for ids in random_documents(*LENGTHS) for story in tell(model, ids, 0.3, max_depth=ceiling)]
    assert_tells_the_same(scores, stories)


@gated
@torch.no_grad()
def test_each_token_may_have_its_own_threshold(variant: str):
    model, (ids,) = model_of(variant), random_documents(8)
    thresholds = [-1.0, 2.0, 0.5, 0.3, 0.7, 2.0, -1.0, 0.4]
    scores = score(model, Tokens.pack([ids]), settings=LoopSettings(router=Thresholded(torch.tensor(thresholds))))
    stories = tell(model, ids, by_threshold(model, thresholds))
    assert_tells_the_same(scores, stories)
    depths = scores.depths.tolist()
    assert depths[0] == depths[6] == 3
    assert depths[1] == depths[5] == 1


@gated
@torch.no_grad()
def test_tokens_that_run_all_ignore_their_gate(variant: str):
    model, (ids,) = model_of(variant), random_documents(6)
    everything = torch.tensor([True, False, True, False, False, True])
    settings = LoopSettings(router=Thresholded(2.0), run_all=everything)
    scores = score(model, Tokens.pack([ids]), settings=settings)
    assert scores.depths.tolist() == [3 if all_of_it else 1 for all_of_it in everything]
    assert_tells_the_same(scores, tell(model, ids, 2.0, run_all=everything.tolist()))


@gated
@torch.no_grad()
def test_decisions_may_be_sampled(variant: str):
    model, (ids,) = model_of(variant), random_documents(9)
    noise = torch.rand(9, 3, generator=torch.Generator().manual_seed(1))

    def sampled(gate, probability: Tensor, survival: Tensor, depth: int, index: Tensor, reading) -> Tensor:
        return noise[index, depth] < probability

    scores = score(model, Tokens.pack([ids]), settings=LoopSettings(router=sampled))
    stories = tell(model, ids, lambda t, m, g, survival: bool(noise[t, m] < g))
    assert_tells_the_same(scores, stories)
    assert set(scores.depths.tolist()) == {1, 2, 3}


@gated
@torch.no_grad()
def test_a_threshold_above_one_is_the_standard_model_exactly(variant: str):
    model, tokens = model_of(variant), random_tokens(*LENGTHS)
    standard = tiny_model(tiny_loop(kind="standard"))
    standard.load_state_dict(model.state_dict(), strict=False)
    plain = score(standard, tokens)
    assert torch.equal(score(model, tokens, settings=LoopSettings(router=Thresholded(1.01))).logits, plain.logits)
    assert plain.depths.tolist() == [1] * len(tokens)


@torch.no_grad()
@pytest.mark.parametrize("variant", [name for name in VARIANTS if name != "huginn"])
def test_a_ceiling_of_one_is_the_standard_model_exactly(variant: str):
    model, tokens = model_of(variant), random_tokens(*LENGTHS)
    standard = tiny_model(tiny_loop(kind="standard"))
    standard.load_state_dict(model.state_dict(), strict=False)
    logits = score(model, tokens, settings=LoopSettings(max_depth=1)).logits
    assert torch.equal(logits, score(standard, tokens).logits)


@torch.no_grad()
def test_huginn_starts_as_the_standard_model_at_depth_one():
    model, tokens = model_of("huginn"), random_tokens(*LENGTHS)
    model.reset_parts()
    standard = tiny_model(tiny_loop(kind="standard"))
    standard.load_state_dict(model.state_dict(), strict=False)
    logits = score(model, tokens, settings=LoopSettings(max_depth=1)).logits
    torch.testing.assert_close(logits, score(standard, tokens).logits, rtol=1e-5, atol=1e-5)


@variants
@torch.no_grad()
def test_chunked_prefill_equals_one_call(variant: str):
    model = model_of(variant)
    documents = random_documents(9, 6)
    tokens = Tokens.pack(documents)
    settings = LoopSettings(router=Thresholded(middle_threshold(model, tokens)))
    whole = score(model, tokens, settings=settings)
    store, parts, depths = LoopStore(), [], []
    for first, last in ((0, 4), (4, 5), (5, 9)):
        chosen = (tokens.position >= first) & (tokens.position < last)
        chunk = Tokens(tokens.ids[chosen], tokens.document[chosen], tokens.position[chosen])
        scores = score(model, chunk, settings=settings, store=store)
        store = scores.run.store.settled(scores.depths)
        parts.append(scores.logits)
        depths.append(scores.depths)
    order = torch.cat(
        [((tokens.position >= a) & (tokens.position < b)).nonzero()[:, 0] for a, b in ((0, 4), (4, 5), (5, 9))]
    )
    torch.testing.assert_close(torch.cat(parts), whole.logits[order], rtol=1e-4, atol=1e-4)
    assert torch.equal(torch.cat(depths), whole.depths[order])


@torch.no_grad()
def test_a_store_must_be_settled_before_the_next_call():
    model, tokens = model_of("tah2"), random_tokens(3)
    store = LoopStore()
    score(model, tokens, store=store)
    with pytest.raises(ValueError, match="settled"):
        score(model, tokens, store=store)


@torch.no_grad()
def test_kept_logits_are_rows_of_all_logits():
    model, tokens = model_of("tah2"), random_tokens(*LENGTHS)
    keep = torch.zeros(len(tokens), dtype=torch.bool)
    keep[[2, 5, 9]] = True
    everything = score(model, tokens, settings=LoopSettings(router=Thresholded(0.5)))
    some = score(model, tokens, keep, LoopSettings(router=Thresholded(0.5)))
    torch.testing.assert_close(some.logits, everything.logits[keep])
    assert torch.equal(some.depths, everything.depths)


@torch.no_grad()
def test_documents_do_not_feel_their_neighbours():
    model = model_of("tah2")
    together = score(model, random_tokens(*LENGTHS)).logits
    alone = torch.cat([score(model, Tokens.pack([ids])).logits for ids in random_documents(*LENGTHS)])
    torch.testing.assert_close(together, alone, rtol=1e-5, atol=1e-5)


@torch.no_grad()
def test_an_untied_head_is_read():
    model = model_of("tah2", tie_word_embeddings=True)
    assert model.head_weight is model.embed_tokens.weight
    untied = model_of("tah2")
    assert untied.head_weight is untied.lm_head.weight
    (ids,) = random_documents(6)
    for each in (model, untied):
        assert_tells_the_same(score(each, Tokens.pack([ids])), tell(each, ids, each.loop.exit_threshold))


@pytest.mark.parametrize("max_depth", [0, -1])
def test_a_ceiling_below_one_is_refused(max_depth: int):
    with pytest.raises(ConfigError, match="max_depth must be at least 1"):
        score(model_of("tah2"), random_tokens(3), settings=LoopSettings(max_depth=max_depth))


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"kind": "tah"}, "Unknown loop kind 'tah'; did you mean 'tah2'"),
        ({"kind": "ouro", "output": "stopping-mixture"}, "has no gate"),
        ({"kind": "huginn", "output": "uniform-mixture"}, "output can only be 'last'"),
        ({"kind": "huginn", "reentry": "top-k-embedding"}, "reads predictions does not fit"),
        ({"kind": "tah2", "reentry": "updaters"}, "did you mean 'updater'"),
        ({"kind": "huginn", "prelude_layers": 2, "coda_layers": 2}, "leave nothing to loop"),
    ],
)
def test_loops_that_cannot_be_are_refused_in_one_sentence(options: dict[str, object], sentence: str):
    with pytest.raises(ConfigError, match=sentence):
        tiny_model(tiny_loop(**options))
