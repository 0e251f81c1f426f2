"""The kernels of `attention.py`. Import this only where there is a GPU: Triton comes with PyTorch for GPUs alone."""

# mypy: disable-error-code="no-untyped-def,untyped-decorator"

import triton
import triton.language as tl


@triton.jit
def attend(
    query,
    keys,
    values,
    slots,
    offsets,
    summed,
    largest,
    weight,
    scale,
    key_stride,
    value_stride,
    GROUP: tl.constexpr,
    GROUP_ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
    COLUMNS: tl.constexpr,
    KEYS: tl.constexpr,
    PARTS: tl.constexpr,
):
    """One part of one query's list, for the query heads that share a key head."""
    row, head, part = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    kv_heads = tl.num_programs(1)
    begin, end = tl.load(offsets + row), tl.load(offsets + row + 1)
    each = tl.cdiv(tl.cdiv(end - begin, PARTS), KEYS) * KEYS
    first = begin + part * each
    last = tl.minimum(first + each, end)
    group, column = tl.arange(0, GROUP_ROWS), tl.arange(0, COLUMNS)
    inside = column < WIDTH
    real = (group < GROUP)[:, None] & inside[None, :]
    owner = (row * kv_heads + head) * GROUP + group
    q = tl.load(query + owner[:, None] * WIDTH + column[None, :], mask=real, other=0.0)
    top = tl.full([GROUP_ROWS], float("-inf"), tl.float32)
    total = tl.zeros([GROUP_ROWS], tl.float32)
    sums = tl.zeros([GROUP_ROWS, COLUMNS], tl.float32)
    for start in range(first, last, KEYS):
        place = start + tl.arange(0, KEYS)
        seen = place < last
        slot = tl.load(slots + place, mask=seen, other=0).to(tl.int64)
        readable = seen[:, None] & inside[None, :]
        inner = head * WIDTH + column[None, :]
        k = tl.load(keys + slot[:, None] * key_stride + inner, mask=readable, other=0.0)
        score = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
        score = tl.where(seen[None, :], score, float("-inf"))
        higher = tl.maximum(top, tl.max(score, 1))
        chance = tl.exp(score - higher[:, None])
        fade = tl.exp(top - higher)
        v = tl.load(values + slot[:, None] * value_stride + inner, mask=readable, other=0.0)
        sums = sums * fade[:, None] + tl.dot(chance.to(v.dtype), v, input_precision="ieee")
        total = total * fade + tl.sum(chance, 1)
        top = higher
    at = owner * PARTS + part
    tl.store(summed + at[:, None] * WIDTH + column[None, :], sums, mask=real)
    tl.store(largest + at, top, mask=group < GROUP)
    tl.store(weight + at, total, mask=group < GROUP)


@triton.jit
def join(summed, largest, weight, out, WIDTH: tl.constexpr, COLUMNS: tl.constexpr, PARTS: tl.constexpr):
    """The parts of one query head, each scaled to the largest score of all."""
    owner = tl.program_id(0) * tl.num_programs(1) + tl.program_id(1)
    part, column = tl.arange(0, PARTS), tl.arange(0, COLUMNS)
    inside = column < WIDTH
    top = tl.load(largest + owner * PARTS + part)
    share = tl.where(top == float("-inf"), 0.0, tl.exp(top - tl.max(top, 0)))
    at = (owner * PARTS + part)[:, None] * WIDTH + column[None, :]
    sums = tl.sum(tl.load(summed + at, mask=inside[None, :], other=0.0) * share[:, None], 0)
    total = tl.sum(tl.load(weight + owner * PARTS + part) * share, 0)
    result = tl.where(total == 0, 0.0, sums / total)
    tl.store(out + owner * WIDTH + column, result.to(out.dtype.element_ty), mask=inside)
