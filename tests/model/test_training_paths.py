"""What training asks of the loop: lookahead, placeholders for other ranks, recomputation, dtype."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor, nn

from tah2.model.attention.dense import DensePlan
from tah2.model.loop import LoopedDecoder, LoopRun, LoopSettings, Thresholded, Tokens
from tah2.model.scoring import LogitsReader, score
from tah2.visibility import Entries, dense_mask
from tests.model.reference_loop import tell
from tests.model.tiny import VARIANTS, random_documents, random_tokens, tiny_loop, tiny_model

LENGTHS = (9, 2, 6)
gated = pytest.mark.parametrize("variant", ["tah2", "ouro-adaptive"])


class AnyPeer:
    """Another rank always has work, so this one must run every pass."""

    def any(self, here: bool) -> bool:
        return True


def run(model: LoopedDecoder, tokens: Tokens, settings: LoopSettings) -> LoopRun:
    return model(tokens, LogitsReader(model.head_weight, torch.arange(len(tokens)), every_depth=True), settings)


def losses(current) -> Tensor:
    """A stand-in for a loss per token of a pass."""
    return current.reading.logits.log_softmax(-1)[:, 3]


def gradients(model: LoopedDecoder, tokens: Tokens, settings: LoopSettings) -> tuple[Tensor, dict[str, Tensor]]:
    model.zero_grad()
    result = run(model, tokens, settings)
    gates = [current.continue_logit.square().sum() for current in result.passes if current.continue_logit is not None]
    read = [losses(current).sum() for current in result.passes if current.reading is not None]
    loss = sum(read) + sum(gates) + result.final_state.square().sum()
    (loss + result.idle).backward()
    return loss.detach(), {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


@gated
@torch.no_grad()
def test_lookaheads_equal_the_reference(variant: str):
    """Each stopped token once more, at the depth below the one where it stopped."""
    model, tokens = tiny_model(tiny_loop(**VARIANTS[variant])), random_tokens(*LENGTHS)
    everyone = torch.ones(len(tokens), dtype=torch.bool)
    result = run(model, tokens, LoopSettings(router=Thresholded(0.55), lookahead=everyone))
    stories = [story for ids in random_documents(*LENGTHS) for story in tell(model, ids, 0.55, probes=True)]
    found = {}
    for probe in result.lookaheads:
        for i, logits in zip(probe.index.tolist(), probe.reading.logits, strict=True):
            assert probe.depth == stories[i].depth + 1
            found[i] = logits.log_softmax(-1)
    assert set(found) == {i for i, story in enumerate(stories) if story.probe is not None} != set()
    for i, logprobs in found.items():
        torch.testing.assert_close(logprobs, stories[i].probe, rtol=1e-4, atol=1e-4)


@torch.no_grad()
def test_lookahead_losses_equal_a_full_rerun_of_all_tokens_of_a_depth():
    """The paper's way: all N_m tokens run depth m + 1 as lookaheads; the stopped ones suffice."""
    model, tokens = tiny_model(), random_tokens(*LENGTHS)
    everyone = torch.ones(len(tokens), dtype=torch.bool)
    result = run(model, tokens, LoopSettings(router=Thresholded(0.55), lookahead=everyone, attention="dense"))
    checked = 0
    for current in result.passes[: model.ceiling() - 1]:
        depth, index = current.depth, current.index
        again = dict(zip(index.tolist(), rerun(model, tokens, result, depth), strict=True))
        deeper = next((p for p in result.passes if p.depth == depth + 1), None)
        probe = next((p for p in result.lookaheads if p.depth == depth + 1), None)
        ours = [part for part in (deeper, probe) if part is not None]
        assert sorted(torch.cat([part.index for part in ours]).tolist()) == sorted(index.tolist())
        for part in ours:
            for i, loss in zip(part.index.tolist(), losses(part), strict=True):
                torch.testing.assert_close(loss, again[i], rtol=1e-4, atol=1e-5)
                checked += 1
    assert checked > len(tokens)


