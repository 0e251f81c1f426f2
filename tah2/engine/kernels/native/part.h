// A learned part of a loop: norms of its inputs side by side, a product, SwiGLU, a norm, and perhaps one score.
#pragma once
#include "block.h"

constexpr int INPUTS = 3;

struct Part {
    Weights fuse, gate_up, down;
    const float* input_norms[INPUTS];
    int64_t widths[INPUTS];  // 0: there is no such input
    const float* fused_norm;  // [width], or null
    const float* output_norm;
    const float* score;  // [width], or null
    float eps;
};

struct Inputs {
    const float* rows[INPUTS];
    int64_t strides[INPUTS];
};

// out [rows, width], or [rows] where there is a score.
INLINE void part_step(const Part& part, const Inputs& inputs, int64_t rows, float* out, int threads) {
    const int64_t all = part.fuse.inner, width = part.fuse.outputs;
    float* evidence = scratch(NORMED, rows * std::max(all, width));
    float* fused = scratch(PROJECTED, rows * width);
    float* inner = scratch(INNER, rows * part.down.inner);
    float* to = evidence;
    for (int i = 0; i < INPUTS; to += part.widths[i++])
        for (int64_t row = 0; part.widths[i] && row < rows; row++)
            normalise(inputs.rows[i] + row * inputs.strides[i], part.input_norms[i], part.widths[i], part.eps, to + row * all);
    linear(part.fuse, evidence, all, rows, fused, width, SET, threads);
    if (part.fused_norm) rms_norm(fused, width, part.fused_norm, rows, width, part.eps, fused);
    linear(part.gate_up, fused, width, rows, inner, part.down.inner, SWIGLU, threads);
    float* last = part.score ? evidence : out;
    linear(part.down, inner, part.down.inner, rows, last, width, SET, threads);
    rms_norm(last, width, part.output_norm, rows, width, part.eps, last);
    if (!part.score) return;
    for (int64_t row = 0; row < rows; row++) out[row] = dot(last + row * width, part.score, width);
}
