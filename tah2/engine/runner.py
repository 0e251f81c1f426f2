"""One pass: embed, run the layers, read the head where it is needed, ask the gate, prepare the next depth.

The pass computes first and writes back last, so a pass that fails leaves every strand as it was.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F

from tah2.engine.batch import Longs, Rows, layout, plan_looped, plan_once, tensor
from tah2.engine.kernels import most_probable
from tah2.engine.mixing import Row, carried, gather, stopped
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
    """By row of the pass: what kept rows have to say."""

    logits: dict[int, Row]
    mixed: dict[int, Row]
    """Distributions of rows that stop here, or would."""
    shares: dict[int, Row]
    """What rows that go on leave to their next depth."""


@dataclass
class _Decision:
    """What the gate said, per row."""

    continues: Bools
    asked: Bools
    probability: NDArray[np.float32]
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
        logits, predicted = self._read(rows, state, asks) if self.reads_every_depth else (None, None)
        decision = self._decide(rows, embedding, state, asks, predicted)
        kept = self._mix(rows, decision, state, logits, drafting)
        finals = self._codas(rows, decision, state) if self.loops_middle else None
        going = np.flatnonzero(decision.continues)
        following = self._reenter(going, anchor, state, predicted)
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
            index = _index(np.concatenate([np.arange(len(rows))[rows.part(i)] for i in fresh]), self.device)
            assert self.pools.once is not None
            plan = plan_once([rows.strands[i] for i in fresh], self.pools.once, self.weights.paged)
            prelude = range(self.decoder.looped.start)
            out = self.weights.layers(embedding[index], prelude, cosine[index], sine[index], plan, 0)
            sizes = [rows.strands[i].rows for i in fresh]
            parts.update(zip(fresh, out.split(sizes), strict=True))
        return torch.cat([parts[i] for i in range(len(rows.strands))])

    def _inputs(self, rows: Rows, anchor: Tensor) -> Tensor:
        """The looped layers' input: depth 1 starts from the anchor, later depths bring theirs."""
        if all(s.x is None for s in rows.strands):
            return self.weights.enter(anchor)
        parts = [self.weights.enter(anchor[rows.part(i)]) if s.x is None else s.x for i, s in enumerate(rows.strands)]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _asks(self, rows: Rows) -> Bools:
        """Rows whose gate matters: undecided ones, and kept ones, whose mixture weights need it."""
        if self.decoder.gate is None:
            return np.zeros(len(rows), dtype=np.bool_)
        undecided = (rows.floor <= rows.depth) & (rows.depth < rows.cap)
        return (rows.depth < rows.ceiling) & (undecided | rows.kept)

    def _read(self, rows: Rows, state: Tensor, asks: Bools) -> tuple[Tensor, Predicted | None]:
        """Logits of the kept rows, and the most probable tokens of the rows whose gate or reentry reads them."""
        logits = self.weights.head(_take(state, np.flatnonzero(rows.kept)))
        top_k, gate = self.decoder.top_k, self.decoder.gate
        wanted = np.zeros(len(rows), dtype=np.bool_)
        if gate is not None and gate.top_k:
            wanted |= asks
        if self.decoder.reentry.top_k:
            wanted |= rows.depth < rows.cap
        if not wanted.any():
            return logits, None
        tokens = torch.zeros(len(rows), top_k, dtype=torch.long, device=self.device)
        probabilities = torch.zeros(len(rows), top_k, dtype=torch.float32, device=self.device)
        among_kept = np.flatnonzero(wanted[rows.kept])
        if len(among_kept):
            index = _index(np.flatnonzero(rows.kept)[among_kept], self.device)
            tokens[index], probabilities[index] = most_probable(logits, top_k, _index(among_kept, self.device))
        for part in np.array_split(others := np.flatnonzero(wanted & ~rows.kept), -(-len(others) // HEAD_ROWS) or 1):
            if len(part):
                index = _index(part, self.device)
                tokens[index], probabilities[index] = most_probable(self.weights.head(state[index]), top_k)
        return logits, Predicted(tokens, probabilities)

    def _decide(
        self, rows: Rows, embedding: Tensor, state: Tensor, asks: Bools, predicted: Predicted | None
    ) -> _Decision:
        n = len(rows)
        says = np.ones(n, dtype=np.bool_)
        probability, log_continue, log_stop = (np.zeros(n, dtype=np.float32) for _ in range(3))
        gate = self.decoder.gate
        if gate is not None and asks.any():
            asked = np.flatnonzero(asks)
            top = None if predicted is None else _take(predicted.probabilities, asked)
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
        if self.loops_middle or not rows.kept.any():
            return _Kept({}, {}, {})
        kept, output = np.flatnonzero(rows.kept), self.decoder.kind.output
        drafts = np.repeat([drafting and len(s) == 1 and s.request.drafts for s in rows.strands], rows.sizes)
        speaks = ~decision.continues | drafts
        if logits is None:
            kept = kept[speaks[kept]]
            logits = self.weights.head(_take(state, kept)) if len(kept) else state[:0]
        logits = logits.float()
        own = {row: Row(logits, at) for at, row in enumerate(kept.tolist())}
        if output is Output.LAST:
            return _Kept(own, {row: value for row, value in own.items() if speaks[row]}, {})
        owners = dict(zip(kept.tolist(), _owners(rows, kept), strict=True))
        found = {row: s.shares[local] for row, (s, local) in owners.items() if local in s.shares}
        log_survival = np.concatenate([s.log_survival[s.active] for s in rows.strands])
        mixed = {row: value for row, value in own.items() if speaks[row] and row not in found}
        shares: dict[int, Row] = {}
        if deep := [row for row in own if speaks[row] and row in found]:
            depth, survival = tensor(rows.depth[deep], self.device), tensor(log_survival[deep], self.device)
            table = stopped(output, _rows(own, deep), _rows(found, deep), depth, survival)
            mixed.update((row, Row(table, at)) for at, row in enumerate(deep))
        for group, earlier in (
            ([row for row in own if decision.continues[row] and row not in found], None),
            ([row for row in own if decision.continues[row] and row in found], found),
        ):
            if group:
                weight = tensor((log_survival + decision.log_stop)[group], self.device)
                share = carried(output, _rows(own, group), None if earlier is None else _rows(earlier, group), weight)
                assert share is not None
                shares.update((row, Row(share, at)) for at, row in enumerate(group))
        return _Kept(own, mixed, shares)

    def _codas(self, rows: Rows, decision: _Decision, state: Tensor) -> dict[int, tuple[Tensor, Tensor | None]]:
        """By strand: its states before the coda so far, and, once it has finished, logits of its kept rows."""
        finals: dict[int, tuple[Tensor, Tensor | None]] = {}
        done = []
        for i, s in enumerate(rows.strands):
            part = rows.part(i)
            stops = ~decision.continues[part]
            buffer = state.new_zeros(len(s), state.shape[1]) if s.final is None else s.final.clone()
            buffer[_index(s.active[stops], self.device)] = _take(state[part], np.flatnonzero(stops))
            finals[i] = (buffer, None)
            if stops.all():
                done.append(i)
        done.sort(key=lambda i: len(rows.strands[i]) > 1)
        if done:
            strands = [rows.strands[i] for i in done]
            position = np.concatenate([np.arange(s.start, s.end) for s in strands])
            prompts = np.repeat([len(s.request.prompt) for s in strands], [len(s) for s in strands])
            cosine, sine = self._waves(position, np.maximum(position + 1, prompts), state.dtype)
            assert self.pools.once is not None
            plan = plan_once(strands, self.pools.once, self.weights.paged)
            coda = range(self.decoder.looped.stop, len(self.decoder.layers))
            x = torch.cat([finals[i][0] for i in done])
            out = self.weights.norm(self.weights.layers(x, coda, cosine, sine, plan, self.decoder.looped.start))
            for i, s, part_of in zip(done, strands, out.split([len(s) for s in strands]), strict=True):
                if s.kept_from < len(s):
                    finals[i] = (finals[i][0], self.weights.head(part_of[s.kept_from :]).float())
        return finals

    def _reenter(self, going: Longs, anchor: Tensor, state: Tensor, predicted: Predicted | None) -> Tensor | None:
        """Next inputs of the continuing rows, `[going, d]`."""
        if not len(going):
            return None
        if predicted is not None:
            predicted = Predicted(_take(predicted.tokens, going), _take(predicted.probabilities, going))
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
        self._write_mixed(rows, kept)
        cursor = 0
        for i, s in enumerate(rows.strands):
            part = rows.part(i)
            continues, ran = decision.continues[part], s.active
            s.executed[ran] = s.depth
            if decision.asked[part].any():
                asked = ran[decision.asked[part]]
                s.survival[asked] *= decision.probability[part][decision.asked[part]]
                s.log_survival[asked] += decision.log_continue[part][decision.asked[part]]
                if decision.asked[part][-1] and ran[-1] == len(s) - 1:
                    s.continue_probs.append(float(decision.probability[part][-1]))
            count = int(continues.sum())
            s.active = ran[continues]
            s.x = following[cursor : cursor + count] if following is not None and count else None
            if finals is not None:
                chosen = _index(np.flatnonzero(continues), self.device)
                s.anchor = anchor[part][chosen] if count else None
                s.final, logits = finals[i]
                if logits is not None:
                    s.mixed.update((s.kept_from + at, Row(logits, at)) for at in range(len(logits)))
            cursor += count
            s.depth += 1

    @staticmethod
    def _write_mixed(rows: Rows, kept: _Kept) -> None:
        index = np.fromiter(kept.logits, dtype=np.int64)
        for row, (s, local) in zip(index.tolist(), _owners(rows, index), strict=True):
            if row in kept.mixed:
                s.mixed[local] = kept.mixed[row]
            if row in kept.shares:
                s.shares[local] = kept.shares[row]
            if s.request.params.depth_logprobs and local == len(s) - 1:
                s.depth_logits.append(kept.logits[row].value)


def _rows(table: dict[int, Row], index: list[int]) -> Tensor:
    return gather([table[row] for row in index])


def _take(values: Tensor, index: Longs) -> Tensor:
    """Rows `index` (ascending) of `values`, without a copy where they are all."""
    return values if len(index) == len(values) else values[tensor(index, values.device)]


def _owners(rows: Rows, index: Longs) -> list[tuple[Strand, int]]:
    """The strand and the row inside it of each row of the pass."""
    strand = np.searchsorted(rows.bounds, index, side="right") - 1
    return [
        (rows.strands[i], int(rows.strands[i].active[row - rows.bounds[i]]))
        for i, row in zip(strand.tolist(), index.tolist(), strict=True)
    ]


def _index(values: Longs, device: torch.device) -> Tensor:
    return tensor(values, device)
