"""The loop: one decoder applied to a shrinking set of tokens, depth after depth.

Everything that runs is a *pass*: the looped layers applied once to flat entries (document, position, depth).
`LoopedDecoder.forward` runs the passes of one call - training, scoring, prefill or decoding alike - and returns
what each depth produced. What to read from the LM head, and who continues, are the caller's: a `HeadReader`
turns states into readings, a `Router` turns continue probabilities into decisions. Decisions are made outside
any recomputed region, so activation checkpointing never repeats them.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tah2.config.backbone import BackboneConfig
from tah2.config.loop import LoopConfig
from tah2.config.strict import ConfigError
from tah2.model.attention import AttentionBackend, AttentionPlan, attention_backend
from tah2.model.decoder import Block, initialise_backbone
from tah2.model.gate import Gate
from tah2.model.kinds import LoopKind, kind_of
from tah2.model.parts import RMSNorm
from tah2.model.reentry import Predicted, Reentry
from tah2.model.rotary import Rotary
from tah2.model.store import LoopStore, SpanStore
from tah2.visibility import PER_ITERATION, Entries, Rule


@dataclass(frozen=True)
class Tokens:
    """Packed tokens: ids, document numbers and positions, long `[N]`; documents are contiguous."""

    ids: Tensor
    document: Tensor
    position: Tensor

    def __len__(self) -> int:
        return self.ids.numel()

    @classmethod
    def pack(cls, documents: list[Tensor]) -> Tokens:
        """One document per tensor of ids, positions from 0."""
        lengths = torch.tensor([len(ids) for ids in documents], device=documents[0].device)
        names = torch.arange(len(documents), device=lengths.device).repeat_interleave(lengths)
        starts = (lengths.cumsum(0) - lengths).repeat_interleave(lengths)
        ids = torch.cat(documents)
        return cls(ids, names, torch.arange(len(ids), device=ids.device) - starts)


class Reading(Protocol):
    """What a head reader returns for the tokens it read; the loop itself asks only for `predicted`."""

    @property
    def predicted(self) -> Predicted | None: ...


class HeadReader(Protocol):
    every_depth: bool
    """Read the head for every token after every depth, not only where inference needs it."""

    def read(self, state: Tensor, index: Tensor, depth: int, top_k: int) -> Reading:
        """state `[n, d]` of tokens `index` `[n]` after `depth`; `predicted` needs the `top_k` most probable tokens."""
        ...


class Router(Protocol):
    def __call__(
        self, gate: Gate, probability: Tensor, survival: Tensor, depth: int, index: Tensor, reading: Any
    ) -> Tensor:
        """Who continues, bool `[n]`, given continue probability and survival `[n]` of tokens `index`."""
        ...


@dataclass(frozen=True)
class Thresholded:
    """The paper's rule, at inference and in training: the gate's own comparison with the exit threshold."""

    threshold: float | Tensor
    """One value, or one per token `[N]`."""

    def __call__(
        self, gate: Gate, probability: Tensor, survival: Tensor, depth: int, index: Tensor, reading: Any
    ) -> Tensor:
        threshold = self.threshold[index] if isinstance(self.threshold, Tensor) else self.threshold
        return gate.continues(probability, survival, threshold)


class Peers(Protocol):
    """Other data-parallel ranks that must run the same passes."""

    def any(self, here: bool) -> bool: ...


class Alone:
    def any(self, here: bool) -> bool:
        return here


@dataclass(frozen=True)
class LoopSettings:
    """How one call runs; every field has the meaning of plain inference by default."""

    router: Router | None = None
    """None: thresholded at the configuration's exit threshold."""
    max_depth: int | None = None
    run_all: Tensor | None = None
    """bool `[N]`: tokens that ignore the gate and run to the ceiling."""
    lookahead: Tensor | None = None
    """bool `[N]`: tokens that, where they stop, run once more without gradient (the supervised ones in training)."""
    checkpoint: bool = False
    attention: str | AttentionBackend = "auto"
    """A backend's name, or a backend (one that watches, for instance)."""
    peers: Peers = field(default_factory=Alone)


