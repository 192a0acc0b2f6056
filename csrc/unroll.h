// Loops unrolled at compile time, so that arrays of vectors are kept in registers. Included like linear_body.h.

#define INLINE __attribute__((always_inline)) inline
#define INLINE_LAMBDA __attribute__((always_inline))

template <int I>
struct Index {
    constexpr operator int() const { return I; }
};

// Calls f(0), f(1), ... f(N-1). Each index is a compile-time constant.
template <int N, int I = 0, class F>
INLINE void unroll(const F& f) {
    if constexpr (I < N) {
        f(Index<I>{});
        unroll<N, I + 1>(f);
    }
}
