// The loops of limits.h with AVX2 and FMA.

#include <immintrin.h>

#include "limits.h"

namespace sameseed {
namespace {

#include "unroll.h"

constexpr int chains = 12;  // independent sums: two units with a latency of 4 to 5 cycles, and only 16 registers

INLINE float total(__m256 x) {
    alignas(32) float values[8];
    _mm256_store_ps(values, x);
    float sum = 0;
    for (float v : values) sum += v;
    return sum;
}

// pmaddubsw computes pairs of products and paddw adds them, as for codes of 4 bits. Leaves out that such sums must be
// widened from time to time. Codes of 8 bits take twice as many steps.
float run_int8(int64_t rounds) {
    __m256i sum[chains];
    unroll<chains>([&](auto i) INLINE_LAMBDA { sum[i] = _mm256_set1_epi32(i); });
    __m256i weight = _mm256_set1_epi8(7);
    const __m256i x = _mm256_set1_epi8(-3);
    for (int64_t r = 0; r < rounds; r++) {
        unroll<chains>([&](auto i) INLINE_LAMBDA {
            asm volatile("" : "+x"(weight));  // hides from the compiler that all chains compute the same product
            sum[i] = _mm256_add_epi16(sum[i], _mm256_maddubs_epi16(weight, x));
            asm volatile("" : "+x"(sum[i]));
        });
    }
    unroll<chains - 1>([&](auto i) INLINE_LAMBDA { sum[0] = _mm256_add_epi32(sum[0], sum[i + 1]); });
    return total(_mm256_cvtepi32_ps(sum[0]));
}

float run_fp32(int64_t rounds) {
    __m256 sum[chains];
    unroll<chains>([&](auto i) INLINE_LAMBDA { sum[i] = _mm256_set1_ps(static_cast<float>(i)); });
    __m256 a = _mm256_set1_ps(0.5f), b = _mm256_set1_ps(0.25f);
    asm volatile("" : "+x"(a), "+x"(b));
    for (int64_t r = 0; r < rounds; r++) unroll<chains>([&](auto i) INLINE_LAMBDA { sum[i] = _mm256_fmadd_ps(sum[i], a, b); });
    unroll<chains - 1>([&](auto i) INLINE_LAMBDA { sum[0] = _mm256_add_ps(sum[0], sum[i + 1]); });
    return total(sum[0]);
}

uint64_t read(const char* data, int64_t bytes, int64_t ahead) {
    constexpr int loads = read_step / 32;
    __m256i sum[4] = {};
    for (int64_t at = 0; at < bytes; at += read_step) {
        const char* from = data + at;
        unroll<read_step / 64>([&](auto i) INLINE_LAMBDA { _mm_prefetch(from + ahead + 64 * i, _MM_HINT_T0); });
        unroll<loads>([&](auto i) INLINE_LAMBDA {
            sum[i % 4] = _mm256_xor_si256(sum[i % 4], _mm256_load_si256(reinterpret_cast<const __m256i*>(from) + i));
        });
    }
    const __m256i all = _mm256_xor_si256(_mm256_xor_si256(sum[0], sum[1]), _mm256_xor_si256(sum[2], sum[3]));
    return static_cast<uint64_t>(_mm256_extract_epi64(all, 0) ^ _mm256_extract_epi64(all, 3));
}

}  // namespace

LimitLoops limits_avx2() {
    return {{"vpmaddubsw + vpaddw, 256 bits", chains * 64.0, run_int8}, {"vfmadd, 256 bits", chains * 16.0, run_fp32}, read};
}

}  // namespace sameseed
