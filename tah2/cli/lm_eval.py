"""`tah2 lm-eval`: the lm-evaluation-harness with looped models among its models."""

from __future__ import annotations

from tah2.config.strict import ConfigError


def main(argv: list[str]) -> int:
    """Every word goes to the harness: `tah2 lm-eval run --model tah2 --model_args pretrained=PATH --tasks ...`."""
    try:
        from tah2.evals.lm_eval import main as start
    except ImportError as error:
        if (error.name or "").partition(".")[0] not in ("lm_eval", "tqdm"):
            raise
        raise ConfigError("This command needs the harness: install tah2 with its extra 'lm-eval'.") from None
    start(argv)
    return 0
