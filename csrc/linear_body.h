// x * W^T for dense weights. Included by each kernels_*.cpp, after its vec_*.h, inside that unit's namespace.
//
// A tile holds M rows of x against R rows of weights: a weight is read and widened once and serves M rows, so that
// checking a few drafts costs little more than one token. Sums keep the order of kernels.h for every M and R.

template <class W>
constexpr bool paired = false;
template <>
constexpr bool paired<bf16> = true;  // even elements of a step, then odd ones

template <class W>
void pack(const float* x, int64_t x_stride, int64_t rows, int64_t depth, float* packed) {
    for (int64_t k = 0; k < depth; k += depth_step) {
        const int64_t n = depth - k < depth_step ? depth - k : depth_step;
        for (int64_t m = 0; m < rows; m++, packed += depth_step) {
            const float* row = x + m * x_stride + k;
            float padded[depth_step];
            if (n < depth_step) {
                for (int i = 0; i < depth_step; i++) padded[i] = i < n ? row[i] : 0.0f;
                row = padded;
            }
            for (int i = 0; i < lanes; i++) {
                packed[i] = paired<W> ? row[2 * i] : row[i];
                packed[lanes + i] = paired<W> ? row[2 * i + 1] : row[lanes + i];
            }
        }
    }
}

template <int M, int R, class W>
inline void multiply_step(const float* x, const W* const* w, int64_t k, V (&sums)[R * M]) {
    V part[R];
    for (int r = 0; r < R; r++) part[r] = first(w[r] + k);
    for (int m = 0; m < M; m++) {
        V xm = load(x + m * depth_step);
        for (int r = 0; r < R; r++) sums[r * M + m] = fma(part[r], xm, sums[r * M + m]);
    }
    for (int r = 0; r < R; r++) part[r] = second(w[r] + k);
    for (int m = 0; m < M; m++) {
        V xm = load(x + m * depth_step + lanes);
        for (int r = 0; r < R; r++) sums[r * M + m] = fma(part[r], xm, sums[r * M + m]);
    }
}

// Outputs o .. o+R-1 (those below o_end) of M rows that start at row t.
template <int M, int R, class W>
void linear_tile(const LinearArgs& a, const float* x, int64_t t, int64_t o, int64_t o_end) {
    const W* w[R];
    for (int r = 0; r < R; r++) {
        const int64_t row = o + r < o_end ? o + r : o_end - 1;  // a last, narrow tile computes its last output again
        w[r] = static_cast<const W*>(a.weight) + row * a.weight_stride;
    }
    V sums[R * M];
    for (int i = 0; i < R * M; i++) sums[i] = zero();
    int64_t k = 0;
    for (; k + depth_step <= a.depth; k += depth_step, x += M * depth_step) {
        for (int r = 0; r < R; r++) prefetch(w[r] + R * a.weight_stride + k);  // the next tile's weights
        multiply_step<M, R, W>(x, w, k, sums);
    }
    if (k < a.depth) {
        W padded[R][depth_step] = {};
        const W* ends[R];
        for (int r = 0; r < R; r++) {
            for (int64_t i = 0; i < a.depth - k; i++) padded[r][i] = w[r][k + i];
            ends[r] = padded[r];
        }
        multiply_step<M, R, W>(x, ends, 0, sums);
    }
    constexpr int count = R * M;
    float totals[count + 3];
    for (int i = 0; i < count; i += 4) {
        const int last = count - 1;
        reduce_add4(sums[i], sums[i + 1 < count ? i + 1 : last], sums[i + 2 < count ? i + 2 : last],
                    sums[i + 3 < count ? i + 3 : last], totals + i);
    }
    for (int m = 0; m < M; m++) {
        float* out = a.out + (t + m) * a.outputs + o;
        for (int r = 0; r < R && o + r < o_end; r++) out[r] = totals[r * M + m];
        if (a.bias)
            for (int r = 0; r < R && o + r < o_end; r++) out[r] += a.bias[o + r];
    }
}

template <int M, class W>
void linear_strip(const LinearArgs& a, int64_t t, int64_t o_begin, int64_t o_end) {
    const float* x = a.packed + t * round_up(a.depth, depth_step);
    constexpr int R = weight_tile[M];
    for (int64_t o = o_begin; o < o_end; o += R) linear_tile<M, R, W>(a, x, t, o, o_end);
}

template <int M, class W>
inline void linear_rest(const LinearArgs& a, int64_t rows, int64_t t, int64_t o_begin, int64_t o_end) {
    if constexpr (M > 0) {
        if (rows == M)
            linear_strip<M, W>(a, t, o_begin, o_end);
        else
            linear_rest<M - 1, W>(a, rows, t, o_begin, o_end);
    }
}

template <class W>
void linear(const LinearArgs& a, int64_t o_begin, int64_t o_end, int64_t t_begin, int64_t t_end) {
    int64_t t = t_begin;
    for (; t + row_tile <= t_end; t += row_tile) linear_strip<row_tile, W>(a, t, o_begin, o_end);
    linear_rest<row_tile - 1, W>(a, t_end - t, t, o_begin, o_end);
}
