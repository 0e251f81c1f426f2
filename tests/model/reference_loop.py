"""What a loop computes, written to be believed: token by token, depth by depth, one entry at a time.

No passes, no packing, no key-value store: an entry's keys are computed anew from the layer inputs of the entries
that it may read, which are listed one by one. Slow and plain; the loop of `tah2.model` is held to it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from tah2.model.loop import LoopedDecoder
from tah2.model.reentry import Predicted
from tah2.model.rotary import rope_frequencies

SEES_EARLIER: dict[str, Callable[[int, int, int], bool]] = {
    "duo-causal": lambda j, m, last: j <= m,
    "base-stream": lambda j, m, last: j == 1,
    "per-iteration": lambda j, m, last: j == m,
    "last-exited": lambda j, m, last: j == min(last, m),
}
SEES_OWN: dict[str, Callable[[int, int], bool]] = {
    "duo-causal": lambda j, m: j <= m,
    "base-stream": lambda j, m: j <= m,
    "per-iteration": lambda j, m: j == m,
    "last-exited": lambda j, m: j == m,
}


@dataclass
class Told:
    """One token's story."""

    depth: int = 0
    continue_probs: list[float] = field(default_factory=list)
    logprobs: list[Tensor] = field(default_factory=list)
    """log q^(m) of every executed depth, `[vocabulary]`; of the last one alone where the head sits behind a coda"""
    mixed: Tensor = field(default_factory=lambda: torch.empty(0))
    """log of the mixed distribution, `[vocabulary]`"""
    state: Tensor = field(default_factory=lambda: torch.empty(0))
    probe: Tensor | None = None
    """log-probabilities one depth deeper than the token went, where it stopped"""


Decide = Callable[[int, int, float, float], bool]
"""(position, depth, continue probability, survival before it) -> continue?"""


def by_threshold(model: LoopedDecoder, thresholds: Sequence[float]) -> Decide:
    """TaH2 stops where g < tau; Ouro stops where the cumulative exit probability reaches q = 1 - tau."""
    if model.kind.name.startswith("ouro"):
        return lambda t, m, g, survival: 1 - survival * g < 1 - thresholds[t]
    return lambda t, m, g, survival: not g < thresholds[t]


@torch.no_grad()
def tell(
    model: LoopedDecoder,
    ids: Tensor,
    decide: Decide | float = 0.5,
    max_depth: int | None = None,
    run_all: Sequence[bool] | None = None,
    probes: bool = False,
) -> list[Told]:
    """Run one document."""
    if isinstance(decide, (int, float)):
        decide = by_threshold(model, [decide] * len(ids))
    ceiling = 1 if model.kind.single_pass else max_depth or model.loop.max_depth
    first, last = model.looped.start, model.looped.stop
    before, middle, after = (Span(model, layers) for layers in (range(first), model.looped, range(last, 99)))
    told: list[Told] = []
    for t, token in enumerate(ids.tolist()):
        embedding = model.embed_tokens.weight[token]
        anchor = before.run(embedding, (t, 1), [(s, 1) for s in range(t)])
        story = Told()
        survival = 1.0
        x = model.reentry.first(anchor[None])[0]
        while True:
            story.depth = m = story.depth + 1
            state = middle.run(x, (t, m), visible_to(model, told, t, m))
            state = state if model.kind.loops_middle else model.norm(state)
            logprobs = log_softmax(model.head_weight @ state)
            story.logprobs.append(logprobs)
            if m == ceiling:
                break
            if model.gate is not None:
                top = logprobs.exp().sort(descending=True).values[: model.gate.top_k]
                g = float(model.gate(embedding[None], state[None], top[None])[0].sigmoid())
                story.continue_probs.append(g)
                stays = decide(t, m, g, survival) or (run_all is not None and run_all[t])
                survival *= g
                if not stays:
                    break
            x = next_input(model, anchor, state, logprobs)
        if probes and story.depth < ceiling:
            x = next_input(model, anchor, state, logprobs)
            probed = middle.run(x, (t, m + 1), visible_to(model, told, t, m + 1), keep=False)
            story.probe = log_softmax(model.head_weight @ model.norm(probed))
        story.state = state
        if model.kind.loops_middle:
            story.state = model.norm(after.run(state, (t, 1), [(s, 1) for s in range(t)]))
            story.logprobs = [log_softmax(model.head_weight @ story.state)]
        story.mixed = mixture(model, story)
        told.append(story)
    return told


