// Encodes rows of the KV cache in 4 bits, and decodes them to floats for attention. Included after codes_body.h.
//
// sameseed/formats/_kv4.py specifies the bytes and the order of the arithmetic. This file gives the same bits. It uses
// loops over plain arrays; elements are computed independently, so the compiler may vectorize them freely.

// Multiplies x [dim] by the normalized Hadamard matrix, in blocks of the largest power of two that divides dim.
inline void rotate(float* x, int64_t dim) {
    const int64_t block = dim & -dim;
    for (int64_t distance = 1; distance < block; distance *= 2)
        for (int64_t i = 0; i < dim; i += 2 * distance)
            for (int64_t j = i; j < i + distance; j++) {
                const float a = x[j], b = x[j + distance];
                x[j] = a + b;
                x[j + distance] = a - b;
            }
    const float factor = static_cast<float>(1.0 / __builtin_sqrt(static_cast<double>(block)));
    for (int64_t i = 0; i < dim; i++) x[i] *= factor;
}

inline uint32_t float_bits(float x) {
    uint32_t bits;
    __builtin_memcpy(&bits, &x, 4);
    return bits;
}
inline float bits_float(uint32_t bits) {
    float x;
    __builtin_memcpy(&x, &bits, 4);
    return x;
}
inline bool finite(float x) { return (float_bits(x) & 0x7f800000u) != 0x7f800000u; }

inline uint16_t to_bf16(float x) {  // rounds to nearest even; NaN stays NaN
    const uint32_t bits = float_bits(x);
    if (x != x) return 0x7fc0;
    return static_cast<uint16_t>((bits + 0x7fffu + (bits >> 16 & 1u)) >> 16);
}

// Writes the codes and the lowest value of x [dim] to `out` and returns the scale. `kept` marks values that are stored
// elsewhere (outliers); it may be null.
inline float encode_nibbles(const float* x, int64_t dim, const bool* kept, uint8_t* out) {
    float high = -__builtin_inff(), low = __builtin_inff();
    bool broken = false;
    for (int64_t i = 0; i < dim; i++) {
        broken |= !finite(x[i]);
        if (kept != nullptr && kept[i]) continue;
        high = x[i] > high ? x[i] : high;
        low = x[i] < low ? x[i] : low;
    }
    const uint32_t bits = float_bits(low);
    float lowest = bits_float(((bits >> 31) != 0 ? bits + 0xffffu : bits) & 0xffff0000u);  // rounded down
    broken |= !finite(lowest) || !finite(high - lowest);
    const float top = __builtin_fabsf(high), bottom = __builtin_fabsf(lowest);
    const bool empty = broken || (top > bottom ? top : bottom) < 0x1p-100f;
    if (empty) lowest = 0.0f;
    const float span = empty ? 0.0f : high - lowest;
    const bool usable = span >= 0x1p-100f;
    const float inverse = usable ? 15.0f / span : 1.0f, round = 12582912.0f;  // + 1.5 * 2^23 rounds to an integer
    uint8_t codes[max_dim];
    for (int64_t i = 0; i < dim; i++) {
        float step = usable ? (x[i] - lowest) * inverse : 0.0f;
        step = step < 15.0f ? step : 15.0f;
        step = (step > 0.0f ? step : 0.0f) + round;
        codes[i] = kept != nullptr && kept[i] ? 0 : static_cast<uint8_t>(float_bits(step));
    }
    const int64_t half = dim / 2;
    for (int64_t i = 0; i < half; i++) out[i] = static_cast<uint8_t>(codes[i] | codes[half + i] << 4);
    const uint16_t stored = static_cast<uint16_t>(float_bits(lowest) >> 16);
    out[half] = static_cast<uint8_t>(stored), out[half + 1] = static_cast<uint8_t>(stored >> 8);
    return broken ? __builtin_nanf("") : usable ? span / 15.0f : 0.0f;
}

inline float lowest_of(const uint8_t* row, int64_t dim) {
    return bits_float(static_cast<uint32_t>(row[dim / 2] | row[dim / 2 + 1] << 8) << 16);
}

