// Quantization of KV cache rows to int8 and fp8 codes. Included like linear_body.h.
//
// With a = max |x|, the scale of a row and head is a / 127 (int8), a / 448 (e4m3) or a / 57344 (e5m2). Codes are x *
// (127 / a) (or 448 / a, 57344 / a), rounded to nearest even. A row with NaN or infinity gets scale NaN and codes 0, so
// that the error stays visible and in its own row. If a < 2^-100, scale and codes are 0. sameseed/formats has the same
// in PyTorch.

template <class T>
void encode_dense(const float* x, int64_t heads, int64_t dim, void* codes, float*) {
    encode<T>(x, heads * dim, codes);
}

// Returns the scale of x[dim]. `factor` maps x to codes of at most `largest`; a factor of 0 means that all codes are 0.
inline float find_scale(const float* x, int64_t dim, float largest, float* factor) {
    V top = zero(), poison = zero();
    for (int64_t d = 0; d < dim; d += lanes) {
        const V part = load_n(x + d, dim - d);
        top = max(top, max(part, sub(zero(), part)));
        poison = add(poison, sub(part, part));  // 0, or NaN if the number is NaN or infinite
    }
    const float a = reduce_max(top), poisoned = reduce_add(poison);
    *factor = 0.0f;
    if (poisoned != 0.0f) return __builtin_nanf("");
    if (a < 0x1p-100f) return 0.0f;
    *factor = largest / a;
    return a / largest;
}

// Stores the low bytes of `words` as codes.
inline void store_bytes(const uint32_t* words, int64_t n, uint8_t* codes) {
    uint8_t bytes[lanes];
    for (int64_t i = 0; i < lanes; i++) bytes[i] = static_cast<uint8_t>(words[i]);
    __builtin_memcpy(codes, bytes, n < lanes ? static_cast<uint64_t>(n) : lanes);
}

void encode_int8(const float* x, int64_t heads, int64_t dim, void* codes, float* scales) {
    uint8_t* out = static_cast<uint8_t*>(codes);
    for (int64_t h = 0; h < heads; h++, x += dim, out += dim) {
        float factor;
        scales[h] = find_scale(x, dim, 127.0f, &factor);
        for (int64_t d = 0; d < dim; d += lanes) {
            V y = factor == 0.0f ? zero() : mul(load_n(x + d, dim - d), set1(factor));
            y = add(max(set1(-127.0f), min(set1(127.0f), y)), set1(12582912.0f));  // + 1.5 * 2^23 rounds to an integer
            float rounded[lanes];
            store(rounded, y);
            uint32_t words[lanes];
            __builtin_memcpy(words, rounded, sizeof words);
            store_bytes(words, dim - d, out + d);
        }
    }
}

// Parameters of an fp8 format: mantissa bits, exponent bias, largest code, largest and smallest normal number. The ulp
// of `magic` is the spacing of subnormal numbers.
template <class T>
struct Fp8;
template <>
struct Fp8<e4m3> {
    static constexpr uint32_t mantissa = 3, bias = 7, last = 0x7e;
    static constexpr float largest = 448.0f, smallest_normal = 0x1p-6f, magic = 0x1p14f;
};
template <>
struct Fp8<e5m2> {
    static constexpr uint32_t mantissa = 2, bias = 15, last = 0x7b;
    static constexpr float largest = 57344.0f, smallest_normal = 0x1p-14f, magic = 0x1p7f;
};

template <class T>
inline void round_fp8(V y, uint32_t* codes) {
    using F = Fp8<T>;
    constexpr uint32_t shift = 23 - F::mantissa, half = (1u << (shift - 1)) - 1, rebias = (127 - F::bias) << F::mantissa;
    const V size = max(y, sub(zero(), y));
    float plain[lanes], sizes[lanes], shifted[lanes];
    store(plain, y);
    store(sizes, size);
    store(shifted, add(size, set1(F::magic)));  // the low bits are then the code of a subnormal
    const float magic = F::magic, smallest = F::smallest_normal;
    uint32_t x[lanes], bits[lanes], tiny[lanes], magic_bits, smallest_bits;
    __builtin_memcpy(x, plain, sizeof x);
    __builtin_memcpy(bits, sizes, sizeof bits);
    __builtin_memcpy(tiny, shifted, sizeof tiny);
    __builtin_memcpy(&magic_bits, &magic, 4);
    __builtin_memcpy(&smallest_bits, &smallest, 4);
    for (int64_t i = 0; i < lanes; i++) {
        const uint32_t size_bits = bits[i] & 0x7fffffffu;
        const uint32_t normal = ((size_bits + half + (size_bits >> shift & 1u)) >> shift) - rebias;
        uint32_t code = size_bits < smallest_bits ? tiny[i] - magic_bits : normal;
        code = code > F::last ? F::last : code;
        codes[i] = code | (x[i] >> 24 & 0x80u);
    }
}

template <class T>
void encode_fp8(const float* x, int64_t heads, int64_t dim, void* codes, float* scales) {
    uint8_t* out = static_cast<uint8_t*>(codes);
    for (int64_t h = 0; h < heads; h++, x += dim, out += dim) {
        float factor;
        scales[h] = find_scale(x, dim, Fp8<T>::largest, &factor);
        for (int64_t d = 0; d < dim; d += lanes) {
            uint32_t words[lanes];
            round_fp8<T>(factor == 0.0f ? zero() : mul(load_n(x + d, dim - d), set1(factor)), words);
            store_bytes(words, dim - d, out + d);
        }
    }
}
