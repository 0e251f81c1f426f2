"""`tah2 eval`: generate the samples of a run."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

DESCRIPTION = """\
Generate n responses to every problem of some benchmarks, one record per response.

  tah2 eval MODEL --tasks aime24,gpqa --n 32 --out runs/eval-m2
  tah2 eval MODEL --tasks gsm8k --limit 20 --n 1 --max-tokens 256 --out runs/quick --data-dir BENCHMARKS
  tah2 eval --endpoint http://localhost:8000/v1 --tasks math500 --out runs/served
  tah2 eval MODEL --tasks aime24 --max-depth 12 --out runs/eval-m8-at-12
  tah2 eval --tasks help                              the benchmarks, with their counts and metrics

OUT receives run.json and samples/TASK.jsonl. The command may be killed at any time; the same command goes on where it
stopped and ends with the same records. With other settings it refuses. What is not given follows the benchmark
(repeats, temperature 0.6, top-p 0.95, top-k 20, 32768 tokens) and the checkpoint (depth, threshold).

Next: 'tah2 grade OUT', then 'tah2 curves OUT ...'.
"""


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(
        prog="tah2 eval", description=DESCRIPTION, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    made.add_argument("model", nargs="?", metavar="MODEL", help="a looped checkpoint: folder or hub id")
    made.add_argument("--tasks", metavar="A,B", required=True, help="benchmarks, by name; 'help' lists them")
    made.add_argument("--out", type=Path, metavar="DIR", help="folder of the run")
    made.add_argument("--n", type=int, metavar="N", help="responses per problem (the benchmark's own by default)")
    made.add_argument("--limit", type=int, metavar="N", help="only the first N problems of each benchmark")
    made.add_argument("--data-dir", type=Path, metavar="DIR", help="folder with local benchmark files; else the hub")
    made.add_argument("--seed", type=int, default=0, help="all samples follow from it (default 0)")
    made.add_argument("--label", help="name of the run in tables and figures")
    drawn = made.add_argument_group("decoding (the benchmark's by default)")
    drawn.add_argument("--max-tokens", type=int, metavar="N", help="output tokens per response")
    drawn.add_argument("--temperature", type=float, metavar="T", help="0 is greedy, and then one response per problem")
    drawn.add_argument("--top-p", type=float, metavar="P")
    drawn.add_argument("--top-k", type=int, metavar="K", help="0: all tokens")
    drawn.add_argument("--chat", choices=("auto", "on", "off"), default="auto", help="use the chat template")
    drawn.add_argument(
        "--chat-template-kwargs", default="{}", metavar="JSON", help="""as in '{"enable_thinking": false}'"""
    )
    depth = made.add_argument_group("depth (the checkpoint's by default)")
    depth.add_argument(
        "--max-depth", type=int, metavar="M", help="depth ceiling of this run; may exceed the trained one"
    )
    depth.add_argument("--exit-threshold", type=float, metavar="G", help="continue while g is at least this")
    where = made.add_argument_group("where it runs")
    where.add_argument("--workers", type=int, default=1, metavar="N", help="engines that share the samples (default 1)")
    where.add_argument("--ray", action="store_true", help="workers on a Ray cluster instead of processes here")
    where.add_argument("--device", help="cpu or cuda (a GPU where there is one)")
    where.add_argument("--dtype", choices=("float32", "bfloat16", "float16"), help="the checkpoint's by default")
    where.add_argument("--batch", type=int, metavar="N", help="responses generated at the same time (default 64)")
    where.add_argument("--max-model-len", type=int, metavar="N", help="longest prompt plus output")
    where.add_argument("--kv-memory-gib", type=float, metavar="G", help="memory for keys and values")
    where.add_argument("--endpoint", metavar="URL", help="an OpenAI-compatible server, with its /v1")
    where.add_argument("--model-name", metavar="NAME", help="what the server calls the model")
    where.add_argument("--in-flight", type=int, default=32, metavar="N", help="requests a server gets at once")
    return made


def main(argv: list[str]) -> int:
    arguments = parser().parse_args(argv)
    if arguments.tasks == "help":
        _list_tasks()
        return 0
    config = _config(arguments)
    from tah2.evals.run import evaluate

    done = evaluate(config)
    failed = f", {done.failed:,} failed (run again to retry them)" if done.failed else ""
    print(f"{done.generated:,} of {done.total:,} samples generated{failed} in {done.out}")
    print(f"next: tah2 grade {done.out}")
    return 1 if done.failed else 0


def _config(arguments: argparse.Namespace) -> Any:
    import json

    from tah2.config.strict import ConfigError, build
    from tah2.evals.run_plan import EvalConfig

    if arguments.out is None:
        raise ConfigError("Name the folder of the run, as in '--out runs/eval'.")
    try:
        template = json.loads(arguments.chat_template_kwargs)
    except ValueError:
        raise ConfigError("'--chat-template-kwargs' must be a JSON object.") from None
    given = vars(arguments)
    engine = {
        "device": arguments.device,
        "dtype": arguments.dtype,
        "max_num_seqs": arguments.batch,
        "max_model_len": arguments.max_model_len,
        "kv_memory_gib": arguments.kv_memory_gib,
    }
    rest = ("tasks", "chat_template_kwargs", "device", "dtype", "batch", "max_model_len", "kv_memory_gib")
    return build(
        EvalConfig,
        {
            **{name: value for name, value in given.items() if name not in rest},
            "tasks": [name.strip() for name in arguments.tasks.split(",") if name.strip()],
            "chat_template_kwargs": template,
            "engine": {name: value for name, value in engine.items() if value is not None},
        },
    )


def _list_tasks() -> None:
    from rich.console import Console
    from rich.table import Table

    from tah2.evals.tasks import TASKS

    table = Table("task", "benchmark", "domain", "problems", "metric")
    for task in TASKS.values():
        table.add_row(task.name, task.title, task.domain, f"{task.count:,}", task.metric)
    Console().print(table)
