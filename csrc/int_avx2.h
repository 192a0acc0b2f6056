// Integer vectors in AVX2 registers. I: sixteen int32. Codes: four unsigned bytes for each of sixteen outputs. Included
// after vec_avx2.h. The unit for AVX-VNNI defines HAS_VNNI.

struct I {
    __m256i lo, hi;
};
struct Codes {
    __m256i lo, hi;
};

#ifdef HAS_VNNI
constexpr int integer_tile = 6;  // rows; with half a block, 12 of the 16 registers are accumulators
constexpr bool dots_add_four = true, wide_codes = false;
#else
constexpr int integer_tile = 4;
constexpr bool dots_add_four = false, wide_codes = true;
#endif
constexpr int halves = 1;  // halves of a block (16 outputs each) that one pass computes together
template <int M>
constexpr int sum_sets = dots_add_four && M <= 2 ? 2 : 1;  // with few rows, two sets of sums shorten dependency chains

inline I set1_int(int32_t x) { return {_mm256_set1_epi32(x), _mm256_set1_epi32(x)}; }
inline I load_ints(const int32_t* p) { return {bits_at(p), bits_at(p + 8)}; }
inline I widen_bytes(const uint8_t* p) {
    const __m128i bytes = half_at(p);
    return {_mm256_cvtepu8_epi32(bytes), _mm256_cvtepu8_epi32(_mm_unpackhi_epi64(bytes, bytes))};
}
inline void store_ints(int32_t* p, I a) {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), a.lo);
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p + 8), a.hi);
}
inline I add_ints(I a, I b) { return {_mm256_add_epi32(a.lo, b.lo), _mm256_add_epi32(a.hi, b.hi)}; }
inline I mul_ints(I a, I b) { return {_mm256_mullo_epi32(a.lo, b.lo), _mm256_mullo_epi32(a.hi, b.hi)}; }
inline V to_floats(I a) { return {_mm256_cvtepi32_ps(a.lo), _mm256_cvtepi32_ps(a.hi)}; }

inline Codes load_codes(const uint8_t* p) { return {bits_at(p), bits_at(p + 32)}; }
inline void store_codes(uint8_t* p, Codes a) {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), a.lo);
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p + 32), a.hi);
}
inline Codes low_nibbles(Codes a) {
    const __m256i mask = _mm256_set1_epi8(15);
    return {_mm256_and_si256(a.lo, mask), _mm256_and_si256(a.hi, mask)};
}
inline Codes high_nibbles(Codes a) { return low_nibbles({_mm256_srli_epi16(a.lo, 4), _mm256_srli_epi16(a.hi, 4)}); }
// Bytes of `table` [16] at the indices `nibbles`.
inline Codes look_up(const uint8_t* table, Codes nibbles) {
    const __m256i both = _mm256_broadcastsi128_si256(half_at(table));
    return {_mm256_shuffle_epi8(both, nibbles.lo), _mm256_shuffle_epi8(both, nibbles.hi)};
}
// Bytes whose high nibbles are the low (high) nibbles of `high`, and whose low nibbles are the low (high) nibbles of
// `low`.
inline __m256i join_nibbles(__m256i high, __m256i low) {
    const __m256i mask = _mm256_set1_epi8(15);
    return _mm256_or_si256(_mm256_andnot_si256(mask, high), _mm256_and_si256(mask, low));
}
inline Codes join_low_nibbles(Codes high, Codes low) {
    return {join_nibbles(_mm256_slli_epi16(high.lo, 4), low.lo), join_nibbles(_mm256_slli_epi16(high.hi, 4), low.hi)};
}
inline Codes join_high_nibbles(Codes high, Codes low) {
    return {join_nibbles(high.lo, _mm256_srli_epi16(low.lo, 4)), join_nibbles(high.hi, _mm256_srli_epi16(low.hi, 4))};
}