def rerun(model: LoopedDecoder, tokens: Tokens, result: LoopRun, depth: int) -> Tensor:
    """Losses at `depth` + 1 of every token of `depth`, all run as lookaheads over the executed entries."""
    current = result.passes[depth - 1]
    index = current.index
    x = model.reentry(model.embed_tokens(tokens.ids[index]), current.state, None, model.embed_tokens.weight)
    query = Entries.of(tokens.document[index], tokens.position[index], depth + 1, lookahead=True)
    span = result.store.looped
    pieces = [p for p, entries in enumerate(span.entries) if int(entries.depth[0]) <= depth + 1]
    key = Entries.cat([*span.seen(result.executed, pieces), query])
    same = (query.document[:, None] == key.document) & (query.position[:, None] == key.position)
    itself_executed = same & (key.depth == depth + 1) & ~key.lookahead  # the probe stands in for it
    plan = DensePlan(dense_mask(model.kind.rule, query, key) & ~itself_executed)
    cosine, sine = model.rotary(query.position, query.document, x.dtype)
    for number, block in enumerate(model.layers):
        keys, values = span.past(number, pieces)
        x, _, _ = block(
            x,
            cosine,
            sine,
            lambda q, k, v, ks=keys, vs=values: plan.attend(q, torch.cat([*ks, k]), torch.cat([*vs, v])),
        )
    return (model.norm(x) @ model.head_weight.T).log_softmax(-1)[:, 3]


@gated
@torch.no_grad()
def test_only_chosen_tokens_are_probed(variant: str):
    model, tokens = tiny_model(tiny_loop(**VARIANTS[variant])), random_tokens(*LENGTHS)
    chosen = torch.arange(len(tokens)) % 2 == 0
    plain = run(model, tokens, LoopSettings(router=Thresholded(0.55), lookahead=~chosen & chosen))
    result = run(model, tokens, LoopSettings(router=Thresholded(0.55), lookahead=chosen))
    probed = torch.cat([probe.index for probe in result.lookaheads])
    assert plain.lookaheads == []
    assert sorted(probed.tolist()) == [i for i, m in enumerate(result.executed.tolist()) if m < 3 and chosen[i]]
    assert torch.equal(result.final_state, plain.final_state)


@gated
@pytest.mark.parametrize("threshold", [0.55, 2.0], ids=["some continue", "none continues"])
def test_passes_for_other_ranks_change_neither_results_nor_gradients(variant: str, threshold: float):
    model, tokens = tiny_model(tiny_loop(**VARIANTS[variant])), random_tokens(*LENGTHS)
    everyone = torch.ones(len(tokens), dtype=torch.bool)
    alone = LoopSettings(router=Thresholded(threshold), lookahead=everyone)
    loss, grads = gradients(model, tokens, alone)
    loss_among_peers, grads_among_peers = gradients(model, tokens, replace(alone, peers=AnyPeer()))
    torch.testing.assert_close(loss_among_peers, loss)
    for name, gradient in grads.items():
        torch.testing.assert_close(grads_among_peers[name], gradient, rtol=1e-5, atol=1e-6)
    extra = set(grads_among_peers) - set(grads)
    assert all(not grads_among_peers[name].any() for name in extra)


@dataclass
class Calls:
    """Which parts were called, in order, with gradient or without."""

    made: list[tuple[str, bool]]

    @classmethod
    def of(cls, model: LoopedDecoder) -> Calls:
        calls = cls([])
        parts: dict[str, nn.Module] = {"block": model.layers[0], "reentry": model.reentry, "gate": model.gate}
        for name, part in parts.items():
            part.register_forward_pre_hook(lambda *_, name=name: calls.made.append((name, torch.is_grad_enabled())))
        return calls


