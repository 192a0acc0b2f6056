// The loops of limits.h with AVX-512 (F, BW, DQ, VL).

#include <immintrin.h>

#include "limits.h"

// GCC 12 warns wrongly about the "undefined" operands of its own intrinsics.
#pragma GCC diagnostic ignored "-Wuninitialized"
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"

namespace sameseed {
namespace {

#include "unroll.h"

constexpr int chains = 16;  // independent sums: two units with a latency of 4 to 5 cycles

float run_int8(int64_t rounds) {
    __m512i sum[chains];
    unroll<chains>([&](auto i) INLINE_LAMBDA { sum[i] = _mm512_set1_epi32(i); });
    __m512i weight = _mm512_set1_epi8(7);
    const __m512i x = _mm512_set1_epi8(-3), ones = _mm512_set1_epi16(1);
    for (int64_t r = 0; r < rounds; r++) {
        unroll<chains>([&](auto i) INLINE_LAMBDA {
            asm volatile("" : "+v"(weight));  // hides from the compiler that all chains compute the same product
            const __m512i pairs = _mm512_maddubs_epi16(weight, x);
            sum[i] = _mm512_add_epi32(sum[i], _mm512_madd_epi16(pairs, ones));
            asm volatile("" : "+v"(sum[i]));
        });
    }
    unroll<chains - 1>([&](auto i) INLINE_LAMBDA { sum[0] = _mm512_add_epi32(sum[0], sum[i + 1]); });
    return static_cast<float>(_mm512_reduce_add_epi32(sum[0]));
}

float run_fp32(int64_t rounds) {
    __m512 sum[chains];
    unroll<chains>([&](auto i) INLINE_LAMBDA { sum[i] = _mm512_set1_ps(static_cast<float>(i)); });
    __m512 a = _mm512_set1_ps(0.5f), b = _mm512_set1_ps(0.25f);
    asm volatile("" : "+v"(a), "+v"(b));
    for (int64_t r = 0; r < rounds; r++) unroll<chains>([&](auto i) INLINE_LAMBDA { sum[i] = _mm512_fmadd_ps(sum[i], a, b); });
    unroll<chains - 1>([&](auto i) INLINE_LAMBDA { sum[0] = _mm512_add_ps(sum[0], sum[i + 1]); });
    return _mm512_reduce_add_ps(sum[0]);
}

uint64_t read(const char* data, int64_t bytes, int64_t ahead) {
    constexpr int lines = read_step / 64;
    __m512i sum[4] = {};
    for (int64_t at = 0; at < bytes; at += read_step) {
        const char* from = data + at;
        unroll<lines>([&](auto i) INLINE_LAMBDA { _mm_prefetch(from + ahead + 64 * i, _MM_HINT_T0); });
        unroll<lines>([&](auto i) INLINE_LAMBDA { sum[i % 4] = _mm512_xor_si512(sum[i % 4], _mm512_load_si512(from + 64 * i)); });
    }
    const __m512i all = _mm512_xor_si512(_mm512_xor_si512(sum[0], sum[1]), _mm512_xor_si512(sum[2], sum[3]));
    return static_cast<uint64_t>(_mm512_reduce_or_epi64(all));
}

}  // namespace

LimitLoops limits_avx512() {
    return {{"vpmaddubsw, 512 bits", chains * 128.0, run_int8}, {"vfmadd, 512 bits", chains * 32.0, run_fp32}, read};
}

}  // namespace sameseed
