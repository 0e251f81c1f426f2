// Vectors of the widest width that the compiler's target has, through GCC/Clang vector extensions: one source
// becomes AVX-512, AVX2, NEON or SSE code. Loads and stores are unaligned.
#pragma once
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>

#if defined(_OPENMP)
#include <omp.h>
#endif
#if defined(__AVX__)
#include <immintrin.h>
#endif

#if defined(__AVX512F__)
constexpr int WIDTH = 16;
#elif defined(__AVX__)
constexpr int WIDTH = 8;
#else
constexpr int WIDTH = 4;
#endif

typedef float Vec __attribute__((vector_size(WIDTH * 4)));
typedef int32_t IntVec __attribute__((vector_size(WIDTH * 4)));
typedef uint32_t WordVec __attribute__((vector_size(WIDTH * 4)));
typedef uint16_t HalfVec __attribute__((vector_size(WIDTH * 2)));
typedef int8_t ByteVec __attribute__((vector_size(WIDTH)));

#define INLINE inline __attribute__((always_inline))

template <class To, class From> INLINE To bits(From from) {
    To to;
    static_assert(sizeof(to) == sizeof(from), "same number of bits");
    std::memcpy(&to, &from, sizeof(to));
    return to;
}

template <class V> INLINE V read(const void* from) {
    V v;
    std::memcpy(&v, from, sizeof(v));
    return v;
}

INLINE Vec splat(float x) { return x - Vec{}; }

// WIDTH weights as fp32, from each way of storing them: fp32, bf16 (the upper half of an fp32) and int8.
INLINE Vec load(const float* p) { return read<Vec>(p); }
INLINE Vec load(const uint16_t* p) { return bits<Vec>(__builtin_convertvector(read<HalfVec>(p), WordVec) << 16); }
INLINE Vec load(const int8_t* p) {
#if defined(__AVX512F__)  // compilers of today turn the portable conversion into scalar code
    return (Vec)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)p)));
#elif defined(__AVX2__)
    return (Vec)_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)p)));
#else
    return __builtin_convertvector(__builtin_convertvector(read<ByteVec>(p), IntVec), Vec);
#endif
}
INLINE void store(float* p, Vec v) { std::memcpy(p, &v, sizeof(v)); }

INLINE float sum(Vec v) {
#if defined(__AVX512F__)
    return _mm512_reduce_add_ps((__m512)v);
#else
    float parts[WIDTH], total[4] = {0, 0, 0, 0};
    store(parts, v);
    for (int i = 0; i < WIDTH; i++) total[i % 4] += parts[i];
    return (total[0] + total[2]) + (total[1] + total[3]);
#endif
}

INLINE float largest_of(Vec v) {
#if defined(__AVX512F__)
    return _mm512_reduce_max_ps((__m512)v);
#else
    float largest = v[0];
    for (int i = 1; i < WIDTH; i++) largest = std::max(largest, v[i]);
    return largest;
#endif
}

// Bit i: p[i] is not below the bound.
INLINE uint32_t reaching(const float* p, float bound) {
#if defined(__AVX512F__)
    return _mm512_cmp_ps_mask(_mm512_loadu_ps(p), _mm512_set1_ps(bound), _CMP_NLT_UQ);
#elif defined(__AVX__)
    return _mm256_movemask_ps(_mm256_cmp_ps(_mm256_loadu_ps(p), _mm256_set1_ps(bound), _CMP_NLT_UQ));
#else
    uint32_t lanes = 0;
    for (int i = 0; i < WIDTH; i++) lanes |= (uint32_t) !(p[i] < bound) << i;
    return lanes;
#endif
}

// One number, from each way of storing it; the loops' tails use it.
INLINE float load_one(const float* p) { return *p; }
INLINE float load_one(const uint16_t* p) { return bits<float>((uint32_t)*p << 16); }
INLINE void store_one(float* p, float x) { *p = x; }
INLINE void store_one(uint16_t* p, float x) {  // round to nearest, ties to even
    const uint32_t word = bits<uint32_t>(x);
    *p = x != x ? 0x7fc0 : (uint16_t)((word + 0x7fff + ((word >> 16) & 1)) >> 16);
}

// e^x to about 2 ulp: x = n ln 2 + r, a polynomial in r, n put into the exponent. Below -87 it gives almost zero.
INLINE Vec exponential(Vec x) {
    const Vec low = splat(-87.0f), high = splat(88.0f);
    x = x < low ? low : x;
    x = x > high ? high : x;
    const Vec shift = splat(12582912.0f);  // 1.5 * 2^23: adding it rounds to an integer
    const Vec n = (x * 1.44269504f + shift) - shift;
    const Vec r = (x - n * 0.693359375f) + n * 2.12194440e-4f;
    Vec p = splat(1.9875691500e-4f);
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * r * r + r + 1.0f;
    return bits<Vec>(bits<IntVec>(p) + (__builtin_convertvector(n, IntVec) << 23));
}

// Scratch memory of the calling thread that grows and is kept: allocating it per call would cost page faults.
enum Purpose { TILES_OF_X, PARTIALS, NORMED, PROJECTED, QUERY, INNER, PURPOSES };

INLINE float* scratch(Purpose purpose, size_t count) {
    static thread_local std::vector<float> buffers[PURPOSES];
    std::vector<float>& buffer = buffers[purpose];
    if (buffer.size() < count) buffer.resize(count);
    return buffer.data();
}
