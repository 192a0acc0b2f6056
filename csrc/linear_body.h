// x * W^T for dense weights. Included by each kernels_*.cpp, after its vec_*.h, inside that unit's namespace.
//
// A tile multiplies M rows of x with 2P rows of weights. A weight is read and widened once for M rows, so verifying a
// few draft tokens costs little more than one token. Sums keep the order of kernels.h for every M and P.

constexpr int64_t prefetch_distance = 4096;  // bytes

template <class W>
constexpr bool paired = false;
template <>
constexpr bool paired<bf16> = true;  // the even elements of a step come first, then the odd ones

template <class W>
void pack(const float* x, int64_t x_stride, int64_t rows, int64_t depth, float* packed) {
    for (int64_t k = 0; k < depth; k += depth_step)
        for (int64_t m = 0; m < rows; m++, packed += depth_step) {
            const V part = load_n(x + m * x_stride + k, depth - k);
            store(packed, paired<W> ? evens_then_odds(part) : part);
        }
}

// Multiplies P pairs of weight rows with M rows of x. sums[p * M + m] holds row m times the two rows of pair p.
template <int M, int P, class W>
INLINE void multiply_step(const float* x, const W* const (&w)[2 * P], int64_t k, V (&sums)[P * M]) {
    RowPair<W> pairs[P];
    V part[P];
    unroll<P>([&](auto p) INLINE_LAMBDA {
        pairs[p] = RowPair<W>{w[2 * p] + k, w[2 * p + 1] + k};
        part[p] = pairs[p].first();
    });
    unroll<M>([&](auto m) INLINE_LAMBDA {
        const V xm = load_twice(x + m * depth_step);
        unroll<P>([&](auto p) INLINE_LAMBDA { accumulate(sums[p * M + m], part[p], xm); });
    });
    unroll<P>([&](auto p) INLINE_LAMBDA { part[p] = pairs[p].second(); });
    unroll<M>([&](auto m) INLINE_LAMBDA {
        const V xm = load_twice(x + m * depth_step + depth_step / 2);
        unroll<P>([&](auto p) INLINE_LAMBDA { accumulate(sums[p * M + m], part[p], xm); });
    });
}

// The last, partial step along K. Reads the weights from a zero-padded copy.
template <int M, int P, class W>
INLINE void multiply_tail(const float* x, const W* const (&w)[2 * P], int64_t k, int64_t n, V (&sums)[P * M]) {
    W padded[2 * P][depth_step] = {};
    const W* ends[2 * P];
    for (int r = 0; r < 2 * P; r++) {
        for (int64_t i = 0; i < n; i++) padded[r][i] = w[r][k + i];
        ends[r] = padded[r];
    }
    multiply_step<M, P, W>(x, ends, 0, sums);
}

// Computes outputs [o, o + 2P), as far as they are below o_end, for M rows that start at row t.
template <int M, int P, class W>
void linear_tile(const LinearArgs& a, const float* x, int64_t t, int64_t o, int64_t o_end) {
    const W* w[2 * P];
    unroll<2 * P>([&](auto r) INLINE_LAMBDA {
        const int64_t row = o + r < o_end ? o + r : o_end - 1;  // a narrow last tile repeats its last output
        w[r] = static_cast<const W*>(a.weight) + row * a.weight_stride;
    });
    V sums[P * M];
    unroll<P * M>([&](auto i) INLINE_LAMBDA { sums[i] = zero(); });
    // The weights of the next tiles follow in memory. Prefetch as many lines as this tile reads, prefetch_distance
    // ahead.
    const char* ahead = reinterpret_cast<const char*>(w[0]) + prefetch_distance;
    constexpr int64_t bytes = 2 * P * depth_step * sizeof(W), lines = (bytes + 63) / 64;
    int64_t k = 0;
    for (; k + depth_step <= a.depth; k += depth_step, x += M * depth_step, ahead += bytes) {
        unroll<lines>([&](auto i) INLINE_LAMBDA { prefetch(ahead + i * 64); });
        multiply_step<M, P, W>(x, w, k, sums);
    }
    if (k < a.depth) multiply_tail<M, P, W>(x, w, k, a.depth - k, sums);

    constexpr int count = P * M, last = count - 1;
    float totals[(count + 7) / 8][16];  // the two outputs of sums[p * M + m] are adjacent
    unroll<(count + 7) / 8>([&](auto j) INLINE_LAMBDA {
        V eight[8];
        unroll<8>([&](auto i) INLINE_LAMBDA { eight[i] = sums[8 * j + i < count ? 8 * j + i : last]; });
        reduce_halves8(eight, totals[j]);
    });
    const float* both = totals[0];
    float* out = a.out + t * a.outputs + o;
    if (o + 2 * P <= o_end && a.bias == nullptr && a.residual == nullptr) {
        unroll<M>([&](auto m) INLINE_LAMBDA {
            unroll<P>([&](auto p) INLINE_LAMBDA { __builtin_memcpy(out + m * a.outputs + 2 * p, both + 2 * (p * M + m), 8); });
        });
        return;
    }
    const float* residual = a.residual ? a.residual + t * a.outputs + o : nullptr;
    for (int m = 0; m < M; m++)
        for (int64_t r = 0; r < 2 * P && o + r < o_end; r++) {
            float sum = both[2 * (r / 2 * M + m) + r % 2];
            if (a.bias) sum += a.bias[o + r];
            if (residual) sum = residual[m * a.outputs + r] + sum;
            out[m * a.outputs + r] = sum;
        }
}

template <int M, class W>
void linear_strip(const LinearArgs& a, int64_t t, int64_t o_begin, int64_t o_end) {
    const float* x = a.packed + t * round_up(a.depth, depth_step);
    constexpr int P = pair_tile[M];
    for (int64_t o = o_begin; o < o_end; o += 2 * P) linear_tile<M, P, W>(a, x, t, o, o_end);
}

template <int M, class W>
inline void linear_rows(const LinearArgs& a, int64_t rows, int64_t t, int64_t o_begin, int64_t o_end) {
    if constexpr (M > 0) {
        if (rows == M)
            linear_strip<M, W>(a, t, o_begin, o_end);
        else
            linear_rows<M - 1, W>(a, rows, t, o_begin, o_end);
    }
}

template <class W>
void linear(const LinearArgs& a, int64_t o_begin, int64_t o_end, int64_t t_begin, int64_t t_end) {
    for (int64_t t = t_begin; t < t_end; t += a.tile)
        linear_rows<row_tile, W>(a, t + a.tile <= t_end ? a.tile : t_end - t, t, o_begin, o_end);
}
