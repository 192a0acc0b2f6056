// The loop of limits.h with vpdpbusd (AVX-512 VNNI).

#include <immintrin.h>

#include "limits.h"

// GCC 12 warns wrongly about the "undefined" operands of its own intrinsics.
#pragma GCC diagnostic ignored "-Wuninitialized"
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"

namespace sameseed {
namespace {

#include "unroll.h"

constexpr int chains = 16;  // independent sums: two units with a latency of 4 to 5 cycles

float run(int64_t rounds) {
    __m512i sum[chains];
    unroll<chains>([&](auto i) INLINE_LAMBDA { sum[i] = _mm512_set1_epi32(i); });
    __m512i weight = _mm512_set1_epi8(7), x = _mm512_set1_epi8(-3);
    asm volatile("" : "+v"(weight), "+v"(x));
    for (int64_t r = 0; r < rounds; r++)
        unroll<chains>([&](auto i) INLINE_LAMBDA {
            sum[i] = _mm512_dpbusd_epi32(sum[i], weight, x);
            asm volatile("" : "+v"(sum[i]));  // keeps each sum in its register; GCC 12 would move them around
        });
    unroll<chains - 1>([&](auto i) INLINE_LAMBDA { sum[0] = _mm512_add_epi32(sum[0], sum[i + 1]); });
    return static_cast<float>(_mm512_reduce_add_epi32(sum[0]));
}

}  // namespace

LimitLoops limits_avx512();

LimitLoops limits_avx512vnni() {
    LimitLoops loops = limits_avx512();
    loops.int8 = {"vpdpbusd, 512 bits", chains * 128.0, run};
    return loops;
}

}  // namespace sameseed
