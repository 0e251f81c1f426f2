// y = x W^T (+ bias) for few rows, from weights packed once.
//
// Packed weights are panels of 16 outputs: panel[k][0..15], panels one after the other, the last one filled with
// zeros. Rows of x are packed per call into tiles x[k][0..R-1], so that one step over k reads R neighbouring floats
// and 16 neighbouring weights. Every output is one chain of multiply-adds over k in order: its value depends neither
// on the number of rows, nor on the tile that it falls into, nor on the number of threads.
#pragma once
#include <utility>

#include "vector.h"

constexpr int PANEL = 16;
constexpr int PARTS = PANEL / WIDTH;
constexpr int GROUP = 2;     // panels finished together: SWIGLU needs gate and up, int8 a second chain to hide latency
constexpr int AHEAD = 1024;  // weights to prefetch ahead of the one in use
#if defined(__AVX512F__)
constexpr int TILE = 16;  // accumulators: 16 of 32 registers
#elif defined(__AVX__) || defined(__aarch64__)
constexpr int TILE = 6;  // 6 x 2 of 16, or 6 x 4 of 32 registers
#else
constexpr int TILE = 2;
#endif
constexpr int TILES = 32;  // tiles that share one reading of the weights; their packed x comes from the caches

enum Storage { FP32 = 0, BF16 = 1, INT8 = 2 };
enum Finish { SET = 0, ADD = 1, SWIGLU = 2 };  // y = r; y += r; y = silu(r of even panels) * r of odd panels

struct Weights {
    const void* packed;  // [panels][inner][16]
    const float* scale;  // [panels * 16], or null
    const float* bias;   // [panels * 16], or null
    int64_t storage, panels, inner;
    int64_t outputs;  // columns of y: those packed, or half of them for SWIGLU
};

// R rows times COLUMNS panels into out[R][GROUP][16].
template <class W, int R, int COLUMNS> void multiply(const float* x, const W* panel, int64_t inner, float* out) {
    Vec acc[R][COLUMNS][PARTS] = {};
#pragma GCC unroll 4
    for (int64_t k = 0; k < inner; k++, x += R) {
#pragma GCC unroll 2
        for (int c = 0; c < COLUMNS; c++) {
            const W* w = panel + (c * inner + k) * PANEL;
            __builtin_prefetch(w + AHEAD);
#pragma GCC unroll 4
            for (int p = 0; p < PARTS; p++) {
                const Vec weights = load(w + p * WIDTH);
#pragma GCC unroll 16
                for (int r = 0; r < R; r++) acc[r][c][p] += splat(x[r]) * weights;
            }
        }
    }
    for (int r = 0; r < R; r++)
        for (int c = 0; c < COLUMNS; c++)
            for (int p = 0; p < PARTS; p++) store(out + (r * GROUP + c) * PANEL + p * WIDTH, acc[r][c][p]);
}

template <class W, int R> void multiply_group(const float* x, const W* panel, int64_t inner, int count, float* out) {
    if (sizeof(W) == 1 && R < 4 && count == GROUP) return multiply<W, R, GROUP>(x, panel, inner, out);
    for (int c = 0; c < count; c++) multiply<W, R, 1>(x, panel + c * inner * PANEL, inner, out + c * PANEL);
}

template <class W> using MultiplyGroup = void (*)(const float*, const W*, int64_t, int, float*);

template <class W, size_t... I> INLINE MultiplyGroup<W> pick(int rows, std::index_sequence<I...>) {
    static constexpr MultiplyGroup<W> by_rows[] = {multiply_group<W, I + 1>...};
    return by_rows[rows - 1];
}

template <class W> INLINE MultiplyGroup<W> rows_of(int rows) { return pick<W>(rows, std::make_index_sequence<TILE>()); }

