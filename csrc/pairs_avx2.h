// Pairs of bf16 columns in AVX2 registers. Included after vec_avx2.h.

constexpr int pair_rows_most = 2;  // rows of x in a tile
constexpr int pair_blocks[3] = {0, 1, 1};  // blocks side by side for each number of rows
constexpr int pair_group = 1;  // blocks that the tiles of a panel share at once

struct WeightPairs {
    V even, odd;
    WeightPairs() = default;
    explicit WeightPairs(const uint8_t* p) {
        const __m256i lo = bits_at(p), hi = bits_at(p + 32), mask = _mm256_set1_epi32(static_cast<int>(0xffff0000u));
        even = {_mm256_castsi256_ps(_mm256_slli_epi32(lo, 16)), _mm256_castsi256_ps(_mm256_slli_epi32(hi, 16))};
        odd = {_mm256_castsi256_ps(_mm256_and_si256(lo, mask)), _mm256_castsi256_ps(_mm256_and_si256(hi, mask))};
    }
};

#include "pairs_float.h"
