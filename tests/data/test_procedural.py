import time

import numpy as np
import pytest

from tah2.config.strict import ConfigError, build
from tah2.data.batches import evaluation_batches
from tah2.data.config import BatchConfig
from tah2.data.procedural import (
    EOS,
    HASH,
    HOP,
    PointerChase,
    ProceduralConfig,
    StopChase,
    load_procedural,
    prompt_and_response,
    tag_name,
)

TASKS = [PointerChase(), PointerChase(base=True), StopChase(), StopChase(base=True), StopChase(base=True, cycle=6)]


@pytest.mark.parametrize("task", TASKS)
def test_the_true_trace_is_exact_and_any_change_is_found(task):
    store = task.generate(30, seed=1)
    assert store.ids.max() < task.vocab_size
    for index in range(30):
        prompt, response = prompt_and_response(store, index)
        trace = task.verify(prompt, response)
        assert trace.exact
        assert trace.answer
        tags = store.sample(index).tags[len(prompt) :]
        for place in range(len(response)):
            changed = response.copy()
            other = changed[place] + 1 if tags[place] != 1 else changed[place] + 100
            changed[place] = other
            assert not task.verify(prompt, changed).exact
        assert not task.verify(prompt, response[:-1]).exact
        assert not task.verify(prompt, []).exact


@pytest.mark.parametrize("task", TASKS)
def test_fillers_are_free(task):
    prompt, response = prompt_and_response(task.generate(1, seed=2), 0)
    filler = task.vocabulary.filler
    response[0] = filler + (response[0] - filler + 1) % task.fillers
    assert task.verify(prompt, response).exact


def plain_hops(task, f, place):
    """How many hops a line makes, the plain way."""
    if task.base:
        return 1
    if isinstance(task, PointerChase):
        return 1 + place % task.strides
    hops, place = 1, f[place]
    while place >= task.stops:
        hops, place = hops + 1, f[place]
    return hops


@pytest.mark.parametrize("task", TASKS)
def test_tags_tell_the_hops_of_every_line(task):
    store, voc = task.generate(20, seed=3), task.vocabulary
    for index in range(20):
        sample = store.sample(index)
        edges = [divmod(token - voc.edge, voc.symbols) for token in sample.ids.tolist() if token >= voc.edge]
        f = dict(edges)
        assert len(f) == len(edges)
        for at in np.flatnonzero(sample.tags >= HOP):
            place, hops = int(sample.ids[at - 1]) - voc.symbol, int(sample.tags[at]) - HOP
            assert hops == plain_hops(task, f, place)
            for _ in range(hops):
                place = f[place]
            assert sample.ids[at] - voc.symbol == place
        assert (sample.tags[sample.mask] > 0).all()
        assert (sample.tags[~sample.mask] == 0).all()


def test_the_layout_is_as_described():
    sample, voc = PointerChase().generate(1, seed=0).sample(0), PointerChase().vocabulary
    assert len(sample) == 1 + 12 + 2 + 4 * 5 + 3
    shown = [voc.describe(token) for token in sample.ids.tolist()]
    assert shown[0] == "BOS"
    assert shown[13] == "Q"
    assert shown[-3] == "HASH"
    assert shown[-1] == "EOS"
    assert voc.size == 4 + 4 + 3 + 12 + 144
    prompt, response = prompt_and_response(PointerChase().generate(1, seed=0), 0)
    assert response[2] == prompt[-1]
    assert response[-2] == response[-4]


def test_the_cycle_of_the_stop_chase_is_one_cycle_and_hops_are_geometric():
    task = StopChase()
    store = task.generate(2000, seed=0)
    prompt, _ = prompt_and_response(store, 0)
    f = dict(divmod(token - task.vocabulary.edge, 16) for token in prompt[1:17])
    place, seen = 0, set()
    while place not in seen:
        seen.add(place)
        place = f[place]
    assert len(seen) == 16
    hops = store.tags[store.tags >= HOP] - HOP
    assert (hops == 1).mean() == pytest.approx(7 / 16, abs=0.02)
    assert (hops <= 2).mean() == pytest.approx(0.70, abs=0.02)
    assert set(np.diff(store.starts)) == {1 + 16 + 3 + 4 * n + 3 for n in (3, 4, 5)}


def test_the_base_curriculum_replaces_symbols_and_shortens_the_cycle():
    task = StopChase(base=True, cycle=6, replace=0.5)
    sample = task.generate(1, seed=4).sample(0)
    assert (sample.ids >= task.vocabulary.edge).sum() == 6
    lines = task.generate(400, seed=4)
    copies = np.flatnonzero(lines.tags == 3)
    follows = lines.tags[copies - 3] == HOP + 1
    moved = lines.ids[copies[follows]] != lines.ids[copies[follows] - 3]
    assert moved.mean() == pytest.approx(0.5 * 5 / 6, abs=0.06)
    with pytest.raises(ConfigError, match="replace"):
        task.verify([0], [0])


def test_seeds_fix_samples_and_splits_are_disjoint():
    task = StopChase()
    store = task.generate(50, seed=1)
    assert np.array_equal(store.ids, task.generate(50, seed=1).ids)
    prompts = [
        {tuple(prompt_and_response(part, i)[0]) for i in range(200)}
        for part in (
            task.generate(200, 1, "train"),
            task.generate(200, 1, "validation"),
            task.generate(200, 2, "train"),
        )
    ]
    assert not prompts[0] & prompts[1]
    assert not prompts[0] & prompts[2]


def test_a_procedural_data_set_trains_like_any_other():
    data = load_procedural(build(ProceduralConfig, {"task": "pointer-chase", "samples": 64, "validation_samples": 8}))
    step = next(data.steps(BatchConfig(16, 300)))
    assert step.samples == 16
    for batch in step.micro_batches:
        assert ((batch.tags > 0) == (batch.targets >= 0)).all()
        assert {tag_name(int(tag)) for tag in batch.tags.unique()} >= {"filler", "rule", "copy", "hop 1"}
    assert len(data.validation) == 8
    assert data.size.samples == 64
    assert sum(batch.documents for batch in evaluation_batches(data.validation, 300)) == 8


def test_generation_is_quick():
    begin = time.perf_counter()
    assert len(StopChase().generate(600 * 48, seed=0)) == 28_800
    assert time.perf_counter() - begin < 20


def test_answers_are_judged_apart_from_the_lines():
    task = PointerChase()
    prompt, response = prompt_and_response(task.generate(1, seed=5), 0)
    wrong = [*response[:4], task.vocabulary.filler, *response[5:]]
    wrong[5] = EOS
    trace = task.verify(prompt, wrong)
    assert (trace.exact, trace.answer, trace.lines_right) == (False, True, 1)
    assert task.verify(prompt, [HASH, response[-2]]).answer


@pytest.mark.parametrize(
    "settings",
    [
        {"task": "pointer-chase", "cycle": 4},
        {"cycle": 6},
        {"base": True, "cycle": 99},
        {"task": "chase"},
        {"samples": 0},
    ],
)
def test_wrong_procedural_settings_are_refused(settings):
    with pytest.raises(ConfigError):
        build(ProceduralConfig, settings)


def test_a_procedural_set_may_have_no_validation_samples() -> None:
    data = load_procedural(ProceduralConfig(samples=4, validation_samples=0))
    assert len(data.validation) == 0
    assert len(data.store) == 4
