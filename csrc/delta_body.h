// The loops of Gated DeltaNet (delta.h). Included by each delta_*.cpp, after rows_body.h.

void convolve(const float* const* taps, int64_t count, const float* weight, int64_t width, float* out) {
    for (int64_t c = 0; c < width; c += lanes) {
        V sum = zero();
        for (int64_t j = 0; j < count; j++)
            if (taps[j] != nullptr) sum = fma(load_n(weight + j * width + c, width - c), load_n(taps[j] + c, width - c), sum);
        store_n(out + c, div(sum, add(set1(1.0f), exponential(sub(zero(), sum)))), width - c);
    }
}

void unit(float* x, int64_t heads, int64_t dim, float scale) {
    for (int64_t h = 0; h < heads; h++, x += dim) {
        V squares = zero();
        for (int64_t i = 0; i < dim; i += lanes) {
            const V xi = load_n(x + i, dim - i);
            squares = fma(xi, xi, squares);
        }
        const V factor = set1(scale / __builtin_sqrtf(reduce_add(squares) + 1e-6f));
        for (int64_t i = 0; i < dim; i += lanes) store_n(x + i, mul(load_n(x + i, dim - i), factor), dim - i);
    }
}

// Columns [c, c + 16 N) of a head.
template <int N>
void delta_columns(const DeltaHead& a, int64_t c, float* s) {
    constexpr int64_t width = N * lanes;
    for (int64_t i = 0; i < a.key_dim; i++)
        for (int n = 0; n < N; n++)
            store(s + i * width + n * lanes, a.fresh ? zero() : load(a.state + i * a.value_dim + c + n * lanes));
    const float* row = a.rows;
    for (int64_t r = 0; r < a.count; r++, row += a.stride) {
        const float *q = row + a.q, *k = row + a.k;
        const V decay = set1(row[a.decay]), beta = set1(row[a.beta]);
        V sum[2 * N], e[N];
        unroll<2 * N>([&](auto n) INLINE_LAMBDA { sum[n] = zero(); });
        for (int64_t i = 0; i < a.key_dim; i += 2)
            unroll<2>([&](auto j) INLINE_LAMBDA {
                const V ki = set1(k[i + j]);
                unroll<N>([&](auto n)
                              INLINE_LAMBDA { sum[j * N + n] = fma(load(s + (i + j) * width + n * lanes), ki, sum[j * N + n]); });
            });
        unroll<N>([&](auto n) INLINE_LAMBDA {
            const V known = mul(decay, add(sum[n], sum[N + n]));
            e[n] = mul(beta, sub(load(row + a.v + c + n * lanes), known));
        });
        unroll<2 * N>([&](auto n) INLINE_LAMBDA { sum[n] = zero(); });
        for (int64_t i = 0; i < a.key_dim; i += 2)
            unroll<2>([&](auto j) INLINE_LAMBDA {
                const V ki = set1(k[i + j]), qi = set1(q[i + j]);
                unroll<N>([&](auto n) INLINE_LAMBDA {
                    float* at = s + (i + j) * width + n * lanes;
                    const V next = fma(ki, e[n], mul(decay, load(at)));
                    store(at, next);
                    sum[j * N + n] = fma(next, qi, sum[j * N + n]);
                });
            });
        if (r >= a.unwanted)
            unroll<N>([&](auto n) INLINE_LAMBDA {
                store(a.out + (r - a.unwanted) * a.out_stride + c + n * lanes, add(sum[n], sum[N + n]));
            });
        if (r + 1 == a.written)
            for (int64_t i = 0; i < a.key_dim; i++)
                for (int n = 0; n < N; n++) store(a.state + i * a.value_dim + c + n * lanes, load(s + i * width + n * lanes));
    }
}

void delta_head(const DeltaHead& a, float* scratch) {
    int64_t c = 0;
    for (; c + 4 * lanes <= a.value_dim; c += 4 * lanes) delta_columns<4>(a, c, scratch);
    for (; c < a.value_dim; c += lanes) delta_columns<1>(a, c, scratch);
    for (int64_t r = 0; r < a.count - a.unwanted; r++) {
        float* row = a.out + r * a.out_stride;
        rms_norm(row, a.value_dim, a.norm, a.eps, 1, a.value_dim, row);
    }
}

void sigmoid_gate(const float* x, const float* gate, int64_t count, float* out) {
    for (int64_t i = 0; i < count; i += lanes) {
        const V below = add(set1(1.0f), exponential(sub(zero(), load_n(gate + i, count - i))));
        store_n(out + i, div(load_n(x + i, count - i), below), count - i);
    }
}

constexpr DeltaLoops delta_loops = {convolve, unit, delta_head, sigmoid_gate};
