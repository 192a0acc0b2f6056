// Decoders of packed codes to floats in plain C++; codes_avx512.h describes them. Included after vec_portable.h.

constexpr int float_tile = 2;
constexpr int whole_rows = float_tile;
template <class>
constexpr int span_rows = 0;
constexpr int output_vectors[float_tile + 1] = {2, 2, 2};
constexpr int block_tile[3] = {0, 1, 1};

struct NibbleCodes {
    static constexpr int depth = 8, bytes = 128;
    const float* table;
    const uint8_t* at;
    NibbleCodes() = default;
    explicit NibbleCodes(const float* values) : table(values), at(nullptr) {}
    void read(const uint8_t* p) { at = p; }
    template <int J>
    void column(V& low, V& high) const {
        auto value = [this](int output) { return table[at[4 * output + J % 4] >> (J < 4 ? 0 : 4) & 15]; };
        low = each(value);
        high = each([&](int i) { return value(i + 16); });
    }
};

struct ByteCodes {
    static constexpr int depth = 4, bytes = 128;
    const uint8_t* at;
    ByteCodes() = default;
    explicit ByteCodes(const float*) : at(nullptr) {}
    void read(const uint8_t* p) { at = p; }
    template <int J>
    void column(V& low, V& high) const {
        auto value = [this](int output) { return static_cast<float>(at[4 * output + J]) - 128.0f; };
        low = each(value);
        high = each([&](int i) { return value(i + 16); });
    }
};

template <bool wide>
struct Float8Codes {
    static constexpr int depth = 2, bytes = 64;
    const uint8_t* at;
    Float8Codes() = default;
    explicit Float8Codes(const float*) : at(nullptr) {}
    void read(const uint8_t* p) { at = p; }
    template <int J>
    void column(V& low, V& high) const {
        auto value = [this](int output) {
            const uint32_t code = at[2 * output + J];
            const uint32_t half = wide ? code << 8 : (code & 0x80u) << 8 | (code & 0x7fu) << 7;
            return widen(fp16{static_cast<uint16_t>(half)});
        };
        low = each(value);
        high = each([&](int i) { return value(i + 16); });
    }
};

struct Bf16Codes {
    static constexpr int depth = 2, bytes = 128;
    const uint8_t* at;
    Bf16Codes() = default;
    explicit Bf16Codes(const float*) : at(nullptr) {}
    void read(const uint8_t* p) { at = p; }
    template <int J>
    void column(V& low, V& high) const {
        auto value = [this](int output) {
            const uint8_t* p = at + 4 * output + 2 * J;
            return from_bits(static_cast<uint32_t>(p[0]) << 16 | static_cast<uint32_t>(p[1]) << 24);
        };
        low = each(value);
        high = each([&](int i) { return value(i + 16); });
    }
};
