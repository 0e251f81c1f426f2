// Attention of flat entries over a paged pool, read in place: entry i sees slots[starts[i] .. ends[i]).
//
// The work is cut into units of (entry, chunk of keys). A unit serves all heads and leaves a partial softmax for each
// (weighted values, maximum, sum); query heads that share a key-value head read it together. Partials of an entry are
// merged in order. Chunks have a fixed length, so a result depends neither on the batch nor on the number of threads.
// Rows of the pool are scattered, so the rows of the next chunk are asked for while this one is computed.
#pragma once
#include "vector.h"

constexpr int64_t CHUNK = 64;
constexpr int TOGETHER = 4;  // query heads that share one reading of keys and values
#if defined(__AVX512F__) || defined(__aarch64__)
constexpr int KEYS = 4;      // keys scored at a time: TOGETHER x KEYS accumulators
constexpr int CHANNELS = 4;  // vectors of a value summed at a time: TOGETHER x CHANNELS accumulators
#else
constexpr int KEYS = 2;
constexpr int CHANNELS = 2;
#endif

template <class T> struct Pool {
    const T *key, *value;
    int64_t key_stride, value_stride;  // from slot to slot; heads and channels are dense
};

struct Heads {
    int64_t query, key, width;
    int64_t shared() const { return query / key; }  // query heads per key-value head
};

// The rows of one chunk for one key-value head.
template <class T> struct Rows {
    const T* base;
    int64_t stride, count;
    const int32_t* slots;
    const T* operator[](int64_t j) const { return base + slots[j] * stride; }
};

// Asks for the keys and values of a later chunk, all heads, `each` rows at a time.
template <class T> struct Ahead {
    Rows<T> keys, values;
    int64_t row, each, at = 0;  // row: numbers per slot; at: rows asked for
    void some() {
        for (const int64_t end = std::min(at + each, 2 * keys.count); at < end; at++) {
            const T* from = at % 2 ? values[at / 2] : keys[at / 2];
            for (int64_t d = 0; d < row; d += 64 / (int64_t)sizeof(T)) __builtin_prefetch(from + d, 0, 2);
        }
    }
};

// scores[q][j] = scale * query q . key j for Q queries; scores past the last key are -inf up to a whole vector.
template <class T, int Q>
INLINE void score(const float* query, const Rows<T>& keys, Ahead<T>& ahead, int64_t width, float scale, float* scores) {
    for (int64_t j = 0; j < keys.count; j += KEYS) {
        const T* row[KEYS];
        Vec acc[Q][KEYS] = {};
        float rest[Q][KEYS] = {};
        for (int i = 0; i < KEYS; i++) row[i] = keys[std::min(j + i, keys.count - 1)];
        ahead.some();
        int64_t d = 0;
        for (; d + WIDTH <= width; d += WIDTH)
            for (int i = 0; i < KEYS; i++) {
                const Vec key = load(row[i] + d);
                for (int q = 0; q < Q; q++) acc[q][i] += load(query + q * width + d) * key;
            }
        for (; d < width; d++)
            for (int i = 0; i < KEYS; i++)
                for (int q = 0; q < Q; q++) rest[q][i] += query[q * width + d] * load_one(row[i] + d);
        for (int q = 0; q < Q; q++)
            for (int i = 0; i < KEYS; i++) scores[q * CHUNK + j + i] = (sum(acc[q][i]) + rest[q][i]) * scale;
    }
    for (int q = 0; q < Q; q++)
        for (int64_t j = keys.count; j % WIDTH; j++) scores[q * CHUNK + j] = -INFINITY;
}

// Scores become e^(score - maximum); the maximum and their sum go to where[0] and where[1].
INLINE void exponentials(float* scores, int64_t count, float* where) {
    Vec top = load(scores), total = {};
    for (int64_t j = WIDTH; j < count; j += WIDTH) {
        const Vec v = load(scores + j);
        top = v > top ? v : top;
    }
    float maximum = top[0];
    for (int i = 1; i < WIDTH; i++) maximum = std::max(maximum, top[i]);
    for (int64_t j = 0; j < count; j += WIDTH) {
        const Vec v = exponential(load(scores + j) - maximum);
        total += v;
        store(scores + j, v);
    }
    where[0] = maximum, where[1] = sum(total);
}

// out[q][PARTS_AT_ONCE vectors] = sum over keys of weights[q][j] * value j, for Q queries `stride` floats apart.
template <class T, int Q, int PARTS_AT_ONCE>
INLINE void weigh(const float* weights, const Rows<T>& values, int64_t d, float* out, int64_t stride) {
    Vec acc[Q][PARTS_AT_ONCE] = {};
    for (int64_t j = 0; j < values.count; j++)
        for (int p = 0; p < PARTS_AT_ONCE; p++) {
            const Vec value = load(values[j] + d + p * WIDTH);
            for (int q = 0; q < Q; q++) acc[q][p] += splat(weights[q * CHUNK + j]) * value;
        }
    for (int q = 0; q < Q; q++)
        for (int p = 0; p < PARTS_AT_ONCE; p++) store(out + q * stride + d + p * WIDTH, acc[q][p]);
}

