"""Multi-turn tool use: BFCL's simulated back ends, in the version of the paper (v3) and the repaired one (v4)."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tah2.config.strict import ConfigError
from tah2.evals.sources import Companions, Hub, Row, Source, hub_file_rows, json_lines
from tah2.evals.task import GREEDY, Problem, Task

CATEGORIES = ("base", "miss_func", "miss_param", "long_context")
CLASSES = {
    "GorillaFileSystem": "gorilla_file_system",
    "MathAPI": "math_api",
    "MessageAPI": "message_api",
    "TicketAPI": "ticket_api",
    "TradingBot": "trading_bot",
    "TravelAPI": "travel_booking",
    "TwitterAPI": "posting_api",
    "VehicleControlAPI": "vehicle_control",
}
"""Simulated back end -> file of its function descriptions in the hub's repository."""


def episode_problem(row: Mapping[str, Any]) -> Problem:
    """The first turn stands for the problem; `tah2.evals.episode` plays all of them."""
    first = tuple(row["question"][0])
    return Problem(row["id"], first, "\n".join(message["content"] for message in first), row)


def joined_functions(file: str) -> Companions:
    """Adds to every row the descriptions of the functions of its back ends, in order, as `functions`."""

    def join(rows: list[Row], folder: Path) -> tuple[str, ...]:
        path = folder / file
        if not path.is_file():
            raise ConfigError(f"{folder} lacks {file}, which describes the functions of this benchmark.")
        describe(rows, {row["id"]: row["functions"] for row in json_lines(path.read_bytes(), str(path))})
        return ()

    return join


def describe(rows: list[Row], documents: Mapping[str, list[Any]]) -> None:
    for row in rows:
        row["functions"] = [function for name in row["involved_classes"] for function in documents[name]]


def from_hub(row: Mapping[str, Any], number: int) -> Row:
    return {**row, "category": row["id"].rsplit("_", 1)[0]}


def gold_calls_and_functions(version: str) -> Any:
    """The hub keeps gold calls and function descriptions in files of their own."""

    def complete(rows: list[Row], hub: Hub) -> None:
        answers = [f"possible_answer/BFCL_{version}_multi_turn_{name}.json" for name in CATEGORIES]
        gold = {row["id"]: row["ground_truth"] for row in hub_file_rows(hub, answers)}
        documents = {
            name: list(hub_file_rows(hub, [f"multi_turn_func_doc/{file}.json"])) for name, file in CLASSES.items()
        }
        for row in rows:
            row["ground_truth"] = gold[row["id"]]
        describe(rows, documents)

    return complete


def _task(version: str, package: str) -> Task:
    hub = Hub(
        "gorilla-llm/Berkeley-Function-Calling-Leaderboard",
        from_hub,
        files=tuple(f"BFCL_{version}_multi_turn_{name}.json" for name in CATEGORIES),
        complete=gold_calls_and_functions(version),
    )
    name = f"bfcl_{version}"
    companions = joined_functions(f"{name}_func_doc.jsonl")
    return Task(
        name,
        f"BFCL {version} multi-turn",
        "tool use",
        800,
        1,
        Source(f"{name}_multi_turn.jsonl", hub, companions=companions),
        episode_problem,
        name,
        decoding=GREEDY,
        multi_turn=True,
        caveat=f"BFCL {version} data on the back ends of bfcl-eval {package}",
    )


TASKS = (_task("v3", "2025.8.6.2"), _task("v4", "2026.3.23"))
