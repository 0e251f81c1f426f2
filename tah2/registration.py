"""Make `import tah2` register its checkpoints with transformers, without importing transformers.

`AutoModelForCausalLM.from_pretrained(folder)` must know our classes as soon as a program has said `import tah2`,
in whichever order the two packages are imported; yet `tah2 --help`, which imports the package too, must not wait
seconds for transformers. So:

* the auto classes are loaded already: register at once;
* they are not: a finder on `sys.meta_path` notices when they are loaded, and registers then.

Registering imports our model, which imports transformers, and both packages are full of circular imports: doing
it while any module of either is half-loaded would fail. The finder therefore counts the modules of the two
packages that are being executed, one inside the other, and registers when the outermost has finished. It changes
nothing about how modules are found or loaded, and leaves `sys.meta_path` once it has done its work.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

AUTO_CLASSES = "transformers.models.auto.configuration_auto"
"""The module whose loading makes registration due: every auto class needs it first."""

PACKAGES = ("transformers", "tah2")


class RegisterWhenLoaded(MetaPathFinder):
    """Calls `register` once, after the outermost import during which `AUTO_CLASSES` was loaded."""

    def __init__(self, register: Callable[[], None]) -> None:
        self.register = register
        self.executing = 0

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname.partition(".")[0] not in PACKAGES:
            return None
        for finder in sys.meta_path:
            spec = None if finder is self else finder.find_spec(fullname, path, target)
            if spec is not None:
                self._watch(spec)
                return spec
        return None

    def _watch(self, spec: ModuleSpec) -> None:
        loader = spec.loader
        if loader is None:  # a namespace package executes nothing
            return
        execute = loader.exec_module

        def exec_module(module: ModuleType) -> None:
            self.executing += 1
            try:
                execute(module)
            finally:
                self.executing -= 1
            if self.executing == 0 and AUTO_CLASSES in sys.modules and self in sys.meta_path:
                sys.meta_path.remove(self)
                self.register()

        loader.exec_module = exec_module  # type: ignore[method-assign]


def register_with_transformers() -> None:
    """Register our classes now if the auto classes are loaded, else when they get loaded; idempotent."""
    if AUTO_CLASSES in sys.modules:
        _register()
    elif not any(isinstance(finder, RegisterWhenLoaded) for finder in sys.meta_path):
        sys.meta_path.insert(0, RegisterWhenLoaded(_register))


def _register() -> None:
    from tah2.model.hf import register

    register()
