"""Every scheme against its story: losses, gradients and labels, told token by token with full logits."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tah2.config.strict import ConfigError
from tah2.data.packing import PackedBatch, pack
from tah2.data.store import Sample
from tah2.model.loop import LoopedDecoder, LoopSettings
from tah2.train.config import ObjectiveSection
from tah2.train.schemes import SCHEMES, Context, Outcome, Sampled, scheme_for, token_keys
from tests.model.tiny import TINY, tiny_loop, tiny_model
from tests.train import story
from tests.train.story import Tale

LENGTHS = (7, 2, 6)
COUNT = 40
"""N of the global batch, of which the batch of the test is a part."""


def batch_of(*lengths: int, seed: int = 0, first: int = 0) -> PackedBatch:
    """Documents whose first tokens are a prompt without loss."""
    draws = np.random.default_rng(seed)
    samples = []
    for number, length in enumerate(lengths, start=first):
        mask = np.arange(length) >= 1 + length // 4
        samples.append(Sample(draws.integers(0, TINY.vocab_size, length).astype(np.int32), mask, f"sample-{number}"))
    return pack(samples)


def model_of(kind: str, max_depth: int = 3, seed: int = 3, **options: Any) -> LoopedDecoder:
    layers = 3 if kind == "huginn" else 2
    loop = tiny_loop(max_depth, kind=kind, **options)
    return tiny_model(loop, seed, num_layers=layers, hidden_size=12, intermediate_size=12)


def context_of(objective: ObjectiveSection, **more: Any) -> Context:
    return Context(objective, COUNT, LoopSettings(), **more)


def gradients(model: LoopedDecoder, loss: Tensor) -> dict[str, Tensor]:
    model.zero_grad()
    loss.backward(retain_graph=True)
    return {name: torch.zeros_like(p) if p.grad is None else p.grad.clone() for name, p in model.named_parameters()}


@dataclass(frozen=True)
class Case:
    """A scheme on a loop, and the loss that its story makes of the supervised tokens' tales."""

    model: Callable[[], LoopedDecoder]
    objective: ObjectiveSection
    loss: Callable[[LoopedDecoder, list[Tale]], Tensor]
    decide: Callable[[LoopedDecoder], story.Decide] = story.by_threshold
    frozen: bool = False
    continue_all: bool = False


def joint(alpha: float = 0.05, **labels: Any) -> Callable[[LoopedDecoder, list[Tale]], Tensor]:
    def loss(model: LoopedDecoder, tales: list[Tale]) -> Tensor:
        found = story.label(tales, model.ceiling(), **labels)
        last = model.kind.output.value == "last"
        predicted = [tale.losses[-1] if last else story.mixture_loss(tale) for tale in tales]
        return torch.stack(predicted).sum() + alpha * story.decider_loss(tales, found)

    return loss


def exit_gate(model: LoopedDecoder, tales: list[Tale]) -> Tensor:
    total, depths = torch.tensor(0.0), model.ceiling()
    for tale in tales:
        for m in range(1, depths):
            improvement = max(0.0, float((tale.losses[m - 1] - tale.losses[m]).detach()))
            target = torch.tensor(50 * (improvement - 0.005)).sigmoid()
            stay = tale.logits[m - 1].sigmoid()
            total = total - (target * stay.log() + (1 - target) * (1 - stay).log()) / depths
    return total


def decider_only(model: LoopedDecoder, tales: list[Tale]) -> Tensor:
    return story.decider_loss(tales, story.label(tales, model.ceiling(), labels="oracle", uniform=True))


def last(model: LoopedDecoder, tales: list[Tale]) -> Tensor:
    return torch.stack([tale.losses[-1] for tale in tales]).sum()


def mean(model: LoopedDecoder, tales: list[Tale]) -> Tensor:
    return torch.stack([torch.stack(tale.losses).mean() for tale in tales]).sum()


def uniform(model: LoopedDecoder, tales: list[Tale]) -> Tensor:
    likelihoods = [torch.stack([(-loss).exp() for loss in tale.losses]).mean() for tale in tales]
    return -torch.stack(likelihoods).log().sum()


def oracle_policy(model: LoopedDecoder) -> story.Decide:
    return story.oracle


def everyone(model: LoopedDecoder) -> story.Decide:
    return story.always


def of(**fields: Any) -> ObjectiveSection:
    return ObjectiveSection(**fields)


