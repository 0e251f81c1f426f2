// Attention of flat entries over a paged pool, read in place: entry i sees slots[starts[i] .. ends[i]).
//
// The work is cut into units of (entry, key-value head, chunk of keys). A unit serves all query heads that share the
// key-value head and leaves a partial softmax (maximum, sum, weighted values); partials of an entry are merged in
// order. Chunks have a fixed length, so a result depends neither on the batch nor on the number of threads.
#pragma once
#include "vector.h"

constexpr int64_t CHUNK = 256;
constexpr int64_t STEP = 8;  // keys whose values are added to an accumulator at a time; also the prefetch distance

template <class T> struct Pool {
    const T *key, *value;
    int64_t key_stride, value_stride;  // from slot to slot; heads and channels are dense
};

struct Heads {
    int64_t query, key, width;
    int64_t shared() const { return query / key; }  // query heads per key-value head
};

template <class T> INLINE float dot(const float* a, const T* b, int64_t width) {
    Vec total = {};
    int64_t d = 0;
    for (; d + WIDTH <= width; d += WIDTH) total += load(a + d) * load(b + d);
    float rest = 0;
    for (; d < width; d++) rest += a[d] * load_one(b + d);
    return sum(total) + rest;
}

template <class T> INLINE void prefetch(const T* row, int64_t width) {
    for (int64_t d = 0; d < width; d += 64 / (int64_t)sizeof(T)) __builtin_prefetch(row + d);
}

// total[width] += weights[j] * values[j] over `count` <= STEP keys.
template <class T>
INLINE void add_values(const float* weights, const T* const* values, int64_t count, float* total, int64_t width) {
    int64_t d = 0;
    for (; d + WIDTH <= width; d += WIDTH) {
        Vec acc = load(total + d);
        for (int64_t j = 0; j < count; j++) acc += splat(weights[j]) * load(values[j] + d);
        store(total + d, acc);
    }
    for (; d < width; d++)
        for (int64_t j = 0; j < count; j++) total[d] += weights[j] * load_one(values[j] + d);
}

// scores[0, count) become e^(score - maximum); returns their sum.
INLINE float exponentials(float* scores, int64_t count, float maximum) {
    float total = 0;
    for (int64_t j = 0; j < count; j += WIDTH) {
        Vec v = splat(-INFINITY);
        std::memcpy(&v, scores + j, std::min<int64_t>(WIDTH, count - j) * sizeof(float));
        v = exponential(v - maximum);
        std::memcpy(scores + j, &v, std::min<int64_t>(WIDTH, count - j) * sizeof(float));
    }
    for (int64_t j = 0; j < count; j++) total += scores[j];
    return total;
}

// One unit. partial[shared] of (values[width], maximum, sum).
template <class T>
void attend_chunk(const float* query, const Pool<T>& pool, const int32_t* slots, int64_t count, Heads heads,
                  int64_t head, float scale, float* partial) {
    const int64_t shared = heads.shared(), width = heads.width;
    float* scores = scratch(SCORES, shared * CHUNK);
    const auto key = [&](int64_t j) { return pool.key + slots[j] * pool.key_stride + head * width; };
    const auto value = [&](int64_t j) { return pool.value + slots[j] * pool.value_stride + head * width; };
    for (int64_t j = 0; j < count; j++) {
        if (j + STEP < count) prefetch(key(j + STEP), width);
        for (int64_t q = 0; q < shared; q++) scores[q * CHUNK + j] = dot(query + q * width, key(j), width) * scale;
    }
    for (int64_t q = 0; q < shared; q++, partial += width + 2) {
        std::memset(partial, 0, width * sizeof(float));
        partial[width] = *std::max_element(scores + q * CHUNK, scores + q * CHUNK + count);
        partial[width + 1] = exponentials(scores + q * CHUNK, count, partial[width]);
    }
    partial -= shared * (width + 2);
    for (int64_t j = 0; j < count; j += STEP) {
        const T* values[STEP];
        const int64_t keys = std::min(STEP, count - j);
        for (int64_t i = 0; i < keys; i++) values[i] = value(j + i);
        for (int64_t i = j + keys; i < std::min(j + 2 * STEP, count); i++) prefetch(value(i), width);
        for (int64_t q = 0; q < shared; q++)
            add_values(scores + q * CHUNK + j, values, keys, partial + q * (width + 2), width);
    }
}

// Merge `chunks` partials of one head, `stride` floats apart, into out[width].
INLINE void merge(const float* partial, int64_t chunks, int64_t stride, int64_t width, float* out) {
    float maximum = -INFINITY, total = 0;
    for (int64_t c = 0; c < chunks; c++) maximum = std::max(maximum, partial[c * stride + width]);
    std::memset(out, 0, width * sizeof(float));
    for (int64_t c = 0; c < chunks; c++) {
        const float* part = partial + c * stride;
        const float weight = chunks == 1 ? 1.0f : std::exp(part[width] - maximum);
        total += weight * part[width + 1];
        for (int64_t d = 0; d < width; d++) out[d] += weight * part[d];
    }
    for (int64_t d = 0; d < width; d++) out[d] /= total;
}

// query [entries, H, D] -> out [entries, H, D]; an entry that sees no key gets zeros.
template <class T>
void attend(const float* query, const Pool<T>& pool, const int32_t* slots, const int32_t* starts, const int32_t* ends,
            int64_t entries, Heads heads, float scale, float* out, int threads) {
    const int64_t shared = heads.shared(), width = heads.width, unit = shared * (width + 2);
    std::vector<int64_t> first(entries + 1, 0), entry_of;  // first[i]: chunks before entry i
    for (int64_t i = 0; i < entries; i++) {
        first[i + 1] = first[i] + (ends[i] - starts[i] + CHUNK - 1) / CHUNK;
        entry_of.resize(first[i + 1], i);
    }
    const int64_t chunks = first[entries];
    float* partials = scratch(PARTIALS, chunks * heads.key * unit);  // [chunks][key heads][shared][width + 2]
    if (chunks * heads.key < 2) threads = 1;
#pragma omp parallel num_threads(threads) if (threads > 1)
    {
#pragma omp for schedule(dynamic, 1)
        for (int64_t u = 0; u < chunks * heads.key; u++) {
            const int64_t chunk = u / heads.key, head = u % heads.key, i = entry_of[chunk];
            const int64_t from = starts[i] + (chunk - first[i]) * CHUNK, count = std::min(CHUNK, ends[i] - from);
            attend_chunk(query + (i * heads.query + head * shared) * width, pool, slots + from, count, heads, head,
                         scale, partials + u * unit);
        }
#pragma omp for schedule(static)
        for (int64_t i = 0; i < entries; i++)
            for (int64_t h = 0; h < heads.query; h++) {
                float* to = out + (i * heads.query + h) * width;
                const int64_t from = first[i] * heads.key + h / shared;
                if (first[i] == first[i + 1]) std::memset(to, 0, width * sizeof(float));
                else merge(partials + from * unit + h % shared * (width + 2), first[i + 1] - first[i], heads.key * unit, width, to);
            }
    }
}
