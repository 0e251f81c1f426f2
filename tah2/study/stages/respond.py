"""Responses to the world's test problems, and what its verifier says of them."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from tah2.config.backbone import BackboneConfig
from tah2.config.strict import build, plain
from tah2.data.procedural import ProceduralConfig
from tah2.engine.engine import Engine
from tah2.engine.llm import LLM
from tah2.engine.params import SamplingParams
from tah2.evals.flops import FlopsModel
from tah2.evals.records import RecordFile, SampleRecord, depth_counts, sample_seed
from tah2.model.checkpoint import load
from tah2.study.layout import EVAL, GRADES, SAMPLES, STAGES, GradeRow
from tah2.study.ledger import digest_files, digest_records
from tah2.study.plan import Task, Unit
from tah2.study.stages.benchmarks import evaluate_unit, grade_benchmarks
from tah2.study.stages.training import BEGUN, describe_unit
from tah2.study.world import Problem, World, open_world
from tah2.train.summary import write_summary

if TYPE_CHECKING:
    from tah2.study.config import GenerateSection
    from tah2.study.shop import Shop, Tell


def generate_unit(shop: Shop, task: Task, key: str, tell: Tell) -> str:
    """Every problem, several times; what was recorded before an interruption is not generated again."""
    unit, section = shop.plan.units[task.subject], shop.plan.study.generate
    describe_unit(shop, unit)
    folder = shop.root / unit.folder / SAMPLES
    _begin(shop.root / unit.folder, key)
    if shop.plan.study.evaluate.tasks:
        return evaluate_unit(shop, unit)
    world = world_of(unit)
    problems = world.problems(section.problems, section.seed)
    respond(shop.root / unit.model, unit, section, problems, world, folder, tell)
    return digest_records(record for path in folder.glob("*.jsonl") for record in RecordFile(path).read())


def world_of(unit: Unit) -> World:
    return open_world(build(ProceduralConfig, unit.recipe.get("procedural") or {}))


def make_llm(model: Path, unit: Unit, requests: int, longest: int, **options: Any) -> LLM:
    """An engine just large enough for `requests` at once, of at most `longest` tokens each."""
    threads = (unit.recipe.get("system") or {}).get("threads")
    if threads is not None:
        torch.set_num_threads(int(threads))
    slots = requests * longest * unit.ceiling + 64
    return LLM(load(model, dtype=torch.float32), max_num_seqs=requests, kv_slots=slots, **options)


def params_of(section: GenerateSection, unit: Unit, seed: int) -> SamplingParams:
    return SamplingParams(
        temperature=section.temperature,
        top_p=section.top_p,
        top_k=section.top_k,
        seed=seed,
        max_tokens=section.max_tokens,
        max_depth=unit.ceiling,
        detokenize=False,
    )


def respond(
    model: Path,
    unit: Unit,
    section: GenerateSection,
    problems: Sequence[Problem],
    world: World,
    folder: Path,
    tell: Tell,
) -> None:
    """Append one record per problem and repeat that `folder` does not hold yet."""
    files = {family: RecordFile(folder / f"{family}.jsonl") for family in {problem.family for problem in problems}}
    done = {family: file.keys() for family, file in files.items()}
    asked = [
        (problem, repeat)
        for problem in problems
        for repeat in range(section.samples)
        if (problem.id, repeat) not in done[problem.family]
    ]
    if not asked:
        return
    longest = max(len(problem.prompt) for problem in problems) + section.max_tokens
    engine = make_llm(model, unit, section.batch, longest).engine
    by_name = {}
    for problem, repeat in asked:
        name = f"{problem.id}/{repeat}"
        seed = sample_seed(section.seed, problem.family, problem.id, repeat)
        by_name[name] = (problem, repeat, seed)
        engine.add_request(name, problem.prompt, params_of(section, unit, seed))
    try:
        _collect(engine, by_name, files, world, unit.ceiling, tell)
    finally:
        for file in files.values():
            file.close()


def _collect(
    engine: Engine,
    asked: dict[str, tuple[Problem, int, int]],
    files: dict[str, RecordFile],
    world: World,
    ceiling: int,
    tell: Tell,
) -> None:
    finished = 0
    while engine.has_unfinished_requests():
        for output in engine.step(stream=False):
            problem, repeat, seed = asked[output.request_id]
            (sample,) = output.outputs
            if sample.error is not None:
                raise ValueError(f"Problem {problem.id} could not be answered: {sample.error}")
            times = sample.metrics
            files[problem.family].append(
                SampleRecord(
                    task=problem.family,
                    problem=problem.id,
                    repeat=repeat,
                    seed=seed,
                    prompt_tokens=len(problem.prompt),
                    prompt_depth_counts=depth_counts(output.prompt_depths, ceiling),
                    token_ids=[int(token) for token in sample.token_ids],
                    depths=[int(depth) for depth in sample.depths],
                    text=world.text(sample.token_ids),
                    finish_reason=str(sample.finish_reason),
                    decode_flops=sample.decode_flops,
                    seconds=_since(times.arrival_time, times.finished_time),
                    first_token_seconds=_since(times.arrival_time, times.first_token_time),
                )
            )
            finished += 1
            tell(finished / len(asked))


def _since(start: float, end: float | None) -> float | None:
    return None if end is None else round(end - start, 4)


def _begin(unit_folder: Path, key: str) -> None:
    """Responses that were generated from other inputs go."""
    path = unit_folder / STAGES / f"generate-{BEGUN}"
    if not path.is_file() or json.loads(path.read_text(encoding="utf-8")) != {"key": key}:
        for name in (SAMPLES, EVAL):
            shutil.rmtree(unit_folder / name, ignore_errors=True)
    write_summary(path, {"key": key})


def grade_unit(shop: Shop, task: Task, key: str, tell: Tell) -> str:
    """One row per response, in order of family, problem and repeat."""
    unit, section = shop.plan.units[task.subject], shop.plan.study.generate
    folder = shop.root / unit.folder
    if shop.plan.study.evaluate.tasks:
        return write_grades(folder, grade_benchmarks(shop, unit))
    records = [r for path in sorted((folder / SAMPLES).glob("*.jsonl")) for r in RecordFile(path).read()]
    world = world_of(unit)
    problems = {problem.id: problem for problem in world.problems(section.problems, section.seed)}
    flops = flops_model(shop, unit)
    rows = []
    for number, record in enumerate(records):
        rows.append(grade_record(record, problems[record.problem], world, flops, section.cutoffs))
        tell((number + 1) / len(records))
    return write_grades(folder, rows)


def write_grades(folder: Path, rows: Iterable[GradeRow]) -> str:
    """The rows, whole or not at all; returns their digest."""
    partial = folder / f"{GRADES}.partial"
    partial.write_text("".join(json.dumps(plain(row)) + "\n" for row in rows), encoding="utf-8")
    partial.replace(folder / GRADES)
    return digest_files([folder / GRADES])


def flops_model(shop: Shop, unit: Unit) -> FlopsModel:
    """What the unit's tokens cost, from the shape of its own checkpoint."""
    config = json.loads((shop.root / unit.model / "config.json").read_text(encoding="utf-8"))
    return FlopsModel(BackboneConfig.from_hf(config["backbone"]), unit.loop, unit.ceiling)


def grade_record(
    record: SampleRecord, problem: Problem, world: World, flops: FlopsModel, cutoffs: Sequence[int]
) -> GradeRow:
    verdict = world.grade(problem, record.token_ids)
    finished = record.finish_reason == "stop"
    return grade_row(
        record,
        flops,
        cutoffs,
        correct=verdict.correct and finished,
        exact=verdict.exact and finished,
        finished=finished,
        answer=verdict.answer if finished else "",
    )


def grade_row(record: SampleRecord, flops: FlopsModel, cutoffs: Sequence[int], **judged: Any) -> GradeRow:
    """A verdict beside what the response cost, whole and cut off at each of `cutoffs` output tokens."""
    spent = flops.of_beginnings(record.prompt_depth_counts, record.depths).tolist() or [0]
    return GradeRow(
        task=record.task,
        problem=record.problem,
        repeat=record.repeat,
        tokens=len(record.token_ids),
        flops=spent[-1],
        flops_at=tuple(spent[min(cutoff, len(spent)) - 1] for cutoff in cutoffs),
        depth=sum(record.depths) / max(1, len(record.depths)),
        **judged,
    )
