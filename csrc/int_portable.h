// Integer vectors in plain C++. I: sixteen int32, stored as unsigned, whose overflow is defined. Codes: four unsigned
// bytes for each of sixteen outputs. Included after vec_portable.h.

struct I {
    uint32_t r[16];
};
struct Codes {
    uint8_t r[64];
};

constexpr int integer_tile = 2;
constexpr int halves = 1;  // halves of a block (16 outputs each) that one pass computes together
constexpr bool dots_add_four = true, wide_codes = false;
template <int M>
constexpr int sum_sets = 1;
inline void widen_codes(int8_t*) {}

template <class F>
inline I each_int(F f) {
    I out;
    for (int i = 0; i < 16; i++) out.r[i] = f(i);
    return out;
}
template <class F>
inline Codes each_code(F f) {
    Codes out;
    for (int i = 0; i < 64; i++) out.r[i] = static_cast<uint8_t>(f(i));
    return out;
}

inline I set1_int(int32_t x) {
    return each_int([=](int) { return static_cast<uint32_t>(x); });
}
inline I load_ints(const int32_t* p) {
    return each_int([=](int i) { return static_cast<uint32_t>(p[i]); });
}
inline I widen_bytes(const uint8_t* p) {
    return each_int([=](int i) { return p[i]; });
}
inline void store_ints(int32_t* p, const I& a) { __builtin_memcpy(p, a.r, sizeof a.r); }
inline I add_ints(const I& a, const I& b) {
    return each_int([&](int i) { return a.r[i] + b.r[i]; });
}
inline I mul_ints(const I& a, const I& b) {
    return each_int([&](int i) { return a.r[i] * b.r[i]; });
}
inline V to_floats(const I& a) {
    return each([&](int i) { return static_cast<float>(static_cast<int32_t>(a.r[i])); });
}

inline Codes load_codes(const uint8_t* p) {
    return each_code([=](int i) { return p[i]; });
}
inline void store_codes(uint8_t* p, const Codes& a) { __builtin_memcpy(p, a.r, sizeof a.r); }
inline Codes low_nibbles(const Codes& a) {
    return each_code([&](int i) { return a.r[i] & 15; });
}
inline Codes high_nibbles(const Codes& a) {
    return each_code([&](int i) { return a.r[i] >> 4; });
}
// Bytes of `table` [16] at the indices `nibbles`.
inline Codes look_up(const uint8_t* table, const Codes& nibbles) {
    return each_code([&](int i) { return table[nibbles.r[i]]; });
}
// Bytes whose high nibbles are the low (high) nibbles of `high`, and whose low nibbles are the low (high) nibbles of
// `low`.
inline Codes join_low_nibbles(const Codes& high, const Codes& low) {
    return each_code([&](int i) { return high.r[i] << 4 | (low.r[i] & 15); });
}
inline Codes join_high_nibbles(const Codes& high, const Codes& low) {
    return each_code([&](int i) { return (high.r[i] & 0xf0) | low.r[i] >> 4; });
}

// sums[h] += the dot product of four codes of each output with four bytes of x.
template <bool small, bool>
inline void add_dots(I (&sums)[halves], const Codes (&w)[halves], const int8_t* x) {
    for (int i = 0; i < 16; i++) {
        int32_t dot = 0;
        for (int j = 0; j < 4; j++) dot += w[0].r[4 * i + j] * x[j];
        sums[0].r[i] += static_cast<uint32_t>(dot);
    }
}

// Operations for super-blocks: add four products per output; multiply the sums of sub-blocks by their steps; multiply
// minima by sums of x.
constexpr int super_tile = 2;
template <int M>
constexpr int super_halves = 1;
constexpr int fold_quads(int) { return 8; }
template <int shift, int mask>
inline Codes with_bits(const Codes& low, const Codes& high) {
    return each_code([&](int i) { return low.r[i] | ((shift < 0 ? high.r[i] << -shift : high.r[i] >> shift) & mask); });
}
inline I add_quad(I dots, const Codes& w, const int8_t* x) {
    I sums[1] = {dots};
    const Codes codes[1] = {w};
    add_dots<false, false>(sums, codes, x);
    return sums[0];
}
inline I widen_pairs(const int8_t* p) {
    return each_int(
        [=](int i) { return (static_cast<uint32_t>(p[2 * i]) & 0xffffu) | static_cast<uint32_t>(p[2 * i + 1]) << 16; });
}
inline uint32_t first_of(uint32_t pair) { return static_cast<uint32_t>(static_cast<int16_t>(pair & 0xffffu)); }
inline uint32_t second_of(uint32_t pair) { return first_of(pair >> 16); }
inline I first_step(const I& pair) {
    return each_int([&](int i) { return first_of(pair.r[i]); });
}
inline I second_step(const I& pair) {
    return each_int([&](int i) { return second_of(pair.r[i]); });
}
inline I add_steps(const I& sum, const I& dots, const I& step) { return add_ints(sum, mul_ints(dots, step)); }
inline I set1_pair(const int16_t* x) {
    const uint32_t both = (static_cast<uint32_t>(x[0]) & 0xffffu) | static_cast<uint32_t>(x[1]) << 16;
    return each_int([=](int) { return both; });
}
inline I add_pairs(const I& sum, const I& pair, const I& x) {
    return each_int(
        [&](int i) { return sum.r[i] + first_of(pair.r[i]) * first_of(x.r[i]) + second_of(pair.r[i]) * second_of(x.r[i]); });
}
// out[i] = (even[i], odd[i]) for 64 codes.
inline void interleave_codes(const int8* even, const int8* odd, int8_t* out) {
    for (int i = 0; i < 64; i++) out[2 * i] = even[i].bits, out[2 * i + 1] = odd[i].bits;
}

// The larger magnitude. Magnitudes are compared as bit patterns, so NaN is larger than infinity.
inline V max_magnitude(const V& a, const V& x) {
    return each([&](int i) {
        const uint32_t old = to_bits(a.r[i]), magnitude = to_bits(x.r[i]) & 0x7fffffffu;
        return from_bits(magnitude > old ? magnitude : old);
    });
}
inline int32_t reduce_magnitude(const V& a) {
    uint32_t most = 0;
    for (int i = 0; i < 16; i++) most = to_bits(a.r[i]) > most ? to_bits(a.r[i]) : most;
    return static_cast<int32_t>(most);
}
inline void store_low_bytes(int8_t* p, const V& a) {
    for (int i = 0; i < 16; i++) p[i] = static_cast<int8_t>(static_cast<uint8_t>(to_bits(a.r[i])));
}
inline void store_low_words(int16_t* p, const V& a) {
    for (int i = 0; i < 16; i++) p[i] = static_cast<int16_t>(static_cast<uint16_t>(to_bits(a.r[i])));
}
