"""math-verify on one answer. It stops itself by alarms, so it has to be the main thread of its process: here it is."""

from __future__ import annotations

import signal
from typing import Any

from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse, verify

EXTRACTION = (LatexExtractionConfig(boxed_match_priority=0), ExprExtractionConfig())
SECONDS, LONGEST = 1.0, 200
"""Of looking for the plain form of an answer, and characters of one that is looked at."""


def check(request: dict[str, Any]) -> dict[str, Any]:
    """`gold` (cleaned) against `response`; the order matters, because `verify` is not symmetric."""
    gold = parse(f"\\boxed{{{request['gold']}}}", extraction_config=EXTRACTION)
    given = parse(request["response"], extraction_config=EXTRACTION)
    correct = bool(gold) and (bool(verify(gold, given)) or near(gold, given, request["tolerance"]))
    return {"correct": correct, "answer": canonical(given[0]) if given and not correct else None}


def near(gold: list[Any], given: list[Any], tolerance: float) -> bool:
    """Whether both are numbers no further apart than the problem allows."""
    numbers = [value[0] for value in (gold, given) if value and getattr(value[0], "is_number", False)]
    return tolerance > 0 and len(numbers) == 2 and bool(abs(numbers[0] - numbers[1]) <= tolerance * (1 + 1e-9))


def canonical(value: Any) -> str:
    """A text that equal numbers share, whether written as fraction or decimal; other answers as they are parsed."""
    import sympy

    plain = str(value)
    signal.signal(signal.SIGALRM, signal.default_int_handler)
    signal.setitimer(signal.ITIMER_REAL, SECONDS)
    try:
        if isinstance(value, sympy.Expr) and value.is_number and len(plain) < LONGEST:
            return str(sympy.nsimplify(value, rational=True).simplify())
    except (Exception, KeyboardInterrupt):
        return plain
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
    return plain
