"""math-verify on one answer.

Its own time limits are alarms of the clock, under which a busy machine changes verdicts, and which only a main thread
may set. They are off: the sandbox limits processor time, and whatever reaches that limit is wrong.
"""

from __future__ import annotations

import signal
from typing import Any

from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse, verify

EXTRACTION = (LatexExtractionConfig(boxed_match_priority=0), ExprExtractionConfig())
SECONDS, LONGEST = 1.0, 200
"""Of processor time for looking for the plain form of an answer, and characters of one that is looked at."""


def check(request: dict[str, Any]) -> dict[str, Any]:
    """`gold` (cleaned) against `response`; the order matters, because `verify` is not symmetric."""
    gold = parse(f"\\boxed{{{request['gold']}}}", extraction_config=EXTRACTION, parsing_timeout=None)
    given = parse(request["response"], extraction_config=EXTRACTION, parsing_timeout=None)
    correct = bool(gold) and (
        bool(verify(gold, given, timeout_seconds=None)) or near(gold, given, request["tolerance"])
    )
    return {"correct": correct, "answer": canonical(given[0]) if given and not correct else None}


def near(gold: list[Any], given: list[Any], tolerance: float) -> bool:
    """Whether both are numbers no further apart than the problem allows."""
    numbers = [value[0] for value in (gold, given) if value and getattr(value[0], "is_number", False)]
    return tolerance > 0 and len(numbers) == 2 and bool(abs(numbers[0] - numbers[1]) <= tolerance * (1 + 1e-9))


def canonical(value: Any) -> str:
    """A text that equal numbers share, whether written as fraction or decimal; other answers as they are parsed."""
    import sympy

    plain = str(value)
    signal.signal(signal.SIGVTALRM, signal.default_int_handler)
    signal.setitimer(signal.ITIMER_VIRTUAL, SECONDS)
    try:
        if isinstance(value, sympy.Expr) and value.is_number and len(plain) < LONGEST:
            return str(sympy.nsimplify(value, rational=True).simplify())
    except (Exception, KeyboardInterrupt):
        return plain
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
    return plain
