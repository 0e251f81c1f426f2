import numpy as np
import pytest

from tah2.config.strict import ConfigError, build
from tah2.data.pocket import PocketConfig, PocketWorld
from tah2.data.pocket.families import FAMILIES, FILLER, PLACE, STEP
from tah2.data.pocket.tokenizer import make_tokenizer
from tah2.data.pocket.vocabulary import EOS, HASH
from tah2.data.procedural import ProceduralConfig, load_procedural
from tah2.data.tags import HOP

SMALL = PocketConfig(letters=5, max_lines=4)


def table_of(world, prompt):
    """The table of a prompt, read from its text: letter -> what it leads to."""
    return dict(word.split(">") for word in world.text(prompt).split() if word[1:2] == ">")


def looked_up(table, letter):
    """Every letter on the way from `letter` to its value, the plain way."""
    found = []
    while letter.islower():
        letter = table[letter]
        found.append(letter)
    return found


@pytest.mark.parametrize("name", FAMILIES)
def test_every_line_says_what_the_table_says(name):
    family, width = FAMILIES[name], len(FAMILIES[name].line)
    world = PocketWorld(PocketConfig(families=(name,)))
    for problem in world.problems(40, seed=1):
        table, trace = table_of(world, problem.prompt_ids), world.text(problem.gold_ids).split()
        assert problem.family == name
        assert len(table) == 12
        for line, hops in enumerate(problem.hops):
            place, step = (trace[width * line + family.line.index(part)] for part in (PLACE, STEP))
            assert looked_up(table, place)[-1] == step
            assert len(looked_up(table, place)) == hops
            assert problem.places[line] == width * line + family.line.index(STEP)
        if family.chained:
            assert trace[-3:] == ["#", step, "<eos>"]


@pytest.mark.parametrize("name", FAMILIES)
def test_the_base_writes_every_look_up_down(name):
    world = PocketWorld(PocketConfig(families=(name,), skip=0.0), base=True)
    for problem in world.problems(40, seed=1):
        table, trace = table_of(world, problem.prompt_ids), world.text(problem.gold_ids).split()
        assert set(problem.hops) <= {0, 1}
        for place in problem.places:
            assert table[trace[place - 1]] == trace[place]
        assert [place for place, word in enumerate(trace) if trace[place - 1] in table and place] == list(
            problem.places
        )
        assert world.verify(problem, problem.gold_ids).exact


@pytest.mark.parametrize("name", FAMILIES)
def test_lines_begin_where_the_question_says(name):
    family, width = FAMILIES[name], len(FAMILIES[name].line)
    world = PocketWorld(PocketConfig(families=(name,)))
    for problem in world.problems(20, seed=2):
        prompt, trace = world.text(problem.prompt_ids).split(), world.text(problem.gold_ids).split()
        places = trace[family.line.index(PLACE) : width * len(problem.hops) : width]
        steps = trace[family.line.index(STEP) : width * len(problem.hops) : width]
        if family.chained:
            assert places == [prompt[-1], *(step.lower() for step in steps[:-1])]
        else:
            bound = {int(word.split("=")[0]): word.split("=")[1] for word in prompt if "=" in word}
            assert places == [bound[left] for left in range(len(bound), 0, -1)]


@pytest.mark.parametrize("name", FAMILIES)
def test_the_gold_response_is_right_and_any_other_token_is_not(name):
    world = PocketWorld(PocketConfig(families=(name,)))
    line = FAMILIES[name].line
    for problem in world.problems(10, seed=3):
        gold = list(problem.gold_ids)
        verdict = world.verify(problem, gold)
        assert verdict.correct
        assert verdict.exact
        assert verdict.steps_right == len(problem.hops)
        assert not world.verify(problem, gold[:-1]).correct
        assert not world.verify(problem, []).correct
        for place in range(len(gold)):
            changed = gold.copy()
            changed[place] = 0
            verdict = world.verify(problem, changed)
            assert not verdict.exact
            if FAMILIES[name].chained:
                assert verdict.correct == (place < gold.index(HASH))
            else:
                assert not verdict.correct
            part = line[place % len(line)]
            if place < len(line) * len(problem.hops) and part == STEP:
                assert verdict.steps_right == place // len(line)


def test_fillers_are_free_and_nothing_after_the_end_counts():
    world = PocketWorld(PocketConfig(families=("chase",)))
    problem = world.problems(1, seed=4)[0]
    gold = list(problem.gold_ids)
    filler = world.vocabulary.filler
    gold[0] = filler + (gold[0] - filler + 1) % 3
    assert world.verify(problem, gold).exact
    assert world.verify(problem, [*gold, EOS, 0]).exact


def problem_keys(world, split, seed):
    """What a problem is: its family, its table in any order, and its question."""
    keys = set()
    for problem in world.problems(300, seed, split):
        words = world.text(problem.prompt_ids).split()
        table = frozenset(word for word in words if word[1:2] == ">")
        keys.add((problem.family, table, tuple(word for word in words if word[1:2] != ">")))
    return keys