#ifdef HAS_VNNI
inline void widen_codes(int8_t*) {}
inline __m256i four_of(const int8_t* x) { return _mm256_set1_epi32(*reinterpret_cast<const int32_t*>(x)); }
// sums[h] += the dot product of four codes of each output with four bytes of x.
template <bool, bool>
INLINE void add_dots(I (&sums)[halves], const Codes (&w)[halves], const int8_t* x) {
    const __m256i four = four_of(x);
    sums[0] = {_mm256_dpbusd_avx_epi32(sums[0].lo, w[0].lo, four), _mm256_dpbusd_avx_epi32(sums[0].hi, w[0].hi, four)};
}
#else
// Converts a piece of 32 codes of a row to int16 in place. Within every four codes, the even ones come first, then the
// odd ones.
inline void widen_codes(int8_t* piece) {
    auto widen = [&](__m128i codes) {
        const __m128i order = _mm_setr_epi8(0, 2, 1, 3, 4, 6, 5, 7, 8, 10, 9, 11, 12, 14, 13, 15);
        return _mm256_cvtepi8_epi16(_mm_shuffle_epi8(codes, order));
    };
    const __m256i first = widen(half_at(piece)), second = widen(half_at(piece + 16));
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(piece), first);
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(piece + 32), second);
}

// sums[h] += the dot product of four codes of each output with four codes of x, which `widen_codes` has converted. Not
// for `small` codes (at most 31): integer_body.h uses add_quad for those, with x in bytes.
template <bool small, bool>
INLINE void add_dots(I (&sums)[halves], const Codes (&w)[halves], const int8_t* x) {
    static_assert(!small, "those are added by add_quad");
    const int32_t* pairs = reinterpret_cast<const int32_t*>(x);
    const __m256i even = _mm256_set1_epi32(pairs[0]), odd = _mm256_set1_epi32(pairs[1]);
    auto dot = [&](__m256i& sum, __m256i c) INLINE_LAMBDA {  // int16, because 2 * 255 * 127 does not fit
        sum = _mm256_add_epi32(sum, _mm256_madd_epi16(_mm256_and_si256(c, _mm256_set1_epi16(255)), even));
        sum = _mm256_add_epi32(sum, _mm256_madd_epi16(_mm256_srli_epi16(c, 8), odd));
        asm("" : "+x"(sum));  // else compilers sum in a tree and run out of registers
    };
    dot(sums[0].lo, w[0].lo);
    dot(sums[0].hi, w[0].hi);
}
#endif

// Operations for super-blocks. Without VNNI, products are added in 16 bits, as many as fit. Then pairs of these sums
// are multiplied by steps and added.
constexpr int super_tile = 4;
template <int M>
constexpr int super_halves = M == 1 ? 2 : 1;
template <int shift, int mask>
inline Codes with_bits(Codes low, Codes high) {
    auto merge = [](__m256i a, __m256i b) {
        const __m256i moved =
            shift < 0 ? _mm256_slli_epi16(b, shift < 0 ? -shift : 0) : _mm256_srli_epi16(b, shift < 0 ? 0 : shift);
        return _mm256_or_si256(a, _mm256_and_si256(moved, _mm256_set1_epi8(mask)));
    };
    return {merge(low.lo, high.lo), merge(low.hi, high.hi)};
}
inline I widen_pairs(const int8_t* p) { return {_mm256_cvtepi8_epi16(half_at(p)), _mm256_cvtepi8_epi16(half_at(p + 16))}; }
inline I set1_pair(const int16_t* x) {
    int32_t both;
    __builtin_memcpy(&both, x, sizeof both);
    return set1_int(both);
}
#ifdef HAS_VNNI
constexpr int fold_quads(int) { return 8; }
inline I add_quad(I dots, Codes w, const int8_t* x) {
    const __m256i four = four_of(x);
    return {_mm256_dpbusd_avx_epi32(dots.lo, w.lo, four), _mm256_dpbusd_avx_epi32(dots.hi, w.hi, four)};
}
inline __m256i first_word(__m256i p) { return _mm256_srai_epi32(_mm256_slli_epi32(p, 16), 16); }
inline I first_step(I pair) { return {first_word(pair.lo), first_word(pair.hi)}; }
inline I second_step(I pair) { return {_mm256_srai_epi32(pair.lo, 16), _mm256_srai_epi32(pair.hi, 16)}; }
inline I add_steps(I sum, I dots, I step) { return add_ints(sum, mul_ints(dots, step)); }
inline I add_pairs(I sum, I pair, I x) {
    return {_mm256_dpwssd_avx_epi32(sum.lo, pair.lo, x.lo), _mm256_dpwssd_avx_epi32(sum.hi, pair.hi, x.hi)};
}
#else
constexpr int fold_quads(int bits) { return bits <= 4 ? 8 : bits == 5 ? 4 : 2; }
inline I add_quad(I dots, Codes w, const int8_t* x) {
    const __m256i q = _mm256_set1_epi32(*reinterpret_cast<const int32_t*>(x));
    dots = {_mm256_add_epi16(dots.lo, _mm256_maddubs_epi16(w.lo, q)), _mm256_add_epi16(dots.hi, _mm256_maddubs_epi16(w.hi, q))};
    asm("" : "+x"(dots.lo), "+x"(dots.hi));  // else compilers sum in a tree and run out of registers
    return dots;
}
inline __m256i twice_first(__m256i p) {
    return _mm256_or_si256(_mm256_and_si256(p, _mm256_set1_epi32(0xffff)), _mm256_slli_epi32(p, 16));
}
inline __m256i twice_second(__m256i p) {
    return _mm256_or_si256(_mm256_andnot_si256(_mm256_set1_epi32(0xffff), p), _mm256_srli_epi32(p, 16));
}
inline I first_step(I pair) { return {twice_first(pair.lo), twice_first(pair.hi)}; }
inline I second_step(I pair) { return {twice_second(pair.lo), twice_second(pair.hi)}; }
inline I add_steps(I sum, I dots, I step) {
    return add_ints(sum, {_mm256_madd_epi16(dots.lo, step.lo), _mm256_madd_epi16(dots.hi, step.hi)});
}
inline I add_pairs(I sum, I pair, I x) { return add_steps(sum, pair, x); }
#endif
// out[i] = (even[i], odd[i]) for 64 codes.
inline void interleave_codes(const int8* even, const int8* odd, int8_t* out) {
    for (int i = 0; i < 64; i += 32, out += 64) {
        const __m256i a = _mm256_permute4x64_epi64(bits_at(even + i), 0xd8), b = _mm256_permute4x64_epi64(bits_at(odd + i), 0xd8);
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(out), _mm256_unpacklo_epi8(a, b));
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(out + 32), _mm256_unpackhi_epi8(a, b));
    }
}

