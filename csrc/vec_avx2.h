// V: sixteen floats in two AVX2 registers. Each kernels_*.cpp for AVX2 includes this file inside its namespace.

struct V {
    __m256 lo, hi;
};

constexpr int row_tile = 6;
constexpr int pair_tile[7] = {0, 4, 2, 1, 1, 1, 1};  // pairs of weight rows for 1..6 rows of x
constexpr int query_tile = 4;  // queries in a tile of scores or of values
constexpr int key_pairs[5] = {0, 4, 4, 4, 4};  // pairs of keys for 1..4 queries
constexpr int pairs_at_once[5] = {0, 4, 2, 2, 1};  // pairs of keys whose sums fit the registers at the same time
constexpr int value_columns[5] = {0, 2, 2, 1, 1};  // vectors of columns for 1..4 queries

inline V zero() { return {_mm256_setzero_ps(), _mm256_setzero_ps()}; }
inline V set1(float x) { return {_mm256_set1_ps(x), _mm256_set1_ps(x)}; }
inline V add(V a, V b) { return {_mm256_add_ps(a.lo, b.lo), _mm256_add_ps(a.hi, b.hi)}; }
inline V sub(V a, V b) { return {_mm256_sub_ps(a.lo, b.lo), _mm256_sub_ps(a.hi, b.hi)}; }
inline V mul(V a, V b) { return {_mm256_mul_ps(a.lo, b.lo), _mm256_mul_ps(a.hi, b.hi)}; }
inline V div(V a, V b) { return {_mm256_div_ps(a.lo, b.lo), _mm256_div_ps(a.hi, b.hi)}; }
inline V fma(V a, V b, V c) { return {_mm256_fmadd_ps(a.lo, b.lo, c.lo), _mm256_fmadd_ps(a.hi, b.hi, c.hi)}; }
inline V max(V a, V b) { return {_mm256_max_ps(a.lo, b.lo), _mm256_max_ps(a.hi, b.hi)}; }  // a > b ? a : b
inline V min(V a, V b) { return {_mm256_min_ps(a.lo, b.lo), _mm256_min_ps(a.hi, b.hi)}; }  // a < b ? a : b

inline __m256i bits_at(const void* p) { return _mm256_loadu_si256(static_cast<const __m256i*>(p)); }
inline __m128i half_at(const void* p) { return _mm_loadu_si128(static_cast<const __m128i*>(p)); }
inline __m256 widen(__m128i bf) { return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(bf), 16)); }

inline V load(const float* p) { return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
inline V load(const bf16* p) { return {widen(half_at(p)), widen(half_at(p + 8))}; }
inline V load(const fp16* p) { return {_mm256_cvtph_ps(half_at(p)), _mm256_cvtph_ps(half_at(p + 8))}; }

inline __m128i quarter_at(const void* p) { return _mm_loadl_epi64(static_cast<const __m128i*>(p)); }
inline __m256 widen_int8(__m128i codes) { return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(codes)); }
inline __m256 widen_e5m2(__m128i codes) { return _mm256_cvtph_ps(_mm_unpacklo_epi8(_mm_setzero_si128(), codes)); }
// Shifted right by one bit, a code is an fp16 number whose exponent is too small by 8. NaN (all bits set) is handled
// apart.
inline __m256 widen_e4m3(__m128i codes) {
    const __m128i high = _mm_unpacklo_epi8(_mm_setzero_si128(), codes);
    const __m128i nan = _mm_cmpeq_epi16(_mm_and_si128(high, _mm_set1_epi16(0x7f00)), _mm_set1_epi16(0x7f00));
    const __m128i half = _mm_and_si128(_mm_srai_epi16(high, 1), _mm_set1_epi16(static_cast<int16_t>(0xbfff)));
    return _mm256_mul_ps(_mm256_cvtph_ps(_mm_or_si128(half, nan)), _mm256_set1_ps(256.0f));
}
inline V load(const int8* p) { return {widen_int8(quarter_at(p)), widen_int8(quarter_at(p + 8))}; }
inline V load(const e5m2* p) { return {widen_e5m2(quarter_at(p)), widen_e5m2(quarter_at(p + 8))}; }
inline V load(const e4m3* p) { return {widen_e4m3(quarter_at(p)), widen_e4m3(quarter_at(p + 8))}; }

// Nibbles of 16 bytes, or of 8 bytes at each of two addresses, as floats. `shift`: 0 for low nibbles, 4 for high
// nibbles.
inline __m256 widen_nibbles(const uint8_t* p, int shift) {
    const __m128i nibbles = _mm_and_si128(_mm_srl_epi16(quarter_at(p), _mm_cvtsi32_si128(shift)), _mm_set1_epi8(15));
    return _mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(nibbles));
}
inline V load_nibbles(const uint8_t* a, const uint8_t* b, int shift) {
    return {widen_nibbles(a, shift), widen_nibbles(b, shift)};
}
inline V load_nibbles(const uint8_t* p, int shift) { return load_nibbles(p, p + 8, shift); }
inline V set_halves(float a, float b) { return {_mm256_set1_ps(a), _mm256_set1_ps(b)}; }

