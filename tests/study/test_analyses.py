"""What the analyses measure, held against plain computations on tiny models."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from tah2.config.strict import ConfigError
from tah2.data.packing import IGNORE, PackedBatch, pack
from tah2.data.store import Sample
from tah2.model.attention import attention_backend
from tah2.model.attention.observe import ObservingBackend
from tah2.model.loop import LoopedDecoder, LoopSettings, Tokens
from tah2.model.scoring import score
from tah2.study.analyses.alignment import alignment
from tah2.study.analyses.attention import attention, query_depth, representative, response_starts
from tah2.study.analyses.depths import depths, text_classes
from tah2.study.analyses.gains import gains
from tah2.study.analyses.measure import TokenTable, measure_tokens
from tah2.study.analyses.pooling import pooled_alignment, pooled_gains
from tests.model.tiny import TINY, VARIANTS, tiny_loop, tiny_model


def batch_of(*lengths: int, prompt: int = 3, seed: int = 0) -> PackedBatch:
    random = np.random.default_rng(seed)
    samples = []
    for i, length in enumerate(lengths):
        ids = random.integers(0, TINY.vocab_size, length).astype(np.int32)
        samples.append(Sample(ids, np.arange(length) >= prompt, f"s{i}", np.where(np.arange(length) % 2, 1, 2)))
    return pack(samples)


def model_of(name: str) -> LoopedDecoder:
    return tiny_model(tiny_loop(**VARIANTS[name])).eval()


@torch.no_grad()
def loss_under(decoder: LoopedDecoder, batch: PackedBatch, depth: int, run_all: bool) -> torch.Tensor:
    """Loss of every target when the model runs under the ceiling `depth` and the last depth alone predicts."""
    decoder.kind = replace(decoder.kind, output=type(decoder.kind.output).LAST)
    everyone = torch.ones_like(batch.ids, dtype=torch.bool) if run_all else None
    tokens = Tokens(batch.ids, batch.document, batch.position)
    found = score(decoder, tokens, settings=LoopSettings(max_depth=depth, run_all=everyone))
    supervised = batch.targets != IGNORE
    return torch.nn.functional.cross_entropy(found.logits, batch.targets.clamp(min=0), reduction="none")[supervised]


@pytest.mark.parametrize("name", ["tah2", "tah2-fixed", "ouro", "ouro-adaptive", "huginn", "tah2, top-k embedding"])
def test_losses_of_a_fixed_loop_are_those_under_lower_ceilings(name: str):
    batch, decoder = batch_of(9, 12), model_of(name)
    table = measure_tokens(decoder, [batch], run_all=True)
    assert table.loss.shape == (int((batch.targets != IGNORE).sum()), 3)
    for depth in (1, 2, 3):
        torch.testing.assert_close(
            torch.from_numpy(table.loss[:, depth - 1]),
            loss_under(model_of(name), batch, depth, True),
            atol=1e-4,
            rtol=0,
        )


def test_a_stopped_token_knows_one_more_depth_and_no_further():
    table = measure_tokens(model_of("tah2"), [batch_of(30, 40), batch_of(25, seed=1)])
    known = np.isfinite(table.loss).sum(1)
    np.testing.assert_array_equal(known, np.minimum(table.executed + 1, table.depths))
    np.testing.assert_array_equal(np.isfinite(table.continue_prob).sum(1), np.minimum(table.executed, table.depths - 1))
    stopped = table.executed < table.depths
    at_stop = table.continue_prob[np.flatnonzero(stopped), table.executed[stopped] - 1]
    assert stopped.any()
    assert not stopped.all()
    assert (at_stop < 0.5).all()
    assert set(table.document) == {0, 1, 2}


def test_routes_are_the_models_own():
    decoder, batch = model_of("tah2"), batch_of(40)
    table = measure_tokens(decoder, [batch])
    with torch.no_grad():
        executed = score(decoder, Tokens(batch.ids, batch.document, batch.position)).depths
    np.testing.assert_array_equal(table.executed, executed[batch.targets != IGNORE].numpy())


def table_of(gain: np.ndarray, prob: np.ndarray | None = None, documents: int = 4) -> TokenTable:
    count = len(gain)
    loss = np.stack([np.full(count, 2.0), 2.0 - gain], axis=1).astype(np.float32)
    prob = np.full(count, 0.5) if prob is None else prob
    zeros = np.zeros(count, dtype=np.int64)
    executed = np.where(prob >= 0.5, 2, 1)
    return TokenTable(
        loss, prob[:, None].astype(np.float32), executed, np.arange(count) % documents, zeros, zeros, zeros + 1
    )


def test_gains_are_counted_in_three_regions():
    found = gains(table_of(np.array([-0.5, -0.002, -0.0005, 0.0, 0.0009, 0.3, 30.0, -20.0])), {1: "word"})
    assert (found.worse, found.little, found.better) == (3 / 8, 3 / 8, 2 / 8)
    assert found.tokens == sum(found.counts) == 8
    assert found.counts[0] == found.counts[-1] == 1
    middle = next(i for i in range(len(found.counts)) if found.edges[i] < 0 < found.edges[i + 1])
    assert found.counts[middle] == 3
    assert found.lost == pytest.approx((-0.5 - 0.002 - 20) / 8, rel=1e-4)
    assert found.by_tag["word"]["worse"] == found.worse


def test_a_single_pass_has_no_gain():
    with pytest.raises(ValueError, match="one iteration"):
        gains(replace(table_of(np.zeros(3)), loss=np.ones((3, 1), np.float32)))


def test_alignment_groups_tokens_and_covers_the_mean_gain():
    random = np.random.default_rng(0)
    prob = random.random(4000)
    gain = prob - 0.5 + random.normal(0, 0.3, 4000)
    found = alignment(table_of(gain, prob, 200), threshold=0.5)
    (part,) = found.depths
    assert sum(band.tokens for band in part.bands) == part.tokens == 4000
    for band in part.bands:
        inside = (prob.astype(np.float32) >= band.low) & (prob.astype(np.float32) < band.high)
        assert band.gain == pytest.approx(gain[inside].mean(), abs=1e-5)
    low, high = part.near_threshold.interval
    assert low < 0 < high
    assert part.stopped.gain < part.stopped.interval[1] < 0 < part.continued.interval[0]
    assert 0.5 < part.correlation < 1


def test_empty_bands_have_no_gain_and_pool():
    prob = np.array([0.01, 0.02, 0.99, 0.98])
    found = alignment(table_of(np.array([-1.0, 0.0, 1.0, 2.0]), prob), 0.5).to_json()
    assert [band["gain"] for band in found["depths"][0]["bands"]][1:-1] == [None] * 18
    pooled = pooled_alignment([found, found])["depths"][0]
    assert pooled["continued"] == {
        **found["depths"][0]["continued"],
        "tokens": 4,
        "interval": list(pooled["continued"]["interval"]),
    }
    assert pooled["bands"][5]["gain"] is None


def test_pooled_gains_weigh_by_tokens():
    few, many = (gains(table_of(np.array(values))).to_json() for values in ([1.0], [-1.0, -1.0, -1.0]))
    pooled = pooled_gains([few, many])
    assert (pooled["better"], pooled["worse"], pooled["tokens"]) == (0.25, 0.75, 4)
    assert pooled["mean"] == pytest.approx(-0.5)


class Recorder:
    def __init__(self) -> None:
        self.seen: dict[int, list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]] = {}

    def __call__(self, layer, query, key, weights) -> None:
        self.seen.setdefault(layer, []).append((query.position, key.depth, weights))


@pytest.mark.parametrize("name", ["tah2", "tah2-fixed", "huginn"])
def test_watching_changes_nothing_and_sees_all_of_the_attention(name: str):
    decoder, batch = model_of(name), batch_of(14, 20)
    tokens, recorder = Tokens(batch.ids, batch.document, batch.position), Recorder()
    backend = ObservingBackend(attention_backend("tiles"), recorder, 2, decoder.looped.start)
    with torch.no_grad():
        plain = score(decoder, tokens)
        watched = score(decoder, tokens, settings=LoopSettings(attention=backend))
    torch.testing.assert_close(watched.logits, plain.logits)
    assert sorted(recorder.seen) == list(decoder.looped)
    second = next(current for current in plain.run.passes if current.depth == 2)
    for parts in recorder.seen.values():
        assert sum(len(position) for position, _, _ in parts) == len(second.index)
        for _, key_depth, weights in parts:
            torch.testing.assert_close(weights.sum(-1), torch.ones(weights.shape[:2]))
            assert int(key_depth.max()) == 2


def test_watched_weights_give_the_dense_output():
    """Weights times values, summed over keys, is what the plan returns."""
    from tah2.visibility import DUO_CAUSAL, Entries

    torch.manual_seed(0)
    position = torch.arange(5).repeat(2)
    key_entries = Entries.of(torch.zeros(10, dtype=torch.long), position, torch.tensor([1] * 5 + [2] * 5))
    query_entries = key_entries[torch.arange(5, 10)]
    shown = []
    backend = ObservingBackend(attention_backend("tiles"), lambda *seen: shown.append(seen), 2)
    query, key, value = torch.randn(5, 4, 6), torch.randn(10, 2, 6), torch.randn(10, 2, 6)
    out = backend.plan(DUO_CAUSAL, query_entries, key_entries).attend(query, key, value)
    ((layer, _, _, weights),) = shown
    assert layer == 0
    torch.testing.assert_close(torch.einsum("hqk,khd->qhd", weights, value.repeat_interleave(2, 1)), out)


def test_attention_mass_adds_up_and_maps_leave_the_prompt_out():
    decoder, batches = model_of("tah2"), [batch_of(30, 40), batch_of(50, seed=1)]
    found = attention(decoder, batches, positions=12)
    layers, heads = TINY.num_layers, TINY.num_heads
    assert found.depth == found.ceiling == query_depth(decoder, batches) == 3
    assert found.mean.shape == (layers, heads, 3)
    np.testing.assert_allclose(found.mean.sum(-1), 1, atol=1e-5)
    assert found.maps.shape == (3, 3, 12, 12)
    known = np.isfinite(found.maps[0, 0, :, 0])
    assert known.any()
    row = int(np.flatnonzero(known)[-1])
    for head in range(3):
        assert 0 < np.nansum(found.maps[head, :, row]) < 1, "prompt keys hold the rest"
        assert np.nansum(found.maps[head, :, row, row + 1 :]) == 0


def test_queries_are_of_an_iteration_that_is_not_rare(monkeypatch: pytest.MonkeyPatch):
    from tah2.study.analyses import attention as module

    decoder, batches = model_of("tah2"), [batch_of(9)]
    for reached, depth in (([3, 1, 1, 1], 3), ([3, 1, 1, 1, 1, 2], 2), ([1, 1, 1, 1, 2], 2), ([1, 1], 1)):
        monkeypatch.setattr(module, "_deepest_of_each", lambda decoder, batch, reached=reached: np.array(reached))
        assert query_depth(decoder, batches) == depth


def test_the_deepest_iteration_of_each_document_is_that_of_its_responses():
    from tah2.study.analyses.attention import _deepest_of_each

    decoder, batch = model_of("tah2"), batch_of(12, 7, 9)
    with torch.no_grad():
        executed = score(decoder, Tokens(batch.ids, batch.document, batch.position)).depths
    plain = [
        max(int(executed[i]) for i in range(len(batch)) if batch.document[i] == name and batch.targets[i] != IGNORE)
        for name in range(3)
    ]
    assert _deepest_of_each(decoder, batch).tolist() == plain


def test_responses_start_where_the_first_target_is_predicted():
    batch = batch_of(6, 8)
    assert response_starts(batch).tolist() == [2, 2]


def test_representative_heads_differ():
    mean = np.array([[[0.9, 0.05, 0.05], [0.1, 0.1, 0.8], [0.34, 0.33, 0.33], [0.92, 0.04, 0.04]]])
    assert [(head.role, head.head) for head in representative(mean)] == [("first", 3), ("later", 1), ("both", 2)]


def test_attention_of_a_loop_that_reads_its_own_iteration_is_refused():
    with pytest.raises(ConfigError, match="its own iteration"):
        attention(model_of("ouro"), [batch_of(9)])


def test_text_is_told_apart_by_its_characters_and_its_place():
    words = ["The", " sum", " is", " ", "$", "x", "$", " 12", "+", ".", "```", "print", "```", "ing", "<eos>"]
    assert text_classes(words) == [
        "word, continued", "word", "word", "white space", "math", "math", "math", "number", "operator", "punctuation",
        "code", "code", "code", "word, continued", "special",
    ]  # fmt: skip


def test_depths_by_kind_and_place():
    table = replace(table_of(np.zeros(20), np.r_[np.zeros(10), np.ones(10)], documents=1), tag=np.array([1, 2] * 10))
    found = depths(table, lambda ids: [f"t{i} " for i in range(len(ids))], {1: "odd", 2: "even"}, maps=1)
    assert found.mean == 1.5
    assert found.by_class["odd"].mean == 1.5
    assert list(found.by_class) == ["odd", "even"]
    assert found.by_place == (1.0,) * 5 + (2.0,) * 5
    assert found.maps[0].depths == (1,) * 10 + (2,) * 10
    assert found.shares == (0.5, 0.5)
