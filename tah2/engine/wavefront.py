"""Wavefront decoding: the next token's shallow passes ride along with this token's deep ones, without loss.

When token t has run depth d and goes deeper, its prediction so far, drawn with the noise of position t + 1, is a guess
at the next token. A *draft* strand runs that guess at depth 1 while t runs depth d + 1, at depth 2 while t runs d + 2,
and so on. This is sound where (t+1, d) reads nothing of t that is deeper than d (`Sight.never_waits`, derived from
the visibility rule's predicates). Drafts may have drafts of their own.

Acceptance, and why nothing can change:
- every draw uses the noise of (seed, position), so the final draw is what plain decoding draws;
- a draft whose token differs from its predecessor's newest draw is discarded with all that follow it;
- a predecessor's newest draw after its last depth is the output. What a surviving draft has run is what plain
  decoding would have run.
"""

from __future__ import annotations

from tah2.engine.constraint import LogitsMask
from tah2.engine.request import Request
from tah2.engine.strand import Strand


def contradicted(request: Request) -> int:
    """Index of the first strand whose token its predecessor would no longer draw; the number of strands if none."""
    strands = request.strands
    for i in range(1, len(strands)):
        if strands[i - 1].draw != int(strands[i].ids[0]):
            return i
    return len(strands)


def mask_after(request: Request, strand: Strand) -> LogitsMask | None:
    """The constraint's state when `strand`'s next token is drawn."""
    return strand.mask if strand.draft else request.mask


def draft(request: Request) -> None:
    """Add the strand that the newest draw of the last strand suggests, if that token would be run at all."""
    if not request.drafts or not request.strands:
        return
    last = request.strands[-1]
    if len(last) != 1 or not last.samples or last.draw is None or last.depth == 1:
        return
    produced = len(request.output_before(last)) + 1
    if last.draw in request.endings or produced >= request.max_tokens:
        return
    mask = mask_after(request, last)
    if mask is not None:
        mask = mask.after(last.draw)
        if mask.finished:
            return
    request.draft_strand(last.draw, mask)