inline __m256i round_bf16(__m256 a) {
    __m256i bits = _mm256_castps_si256(a);
    __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
    __m256i rounded = _mm256_srli_epi32(_mm256_add_epi32(_mm256_add_epi32(bits, _mm256_set1_epi32(0x7fff)), odd), 16);
    __m256i nan = _mm256_castps_si256(_mm256_cmp_ps(a, a, _CMP_UNORD_Q));
    return _mm256_blendv_epi8(rounded, _mm256_set1_epi32(0x7fc0), nan);
}

inline void store(float* p, V a) {
    _mm256_storeu_ps(p, a.lo);
    _mm256_storeu_ps(p + 8, a.hi);
}
inline void store(bf16* p, V a) {
    __m256i packed = _mm256_packus_epi32(round_bf16(a.lo), round_bf16(a.hi));  // 0-3, 8-11, 4-7, 12-15
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm256_permute4x64_epi64(packed, 0xd8));
}
inline void store(fp16* p, V a) {
    constexpr int nearest = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;
    _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm256_cvtps_ph(a.lo, nearest));
    _mm_storeu_si128(reinterpret_cast<__m128i*>(p + 8), _mm256_cvtps_ph(a.hi, nearest));
}

// Lanes begin..end-1 of a, and `other` in the rest.
inline __m256 keep8(__m256 a, int begin, int end, __m256 other) {
    const __m256i index = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
    __m256i inside = _mm256_andnot_si256(_mm256_cmpgt_epi32(_mm256_set1_epi32(begin), index),
                                         _mm256_cmpgt_epi32(_mm256_set1_epi32(end), index));
    return _mm256_blendv_ps(other, a, _mm256_castsi256_ps(inside));
}
inline V keep(V a, int64_t begin, int64_t end, V other) {
    int b = begin < 0 ? 0 : begin > 16 ? 16 : static_cast<int>(begin);
    int e = end < 0 ? 0 : end > 16 ? 16 : static_cast<int>(end);
    return {keep8(a.lo, b, e, other.lo), keep8(a.hi, b - 8, e - 8, other.hi)};
}

// `linear` keeps two rows of weights in a vector, 8 lanes each. 16 weights of each row make two vectors, in the order
// in which `pack` lays out x: for bf16 even, then odd elements; for other types first, then second half.
template <class W>
struct RowPair {
    const W *a, *b;
    V first() const { return {widen8(a), widen8(b)}; }
    V second() const { return {widen8(a + 8), widen8(b + 8)}; }
    static __m256 widen8(const float* p) { return _mm256_loadu_ps(p); }
    static __m256 widen8(const fp16* p) { return _mm256_cvtph_ps(half_at(p)); }
    static __m256 widen8(const int8* p) { return widen_int8(quarter_at(p)); }
    static __m256 widen8(const e5m2* p) { return widen_e5m2(quarter_at(p)); }
    static __m256 widen8(const e4m3* p) { return widen_e4m3(quarter_at(p)); }
};
template <>
struct RowPair<bf16> {
    const bf16 *a, *b;
    V first() const { return {evens(a), evens(b)}; }
    V second() const { return {odds(a), odds(b)}; }
    static __m256 evens(const bf16* p) { return _mm256_castsi256_ps(_mm256_slli_epi32(bits_at(p), 16)); }
    static __m256 odds(const bf16* p) {
        return _mm256_castsi256_ps(_mm256_and_si256(bits_at(p), _mm256_set1_epi32(static_cast<int>(0xffff0000u))));
    }
};
inline V load_twice(const float* p) { return {_mm256_loadu_ps(p), _mm256_loadu_ps(p)}; }
inline V evens_then_odds(V a) {
    auto pick = [](__m256 even_odd) { return _mm256_castpd_ps(_mm256_permute4x64_pd(_mm256_castps_pd(even_odd), 0xd8)); };
    return {pick(_mm256_shuffle_ps(a.lo, a.hi, 0x88)), pick(_mm256_shuffle_ps(a.lo, a.hi, 0xdd))};
}

