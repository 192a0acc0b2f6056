// V: sixteen floats in one AVX-512 register. Each kernels_*.cpp for AVX-512 includes this file inside its namespace.

struct V {
    __m512 r;
};

constexpr int row_tile = 8;
// Pairs of weight rows in a tile for 1..8 rows of x: accumulators, weights and one x must fit 32 registers.
constexpr int pair_tile[9] = {0, 4, 4, 4, 4, 3, 3, 3, 3};
constexpr int query_tile = 4;  // queries in a tile of scores or of values
constexpr int key_pairs[5] = {0, 8, 4, 4, 4};  // pairs of keys for 1..4 queries
constexpr int pairs_at_once[5] = {0, 8, 4, 4, 4};  // pairs of keys whose sums fit the registers at the same time
constexpr int value_columns[5] = {0, 4, 4, 4, 4};  // vectors of columns for 1..4 queries

inline V zero() { return {_mm512_setzero_ps()}; }
inline V set1(float x) { return {_mm512_set1_ps(x)}; }
inline V add(V a, V b) { return {_mm512_add_ps(a.r, b.r)}; }
inline V sub(V a, V b) { return {_mm512_sub_ps(a.r, b.r)}; }
inline V mul(V a, V b) { return {_mm512_mul_ps(a.r, b.r)}; }
inline V div(V a, V b) { return {_mm512_div_ps(a.r, b.r)}; }
inline V fma(V a, V b, V c) { return {_mm512_fmadd_ps(a.r, b.r, c.r)}; }
inline V max(V a, V b) { return {_mm512_max_ps(a.r, b.r)}; }  // a > b ? a : b
inline V min(V a, V b) { return {_mm512_min_ps(a.r, b.r)}; }  // a < b ? a : b

inline V load(const float* p) { return {_mm512_loadu_ps(p)}; }
inline V load(const bf16* p) {
    __m512i wide = _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
    return {_mm512_castsi512_ps(_mm512_slli_epi32(wide, 16))};
}
inline V load(const fp16* p) { return {_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)))}; }

inline __m128i sixteen_at(const void* p) { return _mm_loadu_si128(static_cast<const __m128i*>(p)); }
inline V widen_int8(__m128i codes) { return {_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(codes))}; }
// Converts 16-bit words whose upper byte is a code.
inline V widen_e5m2(__m256i high) { return {_mm512_cvtph_ps(high)}; }
// Shifted right by one bit, a code is an fp16 number whose exponent is too small by 8. NaN (all bits set) is handled
// apart.
inline V widen_e4m3(__m256i high) {
    const __m256i nan = _mm256_cmpeq_epi16(_mm256_and_si256(high, _mm256_set1_epi16(0x7f00)), _mm256_set1_epi16(0x7f00));
    const __m256i half = _mm256_and_si256(_mm256_srai_epi16(high, 1), _mm256_set1_epi16(static_cast<int16_t>(0xbfff)));
    return {_mm512_mul_ps(_mm512_cvtph_ps(_mm256_or_si256(half, nan)), _mm512_set1_ps(256.0f))};
}
inline __m256i to_high(const void* p) { return _mm256_slli_epi16(_mm256_cvtepu8_epi16(sixteen_at(p)), 8); }
inline V load(const int8* p) { return widen_int8(sixteen_at(p)); }
inline V load(const e5m2* p) { return widen_e5m2(to_high(p)); }
inline V load(const e4m3* p) { return widen_e4m3(to_high(p)); }

// Nibbles of 16 bytes as floats. `shift`: 0 for low nibbles, 4 for high nibbles.
inline V widen_nibbles(__m128i bytes, int shift) {
    const __m128i nibbles = _mm_and_si128(_mm_srl_epi16(bytes, _mm_cvtsi32_si128(shift)), _mm_set1_epi8(15));
    return {_mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(nibbles))};
}
inline V load_nibbles(const uint8_t* p, int shift) { return widen_nibbles(sixteen_at(p), shift); }
inline V set_halves(float a, float b) {
    return {_mm512_mask_mov_ps(_mm512_set1_ps(a), static_cast<__mmask16>(0xff00), _mm512_set1_ps(b))};
}