@gated
def test_every_rank_calls_the_same_parts_in_the_same_order(variant: str):
    """A rank whose tokens all stop at once runs what a rank of lookaheads and continuing tokens runs."""
    made = []
    for threshold in (0.55, 2.0, -1.0):
        model, tokens = tiny_model(tiny_loop(**VARIANTS[variant])), random_tokens(*LENGTHS)
        calls = Calls.of(model)
        everyone = torch.ones(len(tokens), dtype=torch.bool)
        run(model, tokens, LoopSettings(router=Thresholded(threshold), lookahead=everyone, peers=AnyPeer()))
        made.append(calls.made)
    assert made[0] == made[1] == made[2]
    assert ("gate", True) in made[0]


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("attention", ["dense", "tiles"])
def test_recomputing_activations_gives_identical_gradients(variant: str, attention: str):
    everyone = torch.ones(sum(LENGTHS), dtype=torch.bool)
    model, tokens = tiny_model(tiny_loop(**VARIANTS[variant])), random_tokens(*LENGTHS)
    settings = LoopSettings(router=Thresholded(0.52), attention=attention, lookahead=everyone)
    loss, grads = gradients(model, tokens, settings)
    loss_again, grads_again = gradients(model, tokens, replace(settings, checkpoint=True))
    assert torch.equal(loss, loss_again)
    assert grads.keys() == grads_again.keys()
    for name, gradient in grads.items():
        torch.testing.assert_close(grads_again[name], gradient, rtol=1e-6, atol=1e-7)


def test_recomputation_saves_memory():
    model, tokens = tiny_model(), random_tokens(60)
    kept = []
    for checkpoint in (False, True):
        total = 0

        def count(tensor: Tensor) -> Tensor:
            nonlocal total
            total += tensor.numel()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(count, lambda tensor: tensor):
            run(model, tokens, LoopSettings(router=Thresholded(-1.0), checkpoint=checkpoint))
        kept.append(total)
    assert kept[1] < 0.7 * kept[0]


def test_tiles_and_dense_give_the_same_gradients():
    model, tokens = tiny_model(), random_tokens(*LENGTHS)
    results = [
        gradients(model, tokens, LoopSettings(router=Thresholded(0.55), attention=name)) for name in ("dense", "tiles")
    ]
    torch.testing.assert_close(results[0][0], results[1][0], rtol=1e-5, atol=1e-5)
    for name, gradient in results[0][1].items():
        torch.testing.assert_close(results[1][1][name], gradient, rtol=1e-3, atol=1e-4)


def test_no_gradient_flows_through_the_most_probable_probabilities_or_into_the_exit_gates_state():
    tokens = random_tokens(*LENGTHS)
    model = tiny_model(tiny_loop(kind="ouro-adaptive"))
    result = run(model, tokens, LoopSettings(router=Thresholded(-1.0)))
    result.passes[0].continue_logit.sum().backward()
    assert model.gate.exit.weight.grad is not None
    assert all(p.grad is None for name, p in model.named_parameters() if not name.startswith("gate."))
    model = tiny_model()
    run(model, tokens, LoopSettings(max_depth=2)).passes[0].continue_logit.sum().backward()
    assert model.lm_head.weight.grad is None, "TopK(q) is a constant to the decider"
    assert model.embed_tokens.weight.grad.any()


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_bf16_model_multiplies_in_bf16(variant: str, monkeypatch: pytest.MonkeyPatch):
    model = tiny_model(tiny_loop(**VARIANTS[variant])).bfloat16()
    seen: set[torch.dtype] = set()
    for part in model.modules():
        if isinstance(part, nn.Linear):
            part.register_forward_pre_hook(lambda module, arguments: seen.add(arguments[0].dtype))
    with torch.no_grad():
        scores = score(model, random_tokens(*LENGTHS), settings=LoopSettings(router=Thresholded(0.5)))
    assert seen == {torch.bfloat16}
    assert scores.run.final_state.dtype == torch.bfloat16
    assert scores.logits.dtype == torch.float32
    for current in scores.run.passes:
        assert current.state.dtype == torch.bfloat16
        assert current.continue_logit is None or current.continue_logit.dtype == torch.float32
        assert current.reading is None or current.reading.logits.dtype == torch.bfloat16


def test_bf16_stays_close_to_fp32():
    tokens, model = random_tokens(*LENGTHS), tiny_model(tiny_loop(kind="ouro"))
    with torch.no_grad():
        exact = score(model, tokens).logits.softmax(-1)
        rough = score(model.bfloat16(), tokens).logits.softmax(-1)
    assert (exact - rough).abs().max() < 0.2
    assert (exact - rough).abs().mean() < 0.01