CASES: dict[str, Case] = {
    "standard": Case(lambda: model_of("standard"), of(), last),
    "huginn": Case(lambda: model_of("huginn", prelude_layers=1, coda_layers=1), of(), last),
    "ouro, last depth": Case(lambda: model_of("ouro"), of(scheme="last-depth"), last),
    "ouro": Case(lambda: model_of("ouro"), of(), mean),
    "tah2-fixed": Case(lambda: model_of("tah2-fixed"), of(), uniform),
    "exit gate": Case(lambda: model_of("ouro-adaptive"), of(), exit_gate, everyone, frozen=True),
    "oracle": Case(
        lambda: model_of("tah2", seed=0, output="last", reentry="top-k-embedding", embedding_top_k=5),
        of(scheme="oracle"),
        last,
        oracle_policy,
    ),
    "decider only": Case(
        lambda: model_of("tah2", seed=7, output="last"),
        of(scheme="decider-only"),
        decider_only,
        oracle_policy,
        frozen=True,
    ),
    "lookahead": Case(lambda: model_of("tah2"), of(), joint()),
    "lookahead, two depths": Case(lambda: model_of("tah2", 2), of(), joint()),
    "lookahead, stronger decider": Case(lambda: model_of("tah2"), of(decider_coefficient=2.0), joint(2.0)),
    "lookahead, full coverage": Case(lambda: model_of("tah2"), of(coverage=1.0), joint(rho=1.0)),
    "lookahead, half coverage": Case(lambda: model_of("tah2"), of(coverage=0.5), joint(rho=0.5)),
    "lookahead, mismatch labels": Case(lambda: model_of("tah2"), of(labels="top1-mismatch"), joint(labels="top1")),
    "lookahead, uniform weights": Case(lambda: model_of("tah2"), of(weights="uniform"), joint(uniform=True)),
    "lookahead, last output": Case(lambda: model_of("tah2", output="last"), of(), joint()),
    "lookahead, top-k embedding": Case(
        lambda: model_of("tah2", seed=4, reentry="top-k-embedding", embedding_top_k=5), of(), joint()
    ),
    "lookahead, all continue": Case(
        lambda: model_of("tah2"), of(continue_all_ratio=0.5), joint(), everyone, continue_all=True
    ),
}
cases = pytest.mark.parametrize("name", CASES)


def outcome_of(case: Case, model: LoopedDecoder, batch: PackedBatch) -> Outcome:
    scheme = scheme_for(model, case.objective)
    assert scheme.freezes_backbone == case.frozen
    return scheme(model, batch, context_of(case.objective, continue_all=case.continue_all))


@cache
def told(name: str) -> tuple[LoopedDecoder, PackedBatch, list[Tale]]:
    """The case's model and batch, and the story of its supervised tokens."""
    case, batch = CASES[name], batch_of(*LENGTHS)
    model = case.model()
    return model, batch, story.tell(model, batch, case.decide(model))


@cases
def test_loss_and_gradients_equal_the_story(name: str):
    case, (model, batch, tales) = CASES[name], told(name)
    ours = outcome_of(case, model, batch)
    theirs = case.loss(model, tales) / COUNT
    torch.testing.assert_close(ours.total, theirs, rtol=1e-4, atol=1e-5)
    found, expected = gradients(model, ours.total), gradients(model, theirs)
    learning = [parameter for parameter in expected if not case.frozen or parameter.startswith("gate.")]
    for parameter in learning:
        torch.testing.assert_close(found[parameter], expected[parameter], rtol=2e-3, atol=2e-5, msg=parameter)
    assert sum(float(expected[parameter].abs().sum()) for parameter in learning) > 0.01


@pytest.mark.parametrize("name", [name for name in CASES if name.startswith(("lookahead", "oracle", "decider"))])
def test_the_stories_have_tokens_of_several_depths_and_labels_of_both_kinds(name: str):
    case, (model, _, tales) = CASES[name], told(name)
    depths = {tale.depth for tale in tales}
    assert depths == {model.ceiling()} if case.continue_all else len(depths) > 1
    if name.startswith("lookahead"):
        first = story.label(tales, model.ceiling())[0]
        assert set(first.continues.values()) == {True, False}
        assert first.beta != 1.0