def visible_to(model: LoopedDecoder, told: list[Told], t: int, m: int) -> list[tuple[int, int]]:
    """Executed entries that (t, m) reads, its own key apart."""
    rule = model.kind.rule.name
    earlier = [
        (s, j)
        for s, story in enumerate(told)
        for j in range(1, story.depth + 1)
        if SEES_EARLIER[rule](j, m, story.depth)
    ]
    return earlier + [(t, j) for j in range(1, m) if SEES_OWN[rule](j, m)]


def next_input(model: LoopedDecoder, anchor: Tensor, state: Tensor, logprobs: Tensor) -> Tensor:
    probabilities, tokens = logprobs.exp().sort(descending=True)
    predicted = Predicted(tokens[None], probabilities[None])
    return model.reentry(anchor[None], state[None], predicted, model.embed_tokens.weight)[0]


def mixture(model: LoopedDecoder, story: Told) -> Tensor:
    depths = len(story.logprobs)
    weights = [0.0] * (depths - 1) + [1.0]
    if model.kind.output.value == "uniform-mixture":
        weights = [1 / depths] * depths
    if model.kind.output.value == "stopping-mixture":
        reach, weights = 1.0, []
        for m in range(depths - 1):
            weights.append(reach * (1 - story.continue_probs[m]))
            reach *= story.continue_probs[m]
        weights.append(reach)
    assert math.isclose(sum(weights), 1.0, rel_tol=1e-6)
    return sum(
        (w * q.double().exp() for w, q in zip(weights, story.logprobs, strict=True)), start=torch.tensor(0.0)
    ).log()


class Span:
    """Some layers, and the layer inputs of every entry that ran through them."""

    def __init__(self, model: LoopedDecoder, layers: range) -> None:
        self.blocks = [model.layers[i] for i in layers if i < len(model.layers)]
        self.frequencies, self.scale = rope_frequencies(model.backbone)
        self.inputs: dict[tuple[int, int], list[Tensor]] = {}

    def run(self, x: Tensor, entry: tuple[int, int], visible: list[tuple[int, int]], keep: bool = True) -> Tensor:
        """x `[d]` of `entry` through the layers, reading itself and the `visible` entries."""
        inputs = []
        for number, block in enumerate(self.blocks):
            inputs.append(x)
            read = [(self.inputs[other][number], other[0]) for other in visible] + [(x, entry[0])]
            x = x + self.attention(block, x, entry[0], read)
            x = x + block.mlp(block.post_attention_layernorm(x))
        if keep:
            self.inputs[entry] = inputs
        return x

    def attention(self, block, x: Tensor, position: int, read: list[tuple[Tensor, int]]) -> Tensor:
        part, norm = block.self_attn, block.input_layernorm
        query = self.rotated(part.q_norm(part.q_proj(norm(x)).view(-1, part.head_dim)), position)
        keys = [self.rotated(part.k_norm(part.k_proj(norm(y)).view(-1, part.head_dim)), at) for y, at in read]
        values = [part.v_proj(norm(y)).view(-1, part.head_dim) for y, _ in read]
        heads = []
        for head, q in enumerate(query):
            shared = head * len(keys[0]) // len(query)
            scores = torch.stack([q @ key[shared] for key in keys]) / math.sqrt(part.head_dim)
            heads.append(sum(w * value[shared] for w, value in zip(scores.softmax(0), values, strict=True)))
        return part.o_proj(torch.cat(heads))

    def rotated(self, x: Tensor, position: int) -> Tensor:
        """Each pair (i, i + half) of `[heads, head_dim]` turned by position x frequency i."""
        half, angle = x.shape[-1] // 2, position * self.frequencies
        a, b, cosine, sine = x[:, :half], x[:, half:], angle.cos() * self.scale, angle.sin() * self.scale
        return torch.cat([a * cosine - b * sine, b * cosine + a * sine], dim=-1)


def log_softmax(logits: Tensor) -> Tensor:
    return logits.float().log_softmax(-1)
