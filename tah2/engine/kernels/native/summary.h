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

// The k most probable tokens of a row, descending, the first of equals first. Logits are put into groups, whose maxima
// are found in passing; the k-th largest maximum is a bound that at least k logits reach and few others do.
INLINE void most_probable(const float* row, int64_t width, int64_t k, float* probability, int64_t* token) {
    constexpr int64_t SPAN = 16, BLOCK = SPAN * WIDTH;  // group: lane l of the SPAN vectors of one block
    static thread_local std::vector<float> maxima, ranked;
    static thread_local std::vector<uint64_t> found;  // order of the logit, then of the token, as one number
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
    float bound = -INFINITY;
    if ((int64_t)maxima.size() > k) {
        ranked = maxima;
        std::nth_element(ranked.begin(), ranked.begin() + k - 1, ranked.end(), std::greater<float>());
        bound = ranked[k - 1];
    }
    found.clear();
    for (int64_t g = 0; g < (int64_t)maxima.size(); g++) {
        if (maxima[g] < bound) continue;
        for (int64_t i = g / WIDTH * BLOCK + g % WIDTH, v = 0; v < SPAN && i < width; v++, i += WIDTH)
            if (!(row[i] < bound)) found.push_back((uint64_t)descending(row[i]) << 32 | (uint32_t)i);
    }
    std::nth_element(found.begin(), found.begin() + k - 1, found.end());
    std::sort(found.begin(), found.begin() + k);
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