inline void store(float* p, V a) { _mm512_storeu_ps(p, a.r); }
inline void store(bf16* p, V a) {
    __m512i bits = _mm512_castps_si512(a.r);
    __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
    __m512i rounded = _mm512_srli_epi32(_mm512_add_epi32(_mm512_add_epi32(bits, _mm512_set1_epi32(0x7fff)), odd), 16);
    __mmask16 nan = _mm512_cmp_ps_mask(a.r, a.r, _CMP_UNORD_Q);
    rounded = _mm512_mask_mov_epi32(rounded, nan, _mm512_set1_epi32(0x7fc0));
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_cvtepi32_epi16(rounded));
}
inline void store(fp16* p, V a) {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_cvtps_ph(a.r, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
}

// Lanes begin..end-1 of a, and `other` in the rest.
inline V keep(V a, int64_t begin, int64_t end, V other) {
    uint32_t below = end <= 0 ? 0u : end >= 16 ? 0xffffu : (1u << end) - 1u;
    uint32_t under = begin <= 0 ? 0u : begin >= 16 ? 0xffffu : (1u << begin) - 1u;
    return {_mm512_mask_mov_ps(other.r, static_cast<__mmask16>(below & ~under), a.r)};
}

// `linear` keeps two rows of weights in a vector, 8 lanes each, because a sum then needs fewer folds. 16 weights of
// each row make two vectors, in the order in which `pack` lays out x: for bf16 even, then odd elements; for other types
// first, then second half.
inline __m512i two(const void* a, const void* b) {
    __m512i low = _mm512_castsi256_si512(_mm256_loadu_si256(static_cast<const __m256i*>(a)));
    return _mm512_inserti64x4(low, _mm256_loadu_si256(static_cast<const __m256i*>(b)), 1);
}
template <class W>
struct RowPair {
    const W *a, *b;
    V first() const { return widen(a, b); }
    V second() const { return widen(a + 8, b + 8); }
    static V widen(const float* a, const float* b) { return {_mm512_castsi512_ps(two(a, b))}; }
    static V widen(const fp16* a, const fp16* b) {
        __m256i low = _mm256_castsi128_si256(_mm_loadu_si128(reinterpret_cast<const __m128i*>(a)));
        return {_mm512_cvtph_ps(_mm256_inserti128_si256(low, _mm_loadu_si128(reinterpret_cast<const __m128i*>(b)), 1))};
    }
};
template <>
struct RowPair<bf16> {
    __m512i pairs;
    RowPair() = default;
    RowPair(const bf16* a, const bf16* b) : pairs(two(a, b)) {}
    V first() const { return {_mm512_castsi512_ps(_mm512_slli_epi32(pairs, 16))}; }
    V second() const { return {_mm512_castsi512_ps(_mm512_and_si512(pairs, _mm512_set1_epi32(static_cast<int>(0xffff0000u))))}; }
};
// Eight bytes from each of two rows.
inline __m128i eights(const void* a, const void* b) {
    const __m128i low = _mm_loadl_epi64(static_cast<const __m128i*>(a));
    return _mm_castps_si128(_mm_loadh_pi(_mm_castsi128_ps(low), static_cast<const __m64*>(b)));
}
inline V load_nibbles(const uint8_t* a, const uint8_t* b, int shift) { return widen_nibbles(eights(a, b), shift); }
template <>
struct RowPair<int8> {
    const int8 *a, *b;
    V first() const { return widen_int8(eights(a, b)); }
    V second() const { return widen_int8(eights(a + 8, b + 8)); }
};
inline __m256i sixteens(const void* a, const void* b) {
    return _mm256_inserti128_si256(_mm256_castsi128_si256(sixteen_at(a)), sixteen_at(b), 1);
}
template <>
struct RowPair<e5m2> {
    __m256i codes;
    RowPair() = default;
    RowPair(const e5m2* a, const e5m2* b) : codes(sixteens(a, b)) {}
    V first() const { return widen_e5m2(_mm256_unpacklo_epi8(_mm256_setzero_si256(), codes)); }
    V second() const { return widen_e5m2(_mm256_unpackhi_epi8(_mm256_setzero_si256(), codes)); }
};
template <>
struct RowPair<e4m3> {
    __m256i codes;
    RowPair() = default;
    RowPair(const e4m3* a, const e4m3* b) : codes(sixteens(a, b)) {}
    V first() const { return widen_e4m3(_mm256_unpacklo_epi8(_mm256_setzero_si256(), codes)); }
    V second() const { return widen_e4m3(_mm256_unpackhi_epi8(_mm256_setzero_si256(), codes)); }
};
inline V load_twice(const float* p) { return {_mm512_broadcast_f32x8(_mm256_loadu_ps(p))}; }
inline V evens_then_odds(V a) {
    return {_mm512_permutexvar_ps(_mm512_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14, 1, 3, 5, 7, 9, 11, 13, 15), a.r)};
}

