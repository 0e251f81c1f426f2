"""A thousand random schedules: every output is right and every slot comes back."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tah2.engine.params import SamplingParams
from tests.engine.tiny import KINDS, Ask, drained, engine, expected, same

STEM = (3, 1, 4, 1, 5, 9, 2, 6)
PROMPTS = [STEM, STEM[:3], (*STEM[:5], 7, 7), (11,), (*STEM, 8), (20, 21, 22, 23)]
PARAMS = [
    SamplingParams(temperature=0.0, max_tokens=4),
    SamplingParams(temperature=1.0, seed=1, max_tokens=5),
    SamplingParams(temperature=0.7, top_k=10, seed=2, max_tokens=2, exit_threshold=0.3),
    SamplingParams(temperature=1.2, seed=3, max_tokens=6, presence_penalty=1.0, max_depth=2),
]
EVENTS = st.one_of(
    st.tuples(st.just("add"), st.integers(0, len(PROMPTS) - 1), st.integers(0, len(PARAMS) - 1)),
    st.tuples(st.just("step"), st.integers(1, 4), st.just(0)),
    st.tuples(st.just("abort"), st.integers(0, 7), st.just(0)),
    st.tuples(st.just("preempt"), st.integers(0, 7), st.just(0)),
)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_random_schedules(kind: str):
    @settings(
        max_examples=100,
        deadline=None,
        derandomize=True,
        database=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(
        events=st.lists(EVENTS, min_size=1, max_size=14),
        slots=st.sampled_from([70, 100, 400]),
        budget=st.integers(1, 12),
        seats=st.integers(1, 4),
        wavefront_rows=st.sampled_from([0, 3, 99]),
        caching=st.booleans(),
        eos=st.sampled_from([(), (7,), (30, 31, 32, 33)]),
    )
    def schedule(
        events: list[tuple[str, int, int]],
        slots: int,
        budget: int,
        seats: int,
        wavefront_rows: int,
        caching: bool,
        eos: tuple[int, ...],
    ) -> None:
        made = engine(
            kind,
            eos=eos,
            kv_slots=slots,
            max_batch_tokens=budget,
            max_num_seqs=seats,
            wavefront_rows=wavefront_rows,
            enable_prefix_caching=caching,
            admission_horizon=0,
        )
        asks: dict[str, Ask] = {}

        def step() -> None:
            for out in made.step():
                if out.finished:
                    same(kind, asks.pop(out.request_id), out, eos)
            made.check()

        for number, (event, first, second) in enumerate(events):
            if event == "add":
                ask = asks[str(number)] = Ask(PROMPTS[first], PARAMS[second])
                made.add_request(str(number), ask.prompt, ask.params)
            elif event == "step":
                for _ in range(first):
                    step()
            elif asks and event == "preempt":
                made.preempt(sorted(asks)[first % len(asks)])
            elif asks:
                name = sorted(asks)[first % len(asks)]
                output = made.abort(name)
                assert output is not None
                written = output.outputs[0].token_ids
                assert expected(kind, asks.pop(name), eos).token_ids[: len(written)] == written
            made.check()
        for _ in range(3000):
            if not made.has_unfinished_requests():
                break
            step()
        assert asks == {}
        drained(made)

    schedule()
