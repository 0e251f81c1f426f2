"""FLOPs while a sample is written: at every token what the exact count of that prefix is."""

from __future__ import annotations

import pytest

from tah2.compute import decode_flops
from tah2.config.loop import LoopConfig
from tah2.server.costs import Costs
from tah2.server.messages import Delta, Ending
from tah2.server.reporting import Tally
from tests.engine.tiny import BACKBONE, LOOPS

PROMPT = [1, 3, 2, 1, 1, 2]
DEPTHS = [2, 1, 3, 1, 1, 2, 3, 1]
CHUNKS = (1, 2, 0, 3, 2)


@pytest.mark.parametrize("kind", ["tah2-4", "ouro", "huginn"])
def test_costs_are_those_of_the_tokens_so_far(kind: str):
    loop, ceiling = LOOPS[kind], 3
    costs, at = Costs(BACKBONE, loop, PROMPT, ceiling), 0
    for size in CHUNKS:
        told = costs.add(DEPTHS[at : at + size])
        at += size
        decoded = DEPTHS[1:at]
        assert told[0] == decode_flops(BACKBONE, loop, PROMPT, decoded, ceiling)
        assert told[1] == decode_flops(BACKBONE, LoopConfig("standard"), [1] * len(PROMPT), [1] * len(decoded))


def test_usage_knows_costs_while_samples_run_and_after_they_end():
    tally = Tally(6)
    assert tally.usage(final=False).decode_flops is None
    tally.add(Delta("r", 0, "a", [1], [2], costs=(30, 20)))
    tally.add(Delta("r", 1, "b", [1], [1], costs=(10, 10)))
    assert tally.usage(final=False).decode_flops == 40
    assert tally.usage(final=False).plain_decode_flops == 30
    tally.add(Delta("r", 0, "", [], [], ending=Ending("stop", None, None, 33, 22, 0.0, 0, 0), costs=(33, 22)))
    assert tally.usage(final=False).decode_flops == 43
    tally.add(Delta("r", 1, "", [], [], ending=Ending("stop", None, None, 11, 11, 0.0, 0, 0)))
    assert tally.usage().decode_flops == 44
    assert tally.usage().plain_decode_flops == 33
