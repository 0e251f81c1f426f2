// The C interface: plain pointers and sizes, no state but scratch memory.
#include "bandwidth.h"
#include "mixing.h"
#include "part.h"

struct PoolView {  // bf16 or fp32
    void *key, *value;
    int64_t key_stride, value_stride, half;
};

template <class T> static Pool<T> pool_of(const PoolView& view) {
    return {(const T*)view.key, (const T*)view.value, view.key_stride, view.value_stride};
}

extern "C" {

int64_t tah2_vector_width() { return WIDTH; }

void tah2_linear(const Weights* weights, const float* x, int64_t x_stride, int64_t rows, float* y, int64_t finish,
                 int64_t threads) {
    linear(*weights, x, x_stride, rows, y, weights->outputs, (Finish)finish, (int)threads);
}

void tah2_attend(const float* query, const PoolView* pool, const Pass* pass, int64_t query_heads, int64_t key_heads,
                 int64_t width, float scale, float* out) {
    const Heads heads{query_heads, key_heads, width};
    const auto run = [&](auto typed) {
        attend(query, typed, pass->slots, pass->starts, pass->ends, pass->entries, heads, scale, out, (int)pass->threads);
    };
    pool->half ? run(pool_of<uint16_t>(*pool)) : run(pool_of<float>(*pool));
}

void tah2_block_step(const Block* block, const Pass* pass, const PoolView* pool, float* hidden) {
    if (pool->half) block_step(*block, *pass, pool_of<uint16_t>(*pool), hidden);
    else block_step(*block, *pass, pool_of<float>(*pool), hidden);
}

void tah2_rms_norm(const float* x, int64_t stride, const float* weight, int64_t rows, int64_t width, float eps, float* out) {
    rms_norm(x, stride, weight, rows, width, eps, out);
}

// `count` blocks, whose pools lie `key_layer` and `value_layer` numbers apart.
void tah2_blocks_step(const Block* blocks, int64_t count, const Pass* pass, const PoolView* pool, int64_t key_layer,
                      int64_t value_layer, float* hidden) {
    const auto run = [&](auto typed) {
        for (int64_t i = 0; i < count; i++) {
            block_step(blocks[i], *pass, typed, hidden);
            typed.key += key_layer, typed.value += value_layer;
        }
    };
    pool->half ? run(pool_of<uint16_t>(*pool)) : run(pool_of<float>(*pool));
}

void tah2_most_probable(const float* logits, int64_t stride, const int64_t* chosen, int64_t rows, int64_t width,
                        int64_t k, float* probability, int64_t* token, float* log_total, int64_t threads) {
    most_probable_rows(logits, stride, chosen, rows, width, k, probability, token, log_total, (int)threads);
}

void tah2_largest(const float* logits, int64_t stride, const int64_t* chosen, int64_t rows, int64_t width,
                  int64_t* index, int64_t threads) {
    largest_rows(logits, stride, chosen, rows, width, index, (int)threads);
}

void tah2_mix(const float* const* logits, const float* const* shares, const float* share_plus, const float* before,
              const float* after, int64_t rows, int64_t width, float* out, int64_t threads) {
    mix_rows({logits, shares, share_plus, before, after}, rows, width, out, (int)threads);
}

void tah2_part_step(const Part* part, const Inputs* inputs, int64_t rows, float* out, int64_t threads) {
    part_step(*part, *inputs, rows, out, (int)threads);
}

float tah2_read(const float* from, int64_t count, int64_t threads) { return read_all(from, count, (int)threads); }
}
