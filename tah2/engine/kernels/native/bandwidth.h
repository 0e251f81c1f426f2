// The yardstick: reading memory once, in order, and doing almost nothing with it.
#pragma once
#include "vector.h"

INLINE float read_all(const float* from, int64_t count, int threads) {
    constexpr int64_t STRIDE = 8 * WIDTH, PIECE = 1 << 16;
    float total = 0;
#pragma omp parallel for schedule(static) num_threads(threads) if (threads > 1) reduction(+ : total)
    for (int64_t start = 0; start < count; start += PIECE) {
        const int64_t end = std::min(start + PIECE, count);
        Vec sums[8] = {};
        int64_t i = start;
        for (; i + STRIDE <= end; i += STRIDE)
            for (int p = 0; p < 8; p++) {
                __builtin_prefetch(from + i + p * WIDTH + 1024);
                sums[p] += load(from + i + p * WIDTH);
            }
        for (int p = 0; p < 8; p++) total += sum(sums[p]);
        for (; i < end; i++) total += from[i];
    }
    return total;
}