@pytest.mark.parametrize("name", [name for name in CASES if name.startswith("lookahead")])
def test_lookahead_of_the_stopped_tokens_alone_gives_the_losses_and_labels_of_rerunning_all(name: str):
    case, (model, batch, tales) = CASES[name], told(name)
    found, by_token = outcome_of(case, model, batch), {tale.index: tale for tale in tales}
    objective, kind = case.objective, {"iteration-gain": "gain", "top1-mismatch": "top1"}[case.objective.labels]
    labels = story.label(tales, model.ceiling(), objective.coverage, kind, uniform=objective.weights == "uniform")
    assert found.supervision is not None
    compared = 0
    for m, theirs in enumerate(labels, start=1):
        evidence, ours = found.supervision.evidence[m - 1], found.supervision.labels[m - 1]
        tokens = evidence.token.tolist()
        assert set(tokens) == set(theirs.continues)
        rerun = torch.tensor([by_token[t].beyond[m - 1] for t in tokens])
        torch.testing.assert_close(evidence.next_loss, rerun, rtol=1e-4, atol=1e-4)
        assert dict(zip(tokens, ours.continues.tolist(), strict=True)) == theirs.continues
        weights = torch.tensor([theirs.weight[t] for t in tokens])
        torch.testing.assert_close(ours.weight, weights, rtol=1e-3, atol=1e-4)
        torch.testing.assert_close(float(found.supervision.balance[m - 1]), theirs.beta, rtol=1e-6, atol=0.0)
        compared += len(rerun)
    assert compared >= len(tales)
    assert sum(len(probe.index) for probe in found.run.lookaheads) < compared


@pytest.mark.parametrize("name", ["lookahead", "exit gate", "decider only"])
def test_micro_batches_divided_by_the_global_count_add_up(name: str):
    """Cutoff and class balance belong to a micro-batch, so a decider's story is told for each of them."""
    case, parts = CASES[name], [batch_of(8, 3), batch_of(7, seed=1, first=2)]
    model = case.model()
    total = sum((outcome_of(case, model, part).total for part in parts), torch.tensor(0.0))
    found = gradients(model, total)
    stories = [case.loss(model, story.tell(model, part, case.decide(model))) for part in parts]
    torch.testing.assert_close(total, sum(stories) / COUNT, rtol=1e-4, atol=1e-5)
    expected = gradients(model, sum(stories) / COUNT)
    part = "gate." if case.frozen else ""
    for parameter, gradient in expected.items():
        if parameter.startswith(part):
            torch.testing.assert_close(found[parameter], gradient, rtol=2e-3, atol=2e-5, msg=parameter)


@pytest.mark.parametrize("name", ["standard", "ouro", "tah2-fixed", "huginn", "oracle"])
def test_how_a_batch_is_split_does_not_matter_without_a_decider_loss(name: str):
    case, model = CASES[name], CASES[name].model()
    lone = [batch_of(7, seed=i, first=i) for i in range(3)]
    samples = [Sample(b.ids.numpy().astype(np.int32), np.append(False, b.targets.numpy()[:-1] >= 0)) for b in lone]
    whole = outcome_of(case, model, pack(samples)).total
    split = sum((outcome_of(case, model, part).total for part in lone), torch.tensor(0.0))
    torch.testing.assert_close(split, whole, rtol=1e-5, atol=1e-6)


@cases
def test_a_placeholder_has_zero_loss_and_finite_zero_gradients(name: str):
    case, model = CASES[name], CASES[name].model()
    outcome = outcome_of(case, model, PackedBatch.placeholder())
    assert float(outcome.total) == 0.0
    for parameter, gradient in gradients(model, outcome.total).items():
        assert not gradient.any(), parameter  # NaN counts as any


def probabilities(count: int, seed: int = 0) -> Tensor:
    return torch.rand(count, generator=torch.Generator().manual_seed(seed))


def drawn(router: Sampled, index: Tensor, probability: Tensor, depth: int = 1) -> Tensor:
    gate: Any = None
    return router(gate, probability[index], torch.ones(len(index)), depth, index, None)


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 2**64 - 1), st.integers(1, 8), st.permutations(range(20)), st.integers(1, 20))
def test_sampled_decisions_are_a_function_of_seed_depth_and_token_alone(
    seed: int, depth: int, order: list[int], kept: int
):
    """Whichever tokens are asked about, in whatever order."""
    batch, probability = batch_of(9, 3, 8), probabilities(20)
    router = Sampled(seed, token_keys(batch))
    whole = drawn(router, torch.arange(20), probability, depth)
    index = torch.tensor(order[:kept])
    assert torch.equal(drawn(router, index, probability, depth), whole[index])


