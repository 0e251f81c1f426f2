"""`tah2 serve`: an OpenAI-compatible server for one looped checkpoint."""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tah2.server.config import ServerConfig, WorkerConfig

DESCRIPTION = """\
Serve a looped checkpoint over HTTP with OpenAI's API: chat, completions, models, tokenizer, metrics, and a page to
chat with at /. Clients of OpenAI and of `vllm serve` work unchanged; point their base URL at http://HOST:PORT/v1.

Requests may set two knobs of their own: `max_depth` (how often the layers may run per token) and `exit_threshold`
(higher stops earlier). With `return_depths` the answer says how deep each token went; `usage` always has the mean
depth and the exact FLOPs of decoding, beside what one iteration per token would have cost.

The model runs in a process of its own. If that dies, its requests fail with an error that says so, and it is started
again. SIGTERM stops taking requests and lets those that run finish.
"""
EPILOG = """\
examples:
  tah2 serve out/tah2
  tah2 serve out/tah2 --port 8080 --served-model-name small --max-model-len 4096
  TAH2_API_KEY=secret tah2 serve out/tah2 --host 0.0.0.0
  tah2 serve out/tah2 --replicas 2 --threads 8

  curl http://127.0.0.1:8000/v1/chat/completions -H 'Content-Type: application/json' \\
    -d '{"messages": [{"role": "user", "content": "Why do loops help?"}], "return_depths": true}'
"""
KEY_VARIABLE = "TAH2_API_KEY"

ENGINE_OPTIONS: dict[str, tuple[dict[str, Any], str]] = {
    "max_model_len": ({"type": int, "metavar": "N"}, "longest prompt plus answer, in tokens (the checkpoint's)"),
    "max_num_seqs": ({"type": int, "metavar": "N"}, "samples that run at the same time (64)"),
    "max_batch_tokens": ({"type": int, "metavar": "N"}, "entries of one pass: decoding first, then prompts (512)"),
    "kv_slots": ({"type": int, "metavar": "N"}, "keys that fit in memory, one per token and depth"),
    "kv_memory_gib": ({"type": float, "metavar": "GIB"}, "or the memory for them (2 on a CPU)"),
    "gpu_memory_utilization": ({"type": float, "metavar": "P"}, "or the share of a GPU's free memory (0.9)"),
    "wavefront_rows": ({"type": int, "metavar": "N"}, "drafts of next tokens while a pass has at most N rows (4)"),
    "weight_storage": ({"choices": ("fp32", "bf16", "int8")}, "how weights are packed on a CPU (fp32)"),
    "kernels": ({"choices": ("auto", "off")}, "compiled CPU kernels where they can be had (auto)"),
    "tensor_parallel_size": ({"type": int, "metavar": "N"}, "processes that hold the model between them (1)"),
    "seed": ({"type": int, "metavar": "N"}, "where seeds of requests without one come from"),
}
"""Fields of `EngineConfig` that the command line may set."""

SERVER_OPTIONS: dict[str, tuple[dict[str, Any], str]] = {
    "max_queue": ({"type": int, "metavar": "N"}, "samples that may wait; more are refused with 429 (512)"),
    "max_body_bytes": ({"type": int, "metavar": "N"}, "largest body of a request (32 MiB)"),
    "max_logprobs": ({"type": int, "metavar": "N"}, "most log-probabilities per token (20)"),
    "request_timeout": ({"type": float, "metavar": "S"}, "seconds that a request may take (3600)"),
    "drain_timeout": ({"type": float, "metavar": "S"}, "seconds that running requests get after SIGTERM (60)"),
    "reasoning": (
        {"choices": ("auto", "on", "off")},
        "split <think> blocks from answers (auto: if the template has them)",
    ),
    "generation_config": ({"choices": ("auto", "off")}, "the checkpoint's sampling defaults (auto: use them)"),
    "metrics_prefix": ({"metavar": "NAME"}, "of metrics; 'vllm' makes dashboards for vLLM fit (tah2)"),
    "log_level": ({"choices": ("debug", "info", "warning", "error")}, "(info)"),
}
"""Fields of `ServerConfig` that the command line may set as they are."""


def main(argv: list[str]) -> int:
    options = _parser().parse_args(argv)
    worker, config = configs(options)
    try:
        from tah2.server.run import run
    except ImportError as error:
        raise ValueError(
            f"Serving needs the server extra, pip install 'tah2[server]' ({error.name} is missing)."
        ) from None
    name = (*config.served_model_names, worker.model)[0]
    return run(worker, config, options.replicas, lambda url: print(_greeting(name, url), flush=True))