@dataclass
class DepthPass:
    """What one depth produced for the tokens `index` `[N_m]` that executed it."""

    depth: int
    index: Tensor
    state: Tensor
    reading: Any = None
    """What the head reader returned for these tokens; None where the head was not read."""
    continue_logit: Tensor | None = None
    """fp32 `[N_m]`, below the ceiling of gated kinds."""
    continues: Tensor | None = None


@dataclass
class LoopRun:
    passes: list[DepthPass]
    lookaheads: list[DepthPass]
    executed: Tensor
    """long `[N]`: m_t of every token"""
    final_state: Tensor
    """`[N, d]`: the state that the LM head reads after each token's last depth"""
    idle: Tensor
    """A zero that ties placeholder rows to the graph; a data-parallel trainer adds it to the loss."""
    store: LoopStore


class LoopedDecoder(nn.Module):
    """Backbone, the kind's learned parts, and the loop over them."""

    def __init__(self, backbone: BackboneConfig, loop: LoopConfig) -> None:
        super().__init__()
        self.backbone, self.loop = backbone, loop
        self.kind: LoopKind = kind_of(loop)
        self.embed_tokens = nn.Embedding(backbone.vocab_size, backbone.hidden_size)
        self.layers = nn.ModuleList(Block(backbone) for _ in range(backbone.num_layers))
        self.norm = RMSNorm(backbone.hidden_size, backbone.rms_norm_eps)
        self.lm_head = (
            None if backbone.tie_word_embeddings else nn.Linear(backbone.hidden_size, backbone.vocab_size, bias=False)
        )
        self.reentry: Reentry = self.kind.reentry(backbone, loop)
        self.gate = None if self.kind.gate is None else self.kind.gate(backbone, loop)
        self.rotary = Rotary(backbone)
        self.looped = self.kind.looped_layers(loop, backbone)
        if self.kind.loops_middle and self.top_k > 0:
            raise ConfigError(
                f"Loop kind {self.kind.name!r} reads its LM head once, after the coda: "
                "a reentry or gate that reads predictions does not fit it."
            )

    @property
    def head_weight(self) -> Tensor:
        """`[vocabulary, d]`"""
        return self.embed_tokens.weight if self.lm_head is None else self.lm_head.weight

    @property
    def top_k(self) -> int:
        """How many of the most probable tokens the kind's parts read after an iteration."""
        return max(self.reentry.top_k, 0 if self.gate is None else self.gate.top_k)

    def reset(self) -> None:
        """Random backbone and start state of the added parts."""
        initialise_backbone(self, self.backbone.initializer_range)
        self.reset_parts()

    def reset_parts(self) -> None:
        self.reentry.reset()
        if self.gate is not None:
            self.gate.reset()

    def ceiling(self, max_depth: int | None = None) -> int:
        return self.kind.ceiling(self.loop, max_depth)

    def forward(
        self, tokens: Tokens, reader: HeadReader, settings: LoopSettings | None = None, store: LoopStore | None = None
    ) -> LoopRun:
        """Run every pass that the tokens need; `store` holds what earlier calls executed (it is extended)."""
        return _Run(self, tokens, reader, settings or LoopSettings(), store or LoopStore()).run()


@dataclass
class _Rows:
    """The rows of one pass: tokens `index`, their inputs `x`; a placeholder row is nobody's."""

    index: Tensor
    x: Tensor
    placeholder: bool = False


