"""math-verify on one answer. It stops itself by alarms, so it has to be the main thread of its process: here it is."""

from __future__ import annotations

from typing import Any

from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse, verify

EXTRACTION = (LatexExtractionConfig(boxed_match_priority=0), ExprExtractionConfig())


def check(request: dict[str, Any]) -> dict[str, Any]:
    """`gold` (cleaned) against `response`; the order matters, because `verify` is not symmetric."""
    gold = parse(f"\\boxed{{{request['gold']}}}", extraction_config=EXTRACTION)
    given = parse(request["response"], extraction_config=EXTRACTION)
    return {"correct": bool(gold) and bool(verify(gold, given)), "answer": canonical(given[0]) if given else None}


def canonical(value: Any) -> str:
    """A text that equal numbers share, whether written as fraction or decimal; other answers as they are parsed."""
    import sympy

    try:
        if isinstance(value, sympy.Expr) and value.is_number and len(str(value)) < 200:
            return str(sympy.nsimplify(value, rational=True).simplify())
    except Exception:
        return str(value)
    return str(value)
