// Decoders of packed codes to floats in AVX-512 registers. Included after vec_avx512.h.
//
// A decoder reads a step of packed codes (32 outputs, `depth` columns) and returns two vectors of 16 outputs for each
// column.

constexpr int float_tile = 12;  // rows of x in a tile: 2 x 12 sums are held in registers
// Blocks of 32 outputs that a tile of 1..12 rows takes side by side: eight or more independent sums hide the latency.
constexpr int block_tile[13] = {0, 4, 2, 2, 1, 1, 1, 1, 1, 1, 1, 1, 1};
constexpr int whole_rows = float_tile;
template <class>
constexpr int span_rows = 0;
constexpr int output_vectors[13] = {2, 2, 2, 2, 2, 2, 2, 2, 2, 2, 2, 2, 2};

struct NibbleCodes {
    static constexpr int depth = 8, bytes = 128;
    __m512i raw[2];
    V table;
    NibbleCodes() = default;
    explicit NibbleCodes(const float* values) : table(load(values)) {}
    void read(const uint8_t* p) {
        raw[0] = _mm512_loadu_si512(p);
        raw[1] = _mm512_loadu_si512(p + 64);
    }
    template <int J>  // the permutation ignores the bits of a lane from bit 4 on, so no mask is needed
    V value(int half) const {
        constexpr int shift = J < 4 ? 8 * J : 8 * J - 28;
        return {_mm512_permutexvar_ps(shift == 0 ? raw[half] : _mm512_srli_epi32(raw[half], shift), table.r)};
    }
    template <int J>
    void column(V& low, V& high) const {
        low = value<J>(0);
        high = value<J>(1);
    }
};

struct ByteCodes {
    static constexpr int depth = 4, bytes = 128;
    __m512i raw[2];
    ByteCodes() = default;
    explicit ByteCodes(const float*) {}
    void read(const uint8_t* p) {
        raw[0] = _mm512_loadu_si512(p);
        raw[1] = _mm512_loadu_si512(p + 64);
    }
    template <int J>  // puts the byte in the low bits of 2^23 + byte; 0xf8 computes a or (b and c)
    V value(int half) const {
        const __m512i moved = J == 0 ? raw[half] : _mm512_srli_epi32(raw[half], 8 * J);
        const __m512i bits = _mm512_ternarylogic_epi32(_mm512_set1_epi32(0x4b000000), moved, _mm512_set1_epi32(0xff), 0xf8);
        return {_mm512_sub_ps(_mm512_castsi512_ps(bits), _mm512_set1_ps(8388736.0f))};
    }
    template <int J>
    void column(V& low, V& high) const {
        low = value<J>(0);
        high = value<J>(1);
    }
};

template <bool wide>  // wide: e5m2, the upper byte of an fp16; else e4m3
struct Float8Codes {
    static constexpr int depth = 2, bytes = 64;
    __m512i raw;
    Float8Codes() = default;
    explicit Float8Codes(const float*) {}
    void read(const uint8_t* p) { raw = _mm512_loadu_si512(p); }
    template <int J>
    void column(V& low, V& high) const {
        __m512i halves;
        if (wide) {
            halves = J == 0 ? _mm512_slli_epi16(raw, 8) : _mm512_and_si512(raw, _mm512_set1_epi16(static_cast<short>(0xff00)));
        } else {  // moves sign, exponent and fraction to their places in an fp16: the value times 2^-8
            halves = _mm512_srai_epi16(J == 0 ? _mm512_slli_epi16(raw, 8) : raw, 1);
            halves = _mm512_and_si512(halves, _mm512_set1_epi16(static_cast<short>(0xbf80)));
        }
        low = {_mm512_cvtph_ps(_mm512_castsi512_si256(halves))};
        high = {_mm512_cvtph_ps(_mm512_extracti64x4_epi64(halves, 1))};
    }
};

struct Bf16Codes {
    static constexpr int depth = 2, bytes = 128;
    __m512i raw[2];
    Bf16Codes() = default;
    explicit Bf16Codes(const float*) {}
    void read(const uint8_t* p) {
        raw[0] = _mm512_loadu_si512(p);
        raw[1] = _mm512_loadu_si512(p + 64);
    }
    template <int J>
    V value(int half) const {
        if (J == 0) return {_mm512_castsi512_ps(_mm512_slli_epi32(raw[half], 16))};
        return {_mm512_castsi512_ps(_mm512_and_si512(raw[half], _mm512_set1_epi32(static_cast<int>(0xffff0000u))))};
    }
    template <int J>
    void column(V& low, V& high) const {
        low = value<J>(0);
        high = value<J>(1);
    }
};