def configs(options: argparse.Namespace) -> tuple[WorkerConfig, ServerConfig]:
    """What the command line asks for; a mistake is a ValueError."""
    from tah2.config.strict import ConfigError, build
    from tah2.engine.config import EngineConfig
    from tah2.server.config import ServerConfig, WorkerConfig

    if options.model.startswith((".", "/", "~")) and not Path(options.model).is_dir():
        raise ConfigError(f"There is no folder {options.model}; name one that tah2 convert or tah2 sft has written.")
    if options.replicas < 1:
        raise ConfigError(f"--replicas must be at least 1, not {options.replicas}.")
    engine = _given(options, ENGINE_OPTIONS)
    if options.no_prefix_caching:
        engine["enable_prefix_caching"] = False
    build(EngineConfig, engine)  # says at once what is wrong
    keys = [*options.api_key, *filter(None, [os.environ.get(KEY_VARIABLE)])]  # an empty option is a mistake
    template = options.chat_template
    server = {
        "host": options.host,
        "port": options.port,
        "served_model_names": options.served_model_name,
        "api_keys": keys,
        "allow_origins": options.allow_origin,
        "allow_hosts": options.allow_host,
        "log_content": options.log_content,
        "chat_template": None if template is None else template.read_text(encoding="utf-8"),
        **_given(options, SERVER_OPTIONS),
    }
    worker = {
        "model": options.model,
        "engine": engine,
        "dtype": options.dtype,
        "device": options.device,
        "threads": options.threads,
    }
    return build(WorkerConfig, worker), build(ServerConfig, server)


def _given(options: argparse.Namespace, names: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name in names if (value := getattr(options, name)) is not None}


def _greeting(name: str, url: str) -> str:
    return f"Serving {name}: API at {url}/v1, page at {url}/. Stop with Ctrl-C."


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="tah2 serve", description=DESCRIPTION, epilog=EPILOG, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", metavar="MODEL", help="folder or hub id of a looped checkpoint (see tah2 convert)")
    door = parser.add_argument_group("the door")
    door.add_argument("--host", default="127.0.0.1", help="address to listen on; 0.0.0.0 for all (127.0.0.1)")
    door.add_argument("--port", type=int, default=8000, metavar="N", help="(8000); 0 takes a free one")
    door.add_argument(
        "--served-model-name", nargs="+", default=[], metavar="NAME", help="names that requests may use (MODEL)"
    )
    door.add_argument(
        "--api-key", action="append", default=[], metavar="KEY",
        help=f"a key that requests must send; may be repeated. ${KEY_VARIABLE} is not seen by other users, this is",
    )  # fmt: skip
    door.add_argument(
        "--allow-origin", action="append", default=[], metavar="URL", help="web pages that may call the API (none)"
    )
    door.add_argument(
        "--allow-host", action="append", default=[], metavar="NAME",
        help="names that a proxy on this machine calls it by, beside localhost",
    )  # fmt: skip
    door.add_argument("--log-content", action="store_true", help="write the bodies of requests to the log")
    door.add_argument("--chat-template", type=Path, metavar="FILE", help="Jinja template instead of the tokenizer's")
    _add(door, SERVER_OPTIONS)
    engine = parser.add_argument_group("the engine")
    engine.add_argument(
        "--dtype",
        choices=("float32", "bfloat16", "float16"),
        help="of the weights (the checkpoint's; float32 on a CPU)",
    )
    engine.add_argument("--device", metavar="NAME", help="cpu, cuda, cuda:1 (a GPU if there is one)")
    engine.add_argument("--threads", type=int, metavar="N", help="threads of PyTorch, per worker")
    engine.add_argument("--replicas", type=int, default=1, metavar="N", help="workers, each with the whole model (1)")
    engine.add_argument(
        "--no-prefix-caching", action="store_true", help="do not reuse keys of prompts that begin alike"
    )
    _add(engine, ENGINE_OPTIONS)
    return parser


def _add(group: argparse._ArgumentGroup, options: dict[str, tuple[dict[str, Any], str]]) -> None:
    for name, (form, text) in options.items():
        group.add_argument(f"--{name.replace('_', '-')}", help=text, **form)
