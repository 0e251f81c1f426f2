"""`import tah2` makes transformers know looped checkpoints, in every order of imports, and stays cheap itself."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

import tah2


def run(program: str, **environment: str) -> str:
    """Run `program` in a fresh interpreter, with `environment` alone added; returns what it prints."""
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)],
        capture_output=True,
        text=True,
        env={**os.environ, **environment},
        cwd=Path(__file__).parent.parent,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.fixture
def stand_in(tmp_path: Path) -> str:
    """A folder with a small `transformers` of the real one's shape: lazy, circular, auto classes loaded midway."""
    auto = tmp_path / "transformers" / "models" / "auto"
    auto.mkdir(parents=True)
    (tmp_path / "transformers" / "__init__.py").write_text("")
    (tmp_path / "transformers" / "models" / "__init__.py").write_text("")
    (auto / "__init__.py").write_text("")
    (auto / "configuration_auto.py").write_text("CONFIGS = {}\n")
    (auto / "modeling_auto.py").write_text(
        "from transformers.models.auto.configuration_auto import CONFIGS\nMODELS = {}\n"
    )
    (auto / "other.py").write_text("")
    (tmp_path / "transformers" / "broken.py").write_text(
        "from transformers.models.auto import configuration_auto\nraise RuntimeError('half loaded')\n"
    )
    return str(tmp_path)


PRELUDE = """
    import sys, types
    calls = []
    hf = types.ModuleType("tah2.model.hf")
    def register():
        from transformers.models.auto.modeling_auto import MODELS  # must be complete by now
        calls.append(len(calls))
    hf.register = register
    sys.modules["tah2.model.hf"] = hf
"""


@pytest.mark.parametrize(
    "imports",
    [
        "import tah2; import transformers.models.auto.configuration_auto",
        "import tah2; import transformers.models.auto.modeling_auto",
        "import transformers.models.auto.modeling_auto; import tah2",
        "import transformers; import tah2; import transformers.models.auto.modeling_auto",
    ],
)
def test_registers_once_when_the_auto_classes_are_complete(stand_in: str, imports: str):
    program = textwrap.dedent(PRELUDE) + f"{imports}\nimport transformers.models.auto.other\nprint(calls)"
    assert run(program, PYTHONPATH=stand_in) == "[0]"


def test_does_not_register_before_the_auto_classes_are_loaded(stand_in: str):
    program = textwrap.dedent(PRELUDE) + "import tah2, transformers.models.auto.other\nprint(calls)"
    assert run(program, PYTHONPATH=stand_in) == "[]"


def test_a_failed_import_leaves_registration_for_the_next_one(stand_in: str):
    program = textwrap.dedent(PRELUDE) + textwrap.dedent("""
        import tah2
        try:
            import transformers.broken
        except RuntimeError:
            print(calls)
        import transformers.models.auto.other
        print(calls)
    """)
    assert run(program, PYTHONPATH=stand_in).split("\n") == ["[]", "[0]"]


def test_the_finder_leaves_and_loaders_stay_as_they_were(stand_in: str):
    program = textwrap.dedent(PRELUDE) + textwrap.dedent("""
        import importlib.machinery, tah2
        from tah2.registration import RegisterWhenLoaded
        import transformers.models.auto.modeling_auto as loaded
        assert not any(isinstance(finder, RegisterWhenLoaded) for finder in sys.meta_path)
        print(type(loaded.__loader__) is importlib.machinery.SourceFileLoader)
    """)
    assert run(program, PYTHONPATH=stand_in) == "True"


@pytest.mark.slow
@pytest.mark.parametrize(
    "imports",
    [
        "import tah2\nfrom transformers import AutoConfig",
        "import tah2\nfrom transformers import AutoTokenizer, AutoConfig",
        "from transformers import AutoConfig\nimport tah2",
        "import tah2.model.hf\nfrom transformers import AutoConfig",
    ],
)
def test_transformers_knows_looped_checkpoints(imports: str):
    program = f"""
{imports}
config = AutoConfig.for_model("looped")
from transformers import AutoModelForCausalLM
model_class = AutoModelForCausalLM._model_mapping[type(config)]
assert type(config) is tah2.LoopedConfig and model_class is tah2.LoopedForCausalLM
print(model_class.__name__)
"""
    assert run(program) == "LoopedForCausalLM"


def test_the_package_and_visibility_do_not_import_transformers():
    assert run("import sys, tah2, tah2.visibility; print('transformers' in sys.modules)") == "False"


def test_the_package_alone_does_not_import_torch():
    assert run("import sys, tah2; print('torch' in sys.modules)") == "False"


def test_sampling_params_need_no_torch():
    assert run("import sys, tah2; tah2.SamplingParams(n=2); print('torch' in sys.modules)") == "False"


def test_public_names_are_listed_and_unknown_ones_refused():
    assert set(tah2.__all__) <= set(dir(tah2))
    with pytest.raises(AttributeError, match="no attribute 'conver'"):
        tah2.conver  # noqa: B018


@pytest.mark.slow
def test_every_public_name_loads():
    assert all(getattr(tah2, name) is not None for name in tah2.__all__)