class _Run:
    """One call of the loop: the state that its passes share."""

    def __init__(
        self, model: LoopedDecoder, tokens: Tokens, reader: HeadReader, settings: LoopSettings, store: LoopStore
    ) -> None:
        if not store.is_settled:
            raise ValueError("This store still belongs to an earlier call; pass store.settled(run.executed).")
        self.model, self.tokens, self.reader, self.settings, self.store = model, tokens, reader, settings, store
        self.backend: AttentionBackend = attention_backend(settings.attention, tokens.ids.device)
        self.router = settings.router or Thresholded(model.loop.exit_threshold)
        self.ceiling = model.ceiling(settings.max_depth)
        self.reads_every_depth = not model.kind.loops_middle and (
            reader.every_depth or model.kind.head_every_depth(model.top_k)
        )
        self.everyone = torch.arange(len(tokens), device=tokens.ids.device)
        self.executed = torch.zeros_like(self.everyone)
        self.survival = torch.ones(len(tokens), device=tokens.ids.device)
        self.passes: list[DepthPass] = []
        self.lookaheads: list[DepthPass] = []
        self.finished: list[tuple[Tensor, Tensor]] = []
        """(tokens, states) in the order in which tokens stopped"""

    def run(self) -> LoopRun:
        model, tokens, looped = self.model, self.tokens, self.model.looped
        self.embedding = model.embed_tokens(tokens.ids)
        self.cosine, self.sine = model.rotary(tokens.position, tokens.document, self.embedding.dtype)
        self.idle = self.embedding.new_zeros(())
        self.anchor = self._once(self.embedding, range(looped.start), self.store.prelude)
        self._iterate()
        final = _in_order(self.finished)
        if model.kind.loops_middle:
            final = model.norm(self._once(final, range(looped.stop, len(model.layers)), self.store.coda))
        return LoopRun(self.passes, self.lookaheads, self.executed, final, self.idle, self.store)

    def _iterate(self) -> None:
        rows = _Rows(self.everyone, self.model.reentry.first(self.anchor))
        previous: DepthPass | None = None
        for depth in range(1, self.ceiling + 1):
            current = self._execute(rows, depth)
            self._look_ahead(previous, depth)
            if depth == self.ceiling:
                if not rows.placeholder:
                    self.finished.append((current.index, current.state))
                return
            rows = self._decide(current, rows.placeholder)
            previous = current
            if not self.settings.peers.any(not rows.placeholder):
                self._look_ahead(previous, depth + 1)
                return

    def _execute(self, rows: _Rows, depth: int) -> DepthPass:
        """One pass with gradient: looped layers, the state after them, and the head where every depth is read."""
        if not rows.placeholder:
            self.executed[rows.index] = depth
        current = DepthPass(depth, rows.index, self._state(self._looped_pass(rows, depth)))
        if rows.placeholder:
            self.idle = self.idle + 0.0 * current.state.sum()
            current.index = rows.index[:0]
            return current
        self.passes.append(current)
        if self.reads_every_depth:
            nobody_asks = depth == self.ceiling  # gate and reentry read predictions below the ceiling alone
            top_k = 0 if nobody_asks else self.model.top_k
            current.reading = self.reader.read(current.state, rows.index, depth, top_k)
        return current

    def _decide(self, current: DepthPass, placeholder: bool) -> _Rows:
        """Gate and router after a depth below the ceiling; returns the rows of the next pass."""
        index, state = current.index, current.state
        if placeholder:
            if self.model.gate is not None:
                self._idle_gate(self.model.gate, state)
            return self._placeholder(state)
        predicted = _predicted(current.reading)
        staying = torch.ones_like(index, dtype=torch.bool)
        if self.model.gate is not None:
            probabilities = None if predicted is None else predicted.probabilities
            current.continue_logit = self.model.gate(self.embedding[index], state, probabilities)
            probability = current.continue_logit.detach().sigmoid()
            staying = self.router(
                self.model.gate, probability, self.survival[index], current.depth, index, current.reading
            )
            self.survival[index] = self.survival[index] * probability
            if self.settings.run_all is not None:
                staying = staying | self.settings.run_all[index]
        current.continues = staying
        self.finished.append((index[~staying], state[~staying]))
        if not bool(staying.any()):
            return self._placeholder(state[:1])
        return _Rows(index[staying], self._re_enter(current, staying))

    def _placeholder(self, state: Tensor) -> _Rows:
        """One row for a pass that only other ranks need."""
        predicted = _predicted(self.passes[0].reading, slice(1))
        x = self.model.reentry(self.anchor[:1], state[:1], predicted, self.model.embed_tokens.weight)
        return _Rows(self.everyone[:1], x, placeholder=True)

    def _idle_gate(self, gate: Gate, state: Tensor) -> None:
        """Call the gate as the other ranks do."""
        predicted = _predicted(self.passes[0].reading, slice(1))
        logit = gate(self.embedding[:1], state, None if predicted is None else predicted.probabilities)
        self.idle = self.idle + 0.0 * logit.sum()

    def _re_enter(self, current: DepthPass, rows: Tensor) -> Tensor:
        anchor, predicted = self.anchor[current.index[rows]], _predicted(current.reading, rows)
        return self.model.reentry(anchor, current.state[rows], predicted, self.model.embed_tokens.weight)

    @torch.no_grad()
    def _look_ahead(self, previous: DepthPass | None, depth: int) -> None:
        """Run the tokens that stopped after `previous` once more at `depth`, against the kept executed entries."""
        probed = self.settings.lookahead
        if probed is None or previous is None or self.model.gate is None:
            return
        stopped = torch.zeros_like(previous.index, dtype=torch.bool)
        if previous.continues is not None:
            stopped = ~previous.continues & probed[previous.index]
        here = bool(stopped.any())
        if not self.settings.peers.any(here):
            return
        if not here:
            self._looped_pass(self._placeholder(previous.state), depth, lookahead=True)
            return
        rows = _Rows(previous.index[stopped], self._re_enter(previous, stopped))
        probe = DepthPass(depth, rows.index, self._state(self._looped_pass(rows, depth, lookahead=True)))
        probe.reading = self.reader.read(probe.state, rows.index, depth, 0)
        self.lookaheads.append(probe)

    def _state(self, x: Tensor) -> Tensor:
        """What leaves the looped layers: after the final norm where the whole stack loops."""
        return x if self.model.kind.loops_middle else self.model.norm(x)

    def _looped_pass(self, rows: _Rows, depth: int, lookahead: bool = False) -> Tensor:
        document, position = self.tokens.document[rows.index], self.tokens.position[rows.index]
        if rows.placeholder:
            document = document - document - 1  # a document of its own: it reads itself alone, nobody reads it
        entries = Entries.of(document, position, depth, lookahead=lookahead)
        span = self.store.looped
        kept = None if rows.placeholder or lookahead else span
        return self._layers(rows.x, rows.index, entries, self.model.looped, self.model.kind.rule, span, kept)

    def _once(self, x: Tensor, layers: range, span: SpanStore) -> Tensor:
        """Prelude or coda: every token once, causally."""
        if len(layers) == 0:
            return x
        entries = Entries.of(self.tokens.document, self.tokens.position, 1)
        return self._layers(x, self.everyone, entries, layers, PER_ITERATION, span, span)

    def _layers(
        self,
        x: Tensor,
        index: Tensor,
        entries: Entries,
        layers: range,
        rule: Rule,
        span: SpanStore,
        kept: SpanStore | None,
    ) -> Tensor:
        """`layers` once over `entries`, which may read what `span` holds; their own keys go into `kept`."""
        pieces = span.readable(rule, int(entries.depth[0]))
        plan = self.backend.plan(rule, entries, Entries.cat([*span.seen(self.executed, pieces), entries]))
        cosine, sine = self.cosine[index], self.sine[index]
        keys, values = [], []
        for offset, layer in enumerate(layers):
            attend = _Attend(plan, *span.past(offset, pieces))
            block = self.model.layers[layer]
            if self.settings.checkpoint and torch.is_grad_enabled():
                x, key, value = checkpoint(block, x, cosine, sine, attend, use_reentrant=False)
            else:
                x, key, value = block(x, cosine, sine, attend)
            keys.append(key)
            values.append(value)
        if kept is not None:
            kept.add(entries, index, keys, values)
        return x


@dataclass(frozen=True)
class _Attend:
    """A layer's attention in one pass; what earlier passes left is fixed here, so recomputing repeats it exactly."""

    plan: AttentionPlan
    past_keys: list[Tensor]
    past_values: list[Tensor]

    def __call__(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        if not self.past_keys:
            return self.plan.attend(query, key, value)
        return self.plan.attend(query, torch.cat([*self.past_keys, key]), torch.cat([*self.past_values, value]))


def _predicted(reading: Any, rows: Tensor | slice = slice(None)) -> Predicted | None:
    """The most probable tokens of a reading's `rows`, where the head was read for them."""
    if reading is None or reading.predicted is None:
        return None
    return Predicted(reading.predicted.tokens[rows], reading.predicted.probabilities[rows])


def _in_order(parts: list[tuple[Tensor, Tensor]]) -> Tensor:
    """Rows of the parts `(index, rows)` brought into the order of their indices, which cover 0..N-1 once."""
    parts = [part for part in parts if part[0].numel()]
    if len(parts) == 1:
        return parts[0][1]
    index = torch.cat([part[0] for part in parts])
    return torch.cat([part[1] for part in parts]).index_select(0, index.argsort())
