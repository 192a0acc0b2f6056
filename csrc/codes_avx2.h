// Decoders of packed codes to floats in AVX2 registers; codes_avx512.h describes them. Included after vec_avx2.h.

constexpr int float_tile = 5;
constexpr int whole_rows = 2;
constexpr int block_tile[whole_rows + 1] = {0, 1, 1};
constexpr int output_vectors[float_tile + 1] = {2, 2, 2, 1, 1, 1};

// A step of 32 outputs with 4 bytes each, in registers.
struct Dwords {
    __m256i raw[4];
    void read(const uint8_t* p) {
        unroll<4>([&](auto i) INLINE_LAMBDA { raw[i] = bits_at(p + 32 * i); });
    }
};

struct NibbleCodes : Dwords {
    static constexpr int depth = 8, bytes = 128;
    V table;
    NibbleCodes() = default;
    explicit NibbleCodes(const float* values) : table(load(values)) {}
    template <int J>
    __m256 value(int part) const {
        constexpr int shift = J < 4 ? 8 * J : 8 * J - 28;
        const __m256i code = _mm256_srli_epi32(raw[part], shift);
        const __m256 upper = _mm256_castsi256_ps(_mm256_slli_epi32(code, 28));  // bit 3 of the code as sign bit
        return _mm256_blendv_ps(_mm256_permutevar8x32_ps(table.lo, code), _mm256_permutevar8x32_ps(table.hi, code), upper);
    }
    template <int J>
    void column(V& low, V& high) const {
        low = {value<J>(0), value<J>(1)};
        high = {value<J>(2), value<J>(3)};
    }
};

struct ByteCodes : Dwords {
    static constexpr int depth = 4, bytes = 128;
    ByteCodes() = default;
    explicit ByteCodes(const float*) {}
    template <int J>
    __m256 value(int part) const {
        const __m256i byte = _mm256_and_si256(_mm256_srli_epi32(raw[part], 8 * J), _mm256_set1_epi32(0xff));
        return _mm256_sub_ps(_mm256_cvtepi32_ps(byte), _mm256_set1_ps(128.0f));
    }
    template <int J>
    void column(V& low, V& high) const {
        low = {value<J>(0), value<J>(1)};
        high = {value<J>(2), value<J>(3)};
    }
};

template <bool wide>
struct Float8Codes {
    static constexpr int depth = 2, bytes = 64;
    __m256i raw[2];
    Float8Codes() = default;
    explicit Float8Codes(const float*) {}
    void read(const uint8_t* p) {
        raw[0] = bits_at(p);
        raw[1] = bits_at(p + 32);
    }
    template <int J>
    V value(int half) const {
        __m256i halves;
        if (wide) {
            halves = J == 0 ? _mm256_slli_epi16(raw[half], 8)
                            : _mm256_and_si256(raw[half], _mm256_set1_epi16(static_cast<short>(0xff00)));
        } else {
            halves = _mm256_srai_epi16(J == 0 ? _mm256_slli_epi16(raw[half], 8) : raw[half], 1);
            halves = _mm256_and_si256(halves, _mm256_set1_epi16(static_cast<short>(0xbf80)));
        }
        return {_mm256_cvtph_ps(_mm256_castsi256_si128(halves)), _mm256_cvtph_ps(_mm256_extracti128_si256(halves, 1))};
    }
    template <int J>
    void column(V& low, V& high) const {
        low = value<J>(0);
        high = value<J>(1);
    }
};

struct Bf16Codes : Dwords {
    static constexpr int depth = 2, bytes = 128;
    Bf16Codes() = default;
    explicit Bf16Codes(const float*) {}
    template <int J>
    __m256 value(int part) const {
        if (J == 0) return _mm256_castsi256_ps(_mm256_slli_epi32(raw[part], 16));
        return _mm256_castsi256_ps(_mm256_and_si256(raw[part], _mm256_set1_epi32(static_cast<int>(0xffff0000u))));
    }
    template <int J>
    void column(V& low, V& high) const {
        low = {value<J>(0), value<J>(1)};
        high = {value<J>(2), value<J>(3)};
    }
};

// Decoding nibbles takes many instructions, so if there is more than one tile, the tiles share a decoded strip.
template <class Codes>
constexpr int span_rows = 12;
template <>
constexpr int span_rows<NibbleCodes> = float_tile;
