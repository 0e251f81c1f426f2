"""One pass: embed, run the layers, read the head where it is needed, ask the gate, prepare the next depth.

The pass computes first and writes back last, so a pass that fails leaves every strand as it was.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F

from tah2.engine.batch import Longs, Rows, layout, plan_looped, plan_once, tensor
from tah2.engine.kernels import Row, most_probable
from tah2.engine.mixing import carried, stopped
from tah2.engine.pool import Pools
from tah2.engine.strand import Strand
from tah2.engine.weights import Weights
from tah2.model.kinds import Output
from tah2.model.loop import LoopedDecoder
from tah2.model.reentry import Predicted
from tah2.model.scoring import HEAD_ROWS

Bools = NDArray[np.bool_]


@dataclass
class _Kept:
    """What kept rows have to say, by their place in `rows`."""

    rows: list[int]
    owners: list[tuple[Strand, int]]
    """The strand of each, and the row inside it."""
    logits: list[Row]
    mixed: dict[int, Row]
    """Distributions of rows that stop here, or would."""
    shares: dict[int, Row]
    """What rows that go on leave to their next depth."""


@dataclass
class _Reading:
    """The most probable tokens of those rows that somebody asks about."""

    places: Longs
    """Of each row of the pass in `predicted`, or -1."""
    predicted: Predicted

    def of(self, rows: Longs) -> Predicted:
        at = self.places[rows]
        if len(at) == len(self.predicted.tokens) and bool((np.diff(at) > 0).all()):
            return self.predicted
        index = tensor(at, self.predicted.tokens.device)
        return Predicted(*(values.index_select(0, index) for values in self.predicted))


@dataclass
class _Decision:
    """What the gate said, per row."""

    continues: Bools
    asked: Bools
    probability: NDArray[np.float32]
    """g; 1 where the gate was not asked"""
    log_continue: NDArray[np.float32]
    log_stop: NDArray[np.float32]
    """log g and log (1 - g); 0 where the gate was not asked"""


class Runner:
    """Runs strands; owns no state between passes."""

    def __init__(self, decoder: LoopedDecoder, weights: Weights, pools: Pools) -> None:
        self.decoder, self.weights, self.pools = decoder, weights, pools
        kind = decoder.kind
        self.loops_middle = kind.loops_middle
        self.reads_every_depth = not kind.loops_middle and kind.head_every_depth(decoder.top_k)
        self.device = decoder.embed_tokens.weight.device

    @torch.inference_mode()
    def run(self, strands: Sequence[Strand], drafting: bool = False) -> None:
        """One pass over the active rows of `strands`, whose slots are assigned.

        `drafting`: strands of one token also say what they would draw if they stopped now.
        """
        strands = layout(strands)
        rows = Rows.of(strands)
        embedding = F.embedding(tensor(rows.ids, self.device), self.decoder.embed_tokens.weight)
        cosine, sine = self._waves(rows.position, rows.extent, embedding.dtype)
        anchor = self._anchors(rows, embedding, cosine, sine)
        x = self._inputs(rows, anchor)
        plan = plan_looped(strands, self.pools.looped, self.weights.paged)
        x = self.weights.layers(x, self.decoder.looped, cosine, sine, plan, 0)
        state = x if self.loops_middle else self.weights.norm(x)

        asks = self._asks(rows)
        logits, reading = self._read(rows, state, asks) if self.reads_every_depth else (None, None)
        decision = self._decide(rows, embedding, state, asks, reading)
        kept = self._mix(rows, decision, state, logits, drafting)
        finals = self._codas(rows, decision, state) if self.loops_middle else None
        going = np.flatnonzero(decision.continues)
        following = self._reenter(going, anchor, state, reading)
        self._write_back(rows, decision, kept, going, following, anchor, finals)

    def _waves(self, position: Longs, extent: Longs, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Cosines and sines `[N, head_dim]`; length-dependent scalings see a sentinel per extent."""
        rotary, n = self.decoder.rotary, len(position)
        if not rotary.depends_on_length:
            places = tensor(position, self.device)
            return rotary(places, places, dtype)
        ends = np.unique(extent)
        places = tensor(np.concatenate([position, ends - 1]), self.device)
        texts = tensor(np.concatenate([extent, ends]), self.device)
        cosine, sine = rotary(places, texts, dtype)
        return cosine[:n], sine[:n]

    def _anchors(self, rows: Rows, embedding: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
        """What the loop returns to, `[N, d]`: embeddings, or the prelude's output (run here by fresh rows)."""
        if not self.loops_middle:
            return embedding
        parts: dict[int, Tensor] = {i: s.anchor for i, s in enumerate(rows.strands) if s.anchor is not None}
        fresh = [i for i in range(len(rows.strands)) if i not in parts]
        if fresh:
            index = tensor(np.concatenate([np.arange(len(rows))[rows.part(i)] for i in fresh]), self.device)
            prelude, strands = range(self.decoder.looped.start), [rows.strands[i] for i in fresh]
            out = self._once(embedding[index], prelude, strands, cosine[index], sine[index], 0)
            sizes = [s.rows for s in strands]
            parts.update(zip(fresh, out.split(sizes), strict=True))
        return torch.cat([parts[i] for i in range(len(rows.strands))])

    def _once(
        self, x: Tensor, layers: range, strands: list[Strand], cosine: Tensor, sine: Tensor, pool_layer: int
    ) -> Tensor:
        """All rows of the strands through layers that run once per token; a model may have none of them."""
        if not layers:
            return x
        assert self.pools.once is not None
        plan = plan_once(strands, self.pools.once, self.weights.paged)
        return self.weights.layers(x, layers, cosine, sine, plan, pool_layer)

    def _inputs(self, rows: Rows, anchor: Tensor) -> Tensor:
        """The looped layers' input: depth 1 starts from the anchor, later depths bring theirs."""
        later = [s.x for s in rows.strands if s.x is not None]
        if not later:
            return self.weights.enter(anchor)
        deep = np.repeat([s.x is not None for s in rows.strands], rows.sizes)
        fresh, going = np.flatnonzero(~deep), np.flatnonzero(deep)
        first = [self.weights.enter(_take(anchor, fresh))] if len(fresh) else []
        places = np.empty(len(rows), dtype=np.int64)
        places[np.concatenate([fresh, going])] = np.arange(len(rows))
        return torch.cat([*first, *later]).index_select(0, tensor(places, self.device))

    def _asks(self, rows: Rows) -> Bools:
        """Rows whose gate matters: undecided ones, and kept ones, whose mixture weights need it."""
        if self.decoder.gate is None:
            return np.zeros(len(rows), dtype=np.bool_)
        undecided = (rows.floor <= rows.depth) & (rows.depth < rows.cap)
        return (rows.depth < rows.ceiling) & (undecided | rows.kept)

    def _read(self, rows: Rows, state: Tensor, asks: Bools) -> tuple[Tensor, _Reading | None]:
        """Logits of the kept rows, and the most probable tokens of the rows whose gate or reentry reads them."""
        kept = np.flatnonzero(rows.kept)
        logits = self.weights.head(_take(state, kept))
        top_k, gate = self.decoder.top_k, self.decoder.gate
        wanted = np.zeros(len(rows), dtype=np.bool_)
        if gate is not None and gate.top_k:
            wanted |= asks
        if self.decoder.reentry.top_k:
            wanted |= rows.depth < rows.cap
        among_kept = np.flatnonzero(wanted[kept])
        found, parts = [kept[among_kept]], []
        if len(among_kept):
            parts.append(most_probable(logits, top_k, tensor(among_kept, self.device)))
        others = np.flatnonzero(wanted & ~rows.kept)
        for part in np.array_split(others, -(-len(others) // HEAD_ROWS)) if len(others) else ():
            found.append(part)
            parts.append(most_probable(self.weights.head(_take(state, part)), top_k))
        if not parts:
            return logits, None
        tokens, probabilities = parts[0] if len(parts) == 1 else map(torch.cat, zip(*parts, strict=True))
        places = np.full(len(rows), -1)
        places[np.concatenate(found)] = np.arange(len(tokens))
        return logits, _Reading(places, Predicted(tokens, probabilities))

    def _decide(self, rows: Rows, embedding: Tensor, state: Tensor, asks: Bools, reading: _Reading | None) -> _Decision:
        n = len(rows)
        says, probability = np.ones(n, dtype=np.bool_), np.ones(n, dtype=np.float32)
        log_continue, log_stop = np.zeros(n, dtype=np.float32), np.zeros(n, dtype=np.float32)
        gate, asked = self.decoder.gate, np.flatnonzero(asks)
        if gate is not None and len(asked):
            top = None if reading is None or not gate.top_k else reading.of(asked).probabilities
            logit = self.weights.gate(_take(embedding, asked), _take(state, asked), top).cpu()
            survival = np.concatenate([s.survival[s.active] for s in rows.strands])[asked]
            threshold = np.repeat(np.array([s.request.threshold for s in rows.strands], np.float32), rows.sizes)[asked]
            chance = logit.sigmoid()
            says[asked] = gate.continues(chance, torch.from_numpy(survival), torch.from_numpy(threshold)).numpy()
            probability[asked] = chance.numpy()
            log_continue[asked] = F.logsigmoid(logit).numpy()
            log_stop[asked] = F.logsigmoid(-logit).numpy()
        continues = (rows.depth < rows.floor) | ((rows.depth < rows.cap) & says)
        return _Decision(continues, asks, probability, log_continue, log_stop)

    def _mix(self, rows: Rows, decision: _Decision, state: Tensor, logits: Tensor | None, drafting: bool) -> _Kept:
        """The kept rows' distributions; kinds that read their last depth alone read the head here."""
        kept = np.flatnonzero(rows.kept)
        if self.loops_middle or not len(kept):
            return _Kept([], [], [], {}, {})
        speaks = ~decision.continues
        if drafting:
            drafts = [len(s) == 1 and s.request.drafts for s in rows.strands]
            speaks |= np.repeat(drafts, rows.sizes)
        if logits is None:
            kept = kept[speaks[kept]]
            logits = self.weights.head(_take(state, kept)) if len(kept) else state[:0]
        logits = logits.float()
        made = _Kept(kept.tolist(), _owners(rows, kept), [Row(logits, at) for at in range(len(kept))], {}, {})
        found = [s.shares.get(local) for s, local in made.owners]
        made.mixed = {at: made.logits[at] for at in np.flatnonzero(speaks[kept]).tolist() if found[at] is None}
        if self.decoder.kind.output is not Output.LAST:
            self._mix_deep(rows, made, found, speaks)
            self._carry(made, found, decision)
        return made

    def _mix_deep(self, rows: Rows, made: _Kept, found: list[Row | None], speaks: Bools) -> None:
        """Distributions of tokens whose earlier depths have left a share."""
        deep = {at: share for at, share in enumerate(found) if share is not None and speaks[made.rows[at]]}
        if deep:
            depth = tensor(rows.depth[[made.rows[at] for at in deep]], self.device)
            survival = self._each(made, deep, lambda row, s, local: s.log_survival[local])
            own = [made.logits[at] for at in deep]
            table = stopped(self.decoder.kind.output, own, list(deep.values()), depth, survival)
            made.mixed.update((at, Row(table, i)) for i, at in enumerate(deep))

    def _carry(self, made: _Kept, found: list[Row | None], decision: _Decision) -> None:
        """Shares of tokens that go on: those that begin one, and those that have one."""
        going = {at: found[at] for at, row in enumerate(made.rows) if decision.continues[row]}
        begun = {at: share for at, share in going.items() if share is not None}
        for group in ([at for at in going if at not in begun], list(begun)):
            if group:
                weight = self._each(made, group, lambda row, s, local: s.log_survival[local] + decision.log_stop[row])
                shares = [begun[at] for at in group if at in begun] or None
                table = carried(self.decoder.kind.output, [made.logits[at] for at in group], shares, weight)
                made.shares.update((at, Row(table, i)) for i, at in enumerate(group))

    def _each(self, made: _Kept, group: Iterable[int], value: Callable[[int, Strand, int], np.float32]) -> Tensor:
        """fp32 `[group]`: a value of every row, found by the row, its strand and its place inside it."""
        values = [value(made.rows[at], *made.owners[at]) for at in group]
        return tensor(np.array(values, dtype=np.float32), self.device)

    def _codas(self, rows: Rows, decision: _Decision, state: Tensor) -> dict[int, tuple[Tensor, Tensor | None]]:
        """By strand: its states before the coda so far, and, once it has finished, logits of its kept rows."""
        finals: dict[int, tuple[Tensor, Tensor | None]] = {}
        done = []
        for i, s in enumerate(rows.strands):
            part = rows.part(i)
            stops = ~decision.continues[part]
            buffer = state.new_zeros(len(s), state.shape[1]) if s.final is None else s.final.clone()
            buffer[tensor(s.active[stops], self.device)] = _take(state[part], np.flatnonzero(stops))
            finals[i] = (buffer, None)
            if stops.all():
                done.append(i)
        done.sort(key=lambda i: len(rows.strands[i]) > 1)
        if done:
            strands = [rows.strands[i] for i in done]
            position = np.concatenate([np.arange(s.start, s.end) for s in strands])
            prompts = np.repeat([len(s.request.prompt) for s in strands], [len(s) for s in strands])
            cosine, sine = self._waves(position, np.maximum(position + 1, prompts), state.dtype)
            coda = range(self.decoder.looped.stop, len(self.decoder.layers))
            x = torch.cat([finals[i][0] for i in done])
            out = self.weights.norm(self._once(x, coda, strands, cosine, sine, self.decoder.looped.start))
            for i, s, part_of in zip(done, strands, out.split([len(s) for s in strands]), strict=True):
                if s.kept_from < len(s):
                    finals[i] = (finals[i][0], self.weights.head(part_of[s.kept_from :]).float())
        return finals

    def _reenter(self, going: Longs, anchor: Tensor, state: Tensor, reading: _Reading | None) -> Tensor | None:
        """Next inputs of the continuing rows, `[going, d]`."""
        if not len(going):
            return None
        predicted = reading.of(going) if reading is not None and self.decoder.reentry.top_k else None
        return self.weights.reenter(_take(anchor, going), _take(state, going), predicted)

    def _write_back(
        self,
        rows: Rows,
        decision: _Decision,
        kept: _Kept,
        going: Longs,
        following: Tensor | None,
        anchor: Tensor,
        finals: dict[int, tuple[Tensor, Tensor | None]] | None,
    ) -> None:
        """Everything has been computed: advance the strands."""
        self._write_mixed(kept)
        counts = np.add.reduceat(decision.continues, rows.bounds[:-1], dtype=np.int64).tolist()
        asked = np.logical_or.reduceat(decision.asked, rows.bounds[:-1]).tolist()
        cursor = 0
        for i, (s, count) in enumerate(zip(rows.strands, counts, strict=True)):
            part, ran = rows.part(i), s.active
            continues = decision.continues[part]
            s.executed[ran] = s.depth
            if asked[i]:
                s.survival[ran] *= decision.probability[part]
                s.log_survival[ran] += decision.log_continue[part]
                if decision.asked[part][-1] and ran[-1] == len(s) - 1:
                    s.continue_probs.append(float(decision.probability[part][-1]))
            s.active = ran[continues] if count else ran[:0]
            s.x = following[cursor : cursor + count] if following is not None and count else None
            if finals is not None:
                s.anchor = anchor[part][tensor(np.flatnonzero(continues), self.device)] if count else None
                s.final, logits = finals[i]
                if logits is not None:
                    s.mixed.update((s.kept_from + at, Row(logits, at)) for at in range(len(logits)))
            cursor += count
            s.depth += 1

    @staticmethod
    def _write_mixed(kept: _Kept) -> None:
        for at, (s, local) in enumerate(kept.owners):
            if at in kept.mixed:
                s.mixed[local] = kept.mixed[at]
            if at in kept.shares:
                s.shares[local] = kept.shares[at]
            if s.request.params.depth_logprobs and local == len(s) - 1:
                s.depth_logits.append(kept.logits[at].value)


def _take(values: Tensor, index: Longs) -> Tensor:
    """Rows `index` (ascending) of `values`, without a copy where they are all."""
    return values if len(index) == len(values) else values.index_select(0, tensor(index, values.device))


def _owners(rows: Rows, index: Longs) -> list[tuple[Strand, int]]:
    """The strand and the row inside it of each row of the pass."""
    strand = np.searchsorted(rows.bounds, index, side="right") - 1
    return [
        (rows.strands[i], int(rows.strands[i].active[row - rows.bounds[i]]))
        for i, row in zip(strand.tolist(), index.tolist(), strict=True)
    ]
