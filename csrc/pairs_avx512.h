// Pairs of bf16 columns in AVX-512 registers. Included after vec_avx512.h.

constexpr int pair_rows_most = 12;  // rows of x in a tile
constexpr int pair_group = 2;  // blocks that the tiles of a panel share at once

#ifdef HAS_BF16

// Blocks side by side for each number of rows: sums, weights and one x fill the registers.
constexpr int pair_blocks[13] = {0, 2, 2, 2, 2, 2, 2, 1, 1, 1, 1, 1, 1};

using Pair = uint32_t;  // the even column in the lower half
inline Pair make_pair(bf16 even, bf16 odd) { return static_cast<uint32_t>(odd.bits) << 16 | even.bits; }

struct WeightPairs {
    __m512i raw;
    WeightPairs() = default;
    explicit WeightPairs(const uint8_t* p) : raw(_mm512_loadu_si512(p)) {}
};
struct RowPairs {
    __m512i raw;
    explicit RowPairs(Pair x) : raw(_mm512_set1_epi32(static_cast<int>(x))) {}
};
// The instruction flushes whatever the mode.
struct FlushSubnormals {
    FlushSubnormals() {}
};
inline void add_pairs(V& sum, const WeightPairs& w, const RowPairs& x) {
    asm("vdpbf16ps %2, %1, %0" : "+v"(sum.r) : "v"(w.raw), "v"(x.raw));
}

#else

constexpr int pair_blocks[13] = {0, 2, 2, 2, 2, 1, 1, 1, 1, 1, 1, 1, 1};

struct WeightPairs {
    V even, odd;
    WeightPairs() = default;
    explicit WeightPairs(const uint8_t* p) {
        const __m512i raw = _mm512_loadu_si512(p);
        even = {_mm512_castsi512_ps(_mm512_slli_epi32(raw, 16))};
        odd = {_mm512_castsi512_ps(_mm512_and_si512(raw, _mm512_set1_epi32(static_cast<int>(0xffff0000u))))};
    }
};

#include "pairs_float.h"

#endif