// Sums of the 8 lower and the 8 upper lanes of eight vectors: out[2 i] and out[2 i + 1] belong to vector i.
inline void reduce_halves8(const V (&v)[8], float* out) {
    auto fold = [](__m512 a, __m512 b)
                    INLINE_LAMBDA { return _mm512_add_ps(_mm512_shuffle_f32x4(a, b, 0x88), _mm512_shuffle_f32x4(a, b, 0xdd)); };
    __m512 a = fold(v[0].r, v[1].r), b = fold(v[2].r, v[3].r), c = fold(v[4].r, v[5].r), d = fold(v[6].r, v[7].r);
    __m512 ab = _mm512_add_ps(_mm512_shuffle_ps(a, b, 0x44), _mm512_shuffle_ps(a, b, 0xee));
    __m512 cd = _mm512_add_ps(_mm512_shuffle_ps(c, d, 0x44), _mm512_shuffle_ps(c, d, 0xee));
    __m512 all = _mm512_add_ps(_mm512_shuffle_ps(ab, cd, 0x88), _mm512_shuffle_ps(ab, cd, 0xdd));
    const __m512i order = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
    _mm512_storeu_ps(out, _mm512_permutexvar_ps(order, all));
}

inline float reduce_add(V a) {
    __m256 s = _mm256_add_ps(_mm512_castps512_ps256(a.r), _mm512_extractf32x8_ps(a.r, 1));
    __m128 t = _mm_add_ps(_mm256_castps256_ps128(s), _mm256_extractf128_ps(s, 1));
    t = _mm_add_ps(t, _mm_movehl_ps(t, t));
    return _mm_cvtss_f32(_mm_add_ss(t, _mm_movehdup_ps(t)));
}

// Four sums at once, each by the tree of reduce_add.
inline void reduce_add4(V a, V b, V c, V d, float* out) {
    __m512 ab = _mm512_add_ps(_mm512_shuffle_f32x4(a.r, b.r, 0x44), _mm512_shuffle_f32x4(a.r, b.r, 0xee));
    __m512 cd = _mm512_add_ps(_mm512_shuffle_f32x4(c.r, d.r, 0x44), _mm512_shuffle_f32x4(c.r, d.r, 0xee));
    __m512 s = _mm512_add_ps(_mm512_shuffle_f32x4(ab, cd, 0x88), _mm512_shuffle_f32x4(ab, cd, 0xdd));
    s = _mm512_add_ps(s, _mm512_permute_ps(s, 0x4e));
    s = _mm512_add_ps(s, _mm512_permute_ps(s, 0xb1));
    const __m512i firsts = _mm512_setr_epi32(0, 4, 8, 12, 0, 4, 8, 12, 0, 4, 8, 12, 0, 4, 8, 12);
    _mm_storeu_ps(out, _mm512_castps512_ps128(_mm512_permutexvar_ps(firsts, s)));
}

