// Pairs of bf16 columns in plain C++. Specifies what an instruction set must define for pairs_body.h. Included after
// vec_portable.h.

constexpr int pair_rows_most = 2;  // rows of x in a tile
constexpr int pair_blocks[3] = {0, 1, 1};  // blocks side by side for each number of rows
constexpr int pair_group = 1;  // blocks that all tiles of a panel compute before the next blocks

struct Pair {  // two columns of a row
    float even, odd;
};
inline float flushed(float x) { return __builtin_fabsf(x) < 0x1p-126f ? __builtin_copysignf(0.0f, x) : x; }
inline Pair make_pair(bf16 even, bf16 odd) { return {flushed(widen(even)), flushed(widen(odd))}; }
inline void store_pairs(Pair* p, const V& a) {  // 16 numbers as 8 pairs
    bf16 rounded[16];
    store(rounded, each([&](int i) { return flushed(a.r[i]); }));
    for (int i = 0; i < 8; i++) p[i] = make_pair(rounded[2 * i], rounded[2 * i + 1]);
}

struct RowPairs {  // a pair of columns of x, the same for all 16 outputs
    Pair x;
    explicit RowPairs(const Pair& pair) : x(pair) {}
};
struct WeightPairs {  // a pair of columns for each of 16 outputs
    V even, odd;
    WeightPairs() = default;
    explicit WeightPairs(const uint8_t* p) {
        auto column = [p](int i, int j) {
            const uint8_t* at = p + 4 * i + 2 * j;
            return flushed(from_bits(static_cast<uint32_t>(at[0]) << 16 | static_cast<uint32_t>(at[1]) << 24));
        };
        even = each([&](int i) { return column(i, 0); });
        odd = each([&](int i) { return column(i, 1); });
    }
};
// On processors with a flush-to-zero mode, the mode is on while an object of this type exists. Here it does nothing.
struct FlushSubnormals {
    FlushSubnormals() {}
};
// a * b + sum, rounded once to 24 bits with an unlimited exponent range. Results below 2^-126 then become zero.
inline float flushed_fma(float a, float b, float sum) {
    const float y = __builtin_fmaf(a, b, sum);
    if (y == 0.0f || !(__builtin_fabsf(y) <= 0x1p-126f)) return y;
    // Here a * b and sum are below 2^-100, because they have 24 bits. Scaled by 2^96, nothing overflows or is
    // subnormal.
    const float exact = __builtin_fmaf(a * 0x1p48f, b * 0x1p48f, sum * 0x1p96f);
    return __builtin_fabsf(exact) < 0x1p-30f ? __builtin_copysignf(0.0f, exact) : y;
}
inline void add_pairs(V& sum, const WeightPairs& w, const RowPairs& x) {
    sum = each([&](int i) { return flushed_fma(w.even.r[i], x.x.even, flushed_fma(w.odd.r[i], x.x.odd, sum.r[i])); });
}
// out[i] = (even[i], odd[i]) for 32 numbers.
inline void interleave_pairs(const bf16* even, const bf16* odd, uint8_t* out) {
    for (int i = 0; i < 32; i++) {
        __builtin_memcpy(out + 4 * i, even + i, 2);
        __builtin_memcpy(out + 4 * i + 2, odd + i, 2);
    }
}