def test_sampled_decisions_do_not_see_how_samples_are_packed():
    first, second = batch_of(9), batch_of(8, seed=1, first=1)
    samples = [
        Sample(b.ids.numpy().astype(np.int32), np.append(False, b.targets.numpy()[:-1] >= 0), b.samples[0])
        for b in (first, second)
    ]
    keys = np.concatenate([token_keys(first), token_keys(second)])
    assert np.array_equal(token_keys(pack(samples)), keys)
    assert len(set(keys.tolist())) == len(keys)


def test_sampled_decisions_follow_their_probability_and_differ_by_seed_and_depth():
    batch = batch_of(*[50] * 40)
    probability, index = torch.full((2000,), 0.3), torch.arange(2000)
    keys = token_keys(batch)
    draws = [drawn(Sampled(seed, keys), index, probability, depth).float() for seed, depth in ((0, 1), (1, 1), (0, 2))]
    assert all(abs(float(draw.mean()) - 0.3) < 0.04 for draw in draws)
    for a, b in ((0, 1), (0, 2), (1, 2)):
        assert abs(float(torch.corrcoef(torch.stack([draws[a], draws[b]]))[0, 1])) < 0.08
    sure = drawn(Sampled(0, keys), index, torch.ones(2000))
    assert sure.all()


def test_the_sampled_scheme_follows_its_draws():
    """The story, told under the decisions that the counter gives."""
    model, batch, objective = model_of("tah2"), batch_of(*LENGTHS), of(decisions="sampled")
    ours = scheme_for(model, objective)(model, batch, context_of(objective, seed=5))
    router = Sampled(5, token_keys(batch))

    def decide(tale: Tale, m: int, g: float) -> bool:
        gate: Any = None
        return bool(router(gate, torch.tensor([g]), torch.ones(1), m, torch.tensor([tale.index]), None))

    tales = story.tell(model, batch, decide)
    theirs = joint()(model, tales) / COUNT
    torch.testing.assert_close(ours.total, theirs, rtol=1e-4, atol=1e-5)
    on_policy = scheme_for(model, of())(model, batch, context_of(of()))
    assert not torch.equal(ours.run.executed, on_policy.run.executed)
    expected = gradients(model, theirs)
    for parameter, gradient in gradients(model, ours.total).items():
        torch.testing.assert_close(gradient, expected[parameter], rtol=2e-3, atol=2e-5, msg=parameter)


@pytest.mark.parametrize("name", ["standard", "ouro"])
def test_kinds_of_tokens_may_weigh_differently(name: str):
    case, batch, model = CASES[name], batch_of(*LENGTHS), CASES[name].model()
    weight = torch.rand(len(batch), generator=torch.Generator().manual_seed(1))
    objective = replace(case.objective, tag_weights={"3": 2.0})
    ours = scheme_for(model, objective)(model, batch, context_of(objective, token_weight=weight)).total
    tales = story.tell(model, batch, story.always)
    theirs = sum(weight[tale.index] * case.loss(model, [tale]) for tale in tales) / COUNT
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("kind", "objective", "sentence"),
    [
        ("tah2", {"scheme": "lookahed"}, "did you mean 'lookahead'"),
        ("ouro", {"scheme": "lookahead"}, "loops with a decider"),
        ("tah2", {"scheme": "last-depth"}, "trains no gate"),
        ("ouro", {"scheme": "uniform-mixture"}, "set 'loop.output' to 'uniform-mixture'"),
        ("tah2-fixed", {"scheme": "last-depth"}, "set 'loop.output' to 'last'"),
        ("tah2", {"scheme": "oracle"}, "loop.output=last"),
        ("huginn", {"scheme": "every-depth"}, "whole-stack"),
        ("ouro", {"scheme": "exit-gate"}, "a gate"),
        ("ouro", {"coverage": 0.5}, "no use for 'objective.coverage'"),
        ("tah2", {"tag_weights": {"1": 2.0}}, "no use for 'objective.tag_weights'"),
        ("tah2-fixed", {"decisions": "sampled"}, "no use for 'objective.decisions'"),
    ],
)
def test_what_a_scheme_cannot_do_is_refused(kind: str, objective: dict[str, Any], sentence: str):
    with pytest.raises(ConfigError, match=sentence):
        scheme_for(model_of(kind), ObjectiveSection(**objective))


def test_every_scheme_has_a_story():
    trained = {scheme_for(case.model(), case.objective).__class__ for case in CASES.values()}
    assert trained == {make().__class__ for make in SCHEMES.values()}
