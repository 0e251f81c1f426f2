"""Two processes that share a batch train exactly as one process that holds it whole."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.multiprocessing.spawn import spawn

from tah2.config.strict import ConfigError
from tah2.model.loop import LoopedDecoder
from tah2.train.parallel import RankPeers, World, accumulate, clip_gradients, compile_blocks, gathered, shard
from tests.train.tiny import DEEP, RANKS, batch_loss, gate_loss, tiny_decoder

STEPS, MAX_NORM = 4, 0.5


def train(
    decoder: LoopedDecoder,
    batches: list[list[range]],
    world: World,
    steps: int,
    prepare: Callable[[int], None] = lambda number: None,
    checkpoint: bool = False,
) -> dict[str, Tensor]:
    """The first step's gradients, every step's norm and the last weights, all whole."""
    optimizer = torch.optim.AdamW(decoder.parameters(), lr=2e-3, eps=1e-4)
    seen: dict[str, Tensor] = {}
    for step in range(steps):
        optimizer.zero_grad()
        for number, documents in enumerate(batches):
            prepare(number)
            with gathered(decoder):
                batch_loss(decoder, documents, world, checkpoint).backward()
        if step == 0:
            seen |= {f"gradient {name}": whole(p.grad) for name, p in decoder.named_parameters()}
        seen[f"norm {step}"] = clip_gradients(decoder.parameters(), MAX_NORM, world)
        optimizer.step()
    return seen | {f"weight {name}": whole(p) for name, p in decoder.named_parameters()}


def whole(tensor: Tensor | None) -> Tensor:
    assert tensor is not None
    return tensor.detach().full_tensor() if isinstance(tensor, DTensor) else tensor.detach().clone()


def train_on_two(rank: int, folder: Path) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", f"file://{folder / 'meet'}", timedelta(seconds=60), 2, rank)
    with World(rank, 2, rank, torch.device("cpu"), dist.group.WORLD) as world:
        results: dict[str, Any] = {}
        for name, tied, checkpoint in (("tied", True, False), ("untied", False, False), ("recomputed", True, True)):
            decoder = shard(tiny_decoder(tied, seed=rank), world)
            results[name] = train(decoder, RANKS[rank], world, STEPS, checkpoint=checkpoint)
        decoder = shard(tiny_decoder(True, seed=rank), world, reshard_after_forward=False)
        results["reduced once"] = train(decoder, RANKS[rank], world, STEPS, lambda n: accumulate(decoder, n == 1))
        decoder = shard(tiny_decoder(True, seed=rank), world, torch.bfloat16)
        results["bf16"] = train(decoder, RANKS[rank], world, 1)
        peers = RankPeers(world)
        results["any"] = [peers.any(here) for here in (False, rank == 1, True)]
        results["sum"] = world.sum_tensor(torch.tensor([rank, 1])).tolist()
        decoder = shard(gate_alone(tiny_decoder(True, seed=rank)), world)
        with gathered(decoder):
            gate_loss(decoder, RANKS[rank][0], world).backward()
        results["gate alone"] = {name: whole(p.grad) for name, p in decoder.named_parameters() if p.requires_grad}
        results["validated"] = validated_like_trained(shard(tiny_decoder(True, seed=rank), world), rank, world)
        world.barrier()
        torch.save(results, folder / f"{rank}.pt")


def gate_alone(decoder: LoopedDecoder) -> LoopedDecoder:
    assert decoder.gate is not None
    decoder.requires_grad_(False)
    decoder.gate.requires_grad_(True)
    return decoder


def validated_like_trained(decoder: LoopedDecoder, rank: int, world: World) -> bool:
    """A validation leaves the same parameter objects behind, and sees an optimizer step made before it."""
    before = list(decoder.parameters())
    losses = []
    for _ in range(2):
        with gathered(decoder), torch.no_grad():
            losses.append(float(world.sum_tensor(batch_loss(decoder, RANKS[rank][0], world))))
        with torch.no_grad():
            for parameter in decoder.parameters():
                parameter.mul_(1.5)
    return all(a is b for a, b in zip(before, decoder.parameters(), strict=True)) and losses[0] != losses[1]


@pytest.fixture(scope="module")
def on_two(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    folder = tmp_path_factory.mktemp("two")
    spawn(train_on_two, (folder,), nprocs=2)
    return [torch.load(folder / f"{rank}.pt") for rank in range(2)]


@pytest.fixture(scope="module")
def on_one() -> Callable[[bool], dict[str, Tensor]]:
    whole_batches = [RANKS[0][number] + RANKS[1][number] for number in range(2)]
    known: dict[bool, dict[str, Tensor]] = {}

    def result(tied: bool) -> dict[str, Tensor]:
        if tied not in known:
            known[tied] = train(shard(tiny_decoder(tied), World()), whole_batches, World(), STEPS)
        return known[tied]

    return result


@pytest.mark.slow
@pytest.mark.parametrize("name", ["tied", "untied", "recomputed", "reduced once"])
def test_two_processes_train_like_one(name: str, on_two: list[dict[str, Any]], on_one: Any) -> None:
    expected = on_one(name != "untied")
    for rank in range(2):
        torch.testing.assert_close(on_two[rank][name], expected, rtol=1e-5, atol=1e-5)


@pytest.mark.slow
def test_the_batches_of_this_test_exercise_placeholders_clipping_and_movement(on_one: Any) -> None:
    deep = [[any(t < DEEP for d in batch for t in d) for batch in rank] for rank in RANKS]
    assert deep == [[True, False], [False, True]]
    result = on_one(True)
    assert all(result[f"norm {step}"] > MAX_NORM for step in range(STEPS))
    start = dict(tiny_decoder(True).named_parameters())
    for name, parameter in start.items():
        assert result[f"gradient {name}"].abs().max() > 1e-4, name
        assert (result[f"weight {name}"] - parameter).abs().max() > 2e-3, name


@pytest.mark.slow
def test_a_gate_on_a_frozen_backbone_gets_the_gradients_of_one_process(on_two: list[dict[str, Any]]) -> None:
    decoder = gate_alone(tiny_decoder(True))
    gate_loss(decoder, RANKS[0][0] + RANKS[1][0], World()).backward()
    expected = {name: whole(p.grad) for name, p in decoder.named_parameters() if p.requires_grad}
    assert all(gradient.abs().max() > 1e-4 for gradient in expected.values())
    for result in on_two:
        torch.testing.assert_close(result["gate alone"], expected, rtol=1e-5, atol=1e-5)


@pytest.mark.slow
def test_bf16_computes_close_to_fp32_on_fp32_masters(on_two: list[dict[str, Any]], on_one: Any) -> None:
    result, expected = on_two[0]["bf16"], on_one(True)
    assert {tensor.dtype for tensor in result.values()} == {torch.float32}
    error = (result["norm 0"] / expected["norm 0"] - 1).abs()
    assert 0 < error < 0.05


@pytest.mark.slow
def test_ranks_agree_on_who_continues_and_on_sums(on_two: list[dict[str, Any]]) -> None:
    for result in on_two:
        assert result["any"] == [False, True, True]
        assert result["sum"] == [1, 2]
        assert result["validated"]


def test_clipping_equals_torchs() -> None:
    decoder = tiny_decoder(True)
    for scale in (1e-3, 10.0):
        ours, theirs = [], []
        for parameter in decoder.parameters():
            parameter.grad = scale * torch.randn_like(parameter)
            ours.append(torch.nn.Parameter(parameter.detach()))
            ours[-1].grad = parameter.grad.clone()
            theirs.append(parameter)
        norm = clip_gradients(ours, 1.0, World())
        torch.testing.assert_close(norm, torch.nn.utils.clip_grad_norm_(theirs, 1.0))
        torch.testing.assert_close([p.grad for p in ours], [p.grad for p in theirs])


def test_a_process_alone_needs_no_group(tmp_path: Path) -> None:
    world = World.from_environment("cpu", {})
    assert world == World()
    assert world.is_main
    assert not dist.is_initialized()
    assert RankPeers(world).any(True)
    assert not RankPeers(world).any(False)
    values = torch.tensor([1.0, 2.0])
    assert world.sum_tensor(values) is values
    world.barrier()
    decoder = tiny_decoder(True)
    assert not any(isinstance(p, DTensor) for p in shard(decoder, world).parameters())


@pytest.mark.parametrize("checkpoint", [False, True])
def test_one_process_computes_in_bf16_on_fp32_masters(checkpoint: bool) -> None:
    """As a decoder of bf16 weights would, with gradients that add up in fp32."""
    world, decoder, halved = World(), tiny_decoder(True), tiny_decoder(True).bfloat16()
    masters = list(shard(decoder, world, torch.bfloat16).parameters())
    expected = [torch.zeros_like(p) for p in masters]
    for documents in (RANKS[0][0], RANKS[1][0]):
        with gathered(decoder, torch.bfloat16):
            assert {p.dtype for p in decoder.parameters()} == {torch.bfloat16}
            batch_loss(decoder, documents, world, checkpoint).backward()
        halved.zero_grad()
        batch_loss(halved, documents, world).backward()
        for total, parameter in zip(expected, halved.parameters(), strict=True):
            total += 0 if parameter.grad is None else parameter.grad.float()
    assert all(a is b for a, b in zip(decoder.parameters(), masters, strict=True))
    torch.testing.assert_close([torch.zeros_like(p) if p.grad is None else p.grad for p in masters], expected)
    assert any(bool(total.any()) for total in expected)


def test_weights_come_back_when_a_micro_batch_fails() -> None:
    decoder = tiny_decoder(True)
    masters = list(decoder.parameters())
    with pytest.raises(ValueError, match="spilled"), gathered(decoder, torch.bfloat16):
        raise ValueError("spilled")
    assert all(a is b for a, b in zip(decoder.parameters(), masters, strict=True))


def test_compiled_blocks_compute_in_bf16() -> None:
    plain, compiled = tiny_decoder(True), tiny_decoder(True)
    compile_blocks(compiled, backend="eager")
    for documents in (RANKS[0][0], RANKS[1][0]):
        for decoder in (plain, compiled):
            with gathered(decoder, torch.bfloat16):
                batch_loss(decoder, documents, World()).backward()
    for ours, theirs in zip(compiled.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad)


def test_a_broken_environment_is_named() -> None:
    with pytest.raises(ConfigError, match="WORLD_SIZE"):
        World.from_environment("cpu", {"WORLD_SIZE": "two"})


def test_compiled_blocks_compute_the_same_for_any_number_of_entries() -> None:
    plain, compiled = tiny_decoder(True), tiny_decoder(True)
    compile_blocks(compiled, backend="eager")
    for documents in (RANKS[0][0], RANKS[1][0]):
        losses = [batch_loss(decoder, documents, World(), checkpoint=True) for decoder in (plain, compiled)]
        torch.testing.assert_close(losses[1], losses[0])
        for loss in losses:
            loss.backward()
        gradients = [{n: p.grad for n, p in d.named_parameters()} for d in (plain, compiled)]
        torch.testing.assert_close(gradients[1], gradients[0])