// out[rows][GROUP][16] of panels first, first + 1 into rows of y.
INLINE void finish(const Weights& w, float* out, int rows, int64_t first, int count, float* y, int64_t stride, Finish how) {
    for (int r = 0; r < rows; r++, out += GROUP * PANEL, y += stride) {
        for (int i = 0; i < count * PANEL; i += WIDTH) {
            Vec v = load(out + i);
            if (w.scale) v *= load(w.scale + first * PANEL + i);
            if (w.bias) v += load(w.bias + first * PANEL + i);
            store(out + i, v);
        }
        if (how == SWIGLU)
            for (int i = 0; i < PANEL; i += WIDTH) {
                const Vec gate = load(out + i);
                store(out + i, gate / (1.0f + exponential(-gate)) * load(out + PANEL + i));
            }
        const int64_t column = how == SWIGLU ? first / 2 * PANEL : first * PANEL;
        const int64_t end = std::min<int64_t>(how == SWIGLU ? PANEL : count * PANEL, w.outputs - column);
        if (how == ADD)
            for (int64_t i = 0; i < end; i++) y[column + i] += out[i];
        else
            std::memcpy(y + column, out, end * sizeof(float));
    }
}

struct Tiling {  // rows split into tiles of nearly equal height
    int64_t rows, tiles;
    int64_t start(int64_t tile) const { return rows * tile / tiles; }
};

INLINE void pack_tile(const float* x, int64_t stride, int64_t rows, int64_t inner, float* tile) {
    for (int64_t r = 0; r < rows; r++)
        for (int64_t k = 0; k < inner; k++) tile[k * rows + r] = x[r * stride + k];
}

template <class W>
void linear_rows(const Weights& w, const float* x, int64_t x_stride, Tiling tiling, float* y, int64_t y_stride,
                 Finish how, int threads) {
    float* packed = tiling.rows == 1 ? nullptr : scratch(TILES_OF_X, tiling.rows * w.inner);
    const float* tiles = packed ? packed : x;
    const int64_t groups = (w.panels + GROUP - 1) / GROUP, grain = std::max<int64_t>(1, groups / (4 * threads));
#pragma omp parallel num_threads(threads) if (threads > 1)
    {
        if (packed) {
#pragma omp for schedule(static)
            for (int64_t t = 0; t < tiling.tiles; t++) {
                const int64_t row = tiling.start(t), rows = tiling.start(t + 1) - row;
                pack_tile(x + row * x_stride, x_stride, rows, w.inner, packed + row * w.inner);
            }
        }
        // Dynamic, because cores differ: in kind on many laptops, in what else they have to do everywhere.
#pragma omp for schedule(dynamic, grain)
        for (int64_t g = 0; g < groups; g++) {
            const int64_t panel = g * GROUP;
            const int count = (int)std::min<int64_t>(GROUP, w.panels - panel);
            const W* weights = (const W*)w.packed + panel * w.inner * PANEL;
            for (int64_t t = 0; t < tiling.tiles; t++) {
                alignas(64) float out[TILE * GROUP * PANEL];
                const int64_t row = tiling.start(t);
                const int rows = (int)(tiling.start(t + 1) - row);
                rows_of<W>(rows)(tiles + row * w.inner, weights, w.inner, count, out);
                finish(w, out, rows, panel, count, y + row * y_stride, y_stride, how);
            }
        }
    }
}

INLINE void linear(const Weights& w, const float* x, int64_t x_stride, int64_t rows, float* y, int64_t y_stride,
                   Finish how, int threads) {
    if (w.panels * w.inner < 4096) threads = 1;  // less work than waking a thread
    for (int64_t row = 0; row < rows; row += TILE * TILES) {
        const int64_t block = std::min<int64_t>(TILE * TILES, rows - row);
        const Tiling tiling{block, (block + TILE - 1) / TILE};
        const float* from = x + row * x_stride;
        float* to = y + row * y_stride;
        if (w.storage == FP32) linear_rows<float>(w, from, x_stride, tiling, to, y_stride, how, threads);
        if (w.storage == BF16) linear_rows<uint16_t>(w, from, x_stride, tiling, to, y_stride, how, threads);
        if (w.storage == INT8) linear_rows<int8_t>(w, from, x_stride, tiling, to, y_stride, how, threads);
    }
}
