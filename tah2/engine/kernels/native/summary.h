// What sampling and the decider need to know of a row of logits: its maximum, where that is, log sum exp, and the
// most probable tokens.
#pragma once
#include <functional>

#include "vector.h"

struct Summary {
    float* maximum;
    int64_t* index;  // the first of equal maxima
    float* logsumexp;  // null: only the index is wanted
};

INLINE float maximum_of(const float* row, int64_t width) {
    Vec top = splat(-INFINITY);
    int64_t d = 0;
    for (; d + WIDTH <= width; d += WIDTH) {
        const Vec v = load(row + d);
        top = v > top ? v : top;
    }
    float maximum = -INFINITY;
    for (int p = 0; p < WIDTH; p++) maximum = std::max(maximum, top[p]);
    for (; d < width; d++) maximum = std::max(maximum, row[d]);
    return maximum;
}

INLINE float sum_of_exponentials(const float* row, int64_t width, float maximum) {
    Vec total = {};
    float rest = 0;
    int64_t d = 0;
    for (; d + WIDTH <= width; d += WIDTH) total += exponential(load(row + d) - maximum);
    for (; d < width; d++) rest += std::exp(row[d] - maximum);
    return sum(total) + rest;
}

INLINE int64_t first_of(const float* row, int64_t width, float value) {
    const int64_t at = std::find(row, row + width, value) - row;
    return at < width ? at : 0;
}

INLINE void summarise(const float* row, int64_t width, int64_t i, const Summary& summary) {
    const float maximum = maximum_of(row, width);
    summary.index[i] = first_of(row, width, maximum);
    if (!summary.logsumexp) return;
    summary.maximum[i] = maximum;
    summary.logsumexp[i] = maximum + std::log(sum_of_exponentials(row, width, maximum));
}

INLINE void summarise_rows(const float* logits, int64_t stride, int64_t rows, int64_t width, const Summary& summary, int threads) {
#pragma omp parallel for num_threads(threads) if (threads > 1 && rows > 1)
    for (int64_t i = 0; i < rows; i++) summarise(logits + i * stride, width, i, summary);
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

// Sorts numbers whose lower half is below 2^22 (a token), ascending: five passes over their digits of 11 bits.
INLINE void sort_words(std::vector<uint64_t>& words, std::vector<uint64_t>& spare) {
    constexpr int BITS = 11, DIGITS = 1 << BITS;
    spare.resize(words.size());
    for (const int shift : {0, 11, 32, 43, 54}) {
        uint32_t place[DIGITS] = {};
        for (const uint64_t word : words) place[(word >> shift) & (DIGITS - 1)]++;
        uint32_t next = 0;
        for (uint32_t& here : place) next += std::exchange(here, next);
        for (const uint64_t word : words) spare[place[(word >> shift) & (DIGITS - 1)]++] = word;
        words.swap(spare);
    }
}

// The k most probable tokens of a row, descending, the first of equals first. Logits are put into groups, whose maxima
// are found in passing; a bound that k of the maxima reach is one that at least k logits reach and few others do.
INLINE void most_probable(const float* row, int64_t width, int64_t k, float* probability, int64_t* token) {
    constexpr int64_t SPAN = 16, BLOCK = SPAN * WIDTH;  // group: lane l of the SPAN vectors of one block
    static thread_local std::vector<float> maxima;
    static thread_local std::vector<uint64_t> found, spare;  // order of the logit, then its token, as one number
    maxima.assign((width + BLOCK - 1) / BLOCK * WIDTH, -INFINITY);
    float maximum = -INFINITY;
    int64_t d = 0;
    for (; d + BLOCK <= width; d += BLOCK) {
        Vec top = load(row + d);
        for (int64_t v = 1; v < SPAN; v++) {
            const Vec next = load(row + d + v * WIDTH);
            top = next > top ? next : top;
        }
        store(maxima.data() + d / SPAN, top);
    }
    for (; d < width; d++) {
        float& top = maxima[d / BLOCK * WIDTH + d % WIDTH];
        top = std::max(top, row[d]);
    }
    for (const float top : maxima) maximum = std::max(maximum, top);
    const float bound = bound_of(maxima, k, maximum);
    found.clear();
    for (int64_t first = 0; first < width; first += BLOCK)
        for (int64_t lane = 0; lane < WIDTH; lane++) {
            if (maxima[first / SPAN + lane] < bound) continue;
            for (int64_t i = first + lane, v = 0; v < SPAN && i < width; v++, i += WIDTH)
                if (!(row[i] < bound)) found.push_back((uint64_t)descending(row[i]) << 32 | (uint32_t)i);
        }
    if ((int64_t)found.size() > 4 * k) {  // the bound is loose where rows are flat
        std::nth_element(found.begin(), found.begin() + k - 1, found.end());
        found.resize(k);
    }
    sort_words(found, spare);
    const float total = sum_of_exponentials(row, width, maximum);
    for (int64_t i = 0; i < k; i++) {
        token[i] = (uint32_t)found[i];
        probability[i] = std::exp(row[token[i]] - maximum) / total;
    }
}

// Of the rows that `chosen` names.
INLINE void most_probable_rows(const float* logits, int64_t stride, const int64_t* chosen, int64_t rows, int64_t width,
                               int64_t k, float* probability, int64_t* token, int threads) {
#pragma omp parallel for num_threads(threads) if (threads > 1 && rows > 1)
    for (int64_t i = 0; i < rows; i++)
        most_probable(logits + chosen[i] * stride, width, k, probability + i * k, token + i * k);
}
