// Pairs of bf16 columns as floats, for processors without vdpbf16ps. Included by pairs_avx512.h and pairs_avx2.h.

struct Pair {
    float even, odd;
};
inline float to_float(bf16 x) {
    const uint32_t bits = static_cast<uint32_t>(x.bits) << 16;
    float out;
    __builtin_memcpy(&out, &bits, sizeof out);
    return out;
}
inline Pair make_pair(bf16 even, bf16 odd) { return {to_float(even), to_float(odd)}; }

inline void store_pairs(Pair* p, V a) {  // 16 numbers as 8 pairs
    bf16 rounded[16];
    store(rounded, without_subnormals(a));
    store(&p->even, load(rounded));
}

struct RowPairs {
    V even, odd;
    explicit RowPairs(const Pair& x) : even(set1(x.even)), odd(set1(x.odd)) {}
};
// While an object of this type exists, this thread's arithmetic treats subnormal operands as zero and flushes subnormal
// results to zero (bits 6 and 15 of MXCSR).
class FlushSubnormals {
   public:
    FlushSubnormals() : before_(_mm_getcsr()) { _mm_setcsr(before_ | 0x8040u); }
    ~FlushSubnormals() { _mm_setcsr(before_); }
    FlushSubnormals(const FlushSubnormals&) = delete;
    FlushSubnormals& operator=(const FlushSubnormals&) = delete;

   private:
    unsigned before_;
};
inline void add_pairs(V& sum, const WeightPairs& w, const RowPairs& x) {
    accumulate(sum, w.odd, x.odd);
    accumulate(sum, w.even, x.even);
}
