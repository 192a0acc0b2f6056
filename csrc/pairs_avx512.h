// Pairs of bf16 columns in AVX-512 registers. Included after vec_avx512.h.

constexpr int pair_rows_most = 12;  // rows of x in a tile
constexpr int pair_group = 2;  // blocks that all tiles of a panel compute before the next blocks

// out[i] = (even[i], odd[i]) for 32 numbers.
inline void interleave_pairs(const bf16* even, const bf16* odd, uint8_t* out) {
    const __m512i a = _mm512_loadu_si512(even), b = _mm512_loadu_si512(odd);
    const __m512i mask = _mm512_set1_epi32(0xffff);
    // Each 32-bit word becomes one (even[i], odd[i]) pair: its lower half comes from a, its upper half from b.
    const __m512i evens = _mm512_or_si512(_mm512_and_si512(a, mask), _mm512_slli_epi32(b, 16));       // 0, 2, 4, ...
    const __m512i odds = _mm512_or_si512(_mm512_srli_epi32(a, 16), _mm512_andnot_si512(mask, b));     // 1, 3, 5, ...
    const __m512i first = _mm512_setr_epi32(0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
    const __m512i second = _mm512_setr_epi32(8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31);
    _mm512_storeu_si512(out, _mm512_permutex2var_epi32(evens, first, odds));
    _mm512_storeu_si512(out + 64, _mm512_permutex2var_epi32(evens, second, odds));
}

#ifdef HAS_BF16

// Blocks side by side for each number of rows, chosen so that sums, weights and one x fill the registers.
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
// vdpbf16ps flushes subnormals regardless of the mode, so there is nothing to set.
struct FlushSubnormals {
    FlushSubnormals() {}
};
inline void add_pairs(V& sum, const WeightPairs& w, const RowPairs& x) {
    asm("vdpbf16ps %2, %1, %0" : "+v"(sum.r) : "v"(w.raw), "v"(x.raw));
}

inline void store_pairs(Pair* p, V a) {
    const __m256i rounded = reinterpret_cast<__m256i>(_mm512_cvtneps_pbh(a.r));
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), rounded);
}

#else

inline V without_subnormals(V a) {
    return {_mm512_maskz_mov_ps(_mm512_cmp_ps_mask(_mm512_abs_ps(a.r), _mm512_set1_ps(0x1p-126f), _CMP_NLT_UQ), a.r)};
}

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