inline void decode_nibbles(const uint8_t* row, float scale, int64_t dim, float* out) {
    const int64_t half = dim / 2;
    const float lowest = lowest_of(row, dim);
    const V scales = set1(scale), low = set1(lowest);
    int64_t i = 0;
    for (; i + lanes <= half; i += lanes) {
        store(out + i, add(mul(load_nibbles(row + i, 0), scales), low));
        store(out + half + i, add(mul(load_nibbles(row + i, 4), scales), low));
    }
    for (; i < half; i++) {
        out[i] = static_cast<float>(row[i] & 15) * scale + lowest;
        out[half + i] = static_cast<float>(row[i] >> 4) * scale + lowest;
    }
}

void encode_rotated4(const float* x, int64_t heads, int64_t dim, void* codes, float* scales) {
    uint8_t* out = static_cast<uint8_t*>(codes);
    for (int64_t h = 0; h < heads; h++, x += dim, out += kv_row_bytes(KvFormat::int4, dim)) {
        float rotated[max_dim];
        __builtin_memcpy(rotated, x, static_cast<uint64_t>(dim) * sizeof(float));
        rotate(rotated, dim);
        scales[h] = encode_nibbles(rotated, dim, nullptr, out);
    }
}

// Marks the `count` largest magnitudes of x in the order of torch's stable sort: NaN is the largest, and of equal
// magnitudes the first comes first.
inline void mark_largest(const float* x, int64_t dim, int64_t count, bool* kept) {
    for (int64_t i = 0; i < dim; i++) kept[i] = false;
    for (; count > 0; count--) {
        int64_t best = -1;
        for (int64_t i = 0; i < dim; i++) {
            if (kept[i] || (best >= 0 && x[best] != x[best])) continue;
            if (best < 0 || x[i] != x[i] || __builtin_fabsf(x[i]) > __builtin_fabsf(x[best])) best = i;
        }
        kept[best] = true;
    }
}

void encode_sparse4(const float* x, int64_t heads, int64_t dim, void* codes, float* scales) {
    constexpr float largest = 0x1.fep127f;  // largest finite bfloat16
    uint8_t* out = static_cast<uint8_t*>(codes);
    const int64_t count = kv_outliers(dim);
    for (int64_t h = 0; h < heads; h++, x += dim, out += kv_row_bytes(KvFormat::int4_sparse, dim)) {
        bool kept[max_dim];
        mark_largest(x, dim, count, kept);
        scales[h] = encode_nibbles(x, dim, kept, out);
        uint8_t *values = out + dim / 2 + 2, *places = values + 2 * count;
        for (int64_t i = 0; i < dim; i++) {
            if (!kept[i]) continue;
            const float clamped = x[i] > largest ? largest : x[i] < -largest ? -largest : x[i];
            const uint16_t value = to_bf16(clamped);
            *values++ = static_cast<uint8_t>(value), *values++ = static_cast<uint8_t>(value >> 8);
            *places++ = static_cast<uint8_t>(i);
            if (dim > 256) *places++ = static_cast<uint8_t>(i >> 8);
        }
    }
}

// Types of stored 4-bit rows. `rotated4` decodes to floats that are still rotated. `nibbles4` is the same layout for D
// = 32 n, where 16 columns occupy 16 bytes, so rows can be decoded in registers.
struct rotated4 {
    uint8_t byte;
};
struct nibbles4 {
    uint8_t byte;
};
struct sparse4 {
    uint8_t byte;
};
template <class T>
constexpr bool unpacked_first = false;  // whether rows are decoded to floats when attention looks them up
template <>
constexpr bool unpacked_first<rotated4> = true;
template <>
constexpr bool unpacked_first<sparse4> = true;

inline void unpack_row(const rotated4* row, float scale, int64_t dim, float* out) { decode_nibbles(&row->byte, scale, dim, out); }

inline void unpack_row(const sparse4* row, float scale, int64_t dim, float* out) {
    const uint8_t* bytes = &row->byte;
    decode_nibbles(bytes, scale, dim, out);
    const int64_t count = kv_outliers(dim), wide = dim > 256 ? 2 : 1;
    const uint8_t *values = bytes + dim / 2 + 2, *places = values + 2 * count;
    for (int64_t i = 0; i < count; i++) {
        int64_t place = places[i * wide] | (wide == 2 ? places[2 * i + 1] << 8 : 0);
        place = place < dim ? place : dim - 1;  // rows that were never written may hold any bytes
        out[place] = bits_float(static_cast<uint32_t>(values[2 * i] | values[2 * i + 1] << 8) << 16);
    }
}
