// Loops unrolled at compile time, so that arrays of vectors are kept in registers. Included like linear_body.h.

#define INLINE __attribute__((always_inline)) inline
#define INLINE_LAMBDA __attribute__((always_inline))

template <int I>
struct Index {
    constexpr operator int() const { return I; }
};

template <class F, int... I>
INLINE void unroll(const F& f, std::integer_sequence<int, I...>) {  // a recursion would take far longer to compile
    (f(Index<I>{}), ...);
}

// Calls f(0), f(1), ... f(N-1). Each index is a compile-time constant.
template <int N, class F>
INLINE void unroll(const F& f) {
    unroll(f, std::make_integer_sequence<int, N>{});
}
