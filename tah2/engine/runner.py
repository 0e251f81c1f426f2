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
from tah2.engine.kernels import Best, Row, most_probable
from tah2.engine.mixing import carried, stopped
from tah2.engine.pool import Pools
from tah2.engine.strand import Strand
from tah2.engine.weights import Weights
from tah2.model.kinds import Output
from tah2.model.loop import LoopedDecoder
from tah2.model.reentry import Predicted
from tah2.model.scoring import HEAD_ROWS

Bools = NDArray[np.bool_]
_NOBODY: Longs = np.empty(0, dtype=np.int64)


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


@dataclass(frozen=True)
class _Outlook:
    """What is known of a pass before its layers run, prepared then: right after them the caches hold weights alone, and
    every small operation takes several times as long."""

    kept: Longs
    owners: list[tuple[Strand, int]]
    """Of kept rows: the strand, and the row inside it."""
    found: list[Row | None]
    """Of kept rows: what earlier depths have left."""
    drafts: Bools | None
    """Rows that say what they would draw if they stopped; None: no row does."""
    must: Bools
    may: Bools
    """Rows that go on unasked, and rows that go on if the gate says so."""
    asks: Bools
    """Rows whose gate matters: undecided ones, and kept ones, whose mixture weights need it."""
    asked: Longs
    index: Tensor
    embedding: Tensor
    survival: Tensor
    threshold: Tensor
    """Of the rows asked"""
    among_kept: Tensor
    """Places among the kept rows of those whose most probable tokens are read."""
    others: list[Longs]
    """Rows whose most probable tokens are read, but not kept."""
    places: Longs
    """By row: the place of its most probable tokens in what is read, or -1."""


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
    """Runs strands; between passes it keeps nothing of theirs."""

    def __init__(self, decoder: LoopedDecoder, weights: Weights, pools: Pools) -> None:
        self.decoder, self.weights, self.pools = decoder, weights, pools
        kind = decoder.kind
        self.loops_middle = kind.loops_middle
        self.reads_every_depth = not kind.loops_middle and kind.head_every_depth(decoder.top_k)
        self.device = decoder.embed_tokens.weight.device
        self._angles: tuple[Tensor, Tensor] | None = None

    @torch.inference_mode()
    def run(self, strands: Sequence[Strand], drafting: bool = False) -> None:
        """One pass over the active rows of `strands`, whose slots are assigned.

        `drafting`: strands of one token also say what they would draw if they stopped now.
        """
        strands = layout(strands)
        rows = Rows.of(strands)
        embedding = self.decoder.embed_tokens.weight.index_select(0, tensor(rows.ids, self.device))
        cosine, sine = self._waves(rows.position, rows.extent, embedding.dtype)
        anchor = self._anchors(rows, embedding, cosine, sine)
        x = self._inputs(rows, anchor)
        plan = plan_looped(strands, self.pools.looped, self.weights.paged)
        outlook = self._outlook(rows, embedding, drafting)
        x = self.weights.layers(x, self.decoder.looped, cosine, sine, plan, 0)
        state = x if self.loops_middle else self.weights.norm(x)

        logits, best = self._read(outlook, state) if self.reads_every_depth else (None, None)
        decision = self._decide(outlook, state, best)
        kept = self._mix(rows, outlook, decision, state, logits, best)
        finals = self._codas(rows, decision, state) if self.loops_middle else None
        going = np.flatnonzero(decision.continues)
        following = self._reenter(outlook, going, anchor, state, best)
        self._write_back(rows, decision, kept, going, following, anchor, finals)

    def _waves(self, position: Longs, extent: Longs, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Cosines and sines `[N, head_dim]`; length-dependent scalings see a sentinel per extent."""
        rotary, n = self.decoder.rotary, len(position)
        if not rotary.depends_on_length:
            places = tensor(position, self.device)
            cosine, sine = self._angles_before(int(position.max()) + 1, dtype)
            return cosine.index_select(0, places), sine.index_select(0, places)
        ends = np.unique(extent)
        places = tensor(np.concatenate([position, ends - 1]), self.device)
        texts = tensor(np.concatenate([extent, ends]), self.device)
        cosine, sine = rotary(places, texts, dtype)
        return cosine[:n], sine[:n]

    def _angles_before(self, length: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Cosines and sines of positions 0, 1, ..., at least `length` of them; made anew when a text outgrows them."""
        if self._angles is None or len(self._angles[0]) < length:
            places = torch.arange(1 << (length - 1).bit_length(), device=self.device)
            self._angles = self.decoder.rotary(places, places, dtype)
        return self._angles

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
        if all(s.x is None for s in rows.strands):
            return self.weights.enter(anchor)
        parts = [self.weights.enter(anchor[rows.part(i)]) if s.x is None else s.x for i, s in enumerate(rows.strands)]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _outlook(self, rows: Rows, embedding: Tensor, drafting: bool) -> _Outlook:
        """See there."""
        kept, decoder, n = np.flatnonzero(rows.kept), self.decoder, len(rows)
        owners = _owners(rows, kept)
        drafts = [drafting and len(s) == 1 and s.request.drafts for s in rows.strands]
        must, may = rows.depth < rows.floor, rows.depth < rows.cap
        asks = np.zeros(n, dtype=np.bool_)
        read = np.zeros(n, dtype=np.bool_)
        if decoder.gate is not None:
            asks = (rows.depth < rows.ceiling) & ((may & ~must) | rows.kept)
            read = asks & bool(decoder.gate.top_k)
        if decoder.reentry.top_k:
            read = read | may
        asked, among_kept, others = np.flatnonzero(asks), np.flatnonzero(read[kept]), np.flatnonzero(read & ~rows.kept)
        places = np.full(n, -1)
        places[np.concatenate([kept[among_kept], others])] = np.arange(len(among_kept) + len(others))
        index = tensor(asked, self.device)
        thresholds = np.array([s.request.threshold for s in rows.strands], dtype=np.float32)
        return _Outlook(
            kept,
            owners,
            [s.shares.get(local) for s, local in owners],
            np.repeat(drafts, rows.sizes) if any(drafts) else None,
            must,
            may,
            asks,
            asked,
            index,
            embedding.index_select(0, index),
            torch.from_numpy(np.concatenate([s.survival[s.active] for s in rows.strands])[asked]),
            torch.from_numpy(np.repeat(thresholds, rows.sizes)[asked]),
            tensor(among_kept, self.device),
            np.array_split(others, -(-len(others) // HEAD_ROWS)) if len(others) else [],
            places,
        )

    def _read(self, outlook: _Outlook, state: Tensor) -> tuple[Tensor, Best | None]:
        """Logits of the kept rows, and the most probable tokens of the rows whose gate or reentry reads them."""
        logits, top_k = self.weights.head(_take(state, outlook.kept)), self.decoder.top_k
        parts = [most_probable(logits, top_k, outlook.among_kept)] if len(outlook.among_kept) else []
        parts += [most_probable(self.weights.head(_take(state, part)), top_k) for part in outlook.others]
        if len(parts) < 2:
            return logits, parts[0] if parts else None
        return logits, Best(*map(torch.cat, zip(*parts, strict=True)))

    def _decide(self, outlook: _Outlook, state: Tensor, best: Best | None) -> _Decision:
        gate, asked, n = self.decoder.gate, outlook.asked, len(outlook.asks)
        says, probability = np.ones(n, dtype=np.bool_), np.ones(n, dtype=np.float32)
        log_continue, log_stop = np.zeros((2, n), dtype=np.float32)
        if gate is not None and len(asked):
            top = _of(best, outlook.places[asked]).probabilities if best is not None and gate.top_k else None
            own = state if len(asked) == n else state.index_select(0, outlook.index)
            logit = self.weights.gate(outlook.embedding, own, top).cpu()
            chance = logit.sigmoid()
            says[asked] = gate.continues(chance, outlook.survival, outlook.threshold).numpy()
            probability[asked] = chance.numpy()
            log_continue[asked] = F.logsigmoid(logit).numpy()
            log_stop[asked] = F.logsigmoid(-logit).numpy()
        continues = outlook.must | (outlook.may & says)
        return _Decision(continues, outlook.asks, probability, log_continue, log_stop)

    def _mix(
        self,
        rows: Rows,
        outlook: _Outlook,
        decision: _Decision,
        state: Tensor,
        logits: Tensor | None,
        best: Best | None,
    ) -> _Kept:
        """The kept rows' distributions; kinds that read their last depth alone read the head here."""
        kept, owners, found = outlook.kept, outlook.owners, outlook.found
        if self.loops_middle or not len(kept):
            return _Kept([], [], [], {}, {})
        speaks = ~decision.continues if outlook.drafts is None else ~decision.continues | outlook.drafts
        if logits is None:
            places = np.flatnonzero(speaks[kept])
            kept, owners, found = kept[places], [owners[at] for at in places], [found[at] for at in places]
            logits = self.weights.head(_take(state, kept)) if len(kept) else state[:0]
        logits = logits.float()
        made = _Kept(kept.tolist(), owners, [Row(logits, at) for at in range(len(kept))], {}, {})
        speaking = speaks[kept].tolist()
        made.mixed = {at: row for at, row in enumerate(made.logits) if speaking[at] and found[at] is None}
        if self.decoder.kind.output is not Output.LAST:
            self._mix_deep(rows, made, found, speaking)
            self._carry(made, found, decision, outlook, best)
        return made

    def _mix_deep(self, rows: Rows, made: _Kept, found: list[Row | None], speaking: list[bool]) -> None:
        """Distributions of tokens whose earlier depths have left a share."""
        deep = {at: share for at, share in enumerate(found) if share is not None and speaking[at]}
        if deep:
            depth = tensor(rows.depth[[made.rows[at] for at in deep]], self.device)
            survival = self._each(made, deep, lambda row, s, local: s.log_survival[local])
            own = [made.logits[at] for at in deep]
            table = stopped(self.decoder.kind.output, own, list(deep.values()), depth, survival)
            made.mixed.update((at, Row(table, i)) for i, at in enumerate(deep))

    def _carry(
        self, made: _Kept, found: list[Row | None], decision: _Decision, outlook: _Outlook, best: Best | None
    ) -> None:
        """Shares of tokens that go on: those that begin one, and those that have one."""
        going = {at: found[at] for at, row in enumerate(made.rows) if decision.continues[row]}
        begun = {at: share for at, share in going.items() if share is not None}
        for group in ([at for at in going if at not in begun], list(begun)):
            if group:
                weight = self._each(made, group, lambda row, s, local: s.log_survival[local] + decision.log_stop[row])
                shares = [begun[at] for at in group if at in begun] or None
                own, places = [made.logits[at] for at in group], outlook.places[[made.rows[at] for at in group]]
                total = None if best is None or (places < 0).any() else best.log_total[tensor(places, self.device)]
                known = None if total is None else total.tolist()
                made.shares.update(
                    zip(group, carried(self.decoder.kind.output, own, shares, weight, known), strict=True)
                )

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

    def _reenter(
        self, outlook: _Outlook, going: Longs, anchor: Tensor, state: Tensor, best: Best | None
    ) -> Tensor | None:
        """Next inputs of the continuing rows, `[going, d]`."""
        if not len(going):
            return None
        predicted = None
        if best is not None and self.decoder.reentry.top_k:
            predicted = _of(best, outlook.places[going])
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
        asked, probability = decision.asked.tolist(), decision.probability.tolist()
        cursor = 0
        for i, (s, count) in enumerate(zip(rows.strands, counts, strict=True)):
            part, ran = rows.part(i), s.active
            s.executed[ran] = s.depth
            if asked[part.stop - 1] and ran[-1] == len(s) - 1:
                s.continue_probs.append(probability[part.stop - 1])
            continues = np.flatnonzero(decision.continues[part]) if count else _NOBODY
            s.active = ran[continues]
            if count:
                s.survival[s.active] *= decision.probability[part][continues]
                s.log_survival[s.active] += decision.log_continue[part][continues]
            s.x = following[cursor : cursor + count] if following is not None and count else None
            if finals is not None:
                s.anchor = anchor[part][tensor(continues, self.device)] if count else None
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


def _of(best: Best, places: Longs) -> Predicted:
    """The entries at `places`, without a copy where they are all, in order."""
    if len(places) == len(best.tokens) and bool((np.diff(places) == 1).all()):
        return Predicted(best.tokens, best.probabilities)
    index = tensor(places, best.tokens.device)
    return Predicted(best.tokens.index_select(0, index), best.probabilities.index_select(0, index))


def _owners(rows: Rows, index: Longs) -> list[tuple[Strand, int]]:
    """The strand and the row inside it of each row of the pass."""
    strand = np.searchsorted(rows.bounds, index, side="right") - 1
    return [
        (rows.strands[i], int(rows.strands[i].active[row - rows.bounds[i]]))
        for i, row in zip(strand.tolist(), index.tolist(), strict=True)
    ]
