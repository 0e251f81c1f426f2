"""Per-depth statistics add up over micro-batches and ranks, and their ratios mean what their names say."""

from __future__ import annotations

import math
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.multiprocessing.spawn import spawn

from tah2.compute.train import TrainFlops
from tah2.objective.cutoff import Cutoff
from tah2.objective.head import NO_TARGET
from tah2.train.depth_stats import DepthObservation, DepthStats
from tah2.train.metrics import StepMetrics

DEPTHS, TOKENS = 3, 12


class Batch:
    """A random micro-batch: who executed what, every loss at every depth, and labels."""

    def __init__(self, seed: int) -> None:
        draw = torch.Generator().manual_seed(seed)
        self.targets = torch.where(torch.rand(TOKENS, generator=draw) < 0.7, 5, NO_TARGET)
        self.targets[0] = 5
        self.logprob = -3 * torch.rand(DEPTHS, TOKENS, generator=draw)
        self.top = torch.randint(4, 7, (DEPTHS, TOKENS), generator=draw)
        self.executed = torch.randint(1, DEPTHS + 1, (TOKENS,), generator=draw)
        self.label = torch.rand(DEPTHS, TOKENS, generator=draw) < 0.5
        self.unknown = torch.rand(DEPTHS, TOKENS, generator=draw) < 0.2

    def next_loss(self, m: int) -> Tensor:
        return torch.where(self.unknown[m], torch.nan, -self.logprob[m])

    def observations(self, among: Tensor) -> list[DepthObservation]:
        """Depths of the tokens `among`, bool `[TOKENS]`, as if they were the micro-batch."""
        depths = []
        for m in range(1, DEPTHS + 1):
            index = (among & (self.executed >= m)).nonzero()[:, 0]
            continues = self.executed[index] > m if m < DEPTHS else None
            depth = DepthObservation.of_pass(
                index, self.targets, self.logprob[m - 1][index], self.top[m - 1][index], continues
            )
            if m < DEPTHS:
                token = index[self.targets[index] != NO_TARGET]
                depth = depth.labelled(
                    self.next_loss(m)[token], self.label[m][token], decider_loss=float(m), lookahead=len(token)
                )
            depths.append(depth)
        return depths

    def stats(self, among: Tensor | None = None) -> DepthStats:
        among = torch.ones(TOKENS, dtype=torch.bool) if among is None else among
        supervised = among & (self.targets != NO_TARGET)
        return DepthStats.observe(
            self.observations(among), DEPTHS, prediction_loss=-self.logprob[0][supervised].double().sum()
        )


def mean(values: list[float]) -> float:
    return sum(values) / len(values)


def expected(batch: Batch) -> dict[str, float]:
    """The metrics of one micro-batch by plain loops over tokens."""
    tokens = range(TOKENS)
    told = [t for t in tokens if batch.targets[t] != NO_TARGET]
    depth = batch.executed.tolist()
    loss = [[-value for value in row] for row in batch.logprob.tolist()]
    hit = [[bool(batch.top[m][t] == batch.targets[t]) for t in tokens] for m in range(DEPTHS)]
    want = {
        "loss/prediction": mean([loss[0][t] for t in told]),
        "depth/mean": mean(depth),
        "accuracy": mean([hit[depth[t] - 1][t] for t in told]),
        "data/tokens": TOKENS,
    }
    for m in range(1, DEPTHS + 1):
        here = [t for t in told if depth[t] >= m]
        want[f"depth/{m}/share"] = mean([depth[t] >= m for t in tokens])
        if here:
            want[f"depth/{m}/loss"] = mean([loss[m - 1][t] for t in here])
            want[f"depth/{m}/accuracy"] = mean([hit[m - 1][t] for t in here])
        if m == DEPTHS or not here:
            continue
        goes, label = [depth[t] > m for t in here], [bool(batch.label[m][t]) for t in here]
        want[f"decider/{m}/continue_rate"] = mean([depth[t] > m for t in tokens if depth[t] >= m])
        want[f"decider/{m}/label_rate"] = mean(label)
        want[f"decider/{m}/agreement"] = mean([a == b for a, b in zip(goes, label, strict=True)])
        want[f"decider/{m}/absent_class"] = float(len(set(label)) == 1)
        if any(label):
            want[f"decider/{m}/recall"] = mean([a for a, b in zip(goes, label, strict=True) if b])
        if any(goes):
            want[f"decider/{m}/precision"] = mean([b for a, b in zip(goes, label, strict=True) if a])
        known = [t for t in here if not batch.unknown[m][t]]
        if known:
            gains = [loss[m - 1][t] - loss[m][t] for t in known]
            want[f"decider/{m}/gain"] = mean(gains)
            want[f"decider/{m}/gain_std"] = math.sqrt(mean([gain**2 for gain in gains]) - mean(gains) ** 2)
            want[f"depth/{m + 1}/loss_measured"] = mean([loss[m][t] for t in known])
    return want


