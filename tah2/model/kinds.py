"""Every loop kind of the project, as data.

A row says who sees whom, how a token re-enters, who decides to continue, how the depths' predictions are
combined and which layers repeat. The loop, the engine and the compute accounting read these fields; none of
them asks for a kind by name. A new kind is one small module and one row (`register`).
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from enum import Enum

from tah2.config.backbone import BackboneConfig
from tah2.config.loop import LoopConfig, middle_block
from tah2.config.strict import ConfigError, suggestion
from tah2.model.gate import Decider, ExitGate, Gate
from tah2.model.reentry import REENTRIES, CarryOver, InputAdapter, Reentry, Updater
from tah2.visibility import BASE_STREAM, DUO_CAUSAL, LAST_EXITED, PER_ITERATION, Rule


class Output(Enum):
    """How the predictions of a token's executed depths become one distribution."""

    STOPPING_MIXTURE = "stopping-mixture"
    UNIFORM_MIXTURE = "uniform-mixture"
    LAST = "last"


@dataclass(frozen=True)
class LoopKind:
    name: str
    summary: str
    rule: Rule
    reentry: type[Reentry] = CarryOver
    gate: type[Gate] | None = None
    """None: every token runs to the ceiling."""
    output: Output = Output.LAST
    loops_middle: bool = False
    """Only a middle block repeats; the layers before and after it run once per token."""
    prefill_runs_all: bool = False
    """Prompt tokens ignore the gate and run to the ceiling."""
    single_pass: bool = False
    """The ceiling is 1 whatever the configuration says."""
    training: str = "last-depth"
    """The training scheme that a recipe gets by default (a name in `tah2.train.schemes`)."""

    def ceiling(self, loop: LoopConfig, max_depth: int | None = None) -> int:
        if max_depth is not None and max_depth < 1:
            raise ConfigError(f"max_depth must be at least 1, not {max_depth}.")
        return 1 if self.single_pass else loop.max_depth if max_depth is None else max_depth

    def looped_layers(self, loop: LoopConfig, backbone: BackboneConfig) -> range:
        return range(*middle_block(loop, backbone)) if self.loops_middle else range(backbone.num_layers)

    def unused_options(self) -> tuple[str, ...]:
        """Fields of `LoopConfig` that change nothing for this kind."""
        used = {*self.reentry.options, *(() if self.gate is None else (*self.gate.options, "exit_threshold"))}
        if self.loops_middle:
            used |= {"prelude_layers", "coda_layers"}
        return tuple(name for name in _OPTIONS if name not in used)

    def head_every_depth(self, top_k: int) -> bool:
        """Does inference read the LM head after every iteration, or after a token's last one alone?

        `top_k` is how many of the most probable tokens the gate or the reentry reads.
        """
        return self.output is not Output.LAST or top_k > 0


_OPTIONS = tuple(
    field.name for field in fields(LoopConfig) if field.name not in ("kind", "max_depth", "reentry", "output")
)
LOOP_KINDS: dict[str, LoopKind] = {}


def register(kind: LoopKind) -> LoopKind:
    if kind.name in LOOP_KINDS:
        raise ConfigError(f"A loop kind named {kind.name!r} is registered already.")
    LOOP_KINDS[kind.name] = kind
    return kind


STANDARD = register(LoopKind("standard", "one pass per token", PER_ITERATION, single_pass=True))
TAH2 = register(
    LoopKind(
        "tah2",
        "whole stack, learned updater, a decider chooses each token's depth",
        DUO_CAUSAL,
        reentry=Updater,
        gate=Decider,
        output=Output.STOPPING_MIXTURE,
        training="lookahead",
    )
)
TAH2_FIXED = register(
    LoopKind(
        "tah2-fixed",
        "whole stack, learned updater, every token runs to the ceiling",
        BASE_STREAM,
        reentry=Updater,
        output=Output.UNIFORM_MIXTURE,
        training="uniform-mixture",
    )
)
OURO = register(
    LoopKind(
        "ouro",
        "whole stack, state carried over, every token runs to the ceiling",
        PER_ITERATION,
        training="every-depth",
    )
)
OURO_ADAPTIVE = register(
    LoopKind(
        "ouro-adaptive",
        "Ouro with its exit gate; later depths reuse an exited token's last keys",
        LAST_EXITED,
        gate=ExitGate,
        prefill_runs_all=True,
        training="exit-gate",
    )
)
HUGINN = register(
    LoopKind(
        "huginn",
        "middle block loops around an input adapter; prelude and coda run once",
        PER_ITERATION,
        reentry=InputAdapter,
        loops_middle=True,
    )
)


def kind_of(loop: LoopConfig) -> LoopKind:
    """The kind that a configuration describes, with its options applied."""
    if loop.kind not in LOOP_KINDS:
        raise ConfigError(f"Unknown loop kind {loop.kind!r}{suggestion(loop.kind, LOOP_KINDS)}.")
    kind = LOOP_KINDS[loop.kind]
    if loop.reentry is not None:
        if loop.reentry not in REENTRIES:
            raise ConfigError(f"Unknown reentry {loop.reentry!r}{suggestion(loop.reentry, REENTRIES)}.")
        kind = replace(kind, reentry=REENTRIES[loop.reentry])
    if loop.output is not None:
        kind = replace(kind, output=Output(loop.output))
    if kind.output is Output.STOPPING_MIXTURE and kind.gate is None:
        raise ConfigError(f"Loop kind {kind.name!r} has no gate, so it has no stopping mixture; choose another output.")
    if kind.loops_middle and kind.output is not Output.LAST:
        raise ConfigError(
            f"Loop kind {kind.name!r} reads its LM head once, after the coda: its output can only be 'last'."
        )
    return kind
