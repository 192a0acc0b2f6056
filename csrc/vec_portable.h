// V: sixteen floats in plain C++, for machines without AVX2. kernels_portable.cpp includes this file inside its
// namespace. Every operation rounds as the vector instructions do, so the bits are the same. A compiler may vectorize
// the loops.

struct V {
    float r[16];
};

constexpr int row_tile = 4;
constexpr int pair_tile[5] = {0, 1, 1, 1, 1};  // pairs of weight rows for 1..4 rows of x
constexpr int query_tile = 4;  // queries in a tile of scores or of values
constexpr int key_pairs[5] = {0, 4, 2, 2, 2};  // pairs of keys for 1..4 queries
constexpr int pairs_at_once[5] = {0, 4, 2, 2, 2};  // pairs of keys whose sums fit the registers at the same time
constexpr int value_columns[5] = {0, 4, 2, 1, 1};  // vectors of columns for 1..4 queries

template <class F>
inline V each(F f) {
    V out;
    for (int i = 0; i < 16; i++) out.r[i] = f(i);
    return out;
}

inline float from_bits(uint32_t bits) {
    float x;
    __builtin_memcpy(&x, &bits, 4);
    return x;
}
inline uint32_t to_bits(float x) {
    uint32_t bits;
    __builtin_memcpy(&bits, &x, 4);
    return bits;
}

inline float widen(float x) { return x; }
inline float widen(bf16 x) { return from_bits(static_cast<uint32_t>(x.bits) << 16); }
inline float widen(fp16 x) {
    uint32_t sign = static_cast<uint32_t>(x.bits & 0x8000u) << 16;
    uint32_t exponent = (x.bits >> 10) & 0x1fu, fraction = x.bits & 0x3ffu;
    if (exponent == 0x1f) return from_bits(sign | 0x7f800000u | fraction << 13 | (fraction ? 0x400000u : 0u));
    if (exponent != 0) return from_bits(sign | (exponent + 112) << 23 | fraction << 13);
    float tiny = static_cast<float>(fraction) * 0x1p-24f;  // zero or subnormal: exact
    return from_bits(sign | to_bits(tiny));
}
inline float widen(int8 x) { return static_cast<float>(x.bits); }
inline float widen(e5m2 x) { return widen(fp16{static_cast<uint16_t>(x.bits << 8)}); }
inline float widen(e4m3 x) {
    const uint32_t sign = static_cast<uint32_t>(x.bits & 0x80u) << 24, magnitude = x.bits & 0x7fu;
    if (magnitude == 0x7f) return from_bits(sign | 0x7fc00000u);
    if (magnitude >= 8) return from_bits(sign | ((magnitude << 20) + (120u << 23)));
    return from_bits(sign | to_bits(static_cast<float>(magnitude) * 0x1p-9f));  // zero or subnormal: exact
}

inline void narrow(float x, float* out) { *out = x; }
inline void narrow(float x, bf16* out) {
    uint32_t bits = to_bits(x);
    out->bits = static_cast<uint16_t>(x != x ? 0x7fc0u : (bits + 0x7fffu + (bits >> 16 & 1u)) >> 16);
}
inline void narrow(float x, fp16* out) {
    uint32_t bits = to_bits(x), sign = bits >> 16 & 0x8000u, magnitude = bits & 0x7fffffffu, half;
    if (magnitude > 0x7f800000u) {
        half = 0x7e00u | (magnitude >> 13 & 0x3ffu);  // a quiet NaN
    } else if (magnitude >= 0x477ff000u) {
        half = 0x7c00u;  // 65520 and more round to infinity
    } else if (magnitude < 0x38800000u) {
        // Below 2^-14: after adding 1/2, the low bits of the fraction are the subnormal's bits, rounded to nearest
        // even.
        half = to_bits(from_bits(magnitude) + 0.5f) - 0x3f000000u;
    } else {
        half = (magnitude + 0xfffu + (magnitude >> 13 & 1u) - 0x38000000u) >> 13;
    }
    out->bits = static_cast<uint16_t>(sign | half);
}

// Nibbles of 16 bytes, or of 8 bytes at each of two addresses, as floats. `shift`: 0 for low nibbles, 4 for high
// nibbles.
inline V load_nibbles(const uint8_t* a, const uint8_t* b, int shift) {
    return each([=](int i) { return static_cast<float>((i < 8 ? a[i] : b[i - 8]) >> shift & 15); });
}
inline V load_nibbles(const uint8_t* p, int shift) { return load_nibbles(p, p + 8, shift); }
inline V set_halves(float a, float b) {
    return each([=](int i) { return i < 8 ? a : b; });
}

