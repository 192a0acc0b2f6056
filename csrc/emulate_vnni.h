// The AVX-VNNI instructions in terms of AVX2, so that the unit for AVX-VNNI can be tested on processors without it
// (CMake's SAMESEED_EMULATE).

#pragma once

#include <immintrin.h>

#define _mm256_dpbusd_avx_epi32 emulated_dpbusd
#define _mm256_dpwssd_avx_epi32 emulated_dpwssd

namespace sameseed {
namespace {

inline __m256i emulated_dpwssd(__m256i sum, __m256i a, __m256i b) { return _mm256_add_epi32(sum, _mm256_madd_epi16(a, b)); }

// Unsigned bytes of `a` times signed bytes of `b`; each sum adds four products.
inline __m256i emulated_dpbusd(__m256i sum, __m256i a, __m256i b) {
    const __m256i even = _mm256_srai_epi16(_mm256_slli_epi16(b, 8), 8), odd = _mm256_srai_epi16(b, 8);
    sum = emulated_dpwssd(sum, _mm256_and_si256(a, _mm256_set1_epi16(255)), even);
    return emulated_dpwssd(sum, _mm256_srli_epi16(a, 8), odd);
}

}  // namespace
}  // namespace sameseed
