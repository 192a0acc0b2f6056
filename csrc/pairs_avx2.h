// Pairs of bf16 columns in AVX2 registers. Included after vec_avx2.h.

constexpr int pair_rows_most = 2;  // rows of x in a tile
constexpr int pair_blocks[3] = {0, 1, 1};  // blocks side by side for each number of rows
constexpr int pair_group = 1;  // blocks that all tiles of a panel compute before the next blocks

struct WeightPairs {
    V even, odd;
    WeightPairs() = default;
    explicit WeightPairs(const uint8_t* p) {
        const __m256i lo = bits_at(p), hi = bits_at(p + 32), mask = _mm256_set1_epi32(static_cast<int>(0xffff0000u));
        even = {_mm256_castsi256_ps(_mm256_slli_epi32(lo, 16)), _mm256_castsi256_ps(_mm256_slli_epi32(hi, 16))};
        odd = {_mm256_castsi256_ps(_mm256_and_si256(lo, mask)), _mm256_castsi256_ps(_mm256_and_si256(hi, mask))};
    }
};

// out[i] = (even[i], odd[i]) for 32 numbers.
inline void interleave_pairs(const bf16* even, const bf16* odd, uint8_t* out) {
    for (int i = 0; i < 32; i++) {
        __builtin_memcpy(out + 4 * i, even + i, 2);
        __builtin_memcpy(out + 4 * i + 2, odd + i, 2);
    }
}

inline __m256 without_subnormals(__m256 a) {
    const __m256 size = _mm256_andnot_ps(_mm256_set1_ps(-0.0f), a);
    return _mm256_and_ps(a, _mm256_cmp_ps(size, _mm256_set1_ps(0x1p-126f), _CMP_NLT_UQ));
}
inline V without_subnormals(V a) { return {without_subnormals(a.lo), without_subnormals(a.hi)}; }

#include "pairs_float.h"