// The larger magnitude. Magnitudes are compared as bit patterns, so NaN is larger than infinity.
inline V max_magnitude(V a, V x) {
    auto larger = [](__m256 m, __m256 v) {
        const __m256i magnitude = _mm256_and_si256(_mm256_castps_si256(v), _mm256_set1_epi32(0x7fffffff));
        return _mm256_castsi256_ps(_mm256_max_epi32(_mm256_castps_si256(m), magnitude));
    };
    return {larger(a.lo, x.lo), larger(a.hi, x.hi)};
}
inline int32_t reduce_magnitude(V a) {
    const __m256i m = _mm256_max_epi32(_mm256_castps_si256(a.lo), _mm256_castps_si256(a.hi));
    __m128i n = _mm_max_epi32(_mm256_castsi256_si128(m), _mm256_extracti128_si256(m, 1));
    n = _mm_max_epi32(n, _mm_shuffle_epi32(n, 0x4e));
    return _mm_cvtsi128_si32(_mm_max_epi32(n, _mm_shuffle_epi32(n, 0xb1)));
}
inline void store_low_bytes(int8_t* p, V a) {
    const __m256i mask = _mm256_set1_epi32(255);
    const __m256i words = _mm256_packus_epi32(_mm256_and_si256(_mm256_castps_si256(a.lo), mask),
                                              _mm256_and_si256(_mm256_castps_si256(a.hi), mask));  // 0-3, 8-11, 4-7, 12-15
    const __m256i ordered = _mm256_permute4x64_epi64(words, 0xd8);
    _mm_storeu_si128(reinterpret_cast<__m128i*>(p),
                     _mm_packus_epi16(_mm256_castsi256_si128(ordered), _mm256_extracti128_si256(ordered, 1)));
}
inline void store_low_words(int16_t* p, V a) {
    const __m256i mask = _mm256_set1_epi32(0xffff);
    const __m256i words = _mm256_packus_epi32(_mm256_and_si256(_mm256_castps_si256(a.lo), mask),
                                              _mm256_and_si256(_mm256_castps_si256(a.hi), mask));  // 0-3, 8-11, 4-7, 12-15
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm256_permute4x64_epi64(words, 0xd8));
}
