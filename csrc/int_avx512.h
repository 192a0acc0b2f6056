// Integer vectors in AVX-512 registers. I: sixteen int32. Codes: four unsigned bytes for each of sixteen outputs.
// Included after vec_avx512.h. The unit for VNNI defines HAS_VNNI.

struct I {
    __m512i r;
};
struct Codes {
    __m512i r;
};

#ifdef HAS_VNNI
constexpr int integer_tile = 12;  // rows; with both halves of a block, 24 of the 32 registers are accumulators
constexpr bool dots_add_four = true, wide_codes = false;
#else
constexpr int integer_tile = 6;
constexpr bool dots_add_four = false, wide_codes = true;
#endif
constexpr int halves = 2;  // halves of a block (16 outputs each) that one pass computes together
template <int M>
constexpr int sum_sets = M <= 4 ? 2 : 1;

inline I set1_int(int32_t x) { return {_mm512_set1_epi32(x)}; }
inline I load_ints(const int32_t* p) { return {_mm512_loadu_si512(p)}; }
inline I widen_bytes(const uint8_t* p) { return {_mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)))}; }
inline void store_ints(int32_t* p, I a) { _mm512_storeu_si512(p, a.r); }
inline I add_ints(I a, I b) { return {_mm512_add_epi32(a.r, b.r)}; }
inline I mul_ints(I a, I b) { return {_mm512_mullo_epi32(a.r, b.r)}; }
inline V to_floats(I a) { return {_mm512_cvtepi32_ps(a.r)}; }

inline Codes load_codes(const uint8_t* p) { return {_mm512_loadu_si512(p)}; }
inline void store_codes(uint8_t* p, Codes a) { _mm512_storeu_si512(p, a.r); }
inline Codes low_nibbles(Codes a) { return {_mm512_and_si512(a.r, _mm512_set1_epi8(15))}; }
inline Codes high_nibbles(Codes a) { return {_mm512_and_si512(_mm512_srli_epi16(a.r, 4), _mm512_set1_epi8(15))}; }
// Bytes of `table` [16] at the indices `nibbles`.
inline Codes look_up(const uint8_t* table, Codes nibbles) {
    return {_mm512_shuffle_epi8(_mm512_broadcast_i32x4(sixteen_at(table)), nibbles.r)};
}
// Bytes whose high nibbles are the low (high) nibbles of `high`, and whose low nibbles are the low (high) nibbles of
// `low`. 0xd8 selects the second operand's bits where the mask is set.
inline Codes join_low_nibbles(Codes high, Codes low) {
    return {_mm512_ternarylogic_epi32(_mm512_slli_epi16(high.r, 4), low.r, _mm512_set1_epi8(15), 0xd8)};
}
inline Codes join_high_nibbles(Codes high, Codes low) {
    return {_mm512_ternarylogic_epi32(high.r, _mm512_srli_epi16(low.r, 4), _mm512_set1_epi8(15), 0xd8)};
}

#ifdef HAS_VNNI
inline void widen_codes(int8_t*) {}
// sums[h] += the dot product of four codes of each output with four bytes of x. `twice` chooses between two instruction
// sequences with the same result.
template <bool, bool twice>
INLINE void add_dots(I (&sums)[halves], const Codes (&w)[halves], const int8_t* x) {
    const int32_t& quad = *reinterpret_cast<const int32_t*>(x);
    // In assembly, because GCC otherwise loads x early, moves accumulators around and spills some to memory. Half of
    // the rows broadcast x once for both sums (three instructions, one load). The other half broadcast x in each sum
    // (two instructions, two loads). With this mix, neither the front end nor the load ports are the bottleneck.
    if constexpr (twice) {
        asm("vpdpbusd %4%{1to16%}, %2, %0\n\tvpdpbusd %4%{1to16%}, %3, %1"
            : "+v"(sums[0].r), "+v"(sums[1].r)
            : "v"(w[0].r), "v"(w[1].r), "m"(quad));
    } else {
        __m512i t;
        asm("vpbroadcastd %5, %2\n\tvpdpbusd %2, %3, %0\n\tvpdpbusd %2, %4, %1"
            : "+v"(sums[0].r), "+v"(sums[1].r), "=&v"(t)
            : "v"(w[0].r), "v"(w[1].r), "m"(quad));
    }
}
#else
// Converts a piece of 32 codes of a row to int16 in place. Within every four codes, the even ones come first, then the
// odd ones.
inline void widen_codes(int8_t* piece) {
    const __m256i order = _mm256_broadcastsi128_si256(_mm_setr_epi8(0, 2, 1, 3, 4, 6, 5, 7, 8, 10, 9, 11, 12, 14, 13, 15));
    const __m256i codes = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(piece));
    _mm512_storeu_si512(piece, _mm512_cvtepi8_epi16(_mm256_shuffle_epi8(codes, order)));
}
// sums[h] += the dot product of four codes of each output with four codes of x, which `widen_codes` has converted. Not
// for `small` codes (at most 31): integer_body.h uses add_quad for those, with x in bytes.
template <bool small, bool>
INLINE void add_dots(I (&sums)[halves], const Codes (&w)[halves], const int8_t* x) {
    static_assert(!small, "those are added by add_quad");
    const int32_t* pairs = reinterpret_cast<const int32_t*>(x);
    const __m512i even = _mm512_set1_epi32(pairs[0]), odd = _mm512_set1_epi32(pairs[1]);
    unroll<halves>([&](auto h) INLINE_LAMBDA {  // int16, because 2 * 255 * 127 does not fit
        __m512i& sum = sums[h].r;
        sum = _mm512_add_epi32(sum, _mm512_madd_epi16(_mm512_and_si512(w[h].r, _mm512_set1_epi16(255)), even));
        sum = _mm512_add_epi32(sum, _mm512_madd_epi16(_mm512_srli_epi16(w[h].r, 8), odd));
        asm("" : "+v"(sum));  // else compilers sum in a tree and run out of registers
    });
}
#endif