@given(st.integers(0, 10_000))
@settings(max_examples=40, deadline=None)
def test_metrics_equal_loops_over_tokens(seed: int):
    batch = Batch(seed)
    flat = StepMetrics(batch.stats()).flat()
    want = expected(batch)
    assert {name: flat[name] for name in want} == pytest.approx(want, abs=1e-5)


@given(st.integers(0, 10_000))
@settings(max_examples=25, deadline=None)
def test_statistics_of_parts_add_up_to_those_of_the_whole(seed: int):
    batch = Batch(seed)
    part = torch.rand(TOKENS, generator=torch.Generator().manual_seed(seed)) < 0.5
    whole, added = batch.stats(), batch.stats(part) + batch.stats(~part)
    per_micro_batch = ("micro_batches", "beta", "absent", "label_batches", "decider_loss", "gate_loss")
    for name in (name for name in DepthStats.__dataclass_fields__ if name not in per_micro_batch):
        torch.testing.assert_close(getattr(added, name), getattr(whole, name), msg=lambda text, n=name: f"{n}: {text}")
    assert float(added.micro_batches) == 2
    assert added.decider_loss.tolist() == [2.0, 4.0, 0.0]


def test_statistics_survive_the_flat_tensor():
    stats = Batch(3).stats()
    flat = stats.to_tensor()
    assert flat.dtype == torch.float64
    assert flat.dim() == 1
    again = DepthStats.from_tensor(flat, DEPTHS)
    for name in DepthStats.__dataclass_fields__:
        assert torch.equal(getattr(again, name), getattr(stats, name))
    assert torch.equal((stats + DepthStats.zero(DEPTHS)).to_tensor(), flat)


def test_a_tensor_of_another_ceiling_is_refused():
    flat = DepthStats.zero(DEPTHS).to_tensor()
    with pytest.raises(ValueError, match="2 depths do not fit"):
        DepthStats.from_tensor(flat, 2)
    with pytest.raises(ValueError, match="cannot be added"):
        DepthStats.zero(2) + DepthStats.zero(3)


