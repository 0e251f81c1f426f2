// What sampling and the decider need to know of a row of logits: where its maximum is, and the most probable tokens.
#pragma once
#include <utility>

#include "vector.h"

constexpr int64_t SPAN = 16, BLOCK = SPAN * WIDTH;

// A row in blocks of BLOCK numbers; what the last one lacks is -inf.
struct Blocks {
    Blocks(const float* row, int64_t width) : row(row), whole(width / BLOCK), count((width + BLOCK - 1) / BLOCK) {
        std::fill(rest, rest + BLOCK, -INFINITY);
        std::copy(row + whole * BLOCK, row + width, rest);
    }
    const float* operator[](int64_t block) const { return block < whole ? row + block * BLOCK : rest; }

    const float* row;
    int64_t whole, count;
    alignas(64) float rest[BLOCK];
};

// The largest of each lane of a block; what is not a number is passed over.
INLINE Vec tops_of(const float* block) {
    Vec top = splat(-INFINITY);
    for (int64_t v = 0; v < SPAN; v++) {
        const Vec next = load(block + v * WIDTH);
        top = next > top ? next : top;
    }
    return top;
}

// The sum of e^(x - maximum) over blocks that come one after the other.
struct Exponentials {
    float maximum = -INFINITY;
    Vec parts = {};

    INLINE void add(const float* block, float peak) {
        if (peak > maximum) {
            parts *= std::exp(maximum - peak);
            maximum = peak;
        }
        if (maximum == -INFINITY) return;
        for (int64_t v = 0; v < SPAN; v++) parts += exponential(load(block + v * WIDTH) - maximum);
    }
    INLINE float total() const { return sum(parts); }
};

// Where the largest of a row is; the first of equals.
INLINE int64_t largest(const float* row, int64_t width) {
    const Blocks blocks(row, width);
    float maximum = -INFINITY;
    int64_t where = 0;
    for (int64_t b = 0; b < blocks.count; b++) {
        const float peak = largest_of(tops_of(blocks[b]));
        if (peak > maximum) maximum = peak, where = b;
    }
    const int64_t lane = std::find(blocks[where], blocks[where] + BLOCK, maximum) - blocks[where];
    const int64_t at = where * BLOCK + lane;
    return lane < BLOCK && at < width ? at : 0;  // 0 where nothing is a number
}

// Of the rows that `chosen` names; null: of all, in order.
INLINE void largest_rows(const float* logits, int64_t stride, const int64_t* chosen, int64_t rows, int64_t width,
                         int64_t* index, int threads) {
#pragma omp parallel for num_threads(threads) if (threads > 1 && rows > 1)
    for (int64_t i = 0; i < rows; i++) index[i] = largest(logits + (chosen ? chosen[i] : i) * stride, width);
}

// A number that falls as x grows; the largest of all where x is not a number.
INLINE uint32_t descending(float x) {
    if (x != x) return UINT32_MAX;
    const uint32_t word = bits<uint32_t>(x + 0.0f);  // -0 becomes 0
    return word >> 31 ? word : ~(word | 0x80000000u);
}

// A number that at least k of the `values` reach and few others do: the smallest of the histogram's bins, counted from
// the maximum down, that together hold k. Values far below the maximum share the last bin.
INLINE float bound_of(const std::vector<float>& values, int64_t k, float maximum) {
    constexpr int BINS = 1024;
    constexpr float PER_UNIT = 32;  // bins of 1/32; a logit 32 below the maximum has no probability to speak of
    if ((int64_t)values.size() <= k || !std::isfinite(maximum)) return -INFINITY;
    int32_t count[BINS] = {};
    for (const float value : values) count[(int)std::min<float>(BINS - 1, (maximum - value) * PER_UNIT)]++;
    int bin = 0;
    for (int64_t held = count[0]; held < k; held += count[bin]) bin++;
    // One bin of slack, so that rounding in (maximum - value) cannot lose a value that was counted.
    return bin >= BINS - 1 ? -INFINITY : maximum - (bin + 2) / PER_UNIT;
}

