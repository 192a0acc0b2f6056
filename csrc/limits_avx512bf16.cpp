// The loop of limits.h with vdpbf16ps (AVX512_BF16).

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
    __m512 sum[chains];
    unroll<chains>([&](auto i) INLINE_LAMBDA { sum[i] = _mm512_set1_ps(static_cast<float>(i)); });
    __m512bh weight = _mm512_cvtne2ps_pbh(_mm512_set1_ps(0.5f), _mm512_set1_ps(0.25f));
    __m512bh x = _mm512_cvtne2ps_pbh(_mm512_set1_ps(-0.5f), _mm512_set1_ps(1.0f));
    asm volatile("" : "+v"(weight), "+v"(x));
    for (int64_t r = 0; r < rounds; r++)
        unroll<chains>([&](auto i) INLINE_LAMBDA {
            sum[i] = _mm512_dpbf16_ps(sum[i], weight, x);
            asm volatile("" : "+v"(sum[i]));  // keeps each sum in its register; GCC 12 would move them around
        });
    unroll<chains - 1>([&](auto i) INLINE_LAMBDA { sum[0] = _mm512_add_ps(sum[0], sum[i + 1]); });
    return _mm512_reduce_add_ps(sum[0]);
}

}  // namespace

Arithmetic bf16_avx512bf16() { return {"vdpbf16ps, 512 bits", chains * 64.0, run}; }

}  // namespace sameseed
