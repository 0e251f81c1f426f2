"""Statistics pooled over ranks equal those of one process that holds everything, whatever the split."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import spawn

from tah2.objective.balance import class_balance, class_counts
from tah2.objective.cutoff import Cutoff, coverage_cutoff
from tah2.objective.evidence import Evidence
from tah2.objective.labels import DepthLabels, continuation_labels
from tah2.objective.pooling import pool_sum, pool_values

TOKENS, DEPTHS, CASES = 40, 3, 6


def whole_batch(case: int) -> list[Evidence]:
    """Three depths over 40 tokens; gains have ties (even cases) or full precision (odd ones)."""
    draw = torch.Generator().manual_seed(case)
    losses = 2 * torch.rand(DEPTHS + 1, TOKENS, generator=draw)
    losses = (8 * losses).round() / 8 if case % 2 == 0 else losses
    reached = torch.rand(TOKENS, generator=draw)
    evidence = []
    for m in range(DEPTHS):
        token = (reached >= 0.3 * m).nonzero()[:, 0]
        correct = torch.rand(len(token), generator=draw) < 0.5
        evidence.append(Evidence(token, torch.arange(len(token)), losses[m][token], losses[m + 1][token], correct))
    return evidence


def share(depth: Evidence, owner: torch.Tensor, rank: int) -> Evidence:
    mine = owner[depth.token] == rank
    names = ("token", "row", "loss", "next_loss", "top1_correct")
    return Evidence(*(getattr(depth, name)[mine] for name in names))


def statistics(labels: list[DepthLabels], group: dist.ProcessGroup | None) -> tuple[list[Cutoff], torch.Tensor]:
    return [depth.cutoff for depth in labels], class_balance(class_counts([depth.continues for depth in labels], group))


def check_every_split(rank: int, world: int, rendezvous: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", f"file://{rendezvous}", timedelta(seconds=60), world, rank)
    group = dist.group.WORLD
    for case in range(CASES):
        whole = whole_batch(case)
        alone = continuation_labels(whole, TOKENS, coverage=0.9)
        draw = torch.Generator().manual_seed(100 + case)
        random_owner = torch.randint(world, (TOKENS,), generator=draw)
        last_rank_owns_all = torch.full((TOKENS,), world - 1)
        for owner in (random_owner, last_rank_owns_all):
            parts = [share(depth, owner, rank) for depth in whole]
            pooled = continuation_labels(parts, TOKENS, coverage=0.9, group=group)
            cutoffs, balance = statistics(pooled, group)
            expected_cutoffs, expected_balance = statistics(alone, None)
            assert cutoffs == expected_cutoffs
            assert torch.equal(balance, expected_balance)
            for depth, mine, true in zip(whole, pooled, alone, strict=True):
                owned = owner[depth.token] == rank
                assert torch.equal(mine.continues, true.continues[owned])
                assert torch.equal(mine.weight, true.weight[owned])
    own = torch.arange(rank, dtype=torch.float32)
    expected = torch.cat([torch.arange(r, dtype=torch.float32) for r in range(world)])
    assert torch.equal(pool_values(own, group), expected)
    assert pool_sum(torch.tensor([rank, 1]), group).tolist() == [sum(range(world)), world]
    assert coverage_cutoff(torch.full((rank,), -1.0), 0.9, group) == Cutoff(0.0, False)
    dist.destroy_process_group()


@pytest.mark.slow
@pytest.mark.parametrize("world", [2, 4])
def test_pooled_statistics_equal_those_of_one_process(world: int, tmp_path: Path) -> None:
    spawn(check_every_split, (world, str(tmp_path / "rendezvous")), nprocs=world)


def test_the_batches_of_this_test_exercise_both_classes_and_ties() -> None:
    ties = 0
    for case in range(CASES):
        first = continuation_labels(whole_batch(case), TOKENS, coverage=0.9)[0]
        assert 0 < first.continues.sum() < len(first.continues)
        ties += int((whole_batch(case)[0].gain == first.cutoff.value).sum()) > 1
    assert ties >= 2


def test_without_a_group_values_stay_as_they_are() -> None:
    values = torch.tensor([1.0, 2.0])
    assert pool_sum(values) is values
    assert pool_values(values) is values
