"""One definition, four readings: mask, mask_mod, slot lists and key counts agree with a rule written by hand."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tah2.visibility import (
    RULES,
    Entries,
    Rule,
    dense_mask,
    keys_of_earlier_token,
    keys_of_own_token,
    mask_mod,
    slot_list,
    visible_key_counts,
)


class Entry(NamedTuple):
    document: int
    position: int
    depth: int
    last: int
    lookahead: bool = False


BY_HAND: dict[str, Callable[[Entry, Entry], bool]] = {
    "duo-causal": lambda q, k: k.position <= q.position and k.depth <= q.depth,
    "base-stream": lambda q, k: (
        (k.position < q.position and k.depth == 1) or (k.position == q.position and k.depth <= q.depth)
    ),
    "per-iteration": lambda q, k: k.position <= q.position and k.depth == q.depth,
    "last-exited": lambda q, k: (
        (k.position < q.position and k.depth == min(k.last, q.depth))
        or (k.position == q.position and k.depth == q.depth)
    ),
}


def reads(rule: str, query: Entry, key: Entry) -> bool:
    if query.document != key.document:
        return False
    if key.lookahead and (not query.lookahead or query.position != key.position or query.depth != key.depth):
        return False
    return BY_HAND[rule](query, key)


documents = st.lists(st.lists(st.integers(1, 4), min_size=1, max_size=5), min_size=1, max_size=3)
"""Executed depths of the tokens of each document."""
rules = st.sampled_from(sorted(RULES))


def executed(profile: list[list[int]]) -> list[Entry]:
    return [
        Entry(document, position, depth, last)
        for document, depths in enumerate(profile)
        for position, last in enumerate(depths)
        for depth in range(1, last + 1)
    ]


def probes(profile: list[list[int]]) -> list[Entry]:
    """Every token once more, one depth deeper than it went."""
    return [
        Entry(document, position, last + 1, last + 1, lookahead=True)
        for document, depths in enumerate(profile)
        for position, last in enumerate(depths)
    ]


def tensors(entries: list[Entry]) -> Entries:
    columns = [torch.tensor(column) for column in zip(*entries, strict=True)]
    return Entries(*columns)


def test_every_rule_has_a_hand_written_twin():
    assert set(RULES) == set(BY_HAND)


@given(rules, documents, st.randoms(use_true_random=False))
def test_masks_say_what_the_rule_says_in_any_packing(name: str, profile: list[list[int]], random):
    entries = executed(profile) + probes(profile)
    random.shuffle(entries)
    packed = tensors(entries)
    expected = torch.tensor([[reads(name, query, key) for key in entries] for query in entries])
    assert torch.equal(dense_mask(RULES[name], packed, packed), expected)
    modify, zero = mask_mod(RULES[name], packed, packed), torch.zeros((), dtype=torch.long)
    pointwise = [[bool(modify(zero, zero, q, k)) for k in torch.arange(len(packed))] for q in torch.arange(len(packed))]
    assert torch.equal(torch.tensor(pointwise), expected)


@given(rules, st.lists(st.integers(1, 4), min_size=1, max_size=6), st.integers(1, 4))
def test_a_slot_list_is_the_next_token_s_row_of_the_mask(name: str, depths: list[int], depth: int):
    rule, past = RULES[name], executed([depths])
    query = [Entry(0, len(depths), depth, depth)]
    row = dense_mask(rule, tensors(query), tensors(past))[0]
    seen = [(entry.position, entry.depth) for entry, visible in zip(past, row.tolist(), strict=True) if visible]
    assert slot_list(rule, depths, depth) == sorted(seen)


@given(rules, st.lists(st.integers(1, 4), min_size=1, max_size=6), st.integers(1, 5))
def test_key_counts_are_row_sums_of_the_mask(name: str, depths: list[int], depth: int):
    """As if each token alone had gone on to `depth`: its own deeper entries are there, everybody else's are not."""
    rule, counts = RULES[name], []
    for position, last in enumerate(depths):
        own = [Entry(0, position, j, max(last, depth)) for j in range(1, depth + 1)]
        others = [entry for entry in executed([depths]) if entry.position != position]
        counts.append(int(dense_mask(rule, tensors(own[-1:]), tensors(others + own)).sum()))
    assert visible_key_counts(rule, torch.tensor(depths), depth, max(5, *depths)).tolist() == counts


@given(rules, st.integers(1, 5), st.integers(1, 5))
def test_numbers_and_tensors_count_alike(name: str, last: int, depth: int):
    as_tensor = keys_of_earlier_token(RULES[name], torch.tensor([last]), depth, 5)
    assert int(as_tensor) == keys_of_earlier_token(RULES[name], last, depth, 5)


@given(documents, rules)
def test_a_lookahead_key_is_seen_by_itself_alone(profile: list[list[int]], name: str):
    everyone = tensors(executed(profile) + probes(profile))
    readers = dense_mask(RULES[name], everyone, everyone)[:, everyone.lookahead]
    assert torch.equal(readers, torch.eye(len(everyone), dtype=torch.bool)[:, everyone.lookahead])


@given(documents)
def test_a_lookahead_query_sees_executed_entries_duo_causally(profile: list[list[int]]):
    queries, keys = tensors(probes(profile)), tensors(executed(profile))
    as_executed = tensors([entry._replace(lookahead=False) for entry in probes(profile)])
    mask = dense_mask(RULES["duo-causal"], queries, keys)
    assert torch.equal(mask, dense_mask(RULES["duo-causal"], as_executed, keys))


@given(documents)
def test_under_the_duo_causal_rule_a_token_reads_a_prefix_of_its_depth_s_list(profile: list[list[int]]):
    """What makes paging simple: entries of depth <= m in order of (position, depth), cut at the query."""
    rule = RULES["duo-causal"]
    for depths in profile:
        for depth in range(1, 5):
            counts = visible_key_counts(rule, torch.tensor(depths), depth, 4)
            slots = slot_list(rule, depths, depth)
            for position in range(len(depths)):
                assert slot_list(rule, depths[:position], depth) == slots[: int(counts[position]) - depth]


@pytest.mark.parametrize("name", sorted(RULES))
def test_reads_depth_names_the_depths_that_some_query_reads(name: str):
    rule: Rule = RULES[name]
    pairs = [(j, m) for j in range(1, 5) for m in range(1, 5)]
    tokens = [Entry(0, position, j, last) for position in (0, 1) for last in range(1, 5) for j in range(1, last + 1)]
    found = {
        (key.depth, m)
        for key in tokens
        for m in range(1, 5)
        if BY_HAND[name](Entry(0, 1, m, m), key) and key.depth <= 4
    }
    assert {pair for pair in pairs if rule.reads_depth(*pair)} == found


@pytest.mark.parametrize("name", sorted(RULES))
def test_a_pass_at_one_depth_alone_is_plain_causality_where_the_rule_says_so(name: str):
    rule = RULES[name]
    for depth in (1, 2):
        entries = Entries.of(torch.zeros(4, dtype=torch.long), torch.arange(4), depth)
        causal = torch.ones(4, 4, dtype=torch.bool).tril()
        assert rule.causal_within(depth) == torch.equal(dense_mask(rule, entries, entries), causal)


@pytest.mark.parametrize(("name", "counts"), [("duo-causal", 3), ("base-stream", 3), ("per-iteration", 1)])
def test_own_keys_at_depth_three(name: str, counts: int):
    assert keys_of_own_token(RULES[name], 3) == counts