// Sums of the 8 lower and the 8 upper lanes of eight vectors: out[2 i] and out[2 i + 1] belong to vector i.
inline void reduce_halves8(const V (&v)[8], float* out) {
    auto fold = [](V a) INLINE_LAMBDA {  // result: 4 lanes of the lower half, then 4 of the upper
        return _mm256_add_ps(_mm256_permute2f128_ps(a.lo, a.hi, 0x20), _mm256_permute2f128_ps(a.lo, a.hi, 0x31));
    };
    auto pair = [](__m256 a, __m256 b)
                    INLINE_LAMBDA { return _mm256_add_ps(_mm256_shuffle_ps(a, b, 0x44), _mm256_shuffle_ps(a, b, 0xee)); };
    unroll<2>([&](auto i) INLINE_LAMBDA {
        const __m256 ab = pair(fold(v[4 * i]), fold(v[4 * i + 1])), cd = pair(fold(v[4 * i + 2]), fold(v[4 * i + 3]));
        const __m256 all = _mm256_add_ps(_mm256_shuffle_ps(ab, cd, 0x88), _mm256_shuffle_ps(ab, cd, 0xdd));
        const __m128 lower = _mm256_castps256_ps128(all), upper = _mm256_extractf128_ps(all, 1);
        _mm_storeu_ps(out + 8 * i, _mm_unpacklo_ps(lower, upper));
        _mm_storeu_ps(out + 8 * i + 4, _mm_unpackhi_ps(lower, upper));
    });
}

inline __m128 fold(V a) {
    __m256 s = _mm256_add_ps(a.lo, a.hi);
    return _mm_add_ps(_mm256_castps256_ps128(s), _mm256_extractf128_ps(s, 1));
}
inline float reduce_add(V a) {
    __m128 t = fold(a);
    t = _mm_add_ps(t, _mm_movehl_ps(t, t));
    return _mm_cvtss_f32(_mm_add_ss(t, _mm_movehdup_ps(t)));
}
// Four sums at once, each by the tree of reduce_add.
inline void reduce_add4(V a, V b, V c, V d, float* out) {
    __m128 s0 = fold(a), s1 = fold(b), s2 = fold(c), s3 = fold(d);
    _MM_TRANSPOSE4_PS(s0, s1, s2, s3);
    _mm_storeu_ps(out, _mm_add_ps(_mm_add_ps(s0, s2), _mm_add_ps(s1, s3)));
}

inline float reduce_max(V a) {
    __m256 s = _mm256_max_ps(a.lo, a.hi);
    __m128 t = _mm_max_ps(_mm256_castps256_ps128(s), _mm256_extractf128_ps(s, 1));
    t = _mm_max_ps(t, _mm_movehl_ps(t, t));
    return _mm_cvtss_f32(_mm_max_ss(t, _mm_movehdup_ps(t)));
}

// y * 2^n, where shifted = n + 1.5 * 2^23 has n in its low bits. Multiplies by two factors, because 2^n itself can
// overflow or be subnormal at the ends of the range.
inline __m256 scale_by_power8(__m256 y, __m256 shifted) {
    __m256i n = _mm256_sub_epi32(_mm256_castps_si256(shifted), _mm256_set1_epi32(0x4b400000));
    __m256i half = _mm256_srai_epi32(n, 1);
    __m256i rest = _mm256_sub_epi32(n, half);
    __m256i one = _mm256_set1_epi32(127);
    __m256 a = _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(half, one), 23));
    __m256 b = _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(rest, one), 23));
    return _mm256_mul_ps(_mm256_mul_ps(y, a), b);
}
inline V scale_by_power(V y, V shifted) { return {scale_by_power8(y.lo, shifted.lo), scale_by_power8(y.hi, shifted.hi)}; }

// In assembly, because GCC treats a function with only the prefetch intrinsic as free of effects and drops the call.
inline void prefetch(const void* p) { asm volatile("prefetcht0 %0" : : "m"(*static_cast<const char*>(p))); }
// To the L2 cache: faster for lines that come from memory. Presumably the L1 cache can wait for fewer lines at a time.
inline void prefetch_far(const void* p) { asm volatile("prefetcht1 %0" : : "m"(*static_cast<const char*>(p))); }
// sum += a * b. In assembly, because GCC otherwise moves accumulators between registers and spills some to memory.
inline void accumulate(V& sum, V a, V b) {
    asm("vfmadd231ps %2, %1, %0" : "+x"(sum.lo) : "x"(a.lo), "x"(b.lo));
    asm("vfmadd231ps %2, %1, %0" : "+x"(sum.hi) : "x"(a.hi), "x"(b.hi));
}

// Transposes 16 rows of 16 words: out[i][j] = (word i (4 bytes) of rows[j] + d) xor `flip`. Rows of `out` are `stride`
// bytes apart.
template <uint32_t flip, class T>
inline void transpose_words(const T* const* rows, int64_t d, uint8_t* out, int64_t stride) {
    for (int j = 0; j < 16; j++)
        for (int i = 0; i < 16; i++) {
            uint32_t word;
            __builtin_memcpy(&word, reinterpret_cast<const char*>(rows[j] + d) + 4 * i, 4);
            word ^= flip;
            __builtin_memcpy(out + i * stride + 4 * j, &word, 4);
        }
}