// Operations for super-blocks. Without VNNI, products are added in 16 bits, as many as fit. Then pairs of these sums
// are multiplied by steps and added.
constexpr int super_tile = 8;
template <int M>
constexpr int super_halves = M <= 6 ? 2 : 1;
#ifdef HAS_VNNI
constexpr int fold_quads(int) { return 8; }
#else
constexpr int fold_quads(int bits) { return bits <= 4 ? 8 : bits == 5 ? 4 : 2; }
#endif
template <int shift, int mask>
inline Codes with_bits(Codes low, Codes high) {
    const __m512i moved =
        shift < 0 ? _mm512_slli_epi16(high.r, shift < 0 ? -shift : 0) : _mm512_srli_epi16(high.r, shift < 0 ? 0 : shift);
    return {_mm512_ternarylogic_epi32(low.r, moved, _mm512_set1_epi8(mask), 0xf8)};
}
inline I widen_pairs(const int8_t* p) { return {_mm512_cvtepi8_epi16(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)))}; }
inline I set1_pair(const int16_t* x) {
    int32_t both;
    __builtin_memcpy(&both, x, sizeof both);
    return set1_int(both);
}
INLINE I add_pairs(I sum, I pair, I x) {
#ifdef HAS_VNNI
    asm("vpdpwssd %2, %1, %0" : "+v"(sum.r) : "v"(pair.r), "v"(x.r));
    return sum;
#else
    return add_ints(sum, {_mm512_madd_epi16(pair.r, x.r)});
#endif
}
// out[i] = (even[i], odd[i]) for 64 codes.
inline void interleave_codes(const int8* even, const int8* odd, int8_t* out) {
    const __m512i order = _mm512_setr_epi64(0, 4, 1, 5, 2, 6, 3, 7);
    const __m512i a = _mm512_permutexvar_epi64(order, _mm512_loadu_si512(even));
    const __m512i b = _mm512_permutexvar_epi64(order, _mm512_loadu_si512(odd));
    _mm512_storeu_si512(out, _mm512_unpacklo_epi8(a, b));
    _mm512_storeu_si512(out + 64, _mm512_unpackhi_epi8(a, b));
}
#ifdef HAS_VNNI
INLINE I add_quad(I dots, Codes w, const int8_t* x) {
    const int32_t& quad = *reinterpret_cast<const int32_t*>(x);
    asm("vpdpbusd %2%{1to16%}, %1, %0" : "+v"(dots.r) : "v"(w.r), "m"(quad));
    return dots;
}
inline I first_step(I pair) { return {_mm512_srai_epi32(_mm512_slli_epi32(pair.r, 16), 16)}; }
inline I second_step(I pair) { return {_mm512_srai_epi32(pair.r, 16)}; }
inline I add_steps(I sum, I dots, I step) { return add_ints(sum, mul_ints(dots, step)); }
#else
INLINE I add_quad(I dots, Codes w, const int8_t* x) {
    const __m512i q = _mm512_set1_epi32(*reinterpret_cast<const int32_t*>(x));
    dots = {_mm512_add_epi16(dots.r, _mm512_maddubs_epi16(w.r, q))};
    asm("" : "+v"(dots.r));  // else compilers sum in a tree and run out of registers
    return dots;
}
inline I first_step(I pair) { return {_mm512_mask_blend_epi16(0xaaaaaaaa, pair.r, _mm512_slli_epi32(pair.r, 16))}; }
inline I second_step(I pair) { return {_mm512_mask_blend_epi16(0x55555555, pair.r, _mm512_srli_epi32(pair.r, 16))}; }
inline I add_steps(I sum, I dots, I step) { return {_mm512_add_epi32(sum.r, _mm512_madd_epi16(dots.r, step.r))}; }
#endif

// The larger magnitude. Magnitudes are compared as bit patterns, so NaN is larger than infinity.
inline V max_magnitude(V a, V x) {
    const __m512i magnitude = _mm512_and_si512(_mm512_castps_si512(x.r), _mm512_set1_epi32(0x7fffffff));
    return {_mm512_castsi512_ps(_mm512_max_epi32(_mm512_castps_si512(a.r), magnitude))};
}
inline int32_t reduce_magnitude(V a) { return _mm512_reduce_max_epi32(_mm512_castps_si512(a.r)); }
inline void store_low_bytes(int8_t* p, V a) {
    _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm512_cvtepi32_epi8(_mm512_castps_si512(a.r)));
}
inline void store_low_words(int16_t* p, V a) {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_cvtepi32_epi16(_mm512_castps_si512(a.r)));
}