@pytest.mark.parametrize("config", [PocketConfig(), SMALL, PocketConfig(letters_used=3)])
def test_splits_share_no_problem_whatever_their_seeds(config):
    kinds = [("train", 0), ("train", 1), ("validation", 0), ("validation", 5), ("test", 0), ("test", 1)]
    found = {kind: problem_keys(PocketWorld(config), *kind) for kind in kinds}
    for kind, keys in found.items():
        for other, others in found.items():
            assert kind[0] == other[0] or not keys & others
    base = problem_keys(PocketWorld(config, base=True), "train", 0)
    assert not base & found["test", 0]


def test_the_same_seed_gives_the_same_samples_and_another_seed_others():
    world = PocketWorld()
    first, again, other = (world.generate(20, seed) for seed in (0, 0, 1))
    assert np.array_equal(first.ids, again.ids)
    assert first.names == again.names
    assert not np.array_equal(first.ids, other.ids)


def test_difficulty_knobs():
    easy = PocketWorld(PocketConfig(continue_share=0.0, min_lines=2, max_lines=3)).problems(50, 0)
    assert {hops for problem in easy for hops in problem.hops} == {1}
    assert {len(problem.hops) for problem in easy} == {2, 3}
    deep = PocketWorld(PocketConfig(continue_share=0.9, max_hops=3)).problems(50, 0)
    assert {hops for problem in deep for hops in problem.hops} == {1, 2, 3}
    assert {hops for problem in deep if problem.family == "call" for hops in problem.hops} == {1}


def test_families_come_in_equal_shares():
    names = [problem.family for problem in PocketWorld().problems(50, 0)]
    assert {name: names.count(name) for name in names} == dict.fromkeys(FAMILIES, 10)


@pytest.mark.parametrize("count", [0, 1, 3])
def test_few_problems_leave_families_out(count):
    assert len(PocketWorld().problems(count, 0)) == count


def test_replaced_letters_of_the_base_have_no_loss():
    store = PocketWorld(base=True).generate(200, 0)
    response = store.tags > 0
    assert 0.05 < (response & ~store.mask).sum() / response.sum() < 0.2
    plain = PocketWorld(PocketConfig(replace=0.0), base=True).generate(50, 0)
    assert np.array_equal(plain.tags > 0, plain.mask)


def test_the_base_skips_some_lines():
    never, always = (PocketWorld(PocketConfig(skip=skip), base=True).generate(200, 0).tags for skip in (0.0, 1.0))
    assert never.max() == HOP + 1
    assert (never == HOP).any()
    assert always.max() == HOP + 5
    assert not (always == HOP).any()
    some = PocketWorld(base=True).generate(500, 0).tags
    several = (some == HOP).sum() + (some > HOP + 1).sum()
    assert 0.25 < (some > HOP + 1).sum() / several < 0.35


def test_few_tokens_are_hard():
    store = PocketWorld().generate(500, 0)
    hard = (store.tags > HOP + 1).sum() / store.mask.sum()
    assert 0.05 < hard < 0.15
    assert store.lengths.max() < 60


def test_a_filler_is_nobodys_guess():
    store = PocketWorld(PocketConfig(families=("chase",))).generate(400, 0)
    words = store.ids[store.tags == 1]
    assert (np.bincount(words - words.min()) / len(words)).max() < 0.4
    assert FILLER in FAMILIES["chase"].line


def test_text_and_tokenizer_round_trip(tmp_path):
    from transformers import AutoTokenizer

    world = PocketWorld()
    make_tokenizer(world.vocabulary).save_pretrained(tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    assert len(tokenizer) == world.vocab_size == len(set(world.vocabulary.words))
    for problem in world.problems(10, 0):
        ids = [*problem.prompt_ids, *problem.gold_ids]
        text = world.text(ids)
        assert world.vocabulary.ids(text) == tokenizer(text)["input_ids"] == ids
        assert tokenizer.decode(ids) == text
    assert tokenizer.eos_token_id == EOS


def test_recipes_reach_the_world():
    config = build(
        ProceduralConfig, {"task": "pocket", "samples": 40, "validation_samples": 10, "pocket": {"letters": 5}}
    )
    data = load_procedural(config)
    assert len(data.store) == 40
    assert len(data.validation) == 10
    assert data.store.ids.max() < config.build_task().vocab_size
    with pytest.raises(ConfigError, match="pocket"):
        build(ProceduralConfig, {"task": "pocke"})
    with pytest.raises(ConfigError, match="belong to the task 'pocket'"):
        build(ProceduralConfig, {"task": "stop-chase", "pocket": {}})


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"families": ["chas"]}, "chase"),
        ({"families": []}, "at least one"),
        ({"letters": 1}, "letters"),
        ({"letters": 5, "letters_used": 6}, "letters"),
        ({"min_lines": 4, "max_lines": 3}, "min_lines"),
        ({"continue_share": 1.0}, "continue_share"),
    ],
)
def test_impossible_worlds_are_refused(options, said):
    with pytest.raises(ConfigError, match=said):
        build(PocketConfig, options)
