// The loop of limits.h with vpdpbusd (AVX-VNNI).

#include <immintrin.h>

#include "limits.h"
#ifdef SAMESEED_EMULATE
#include "emulate_vnni.h"
#endif

// GCC 12 warns wrongly about the "undefined" operands of its own intrinsics.
#pragma GCC diagnostic ignored "-Wuninitialized"
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"

namespace sameseed {
namespace {

#include "unroll.h"

constexpr int chains = 12;  // independent sums: two units with a latency of 4 to 5 cycles

float run(int64_t rounds) {
    __m256i sum[chains];
    unroll<chains>([&](auto i) INLINE_LAMBDA { sum[i] = _mm256_set1_epi32(i); });
    __m256i weight = _mm256_set1_epi8(7), x = _mm256_set1_epi8(-3);
    asm volatile("" : "+x"(weight), "+x"(x));
    for (int64_t r = 0; r < rounds; r++)
        unroll<chains>([&](auto i) INLINE_LAMBDA {
            sum[i] = _mm256_dpbusd_avx_epi32(sum[i], weight, x);
            asm volatile("" : "+x"(sum[i]));  // keeps each sum in its register; GCC 12 would move them around
        });
    unroll<chains - 1>([&](auto i) INLINE_LAMBDA { sum[0] = _mm256_add_epi32(sum[0], sum[i + 1]); });
    return static_cast<float>(_mm256_extract_epi32(sum[0], 0));
}

}  // namespace

LimitLoops limits_avx2();

LimitLoops limits_avxvnni() {
    LimitLoops loops = limits_avx2();
    loops.int8 = {"vpdpbusd, 256 bits", chains * 64.0, run};
    return loops;
}

}  // namespace sameseed
