"""The page `docs/add-a-loop.md` is true: its code, exactly as it stands there, makes a loop kind that works."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

import tah2
from tah2.compute import parameter_counts, per_call
from tah2.model.kinds import LOOP_KINDS, LoopKind, kind_of
from tests.model.reference_loop import tell

PAGE = Path(__file__).resolve().parent.parent / "docs" / "add-a-loop.md"


def blocks() -> list[str]:
    return re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)


@pytest.fixture
def reader(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Somebody with a base model and the page's file `blend.py`; afterwards no trace of the kind is left."""
    torch.manual_seed(0)
    shape = {"vocab_size": 31, "hidden_size": 12, "intermediate_size": 16, "num_attention_heads": 2}
    base = LlamaForCausalLM(LlamaConfig(**shape, num_hidden_layers=2, eos_token_id=None, initializer_range=0.3))
    base.save_pretrained(tmp_path / "path" / "to" / "base")
    (tmp_path / "blend.py").write_text(blocks()[0], encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    before = dict(LOOP_KINDS)
    yield tmp_path
    sys.modules.pop("blend", None)
    LOOP_KINDS.clear()
    LOOP_KINDS.update(before)


def test_the_page_holds_a_module_and_a_program_that_uses_it():
    module, program = blocks()
    assert "register(" in module
    assert "import blend" in program


def test_the_new_kind_converts_runs_trains_and_is_accounted_for(reader: Path, capsys: pytest.CaptureFixture[str]):
    exec(compile(blocks()[1], str(PAGE), "exec"), {})
    said = dict(line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines())
    assert "[[3, 3, 3, 3, 3, 3]]" in said["depths"], "an undecided gate sends every token on"
    assert float(re.search(r"tensor\((.*?)[,)]", said["depths"]).group(1)) > 0
    assert said["generated"].startswith("[3, 1, 4, 1, 5, 9, ")
    assert "'blend': 12" in said["added"]
    assert int(said["FLOPs"].split()[-1]) > 0

    model = tah2.load(reader / "out" / "blend")
    counts = parameter_counts(model.model.backbone, model.model.loop)
    assert counts.total == sum(parameter.numel() for parameter in model.parameters())
    assert per_call(model.model.backbone, model.model.loop).reentry == 0
    with torch.no_grad():
        logits = model(torch.tensor([[3, 1, 4, 1, 5]])).logits[0]
        stories = tell(model.model, torch.tensor([3, 1, 4, 1, 5]), 0.5)
    expected = torch.stack([story.mixed for story in stories]).float()
    torch.testing.assert_close(logits.log_softmax(-1), expected, rtol=1e-4, atol=1e-4)


def test_a_step_of_training_changes_what_the_new_part_does(reader: Path):
    exec(compile(blocks()[1], str(PAGE), "exec"), {})
    model = tah2.load(reader / "out" / "blend")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    ids = torch.tensor([[3, 1, 4, 1, 5, 9]])
    losses = []
    for _ in range(3):
        loss = model(ids, labels=ids).loss
        losses.append(float(loss.detach()))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert losses[-1] < losses[0]
    assert model.model.reentry.share.any()


def test_the_page_names_every_field_of_the_row():
    rows = set(re.findall(r"^\| `(\w+)` \|", PAGE.read_text(encoding="utf-8"), re.MULTILINE))
    fields = set(LoopKind.__dataclass_fields__) - {"name", "summary", "single_pass"}
    assert rows == fields


def test_a_name_is_taken_once(reader: Path):
    exec(blocks()[0], {"__name__": "blend"})
    with pytest.raises(ValueError, match="registered already"):
        exec(blocks()[0], {"__name__": "blend"})
    from tah2.config.loop import LoopConfig

    assert kind_of(LoopConfig("blend")).name == "blend"
