"""Post-train every kind of loop on the pocket task from one base, in minutes on one CPU core, and print a table.

    python examples/pocket_chase.py --out runs/pocket-chase
    python examples/pocket_chase.py --seeds 0 1 2 --json results/pocket-chase/summary.json

The task is "chase until a stop symbol": most tokens are easy, the answer of each line takes k hops. The base learns
single hops; post-training asks for all k at once, so depth pays only on the tokens with k > 1.
"""

from __future__ import annotations

import argparse
import json
import platform
import subprocess
from pathlib import Path
from typing import Any

from tah2.cli.recipe import load_recipe
from tah2.compute import decode_per_token
from tah2.config.strict import build, merge
from tah2.data.procedural import HOP
from tah2.train.config import TrainConfig
from tah2.train.trainer import train

RECIPES = Path(__file__).parent.parent / "recipes" / "laptop"
CURRICULUM: list[dict[str, Any]] = [
    {},
    {"procedural": {"cycle": 10}},
    {"procedural": {"cycle": 16}, "budget": {"steps": 400}},
    {"procedural": {"cycle": 16, "replace": 0.0}, "budget": {"steps": 200}, "objective": {"tag_weights": {"3": 8.0}}},
]
"""Stages of the base: ever longer cycles, then copying (tag 3) without replaced symbols."""
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "Standard": ("chase-standard.yaml", {}),
    "Standard, longer": ("chase-standard.yaml", {"budget": {"steps": 600}}),
    "Huginn M=3": ("chase-huginn.yaml", {}),
    "Ouro M=2": ("chase-ouro.yaml", {}),
    "TaH2-fixed M=2": ("chase-tah2-fixed.yaml", {}),
    "TaH2 M=2": ("chase-tah2.yaml", {}),
    "TaH2 M=4": ("chase-tah2.yaml", {"loop": {"max_depth": 4}}),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("runs/pocket-chase"))
    parser.add_argument("--seeds", type=int, nargs="+", default=[0], help="base and post-training seeds")
    parser.add_argument("--variants", nargs="+", default=list(VARIANTS), choices=list(VARIANTS))
    parser.add_argument("--json", type=Path, help="also write the results here")
    arguments = parser.parse_args()
    rows = []
    origin = made_by(arguments)
    for seed in arguments.seeds:
        base = train_base(arguments.out / f"seed-{seed}", seed)
        for name in arguments.variants:
            rows.append(post_train(name, base, arguments.out / f"seed-{seed}", seed))
            print(line(rows[-1]), flush=True)
    print("\n" + "\n".join([HEADER, *map(line, rows)]))
    if arguments.json:
        arguments.json.parent.mkdir(parents=True, exist_ok=True)
        arguments.json.write_text(json.dumps({"made_by": origin, "rows": rows}, indent=2) + "\n")


def train_base(out: Path, seed: int) -> Path:
    model: dict[str, Any] = {}
    for number, stage in enumerate(CURRICULUM):
        recipe = merge(load_recipe(RECIPES / "chase-base.yaml"), stage)
        recipe = merge(recipe, {"seed": seed, "out": str(out / f"base-{number}"), "procedural": {"seed": seed}})
        recipe["objective"] = stage.get("objective", recipe["objective"])
        if model:
            recipe["model"] = model
        print(f"base stage {number + 1}: loss {run(recipe)['validation']['loss']:.4f}", flush=True)
        model = {"path": str(out / f"base-{number}" / "model")}
    return Path(model["path"])


def post_train(name: str, base: Path, out: Path, seed: int) -> dict[str, Any]:
    file, changes = VARIANTS[name]
    recipe = merge(load_recipe(RECIPES / file), changes)
    folder = out / name.lower().replace(" ", "-").replace(",", "").replace("=", "")
    recipe = merge(
        recipe, {"seed": seed, "out": str(folder), "model": {"path": str(base)}, "procedural": {"seed": seed}}
    )
    config = build(TrainConfig, recipe)
    summary = run(recipe)
    found = summary["validation"]
    assert config.loop is not None
    from tah2 import load

    decoder = load(folder / "model").model
    depths = range(2, decoder.ceiling() + 1)
    shares = [found.get(f"depth/{m}/share", 0.0) for m in depths] if decoder.gate is not None else []
    flops = decode_per_token(decoder.backbone, decoder.loop, shares, mean_keys=40.0).total
    return {
        "name": name,
        "seed": seed,
        "validation_loss": found["loss"],
        "mean_depth": found["depth/mean"],
        "flops_per_token": flops,
        "loss_by_hops": {k: found.get(f"tag/{HOP + k}/loss") for k in range(1, 6)},
        "seconds": summary["seconds"],
    }


def run(recipe: dict[str, Any]) -> dict[str, Any]:
    return train(build(TrainConfig, recipe))


HEADER = f"{'variant':<18}{'seed':>5}{'loss':>8}{'depth':>7}{'kFLOP/token':>13}  {'loss at k=1..5 hops':<38}{'s':>5}"


def line(row: dict[str, Any]) -> str:
    hops = " ".join("   -  " if loss is None else f"{loss:6.3f}" for loss in row["loss_by_hops"].values())
    return (
        f"{row['name']:<18}{row['seed']:>5}{row['validation_loss']:>8.4f}{row['mean_depth']:>7.2f}"
        f"{row['flops_per_token'] / 1e3:>13.0f}  {hops:<38}{row['seconds']:>5.0f}"
    )


def made_by(arguments: argparse.Namespace) -> dict[str, Any]:
    commit = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=False).stdout.strip()
    seeds = " ".join(map(str, arguments.seeds))
    return {
        "command": f"python examples/pocket_chase.py --seeds {seeds}",
        "commit": commit,
        "machine": f"{platform.machine()}, {platform.processor() or platform.system()}, one thread",
    }


if __name__ == "__main__":
    main()