// Sorts numbers by their upper half, ascending, and leaves equals as they stand.
INLINE void sort_words(std::vector<uint64_t>& words, std::vector<uint64_t>& spare, int64_t count) {
    constexpr int BYTES = 4, VALUES = 256;
    uint32_t places[BYTES][VALUES] = {};
    for (int64_t i = 0; i < count; i++)
        for (int byte = 0; byte < BYTES; byte++) places[byte][words[i] >> (32 + 8 * byte) & 255]++;
    for (int byte = 0; byte < BYTES; byte++) {
        uint32_t* place = places[byte];
        const int shift = 32 + 8 * byte;
        if (place[words[0] >> shift & 255] == count) continue;
        for (uint32_t next = 0, value = 0; value < VALUES; value++) next += std::exchange(place[value], next);
        for (int64_t i = 0; i < count; i++) spare[place[words[i] >> shift & 255]++] = words[i];
        words.swap(spare);
    }
}

// The k most probable tokens of a row, descending, the first of equals first. The maxima of groups (a lane of a block)
// are found in passing; a bound that k of them reach is one that at least k logits reach and few others do.
// Returns log sum exp.
INLINE float most_probable(const float* row, int64_t width, int64_t k, float* probability, int64_t* token) {
    static thread_local std::vector<float> tops;
    static thread_local std::vector<uint64_t> found, spare;  // order of the logit, then its token, as one number
    const Blocks blocks(row, width);
    Exponentials sum;
    tops.resize(blocks.count * WIDTH);
    for (int64_t b = 0; b < blocks.count; b++) {
        const Vec top = tops_of(blocks[b]);
        store(tops.data() + b * WIDTH, top);
        sum.add(blocks[b], largest_of(top));
    }
    const float bound = bound_of(tops, k, sum.maximum);
    if ((int64_t)found.size() < width) found.resize(width), spare.resize(width);
    int64_t count = 0;
    for (int64_t b = 0; b < blocks.count; b++) {
        if (!reaching(tops.data() + b * WIDTH, bound)) continue;
        for (int64_t v = 0; v < SPAN; v++)
            for (uint32_t lanes = reaching(blocks[b] + v * WIDTH, bound); lanes; lanes &= lanes - 1) {
                const int64_t at = v * WIDTH + __builtin_ctz(lanes), id = b * BLOCK + at;
                if (id < width) found[count++] = (uint64_t)descending(blocks[b][at]) << 32 | (uint32_t)id;
            }
    }
    if (count > 4 * k) {  // the bound is loose where rows are flat
        std::nth_element(found.begin(), found.begin() + k - 1, found.begin() + count);
        std::sort(found.begin(), found.begin() + k);
    } else {
        sort_words(found, spare, count);
    }
    for (int64_t i = 0; i < k; i++) {
        token[i] = (uint32_t)found[i];
        probability[i] = row[token[i]];
    }
    const float total = sum.total(), scale = 1 / total;
    int64_t i = 0;
    for (; i + WIDTH <= k; i += WIDTH) store(probability + i, exponential(load(probability + i) - sum.maximum) * scale);
    for (; i < k; i++) probability[i] = std::exp(probability[i] - sum.maximum) * scale;
    return sum.maximum + std::log(total);
}

// Of the rows that `chosen` names; null: of all, in order.
INLINE void most_probable_rows(const float* logits, int64_t stride, const int64_t* chosen, int64_t rows, int64_t width,
                               int64_t k, float* probability, int64_t* token, float* log_total, int threads) {
#pragma omp parallel for num_threads(threads) if (threads > 1 && rows > 1)
    for (int64_t i = 0; i < rows; i++)
        log_total[i] = most_probable(logits + (chosen ? chosen[i] : i) * stride, width, k, probability + i * k, token + i * k);
}
