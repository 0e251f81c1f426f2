// What sampling needs to know of a row of logits: its maximum, where that is, and log sum exp.
#pragma once
#include "vector.h"

struct Summary {
    float* maximum;
    int64_t* index;  // the first of equal maxima
    float* logsumexp;
};

INLINE void summarise(const float* row, int64_t width, int64_t i, const Summary& summary) {
    Vec top = splat(-INFINITY), total = {};
    int64_t d = 0;
    for (; d + WIDTH <= width; d += WIDTH) {
        const Vec v = load(row + d);
        top = v > top ? v : top;
    }
    float maximum = -INFINITY, rest = 0;
    for (int p = 0; p < WIDTH; p++) maximum = std::max(maximum, top[p]);
    for (; d < width; d++) maximum = std::max(maximum, row[d]);
    for (d = 0; d + WIDTH <= width; d += WIDTH) total += exponential(load(row + d) - maximum);
    for (; d < width; d++) rest += std::exp(row[d] - maximum);
    summary.maximum[i] = maximum;
    summary.index[i] = std::find(row, row + width, maximum) - row;
    summary.logsumexp[i] = maximum + std::log(sum(total) + rest);
}

INLINE void summarise_rows(const float* logits, int64_t stride, int64_t rows, int64_t width, const Summary& summary, int threads) {
#pragma omp parallel for num_threads(threads) if (threads > 1 && rows > 1)
    for (int64_t i = 0; i < rows; i++) summarise(logits + i * stride, width, i, summary);
}
