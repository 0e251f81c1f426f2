// The small operations between the products, and one decoder block made of all of them.
#pragma once
#include "attention.h"
#include "linear.h"

INLINE float dot(const float* x, const float* y, int64_t width) {
    Vec total = {};
    int64_t i = 0;
    for (; i + WIDTH <= width; i += WIDTH) total += load(x + i) * load(y + i);
    float rest = 0;
    for (; i < width; i++) rest += x[i] * y[i];
    return sum(total) + rest;
}

// One row: x / rms(x) * weight.
INLINE void normalise(const float* x, const float* weight, int64_t width, float eps, float* out) {
    const float scale = 1.0f / std::sqrt(dot(x, x, width) / width + eps);
    for (int64_t i = 0; i < width; i++) out[i] = x[i] * scale * weight[i];
}

INLINE void rms_norm(const float* x, int64_t stride, const float* weight, int64_t rows, int64_t width, float eps, float* out) {
    for (int64_t i = 0; i < rows; i++) normalise(x + i * stride, weight, width, eps, out + i * width);
}

// One head: the two halves rotated by angles whose cosines and sines [width] are given.
template <class T> INLINE void rotate(const float* x, const float* cosine, const float* sine, int64_t width, T* out) {
    const int64_t half = width / 2;
    for (int64_t i = 0; i < half; i++) {
        store_one(out + i, x[i] * cosine[i] - x[i + half] * sine[i]);
        store_one(out + i + half, x[i + half] * cosine[i + half] + x[i] * sine[i + half]);
    }
}

struct Rotary {
    const float *cosine, *sine;           // [entries, width]
    const float *query_norm, *key_norm;   // [width], or null
    float eps;
};

// projected [entries, (H + 2G) D] -> rotated query [entries, H, D]; rotated keys and values into the pool at `targets`.
template <class T>
void rotate_and_store(float* projected, const Rotary& rotary, Pool<T> pool, const int32_t* targets, int64_t entries,
                      Heads heads, float* query) {
    const int64_t width = heads.width, row = (heads.query + 2 * heads.key) * width;
    for (int64_t i = 0; i < entries; i++) {
        const float *cosine = rotary.cosine + i * width, *sine = rotary.sine + i * width;
        float *q = projected + i * row, *k = q + heads.query * width, *v = k + heads.key * width;
        T* key = const_cast<T*>(pool.key) + targets[i] * pool.key_stride;
        T* value = const_cast<T*>(pool.value) + targets[i] * pool.value_stride;
        for (int64_t h = 0; h < heads.query; h++) {
            if (rotary.query_norm) normalise(q + h * width, rotary.query_norm, width, rotary.eps, q + h * width);
            rotate(q + h * width, cosine, sine, width, query + (i * heads.query + h) * width);
        }
        for (int64_t h = 0; h < heads.key; h++) {
            if (rotary.key_norm) normalise(k + h * width, rotary.key_norm, width, rotary.eps, k + h * width);
            rotate(k + h * width, cosine, sine, width, key + h * width);
        }
        for (int64_t d = 0; d < heads.key * width; d++) store_one(value + d, v[d]);
    }
}

struct Block {
    Weights qkv, output, gate_up, down;
    const float *input_norm, *post_norm;  // [hidden]
    const float *query_norm, *key_norm;   // [head width], or null
    Heads heads;
    float eps, scale;
};

struct Pass {  // what all blocks of one pass share
    const float *cosine, *sine;  // [entries, head width]
    const int32_t *targets, *slots, *starts, *ends;
    int64_t entries, threads;
};

// hidden [entries, width] is updated in place.
template <class T> void block_step(const Block& block, const Pass& pass, const Pool<T>& pool, float* hidden) {
    const Heads heads = block.heads;
    const int64_t width = block.qkv.inner, n = pass.entries, query_width = heads.query * heads.width;
    const int threads = (int)pass.threads;
    float* normed = scratch(NORMED, n * std::max(width, query_width));
    float* projected = scratch(PROJECTED, n * block.qkv.outputs);
    float* query = scratch(QUERY, n * query_width);
    float* inner = scratch(INNER, n * block.down.inner);
    rms_norm(hidden, width, block.input_norm, n, width, block.eps, normed);
    linear(block.qkv, normed, width, n, projected, block.qkv.outputs, SET, threads);
    const Rotary rotary{pass.cosine, pass.sine, block.query_norm, block.key_norm, block.eps};
    rotate_and_store(projected, rotary, pool, pass.targets, n, heads, query);
    attend(query, pool, pass.slots, pass.starts, pass.ends, n, heads, block.scale, normed, threads);
    linear(block.output, normed, query_width, n, hidden, width, ADD, threads);
    rms_norm(hidden, width, block.post_norm, n, width, block.eps, normed);
    linear(block.gate_up, normed, width, n, inner, block.down.inner, SWIGLU, threads);
    linear(block.down, inner, block.down.inner, n, hidden, width, ADD, threads);
}
