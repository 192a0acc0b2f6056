// Row-wise kernels: RMS norm, rotary positions, SwiGLU, and conversion to and from dense formats. Included like
// linear_body.h.

template <class T>
inline V load_n(const T* p, int64_t n) {  // missing lanes are zero
    if (n >= lanes) return load(p);
    T padded[lanes] = {};
    for (int64_t i = 0; i < n; i++) padded[i] = p[i];
    return load(padded);
}

template <class T>
inline void store_n(T* p, V a, int64_t n) {
    if (n >= lanes) return store(p, a);
    T padded[lanes];
    store(padded, a);
    for (int64_t i = 0; i < n; i++) p[i] = padded[i];
}

// e^x within 2 ulp. Splits x = n ln 2 + r, evaluates a polynomial for e^r (relative minimax, degree 6, |r| <= ln(2)/2,
// with an approximation error of 0.1 ulp), and multiplies by 2^n. NaN stays NaN.
inline V exponential(V x) {
    const V magic = set1(12582912.0f);  // 1.5 * 2^23: adding it rounds to an integer
    x = min(set1(90.0f), max(set1(-106.0f), x));
    const V shifted = fma(x, set1(1.44269504f), magic);
    const V n = sub(shifted, magic);
    V r = fma(n, set1(-0.693145751953125f), x);
    r = fma(n, set1(-1.42860677e-6f), r);
    V p = set1(0x1.6a23c2p-10f);
    p = fma(p, r, set1(0x1.123a20p-7f));
    p = fma(p, r, set1(0x1.5558f4p-5f));
    p = fma(p, r, set1(0x1.555492p-3f));
    p = fma(p, r, set1(0x1.fffffcp-2f));
    p = fma(mul(r, r), p, r);
    return scale_by_power(add(p, set1(1.0f)), shifted);
}

void rms_norm(const float* x, int64_t x_stride, const float* weight, float eps, int64_t rows, int64_t width, float* out) {
    for (int64_t t = 0; t < rows; t++, x += x_stride, out += width) {
        V squares = zero();
        for (int64_t i = 0; i < width; i += lanes) {
            V xi = load_n(x + i, width - i);
            squares = fma(xi, xi, squares);
        }
        const float mean = reduce_add(squares) / static_cast<float>(width);
        const V inverse = set1(1.0f / __builtin_sqrtf(mean + eps));
        for (int64_t i = 0; i < width; i += lanes) {
            V y = mul(mul(load_n(x + i, width - i), inverse), load_n(weight + i, width - i));
            store_n(out + i, y, width - i);
        }
    }
}

void rope(const float* x, int64_t x_stride, const int32_t* positions, const float* table, int64_t rows, int64_t heads,
          int64_t dim, float* out) {
    const int64_t half = dim / 2;
    for (int64_t t = 0; t < rows; t++) {
        const float* cosines = table + positions[t] * dim;
        for (int64_t h = 0; h < heads; h++, out += dim) {
            const float* row = x + t * x_stride + h * dim;
            for (int64_t i = 0; i < half; i += lanes) {
                const int64_t n = half - i;
                V c = load_n(cosines + i, n), s = load_n(cosines + half + i, n);
                V x1 = load_n(row + i, n), x2 = load_n(row + half + i, n);
                store_n(out + i, sub(mul(x1, c), mul(x2, s)), n);
                store_n(out + half + i, add(mul(x2, c), mul(x1, s)), n);
            }
        }
    }
}

void silu_mul(const float* gate_up, int64_t stride, int64_t rows, int64_t width, float* out) {
    for (int64_t t = 0; t < rows; t++, gate_up += stride, out += width) {
        for (int64_t i = 0; i < width; i += lanes) {
            V gate = load_n(gate_up + i, width - i), up = load_n(gate_up + width + i, width - i);
            V silu = div(gate, add(set1(1.0f), exponential(sub(zero(), gate))));
            store_n(out + i, mul(silu, up), width - i);
        }
    }
}

// gelu(x) in its tanh form is x * sigmoid(2 u), with u = sqrt(2 / pi) * (x + 0.044715 x^3).
void gelu_mul(const float* gate_up, int64_t stride, int64_t rows, int64_t width, float* out) {
    for (int64_t t = 0; t < rows; t++, gate_up += stride, out += width) {
        for (int64_t i = 0; i < width; i += lanes) {
            V gate = load_n(gate_up + i, width - i), up = load_n(gate_up + width + i, width - i);
            V inner = mul(gate, fma(mul(gate, gate), set1(-2.0f * 0.7978845608f * 0.044715f), set1(-2.0f * 0.7978845608f)));
            V gelu = div(gate, add(set1(1.0f), exponential(inner)));
            store_n(out + i, mul(gelu, up), width - i);
        }
    }
}

// gpt-oss's SwiGLU: g = min(gate, limit), u = up within -limit..limit, out = (u + 1) * (g * sigmoid(1.702 g)).
void clamped_mul(const float* gate_up, int64_t stride, float limit, int64_t rows, int64_t width, float* out) {
    const V most = set1(limit), least = set1(-limit), one = set1(1.0f);
    for (int64_t t = 0; t < rows; t++, gate_up += stride, out += width) {
        for (int64_t i = 0; i < width; i += lanes) {
            V gate = min(most, load_n(gate_up + i, width - i));  // in this order NaN stays NaN
            V up = max(least, min(most, load_n(gate_up + width + i, width - i)));
            V swish = div(gate, add(one, exponential(mul(set1(-1.702f), gate))));
            store_n(out + i, mul(swish, add(up, one)), width - i);
        }
    }
}

void softcap(float* x, float cap, int64_t count) {  // tanh(y) = 1 - 2 / (e^2y + 1)
    for (int64_t i = 0; i < count; i += lanes) {
        V doubled = mul(load_n(x + i, count - i), set1(2.0f / cap));
        V tanh = sub(set1(1.0f), div(set1(2.0f), add(exponential(doubled), set1(1.0f))));
        store_n(x + i, mul(tanh, set1(cap)), count - i);
    }
}

template <class T>
void encode(const float* x, int64_t count, void* codes) {
    for (int64_t i = 0; i < count; i += lanes) store_n(static_cast<T*>(codes) + i, load_n(x + i, count - i), count - i);
}

template <class T>
void decode(const void* codes, int64_t count, float* x) {
    for (int64_t i = 0; i < count; i += lanes) store_n(x + i, load_n(static_cast<const T*>(codes) + i, count - i), count - i);
}