inline V zero() {
    return each([](int) { return 0.0f; });
}
inline V set1(float x) {
    return each([=](int) { return x; });
}
inline V add(const V& a, const V& b) {
    return each([&](int i) { return a.r[i] + b.r[i]; });
}
inline V sub(const V& a, const V& b) {
    return each([&](int i) { return a.r[i] - b.r[i]; });
}
inline V mul(const V& a, const V& b) {
    return each([&](int i) { return a.r[i] * b.r[i]; });
}
inline V div(const V& a, const V& b) {
    return each([&](int i) { return a.r[i] / b.r[i]; });
}
inline V fma(const V& a, const V& b, const V& c) {
    return each([&](int i) { return __builtin_fmaf(a.r[i], b.r[i], c.r[i]); });
}
inline V max(const V& a, const V& b) {
    return each([&](int i) { return a.r[i] > b.r[i] ? a.r[i] : b.r[i]; });
}
inline V min(const V& a, const V& b) {
    return each([&](int i) { return a.r[i] < b.r[i] ? a.r[i] : b.r[i]; });
}

template <class T>
inline V load(const T* p) {
    return each([=](int i) { return widen(p[i]); });
}
template <class T>
inline void store(T* p, const V& a) {
    for (int i = 0; i < 16; i++) narrow(a.r[i], p + i);
}

// Lanes begin..end-1 of a, and `other` in the rest.
inline V keep(const V& a, int64_t begin, int64_t end, const V& other) {
    return each([&](int i) { return i >= begin && i < end ? a.r[i] : other.r[i]; });
}

// `linear` keeps two rows of weights in a vector, 8 lanes each. 16 weights of each row make two vectors, in the order
// in which `pack` lays out x: for bf16 even, then odd elements; for other types first, then second half.
template <class W>
struct RowPair {
    const W *a, *b;
    V first() const {
        return each([this](int i) { return widen(i < 8 ? a[i] : b[i - 8]); });
    }
    V second() const {
        return each([this](int i) { return widen(i < 8 ? a[i + 8] : b[i]); });
    }
};
template <>
struct RowPair<bf16> {
    const bf16 *a, *b;
    V first() const {
        return each([this](int i) { return widen(i < 8 ? a[2 * i] : b[2 * i - 16]); });
    }
    V second() const {
        return each([this](int i) { return widen(i < 8 ? a[2 * i + 1] : b[2 * i - 15]); });
    }
};
inline V load_twice(const float* p) {
    return each([=](int i) { return p[i % 8]; });
}
inline V evens_then_odds(const V& a) {
    return each([&](int i) { return a.r[i < 8 ? 2 * i : 2 * i - 15]; });
}

// Sums of the 8 lower and the 8 upper lanes of eight vectors: out[2 i] and out[2 i + 1] belong to vector i.
inline void reduce_halves8(const V (&v)[8], float* out) {
    for (int i = 0; i < 16; i++) {
        V s = v[i / 2];
        float* half = s.r + i % 2 * 8;
        for (int step = 4; step > 0; step /= 2)
            for (int l = 0; l < step; l++) half[l] = half[l] + half[l + step];
        out[i] = half[0];
    }
}

inline float reduce_add(const V& a) {
    V s = a;
    for (int step = 8; step > 0; step /= 2)
        for (int i = 0; i < step; i++) s.r[i] = s.r[i] + s.r[i + step];
    return s.r[0];
}
inline void reduce_add4(const V& a, const V& b, const V& c, const V& d, float* out) {
    out[0] = reduce_add(a);
    out[1] = reduce_add(b);
    out[2] = reduce_add(c);
    out[3] = reduce_add(d);
}
inline float reduce_max(const V& a) {
    V s = a;
    for (int step = 8; step > 0; step /= 2)
        for (int i = 0; i < step; i++) s.r[i] = s.r[i] > s.r[i + step] ? s.r[i] : s.r[i + step];
    return s.r[0];
}

// y * 2^n, where shifted = n + 1.5 * 2^23 has n in its low bits. Multiplies by two factors, because 2^n itself can
// overflow or be subnormal at the ends of the range.
inline V scale_by_power(const V& y, const V& shifted) {
    return each([&](int i) {
        int32_t n = static_cast<int32_t>(to_bits(shifted.r[i]) - 0x4b400000u);
        int32_t half = n >> 1, rest = n - half;
        float a = from_bits(static_cast<uint32_t>(half + 127) << 23), b = from_bits(static_cast<uint32_t>(rest + 127) << 23);
        return y.r[i] * a * b;
    });
}

inline void prefetch(const void* p) { __builtin_prefetch(p); }
inline void prefetch_far(const void* p) { __builtin_prefetch(p, 0, 2); }
inline void accumulate(V& sum, const V& a, const V& b) { sum = fma(a, b, sum); }  // sum += a * b

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
