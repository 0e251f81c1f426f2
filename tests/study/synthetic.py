"""A study's folder without training: made-up responses whose statistics are known, in the layout of a real study."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from tah2.evals.records import SampleRecord
from tah2.study.analyses.alignment import alignment
from tah2.study.analyses.attention import Attention, representative
from tah2.study.analyses.depths import depths
from tah2.study.analyses.gains import gains
from tah2.study.analyses.measure import TokenTable
from tah2.study.analyses.run import MAPS
from tah2.study.layout import GradeRow, UnitInfo

TASKS = ("arithmetic", "chase", "copying", "expressions", "iteration")
CUTOFFS = (16, 24, 32, 48, 64, 96)
PROBLEMS, REPEATS = 8, 4


@dataclass(frozen=True)
class Made:
    """A variant: how good it is and what it costs."""

    name: str
    title: str
    loop: str
    max_depth: int
    skill: float
    depth: float
    loss: float
    group: str = "main"
    ceiling: int = 0
    base: str = "pocket"
    of: str = ""
    differs: str = ""


VARIANTS = (
    Made("standard", "Standard", "standard", 1, 0.34, 1.0, 0.410),
    Made("huginn-m3", "Huginn M=3", "huginn", 3, 0.35, 2.0, 0.412),
    Made("huginn-m7", "Huginn M=7", "huginn", 7, 0.36, 4.0, 0.411),
    Made("ouro-m2", "Ouro M=2", "ouro", 2, 0.36, 2.0, 0.409),
    Made("ouro-m4", "Ouro M=4", "ouro", 4, 0.35, 4.0, 0.414),
    Made("ouro-adaptive", "Ouro adaptive M=2", "ouro-adaptive", 2, 0.35, 1.4, 0.415),
    Made("tah2-fixed-m2", "TaH2-fixed M=2", "tah2-fixed", 2, 0.42, 2.0, 0.402),
    Made("tah2-fixed-m4", "TaH2-fixed M=4", "tah2-fixed", 4, 0.45, 4.0, 0.398),
    Made("tah2-m2", "TaH2 M=2", "tah2", 2, 0.58, 1.2, 0.345),
    Made("tah2-m4", "TaH2 M=4", "tah2", 4, 0.70, 1.4, 0.290),
    Made("tah2-m8", "TaH2 M=8", "tah2", 8, 0.74, 1.6, 0.270),
    Made("standard-long", "Standard, 3x longer", "standard", 1, 0.40, 1.0, 0.390, "budget"),
    Made("top1-mismatch", "Top-1 mismatch", "tah2", 2, 0.50, 1.3, 0.360, "ablation", differs="labels: top-1 mismatch"),
    Made("uniform-weights", "Uniform", "tah2", 2, 0.44, 1.4, 0.380, "ablation", differs="decider loss weights"),
    Made("coverage-1", "rho = 1", "tah2", 2, 0.48, 1.5, 0.365, "ablation", differs="gain coverage"),
    Made("sampled", "Sampled", "tah2", 2, 0.50, 1.2, 0.362, "ablation", differs="training decisions"),
    Made("top-k-embedding", "Top-k embedding", "tah2", 2, 0.49, 1.2, 0.364, "ablation", differs="updater"),
    Made("final-output", "Final iteration", "tah2", 2, 0.53, 1.2, 0.352, "ablation", differs="output"),
    Made("no-regression", "Without the fitted start", "tah2", 2, 0.41, 1.1, 0.395, "ours", differs="start state"),
    Made("no-forcing", "Without forced first steps", "tah2", 2, 0.52, 1.1, 0.358, "ours", differs="first steps"),
    Made("wide-standard", "Standard, wide", "standard", 1, 0.45, 1.0, 0.380, "size", base="wide"),
    Made("wide-tah2", "TaH2 M=2, wide", "tah2", 2, 0.66, 1.2, 0.310, "size", base="wide"),
    Made("tah2-m8-at-4", "TaH2 M=8 at 4", "tah2", 8, 0.68, 1.4, 0.300, "ceiling", 4, of="tah2-m8"),
    Made("tah2-m8-at-12", "TaH2 M=8 at 12", "tah2", 8, 0.73, 1.7, 0.275, "ceiling", 12, of="tah2-m8"),
)


def synthetic_study(
    root: Path, variants: tuple[Made, ...] = VARIANTS, bases: int = 3, seeds: int = 1, responses: bool = True
) -> Path:
    """Write the whole folder; every number in it is a function of the arguments."""
    units = [
        (made, f"{made.name}-b{base}-s{seed}", base, seed)
        for made in variants
        for base in range(bases)
        for seed in range(seeds)
    ]
    study = {
        "title": "A synthetic study",
        "about": "Made-up responses, to see the page.",
        "baseline": "standard",
        "main": "tah2-m2",
        "seeds": list(range(seeds)),
        "generate": {"cutoffs": list(CUTOFFS), "samples": REPEATS, "max_tokens": CUTOFFS[-1]},
        "variants": {made.name: {"title": made.title, "group": made.group} for made in variants},
        "runtime": {"variants": ["standard", "tah2-m2"]},
    }
    _write(root / "study.json", {"study": study, "units": [unit for _, unit, _, _ in units]})
    for made, unit, base, seed in units:
        _write_unit(root, made, unit, base, seed, responses)
        if of_itself(made):
            _write_analyses(root / "analyses" / unit, made, np.random.default_rng([base, seed, made.max_depth]))
    _write(root / "runtime.json", {"rows": list(_runtime(variants))})
    _write(root / "summary.json", {"variants": [], "matched_compute": [], "claims": CLAIMS, "made_by": MADE_BY})
    return root


CLAIMS = [
    {
        "claim": "TaH2 M=2 beats Standard at matched compute",
        "paper": "+3.4 points",
        "ours": "+15.0 points",
        "holds": True,
    },
    {
        "claim": "Existing looped models have steeper slopes",
        "paper": "2.12 to 2.27 against 1.79",
        "ours": "",
        "holds": False,
    },
]
MADE_BY = {"command": "tah2 study recipes/studies/pocket.yaml", "commit": "0" * 40, "machine": "x86_64, one thread"}


def _write_unit(root: Path, made: Made, unit: str, base: int, seed: int, responses: bool) -> None:
    folder = root / "units" / unit
    random = np.random.default_rng([base, seed, len(made.name), made.max_depth])
    of = f"{made.of}-b{base}-s{seed}" if made.of else None
    info = UnitInfo(
        id=unit, variant=made.name, title=made.title, group=made.group, loop=made.loop, max_depth=made.max_depth,
        ceiling=made.ceiling or made.max_depth, base=made.base, base_seed=base, seed=seed,
        model=f"units/{of or unit}/train/model", learning_rate=1e-3, of=of, differs=made.differs,
    )  # fmt: skip
    _write(folder / "unit.json", dataclasses.asdict(info))
    shift = 0.01 * (base - 1)
    validation = {
        "loss": made.loss + shift,
        "depth/mean": made.depth,
        "depth/1/loss": made.loss + 0.1,
        "depth/1/share": 1.0,
    }
    validation |= {f"tag/{tag}/loss": made.loss * (1 + tag % 3) for tag in (101, 102, 103)}
    _write(folder / "validate.json", validation)
    if of is None:
        flops = 1e12 * made.depth
        training = {
            "steps": 100,
            "seconds": 30.0 * made.depth,
            "tokens": 500_000,
            "flops": flops,
            "flops_paper": flops * 1.2,
        }
        _write(folder / "train" / "summary.json", training)
        steps = range(0, 101, 10)
        curve = [{"kind": "validation", "step": step, "loss": made.loss + shift + np.exp(-step / 25)} for step in steps]
        (folder / "train" / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in curve))
    if responses:
        _write_responses(folder, made, random)


def _write_responses(folder: Path, made: Made, random: np.random.Generator) -> None:
    grades, records = [], {task: [] for task in TASKS}
    for task_number, task in enumerate(TASKS):
        for problem in range(PROBLEMS):
            ease = (problem + 0.5) / PROBLEMS - 0.5 - 0.05 * task_number
            for repeat in range(REPEATS):
                length = int(np.clip(random.normal(20 + 5 * problem, 4), 8, CUTOFFS[-1]))
                correct = bool(random.random() < np.clip(made.skill + 0.5 * ease, 0.02, 0.98))
                depths = np.clip(random.poisson(made.depth - 1, length) + 1, 1, made.ceiling or made.max_depth)
                each = 4e5 * (1 + 0.02 * made.depth) * depths
                at = tuple(int(each[: min(cutoff, length)].sum()) for cutoff in CUTOFFS)
                answer = str(problem) if correct else f"wrong {int(random.integers(3))}"
                name = f"{task}-{problem}"
                grades.append(
                    GradeRow(
                        task, name, repeat, correct, correct, length, True, at[-1], at, float(depths.mean()), answer
                    )
                )
                record = SampleRecord(
                    task, name, repeat, 0, 12, [12], list(range(length)), depths.tolist(),
                    " ".join(f"t{i}" for i in range(length)), "stop",
                )  # fmt: skip
                records[task].append(record)
    (folder / "grades.jsonl").write_text("".join(json.dumps(dataclasses.asdict(row)) + "\n" for row in grades))
    (folder / "samples").mkdir()
    for task, rows in records.items():
        lines = "".join(json.dumps(dataclasses.asdict(row)) + "\n" for row in rows)
        (folder / "samples" / f"{task}.jsonl").write_text(lines)


def of_itself(made: Made) -> bool:
    return made.group == "main" and made.max_depth > 1


def token_table(made: Made, random: np.random.Generator, tokens: int = 3000) -> TokenTable:
    """Gains that are mostly small, and a decider that sees some of them coming."""
    gain = (
        random.standard_t(2, (tokens, made.max_depth - 1)) * 0.02 * (random.random((tokens, made.max_depth - 1)) < 0.6)
    )
    loss = np.abs(random.normal(1.0, 0.8, (tokens, 1))) - np.cumsum(np.concatenate([np.zeros((tokens, 1)), gain], 1), 1)
    prob = 1 / (1 + np.exp(-(40 * gain - 1 + random.normal(0, 1, gain.shape))))
    executed = 1 + np.cumprod(prob >= 0.5, axis=1).sum(1)
    return TokenTable(
        loss.astype(np.float32), prob.astype(np.float32), executed, np.arange(tokens) // 30, np.arange(tokens) % 30,
        random.integers(0, 50, tokens), random.choice([1, 2, 101, 102, 103], tokens),
    )  # fmt: skip


def _write_analyses(folder: Path, made: Made, random: np.random.Generator) -> None:
    table = token_table(made, random)
    if made.loop != "tah2":
        _write(folder / "gains.json", gains(table).to_json())
    else:
        _write(folder / "alignment.json", alignment(table, 0.5).to_json())
        names = {1: "filler", 2: "rule", 101: "hop 1", 102: "hop 2", 103: "hop 3"}
        _write(folder / "depths.json", depths(table, lambda ids: [f"w{token} " for token in ids], names).to_json())
        if made.max_depth == 8:
            _write_attention(folder, made.max_depth, random)


def _write_attention(folder: Path, depth: int, random: np.random.Generator) -> None:
    layers, heads, size = 4, 2, 24
    mean = random.dirichlet(np.linspace(2, 0.5, depth), (layers, heads))
    causal = np.tril(random.exponential(0.02, (3, depth, size, size)))
    causal[:, :, 5] = np.nan
    found = Attention(depth, depth, 100, mean, mean / 5, representative(mean), causal)
    _write(folder / "attention.json", found.to_json())
    np.savez_compressed(folder / MAPS, maps=causal.astype(np.float32))


def _runtime(variants: tuple[Made, ...]) -> list[dict[str, Any]]:
    shown = [made for made in variants if made.name in ("standard", "tah2-fixed-m2", "tah2-m2", "ouro-m2")]
    return [
        {
            "variant": made.name,
            "batch": batch,
            "latency_seconds": 0.02 * made.depth * (1 + 0.1 * batch),
            "tokens_per_second": 900 * batch**0.7 / made.depth,
            "flops_per_token": 4e5 * made.depth,
        }
        for batch in (1, 4)
        for made in shown
    ]


def _write(path: Path, value: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(value))
