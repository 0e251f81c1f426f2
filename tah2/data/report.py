"""What became of every row: nothing is dropped without being counted."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any

SHOWN_BAD_ROWS = 5


class DataError(ValueError):
    """Data that cannot be trained on; the message is one sentence for the user."""


class BadRow(Exception):
    """A row that cannot become a sample. `reason` is a short category, `detail` says more."""

    def __init__(self, reason: str, detail: str = "") -> None:
        super().__init__(f"{reason}: {detail}" if detail else reason)
        self.reason = reason


@dataclass
class Counts:
    """Rows and tokens of one source, or of all."""

    read: int = 0
    kept: int = 0
    too_long: int = 0
    bad: int = 0
    unsupervised: int = 0
    """Rows without a single token to train on."""
    rewritten_turns: int = 0
    """Assistant turns kept as context, because the chat template renders them differently once they are history."""
    trimmed_rows: int = 0
    """Rows whose messages after the last assistant turn were cut off."""
    control_token_rows: int = 0
    """Rows whose text spells a control token of the tokenizer; it is tokenised as `apply_chat_template` does."""
    tokens: int = 0
    supervised_tokens: int = 0

    def __add__(self, other: Counts) -> Counts:
        return Counts(*(getattr(self, item.name) + getattr(other, item.name) for item in fields(Counts)))


@dataclass
class DataReport:
    """Filled while data is read; `total` and `describe()` sum it up."""

    sources: dict[str, Counts] = field(default_factory=dict)
    reasons: dict[str, int] = field(default_factory=dict)
    bad_rows: list[str] = field(default_factory=list)
    """The first bad rows: `file:line: reason`."""
    validation_samples: int = 0
    validation: DataReport | None = None
    """Of the validation set, where it has sources of its own; not part of `total`."""

    @property
    def total(self) -> Counts:
        return sum(self.sources.values(), Counts())

    def of(self, label: str) -> Counts:
        """The counts of one source, made on first use."""
        return self.sources.setdefault(label, Counts())

    def add_bad(self, label: str, where: str, problem: BadRow) -> None:
        self.of(label).bad += 1
        self.reasons[problem.reason] = self.reasons.get(problem.reason, 0) + 1
        if len(self.bad_rows) < SHOWN_BAD_ROWS:
            self.bad_rows.append(f"{where}: {problem}")

    def describe(self) -> str:
        """One paragraph for people."""
        total = self.total
        parts = [
            f"{total.read:,} rows read from {len(self.sources)} source(s), {total.kept:,} kept "
            f"({total.tokens:,} tokens, {total.supervised_tokens:,} of them with a loss)"
        ]
        if self.validation_samples and self.validation is None:
            parts[0] += f", {self.validation_samples:,} of these held out for validation"
        if total.too_long:
            parts.append(f"{total.too_long:,} were longer than allowed")
        if total.unsupervised:
            parts.append(f"{total.unsupervised:,} had no token to train on")
        if total.bad:
            listed = ", ".join(f"{count:,} {reason}" for reason, count in sorted(self.reasons.items()))
            parts.append(f"{total.bad:,} were unusable ({listed}); the first: {' | '.join(self.bad_rows)}")
        if total.rewritten_turns:
            parts.append(
                f"{total.rewritten_turns:,} assistant turns have no loss, as the chat template renders them "
                "in the whole conversation otherwise than it asks the model to write them"
            )
        if total.trimmed_rows:
            parts.append(f"{total.trimmed_rows:,} rows ended in messages that nobody answers, which were cut off")
        if total.control_token_rows:
            parts.append(f"{total.control_token_rows:,} rows spell control tokens in their text")
        if self.validation is not None:
            parts.append(f"For validation: {self.validation.describe().rstrip('.')}")
        return ". ".join(parts) + "."

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> DataReport:
        sources = {label: Counts(**counts) for label, counts in data["sources"].items()}
        validation = data.get("validation")
        return cls(
            sources,
            dict(data["reasons"]),
            list(data["bad_rows"]),
            int(data["validation_samples"]),
            None if validation is None else cls.from_dict(validation),
        )
