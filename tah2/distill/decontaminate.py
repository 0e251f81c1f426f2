"""Data sets against benchmarks: which rows hold a problem, and the rows that hold none."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple

from tah2.config.strict import ConfigError, build
from tah2.data.config import SourceConfig
from tah2.data.conversation import parse_prompt, without_nulls
from tah2.data.report import BadRow
from tah2.data.sources import RawRow, local_files, open_source
from tah2.distill.assemble import replaced
from tah2.distill.benchmarks import Compared
from tah2.distill.contamination import Hit

ASKING = ("user", "system")
HUB_ID = re.compile(r"[\w.-]+/[\w.-]+(?<!\.jsonl)(?<!\.ndjson)(?<!\.parquet)")


@dataclass
class ContaminationReport:
    """Matched rows by benchmark."""

    problems: dict[str, int]
    missing: tuple[str, ...]
    run: int
    secret: frozenset[str] = frozenset()
    rows: int = 0
    matches: list[dict[str, Any]] = field(default_factory=list)
    unreadable: list[str] = field(default_factory=list)

    @classmethod
    def of(cls, compared: Compared) -> ContaminationReport:
        return cls(dict(compared.problems), compared.missing, compared.index.run, compared.secret)

    def add(self, where: str, name: str, hit: Hit) -> None:
        """Of benchmarks that are kept from plain text, the shared words are left out."""
        match = {"where": where, "id": name, **asdict(hit)}
        if hit.benchmark in self.secret:
            del match["shared"]
        self.matches.append(match)

    @property
    def counts(self) -> Counter[str]:
        return Counter(match["benchmark"] for match in self.matches)

    def to_dict(self) -> dict[str, Any]:
        return {
            "words": self.run,
            "rows": self.rows,
            "contaminated": len(self.matches),
            "benchmarks": {
                name: {
                    "problems": count,
                    "rows": self.counts[name],
                    "matches": [
                        {key: value for key, value in match.items() if key != "benchmark"}
                        for match in self.matches
                        if match["benchmark"] == name
                    ],
                }
                for name, count in self.problems.items()
            },
            "not_compared": list(self.missing),
            "unreadable": self.unreadable,
        }

    def lines(self) -> list[str]:
        """For people."""
        compared = f"{len(self.problems)} benchmarks ({sum(self.problems.values()):,} problems)"
        found = [f"{self.rows:,} rows compared with {compared}: {len(self.matches):,} hold one of their problems"]
        for match in self.matches[:20]:
            shared = f": {match['shared']}" if "shared" in match else ""
            found.append(f"  {match['where']}  {match['benchmark']} {match['problem']} ({match['kind']}){shared}")
        if len(self.matches) > 20:
            found.append(f"  and {len(self.matches) - 20:,} more")
        if self.unreadable:
            found.append(f"{len(self.unreadable):,} rows cannot be read; the first: {self.unreadable[0]}")
        if self.missing:
            found.append(f"Not compared, as their files are missing: {', '.join(self.missing)}")
        return found


def decontaminate(
    data: Iterable[str],
    compared: Compared,
    out: Path | None = None,
    responses: bool = False,
    watch: Callable[[int], None] = lambda rows: None,
) -> ContaminationReport:
    """Compare every row of `data` (files, folders, patterns, Hugging Face ids); with `out`, write the clean ones there.

    Clean rows go into files named as those that they came from; unreadable ones are counted and go nowhere.
    """
    sources = dict.fromkeys(source for word in data for source in sources_of(word))
    targets = [_target(source) for source in sources]
    if out is not None:
        _check_targets(out, sources, targets)
    report = ContaminationReport.of(compared)
    for source, target in zip(sources, targets, strict=True):
        with ExitStack() as stack:
            clean = None if out is None else stack.enter_context(replaced(out / target))
            for raw in open_source(build(SourceConfig, {source.kind: source.name})).rows():
                report.rows += 1
                watch(report.rows)
                try:
                    hit = next(filter(None, map(compared.index.find, texts_of(raw, responses))), None)
                except BadRow as problem:
                    report.unreadable.append(f"{raw.where}: {problem}")
                    continue
                if hit is not None:
                    report.add(raw.where, str(raw.load().get("id", "")), hit)
                elif clean is not None:
                    clean.write(_line(raw))
    return report


class Named(NamedTuple):
    """One thing to read, as `SourceConfig` has it."""

    kind: Literal["path", "id"]
    name: str


def sources_of(word: str) -> list[Named]:
    """The files that `word` names, or the data set of the hub where there is no such path."""
    is_id = HUB_ID.fullmatch(word) and not Path(word).exists()
    return [Named("id", word)] if is_id else [Named("path", str(file)) for file in local_files(word)]


def _target(source: Named) -> str:
    return (
        Path(source.name).with_suffix(".jsonl").name
        if source.kind == "path"
        else source.name.replace("/", "--") + ".jsonl"
    )


def _check_targets(out: Path, sources: Iterable[Named], targets: list[str]) -> None:
    if len(set(targets)) < len(targets):
        raise ConfigError("Two data files have the same name: give each its own '--out'.")
    for source, target in zip(sources, targets, strict=True):
        if source.kind == "path" and (out / target).resolve() == Path(source.name).resolve():
            raise ConfigError(f"'--out' would overwrite {source.name}: choose another folder.")
    out.mkdir(parents=True, exist_ok=True)


def texts_of(raw: RawRow, responses: bool) -> Iterator[str]:
    """What a row asks: its user and system messages, or else every string in it. `responses`: all messages."""
    row = raw.load()
    try:
        messages = parse_prompt(row).messages
    except BadRow:
        yield from strings_in(row)
        return
    yield from (str(m["content"]) for m in messages if responses or m["role"] in ASKING)


def strings_in(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for entry in value.values():
            yield from strings_in(entry)
    elif isinstance(value, (list, tuple)):
        for entry in value:
            yield from strings_in(entry)


def _line(raw: RawRow) -> bytes:
    """The row as it stood, or as JSON where it stood in a table."""
    if isinstance(raw.payload, bytes):
        return raw.payload if raw.payload.endswith(b"\n") else raw.payload + b"\n"
    return json.dumps(without_nulls(raw.payload), ensure_ascii=False, default=str).encode() + b"\n"
