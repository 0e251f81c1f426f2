"""What became of every prompt: each one read ends in exactly one line of the report."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

SHOWN = 5

UNANSWERED, REFUSED = "not answered yet", "refused by the teacher"


@dataclass
class DistillReport:
    read: Counter[str] = field(default_factory=Counter)
    """Rows by source."""
    kept: Counter[str] = field(default_factory=Counter)
    """Prompts that became rows, by source."""
    dropped: Counter[str] = field(default_factory=Counter)
    """Prompts by reason."""
    examples: dict[str, list[str]] = field(default_factory=dict)
    """The first few of each reason: `file:line (id): detail`."""
    rows: dict[str, int] = field(default_factory=dict)
    """Rows by file."""
    tokens: int = 0
    """Of all rows; 0 where nobody counted them."""
    uncounted: int = 0
    """Rows whose length nobody knows."""
    missing_answers: int = 0
    """Prompts with answers that another run of the same command may still get."""
    contamination: dict[str, Any] = field(default_factory=dict)

    def drop(self, reason: str, where: str, detail: str = "") -> None:
        self.dropped[reason] += 1
        shown = self.examples.setdefault(reason, [])
        if len(shown) < SHOWN:
            shown.append(f"{where}: {detail}" if detail else where)

    def to_dict(self) -> dict[str, Any]:
        return {
            "prompts": {"read": self.read.total(), "kept": self.kept.total(), "dropped": self.dropped.total()},
            "sources": {label: {"read": self.read[label], "kept": self.kept[label]} for label in self.read},
            "dropped": {
                reason: {"count": count, "first": self.examples[reason]} for reason, count in self.dropped.most_common()
            },
            "rows": self.rows,
            "tokens": self.tokens,
            "prompts_with_missing_answers": self.missing_answers,
            "rows_of_unknown_length": self.uncounted,
            "contamination": self.contamination,
        }

    def lines(self) -> list[str]:
        """For people."""
        found = [f"{self.read.total():,} prompts read, {self.kept.total():,} kept, {self.dropped.total():,} dropped"]
        for reason, count in self.dropped.most_common():
            found.append(f"  {count:>8,}  {reason}")
            found += [f"            {example}" for example in self.examples[reason]]
        if self.contamination:
            compared, missing = self.contamination["benchmarks"], self.contamination["not_compared"]
            absent = f"; missing: {', '.join(missing)}" if missing else ""
            found.append(f"  compared with {len(compared)} benchmarks{absent}")
        if self.rows:
            written = ", ".join(f"{count:,} rows in {name}" for name, count in self.rows.items())
            found.append(f"{written}; {self.tokens:,} tokens" if self.tokens else written)
        if self.missing_answers:
            found.append(f"{self.missing_answers:,} prompts lack answers: run the command again to ask for them")
        if self.uncounted:
            found.append(f"{self.uncounted:,} rows have an unknown length: name the student's 'filter.tokenizer'")
        return found