def check_pooled(rank: int, world: int, rendezvous: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", f"file://{rendezvous}", timedelta(seconds=60), world, rank)
    try:
        alone = [Batch(seed).stats() for seed in range(world)]
        assert torch.equal(alone[rank].pooled(dist.group.WORLD).to_tensor(), sum(alone[1:], alone[0]).to_tensor())
    finally:
        dist.destroy_process_group()


def test_pooling_adds_the_ranks(tmp_path: Path):
    spawn(check_pooled, args=(2, str(tmp_path / "rendezvous")), nprocs=2)
    alone = Batch(0).stats()
    assert alone.pooled(None) is alone


def one_depth(loss: list[float]) -> DepthObservation:
    return DepthObservation(executed=4, loss=torch.tensor(loss))


def test_a_model_of_one_depth_reports_nothing_about_deciders():
    flat = StepMetrics(DepthStats.observe([one_depth([1.0, 2.0])], 1)).flat()
    assert flat == {
        "loss": 1.5,
        "loss/prediction": 1.5,
        "depth/mean": 1.0,
        "depth/1/share": 1.0,
        "depth/1/loss": 1.5,
        "data/tokens": 4.0,
        "data/supervised_tokens": 2.0,
    }


def test_depths_that_only_know_their_summed_loss_report_its_mean():
    depths = [DepthObservation(4, torch.tensor(6.0), supervised=3), DepthObservation(4, torch.tensor(3.0), 3)]
    flat = StepMetrics(DepthStats.observe(depths, 2, prediction_loss=torch.tensor(4.5))).flat()
    assert (flat["depth/1/loss"], flat["depth/2/loss"], flat["loss"]) == (2.0, 1.0, 1.5)
    with pytest.raises(ValueError, match="needs `supervised`"):
        DepthObservation(4, torch.tensor(6.0))


def test_depths_without_a_head_report_depth_alone():
    stats = DepthStats.observe([DepthObservation(4)] * 3, 3, supervised_tokens=2, prediction_loss=5.0)
    flat = StepMetrics(stats).flat()
    assert (flat["depth/mean"], flat["loss"]) == (3.0, 2.5)
    assert "depth/1/loss" not in flat


def test_a_depth_that_predicts_nothing_right_has_accuracy_zero():
    depth = DepthObservation(2, torch.ones(2), correct=torch.zeros(2, dtype=torch.bool))
    assert StepMetrics(DepthStats.observe([depth], 1)).flat()["accuracy"] == 0.0


def test_depths_beyond_the_deepest_token_count_as_zero():
    stats = DepthStats.observe([one_depth([1.0])], 4)
    assert stats.executed.tolist() == [4, 0, 0, 0]
    with pytest.raises(ValueError, match="1 to 1 depths"):
        DepthStats.observe([one_depth([1.0])] * 2, 1)


def decided(label: list[bool], cutoff: Cutoff, **more: object) -> DepthStats:
    size = len(label)
    depth = DepthObservation.of_pass(
        torch.arange(size), torch.zeros(size, dtype=torch.long), torch.zeros(size), None, torch.tensor(label)
    ).labelled(torch.zeros(size), torch.tensor(label), cutoff, **more)  # type: ignore[arg-type]
    return DepthStats.observe([depth], 2)


def test_cutoff_averages_over_micro_batches_with_a_positive_gain():
    stats = decided([True, False], Cutoff(0.5, True), beta=3.0) + decided([False], Cutoff(0.0, False), beta=1.0)
    flat = StepMetrics(stats).flat()
    assert flat["decider/1/cutoff"] == 0.5
    assert flat["decider/1/beta"] == 2.0
    assert flat["decider/1/absent_class"] == 0.5


def test_a_class_is_absent_only_if_no_rank_has_it():
    here = decided([False], Cutoff(0.0, False), class_counts=torch.tensor([5, 1]))
    assert StepMetrics(here).flat()["decider/1/absent_class"] == 0.0


def test_loss_is_the_joint_objective():
    stats = DepthStats.observe([one_depth([1.0, 3.0])], 2, gate_loss=torch.tensor(4.0))
    flat = StepMetrics(stats, decider_coefficient=0.1).flat()
    assert flat["loss/decider"] == 2.0
    assert flat["loss"] == pytest.approx(2.2)


def test_compute_speed_and_optimizer_values_are_reported_as_given():
    flops = TrainFlops(forward_backward=60.0, label_paper=40.0, label_actual=20.0)
    metrics = StepMetrics(DepthStats.observe([one_depth([1.0])], 1), 0.05, flops, 2.0, 1e-3, 0.5, 1024)
    flat = metrics.flat()
    assert flat["compute/flops"] == 80.0
    assert flat["compute/label_share_actual"] == 0.25
    assert flat["compute/label_share_paper"] == 0.4
    assert flat["speed/tokens_per_second"] == 2.0
    assert (flat["optim/lr"], flat["optim/grad_norm"], flat["memory/peak_bytes"]) == (1e-3, 0.5, 1024.0)


def test_lookahead_tokens_are_counted_both_ways():
    depths = [
        DepthObservation(10, torch.ones(4), continued=3, lookahead=2),
        DepthObservation(3, torch.ones(2)),
    ]
    flat = StepMetrics(DepthStats.observe(depths, 2, prediction_loss=1.0)).flat()
    assert flat["compute/lookahead_tokens_actual"] == 2.0
    assert flat["compute/lookahead_tokens_paper"] == 10.0
    assert flat["decider/1/continue_rate"] == pytest.approx(0.3)


def test_labels_need_decisions():
    with pytest.raises(ValueError, match="nothing to label"):
        one_depth([1.0]).labelled(torch.zeros(1), torch.zeros(1, dtype=torch.bool))


def test_observing_keeps_no_graph():
    loss = torch.ones(3, requires_grad=True)
    stats = DepthStats.observe([DepthObservation(3, loss * 2)], 1)
    assert not stats.to_tensor().requires_grad
