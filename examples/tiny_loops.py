"""Convert one tiny random model to every loop kind, and generate with each: `python examples/tiny_loops.py`.

The model knows nothing, so the words mean nothing; the depths show how each kind spends its passes.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, Qwen3Config, Qwen3ForCausalLM
from transformers.utils.logging import disable_progress_bar

import tah2
from tah2.model.kinds import LOOP_KINDS

PROMPT = torch.tensor([[3, 1, 4, 1, 5, 9, 2, 6]])


def save_tiny_base(folder: Path) -> None:
    """A random Qwen3 with four small layers."""
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=128,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        eos_token_id=None,
    )
    Qwen3ForCausalLM(config).save_pretrained(folder)


def show(kind: str, base: Path, looped: Path) -> None:
    tah2.convert(base, looped, loop=kind, max_depth=2)
    model = AutoModelForCausalLM.from_pretrained(looped).eval()
    with torch.no_grad():
        depths = model(PROMPT).depths
    tokens = model.generate(PROMPT, max_new_tokens=8, do_sample=False)
    with torch.no_grad():
        shallow = model(PROMPT, exit_threshold=1.1).depths
    answer = tokens[0, PROMPT.shape[1] :].tolist()
    line = f"{kind:<14} depths {depths.tolist()}  with threshold 1.1 {shallow.tolist()}  generated {answer}"
    sys.stdout.write(line + "\n")


def main() -> None:
    disable_progress_bar()
    with tempfile.TemporaryDirectory() as folder:
        base = Path(folder) / "base"
        save_tiny_base(base)
        for kind in LOOP_KINDS:
            show(kind, base, Path(folder) / kind)


if __name__ == "__main__":
    main()