// One chunk, one key-value head, Q of its query heads -> partial[Q] of (values[width], maximum, sum).
template <class T, int Q>
void attend_heads(const float* query, const Rows<T>& keys, const Rows<T>& values, Ahead<T>& ahead, int64_t width,
                  float scale, float* partial) {
    alignas(64) float scores[Q * CHUNK];
    score<T, Q>(query, keys, ahead, width, scale, scores);
    for (int q = 0; q < Q; q++) exponentials(scores + q * CHUNK, keys.count, partial + q * (width + 2) + width);
    int64_t d = 0;
    for (; d + CHANNELS * WIDTH <= width; d += CHANNELS * WIDTH) weigh<T, Q, CHANNELS>(scores, values, d, partial, width + 2);
    for (; d + WIDTH <= width; d += WIDTH) weigh<T, Q, 1>(scores, values, d, partial, width + 2);
    for (; d < width; d++)
        for (int q = 0; q < Q; q++) {
            float total = 0;
            for (int64_t j = 0; j < values.count; j++) total += scores[q * CHUNK + j] * load_one(values[j] + d);
            partial[q * (width + 2) + d] = total;
        }
}

// One unit: slots[0, count), of which slots[count, count + later) is what this thread probably does next.
template <class T>
void attend_chunk(const float* query, const Pool<T>& pool, const int32_t* slots, int64_t count, const int32_t* later,
                  int64_t later_count, Heads heads, float scale, float* partial) {
    const int64_t width = heads.width, shared = heads.shared();
    const int64_t steps = heads.key * ((shared + TOGETHER - 1) / TOGETHER) * ((count + KEYS - 1) / KEYS);
    Ahead<T> ahead{{pool.key, pool.key_stride, later_count, later}, {pool.value, pool.value_stride, later_count, later},
                   heads.key * width, (2 * later_count + steps - 1) / steps};
    for (int64_t head = 0; head < heads.key; head++) {
        const Rows<T> keys{pool.key + head * width, pool.key_stride, count, slots};
        const Rows<T> values{pool.value + head * width, pool.value_stride, count, slots};
        for (int64_t q = 0; q < shared; q += TOGETHER) {
            switch (std::min<int64_t>(TOGETHER, shared - q)) {
                case 1: attend_heads<T, 1>(query, keys, values, ahead, width, scale, partial); break;
                case 2: attend_heads<T, 2>(query, keys, values, ahead, width, scale, partial); break;
                case 3: attend_heads<T, 3>(query, keys, values, ahead, width, scale, partial); break;
                default: attend_heads<T, 4>(query, keys, values, ahead, width, scale, partial);
            }
            const int64_t done = std::min<int64_t>(TOGETHER, shared - q);
            query += done * width, partial += done * (width + 2);
        }
    }
}

// Merge `chunks` partials of one head, `stride` floats apart, into out[width]; zeros if there are none.
INLINE void merge(const float* partial, int64_t chunks, int64_t stride, int64_t width, float* out) {
    float maximum = -INFINITY, total = 0;
    for (int64_t c = 0; c < chunks; c++) maximum = std::max(maximum, partial[c * stride + width]);
    std::memset(out, 0, width * sizeof(float));
    for (int64_t c = 0; c < chunks; c++, partial += stride) {
        const float weight = std::exp(partial[width] - maximum);
        total += weight * partial[width + 1];
        for (int64_t d = 0; d < width; d++) out[d] += weight * partial[d];
    }
    for (int64_t d = 0; chunks && d < width; d++) out[d] /= total;
}

// query [entries, H, D] -> out [entries, H, D]; an entry that sees no key gets zeros.
template <class T>
void attend(const float* query, const Pool<T>& pool, const int32_t* slots, const int32_t* starts, const int32_t* ends,
            int64_t entries, Heads heads, float scale, float* out, int threads) {
    const int64_t width = heads.width, partial = width + 2, unit = heads.query * partial;
    std::vector<int64_t> first(entries + 1, 0), entry_of;  // first[i]: chunks before entry i
    for (int64_t i = 0; i < entries; i++) {
        first[i + 1] = first[i] + (ends[i] - starts[i] + CHUNK - 1) / CHUNK;
        entry_of.resize(first[i + 1], i);
    }
    const int64_t chunks = first[entries];
    float* partials = scratch(PARTIALS, chunks * unit);  // [chunks][H][width + 2]
    struct Span { int64_t entry; const int32_t* slots; int64_t count; };
    const auto chunk = [&](int64_t u) {
        const int64_t i = entry_of[u], from = starts[i] + (u - first[i]) * CHUNK;
        return Span{i, slots + from, std::min<int64_t>(CHUNK, ends[i] - from)};
    };
    if (chunks < 2) threads = 1;
    const int64_t grain = std::max<int64_t>(1, chunks / (4 * threads));
#pragma omp parallel num_threads(threads) if (threads > 1)
    {
#pragma omp for schedule(dynamic, grain)
        for (int64_t u = 0; u < chunks; u++) {
            const Span now = chunk(u), later = u + 1 < chunks ? chunk(u + 1) : Span{};
            attend_chunk(query + now.entry * heads.query * width, pool, now.slots, now.count, later.slots, later.count,
                         heads, scale, partials + u * unit);
        }
#pragma omp for schedule(static)
        for (int64_t i = 0; i < entries; i++)
            for (int64_t h = 0; h < heads.query; h++)
                merge(partials + first[i] * unit + h * partial, first[i + 1] - first[i], unit, width,
                      out + (i * heads.query + h) * width);
    }
}