inline float reduce_max(V a) { return _mm512_reduce_max_ps(a.r); }

// y * 2^n for shifted = n + 1.5 * 2^23.
inline V scale_by_power(V y, V shifted) { return {_mm512_scalef_ps(y.r, _mm512_sub_ps(shifted.r, _mm512_set1_ps(12582912.0f)))}; }

// In assembly, because GCC treats a function with only the prefetch intrinsic as free of effects and drops the call.
inline void prefetch(const void* p) { asm volatile("prefetcht0 %0" : : "m"(*static_cast<const char*>(p))); }
// To the L2 cache: faster for lines that come from memory. Presumably the L1 cache can wait for fewer lines at a time.
inline void prefetch_far(const void* p) { asm volatile("prefetcht1 %0" : : "m"(*static_cast<const char*>(p))); }
// sum += a * b. In assembly, because GCC otherwise moves accumulators between registers and spills some to memory.
inline void accumulate(V& sum, V a, V b) { asm("vfmadd231ps %2, %1, %0" : "+v"(sum.r) : "v"(a.r), "v"(b.r)); }

// Transposes 16 rows of 16 words: out[i][j] = (word i (4 bytes) of rows[j] + d) xor `flip`. Rows of `out` are `stride`
// bytes apart.
template <uint32_t flip, class T>
inline void transpose_words(const T* const* rows, int64_t d, uint8_t* out, int64_t stride) {
    __m512i a[16], b[16];
    unroll<16>([&](auto i) INLINE_LAMBDA {
        a[i] = _mm512_loadu_si512(rows[i] + d);
        if constexpr (flip != 0) a[i] = _mm512_xor_si512(a[i], _mm512_set1_epi32(static_cast<int>(flip)));
    });
    unroll<8>([&](auto i) INLINE_LAMBDA {
        b[2 * i] = _mm512_unpacklo_epi32(a[2 * i], a[2 * i + 1]);
        b[2 * i + 1] = _mm512_unpackhi_epi32(a[2 * i], a[2 * i + 1]);
    });
    unroll<4>([&](auto i) INLINE_LAMBDA {
        a[4 * i] = _mm512_unpacklo_epi64(b[4 * i], b[4 * i + 2]);
        a[4 * i + 1] = _mm512_unpackhi_epi64(b[4 * i], b[4 * i + 2]);
        a[4 * i + 2] = _mm512_unpacklo_epi64(b[4 * i + 1], b[4 * i + 3]);
        a[4 * i + 3] = _mm512_unpackhi_epi64(b[4 * i + 1], b[4 * i + 3]);
    });
    // Now quarter q (128 bits) of a[4 i + j] holds word 4 q + j of rows 4 i .. 4 i + 3.
    unroll<4>([&](auto j) INLINE_LAMBDA {
        const __m512i low = _mm512_shuffle_i32x4(a[j], a[4 + j], 0x88), low_odd = _mm512_shuffle_i32x4(a[j], a[4 + j], 0xdd);
        const __m512i high = _mm512_shuffle_i32x4(a[8 + j], a[12 + j], 0x88);
        const __m512i high_odd = _mm512_shuffle_i32x4(a[8 + j], a[12 + j], 0xdd);
        _mm512_storeu_si512(out + j * stride, _mm512_shuffle_i32x4(low, high, 0x88));
        _mm512_storeu_si512(out + (4 + j) * stride, _mm512_shuffle_i32x4(low_odd, high_odd, 0x88));
        _mm512_storeu_si512(out + (8 + j) * stride, _mm512_shuffle_i32x4(low, high, 0xdd));
        _mm512_storeu_si512(out + (12 + j) * stride, _mm512_shuffle_i32x4(low_odd, high_odd, 0xdd));
    });
}
