// The mixture of one token's depths: what earlier depths left, and this depth's log-probabilities, added as
// probabilities.
#pragma once
#include "summary.h"

// log(1 + y) for y in [0, 1], to rounding: 2 artanh(y / (2 + y)) as a series.
INLINE Vec log_of_one_plus(Vec y) {
    const Vec s = y / (y + 2.0f), q = s * s;
    Vec p = splat(1.0f / 13);
    p = p * q + 1.0f / 11;
    p = p * q + 1.0f / 9;
    p = p * q + 1.0f / 7;
    p = p * q + 1.0f / 5;
    p = p * q + 1.0f / 3;
    return 2.0f * (s + s * q * p);
}

// log(e^a + e^b); -inf where both are.
INLINE Vec log_of_sum(Vec a, Vec b) {
    const Vec high = a > b ? a : b, low = a > b ? b : a;
    return high + log_of_one_plus(exponential(low == high ? Vec{} : low - high));
}

struct Mixture {
    const float* const* logits;
    const float* const* shares;  // of earlier depths, or null
    const float* share_plus;     // [rows]: what is to be added to each share
    const float* before;         // [rows]
    const float* after;          // [rows], or null
};

// out = log(e^(share + plus) + e^(before + log_softmax(logits))) + after; without a share the second term alone.
INLINE void mix_row(const float* logits, const float* share, float plus, float before, float after, int64_t width, float* out) {
    const Blocks blocks(logits, width);
    Exponentials sum;
    for (int64_t b = 0; b < blocks.count; b++) sum.add(blocks[b], largest_of(tops_of(blocks[b])));
    const float offset = before - std::log(sum.total());
    const auto mixed = [&](const float* own, const float* earlier, float* to) {
        Vec v = (load(own) - sum.maximum) + offset;
        if (earlier) v = log_of_sum(load(earlier) + plus, v);
        store(to, v + after);
    };
    int64_t i = 0;
    for (; i + WIDTH <= width; i += WIDTH) mixed(logits + i, share ? share + i : nullptr, out + i);
    if (i == width) return;
    float own[WIDTH] = {}, earlier[WIDTH] = {}, last[WIDTH];
    const int64_t bytes = (width - i) * sizeof(float);
    std::memcpy(own, logits + i, bytes);
    if (share) std::memcpy(earlier, share + i, bytes);
    mixed(own, share ? earlier : nullptr, last);
    std::memcpy(out + i, last, bytes);
}

INLINE void mix_rows(const Mixture mixture, int64_t rows, int64_t width, float* out, int threads) {
#pragma omp parallel for num_threads(threads) if (threads > 1 && rows > 1)
    for (int64_t i = 0; i < rows; i++)
        mix_row(mixture.logits[i], mixture.shares ? mixture.shares[i] : nullptr,
                mixture.shares ? mixture.share_plus[i] : 0, mixture.before[i], mixture.after ? mixture.after[i] : 0, width,
                out + i * width);
}
