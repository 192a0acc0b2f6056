// x * W^T for packed weights and float32 rows. Included by each kernels_*.cpp, after its codes_*.h, inside that unit's
// namespace.
//
// The lanes of a vector are 16 outputs. A column of weights is decoded once for all rows of a tile. There are three
// variants; a unit whose `whole_rows` is `float_tile` has only the first:
// - tiles of up to `whole_rows` rows: each decodes weights in registers, both halves of a block at once;
// - larger tiles, up to `span_rows` rows: each decodes a span of columns for itself, one half of a block after the other;
// - larger tiles, more rows: a strip of weights is decoded into the cache once, and all tiles use it.
// All variants sum in the order given in kernels.h, so the tile shape does not affect the bits.

constexpr int64_t float_prefetch = 4096;  // bytes

// Scales of a group for 32 outputs, and their shifts (middle - zero point) if the weight has zero points.
struct GroupScales {
    V scale[2], shift[2];
};

template <class S>
INLINE void load_scales(const FloatArgs& a, int64_t at, GroupScales& s) {
    s.scale[0] = load(static_cast<const S*>(a.scales) + at);
    s.scale[1] = load(static_cast<const S*>(a.scales) + at + lanes);
}

inline void read_scales(const FloatArgs& a, int64_t block, int64_t g, GroupScales& s) {
    const int64_t at = (block * a.groups + g) * block_outputs;
    if (a.scale_format == Format::fp32)
        load_scales<float>(a, at, s);
    else if (a.scale_format == Format::bf16)
        load_scales<bf16>(a, at, s);
    else
        load_scales<fp16>(a, at, s);
    if (a.factor != 1.0f)
        for (V& scale : s.scale) scale = mul(scale, set1(a.factor));
    if (a.nans != nullptr) {  // an output with a NaN weight gets a NaN scale
        for (int c = 0; c < 2; c++) {
            float scale[lanes];
            store(scale, s.scale[c]);
            for (int i = 0; i < lanes; i++)
                if (a.nans[at + c * lanes + i]) scale[i] = __builtin_nanf("");
            s.scale[c] = load(scale);
        }
    }
    if (a.zeros != nullptr) {
        for (int c = 0; c < 2; c++) {
            float shift[lanes];
            for (int i = 0; i < lanes; i++) shift[i] = a.middle - static_cast<float>(a.zeros[at + c * lanes + i]);
            s.shift[c] = load(shift);
        }
    }
}

// Ends a group: total = fma(sum + shift * (sum of the group's x), scale, total), for 32 outputs of `rows` rows.
inline void end_group(const FloatArgs& a, int64_t block, int64_t g, int64_t rows, const float* x_sums, const float* sums,
                      float* totals, int64_t stride) {
    GroupScales s;
    read_scales(a, block, g, s);
    for (int64_t m = 0; m < rows; m++, sums += stride, totals += stride)
        for (int c = 0; c < 2; c++) {
            V sum = load(sums + c * lanes);
            if (a.zeros != nullptr) sum = fma(s.shift[c], set1(x_sums[m]), sum);
            store(totals + c * lanes, fma(sum, s.scale[c], load(totals + c * lanes)));
        }
}

// Adds bias and residual to totals [32] of row t and writes the outputs of the block.
inline void finish(const FloatArgs& a, int64_t t, int64_t block, const float* totals) {
    for (int64_t i = 0; i < block_outputs; i += lanes) {
        const int64_t o = block * block_outputs + i, n = a.outputs - o;
        if (n <= 0) return;
        V y = load(totals + i);
        if (a.bias) y = add(y, load_n(a.bias + o, n));
        if (a.residual) y = add(load_n(a.residual + t * a.outputs + o, n), y);
        store_n(a.out + t * a.outputs + o, y, n);
    }
}

// Computes N blocks side by side for M rows from row t on.
template <int M, int N, class Codes>
void float_blocks(const FloatArgs& a, int64_t t, int64_t block) {
    constexpr int C = 2 * N;  // vectors of outputs
    const int64_t bytes = a.depth / Codes::depth * Codes::bytes;  // of a block
    const uint8_t* p = static_cast<const uint8_t*>(a.codes) + block * bytes;
    // After this block, the next tile reads the block that is N - 1 blocks further on.
    const uint8_t *turn = p + bytes - float_prefetch, *ahead = p + float_prefetch;
    const float* x = a.x + t * a.depth;
    alignas(64) float totals[M][C * lanes] = {}, sums_at[M][C * lanes];
    Codes codes[N];
    unroll<N>([&](auto n) INLINE_LAMBDA { codes[n] = Codes(a.table); });
    for (int64_t g = 0; g < a.groups; g++) {
        V sums[M * C];
        unroll<M * C>([&](auto i) INLINE_LAMBDA { sums[i] = zero(); });
        for (int64_t k = 0; k < a.group; k += Codes::depth, x += Codes::depth * M, p += Codes::bytes, ahead += Codes::bytes) {
            if (N > 1 && p == turn) ahead += (N - 1) * bytes;
            unroll<N>([&](auto n) INLINE_LAMBDA {
                codes[n].read(p + n * bytes);
                unroll<Codes::bytes / 64>([&](auto i) INLINE_LAMBDA { prefetch(ahead + n * bytes + i * 64); });
            });
            unroll<Codes::depth>([&](auto j) INLINE_LAMBDA {
                V w[C];
                unroll<N>([&](auto n) INLINE_LAMBDA { codes[n].template column<j>(w[2 * n], w[2 * n + 1]); });
                unroll<M>([&](auto m) INLINE_LAMBDA {
                    const V xm = set1(x[j * M + m]);
                    unroll<C>([&](auto c) INLINE_LAMBDA { accumulate(sums[m * C + c], w[c], xm); });
                });
            });
        }
        float* group = a.scales ? sums_at[0] : totals[0];
        unroll<M * C>([&](auto i) INLINE_LAMBDA { store(group + i * lanes, sums[i]); });
        if (a.scales == nullptr) break;
        const float* x_sums = a.zeros ? a.x_sums + t * a.groups + g * M : nullptr;
        for (int n = 0; n < N; n++)
            end_group(a, block + n, g, M, x_sums, group + n * block_outputs, totals[0] + n * block_outputs, C * lanes);
    }
    for (int m = 0; m < M; m++)
        for (int n = 0; n < N; n++) finish(a, t + m, block + n, totals[m] + n * block_outputs);
}

template <int M, class Codes>
void float_run(const FloatArgs& a, int64_t t, int64_t begin, int64_t end) {
    constexpr int N = block_tile[M];
    int64_t block = begin;
    for (; block + N <= end; block += N) float_blocks<M, N, Codes>(a, t, block);
    if constexpr (N > 1)
        for (; block < end; block++) float_blocks<M, 1, Codes>(a, t, block);
}

template <int M, class Codes>
void float_rows(const FloatArgs& a, int64_t rows, int64_t t, int64_t begin, int64_t end) {
    if constexpr (M > 0) {
        if (rows == M)
            float_run<M, Codes>(a, t, begin, end);
        else
            float_rows<M - 1, Codes>(a, rows, t, begin, end);
    }
}

// --- many rows: decoded strips ---

// Decodes columns [k, k + depth) of a block to floats [depth, 32].
template <class Codes>
void expand(const FloatArgs& a, int64_t block, int64_t k, int64_t depth, float* strip) {
    const int64_t bytes = a.depth / Codes::depth * Codes::bytes;
    const uint8_t* p = static_cast<const uint8_t*>(a.codes) + block * bytes + k / Codes::depth * Codes::bytes;
    Codes codes(a.table);
    for (int64_t i = 0; i < depth; i += Codes::depth, p += Codes::bytes) {
        codes.read(p);
        prefetch(p + float_prefetch);
        if (Codes::bytes > 64) prefetch(p + float_prefetch + 64);
        unroll<Codes::depth>([&](auto j) INLINE_LAMBDA {
            V low, high;
            codes.template column<j>(low, high);
            store(strip, low);
            store(strip + lanes, high);
            strip += block_outputs;
        });
    }
}

// sums [M, 32] += M rows of x times a decoded strip, with as many vectors of outputs at a time as fit in registers.
// Sums are loaded from memory and stored back. Kept in registers across the end of a group, they make the compiler move
// registers.
template <int M>
void float_piece(const float* x, const float* strip, int64_t depth, float* sums) {
    constexpr int C = output_vectors[M];
    for (int c = 0; c < 2; c += C, strip += C * lanes, sums += C * lanes) {
        V sum[C * M];
        unroll<C * M>([&](auto i) INLINE_LAMBDA { sum[i] = load(sums + i / C * block_outputs + i % C * lanes); });
        const float *xk = x, *w = strip;
        for (int64_t k = 0; k < depth; k += 4, xk += 4 * M, w += 4 * block_outputs)
            unroll<4>([&](auto j) INLINE_LAMBDA {
                V column[C];
                unroll<C>([&](auto i) INLINE_LAMBDA { column[i] = load(w + j * block_outputs + i * lanes); });
                unroll<M>([&](auto m) INLINE_LAMBDA {
                    const V xm = set1(xk[j * M + m]);
                    unroll<C>([&](auto i) INLINE_LAMBDA { accumulate(sum[C * m + i], column[i], xm); });
                });
            });
        unroll<C * M>([&](auto i) INLINE_LAMBDA { store(sums + i / C * block_outputs + i % C * lanes, sum[i]); });
    }
}

template <int M>
void float_pieces(int64_t rows, const float* x, const float* strip, int64_t depth, float* sums) {
    if constexpr (M > 0) {
        if (rows == M)
            float_piece<M>(x, strip, depth, sums);
        else
            float_pieces<M - 1>(rows, x, strip, depth, sums);
    }
}

// `scratch` holds float_scratch(blocks, rows) floats.
template <class Codes>
void float_strips(const FloatArgs& a, int64_t begin, int64_t end, int64_t t_begin, int64_t t_end, float* scratch) {
    const int64_t rows = t_end - t_begin, area = rows * block_outputs;
    float *strip = scratch, *sums = strip + float_chunk * block_outputs, *totals = sums + (end - begin) * area;
    const uint64_t bytes = static_cast<uint64_t>(area) * sizeof(float);
    __builtin_memset(totals, 0, static_cast<uint64_t>(end - begin) * bytes);
    for (int64_t g = 0; g < a.groups; g++)
        for (int64_t k = 0; k < a.group; k += float_chunk) {
            const int64_t depth = k + float_chunk < a.group ? float_chunk : a.group - k;
            for (int64_t block = begin; block < end; block++) {
                expand<Codes>(a, block, g * a.group + k, depth, strip);
                float *at = sums + (block - begin) * area, *total = totals + (block - begin) * area;
                if (k == 0) __builtin_memset(at, 0, bytes);
                for (int64_t t = t_begin; t < t_end; t += a.tile, at += a.tile * block_outputs, total += a.tile * block_outputs) {
                    const int64_t count = t + a.tile < t_end ? a.tile : t_end - t;
                    float_pieces<float_tile>(count, a.x + t * a.depth + (g * a.group + k) * count, strip, depth, at);
                    if (a.scales == nullptr || k + depth < a.group) continue;
                    const float* x_sums = a.zeros ? a.x_sums + t * a.groups + g * count : nullptr;
                    end_group(a, block, g, count, x_sums, at, total, block_outputs);
                }
            }
        }
    const float* result = a.scales ? totals : sums;
    for (int64_t block = begin; block < end; block++)
        for (int64_t t = 0; t < rows; t++, result += block_outputs) finish(a, t_begin + t, block, result);
}

// --- some rows: every tile decodes a span of columns for itself ---

// sums [M, 32] += M rows of x times `depth` columns of the block at p, for the 16 outputs of half `half`.
template <int M, int half, class Codes>
INLINE void float_half(const float* table, const float* x, const uint8_t* p, int64_t depth, float* sums) {
    V sum[M];
    unroll<M>([&](auto m) INLINE_LAMBDA { sum[m] = load(sums + m * block_outputs + half * lanes); });
    Codes codes(table);
    for (int64_t k = 0; k < depth; k += Codes::depth, x += Codes::depth * M, p += Codes::bytes) {
        codes.read(p);
        if (half == 0) unroll<Codes::bytes / 64>([&](auto i) INLINE_LAMBDA { prefetch(p + float_prefetch + i * 64); });
        unroll<Codes::depth>([&](auto j) INLINE_LAMBDA {
            V w[2];
            codes.template column<j>(w[0], w[1]);
            unroll<M>([&](auto m) INLINE_LAMBDA { accumulate(sum[m], w[half], set1(x[j * M + m])); });
        });
    }
    unroll<M>([&](auto m) INLINE_LAMBDA { store(sums + m * block_outputs + half * lanes, sum[m]); });
}

template <int M, class Codes>
void float_span(int64_t rows, const float* table, const float* x, const uint8_t* p, int64_t depth, float* sums) {
    if constexpr (M > 0) {
        if (rows != M) return float_span<M - 1, Codes>(rows, table, x, p, depth, sums);
        float_half<M, 0, Codes>(table, x, p, depth, sums);
        float_half<M, 1, Codes>(table, x, p, depth, sums);
    }
}

// Processes one block after the other, so that weights are read in memory order. `scratch` as for float_strips.
template <class Codes>
void float_spans(const FloatArgs& a, int64_t begin, int64_t end, int64_t t_begin, int64_t t_end, float* scratch) {
    const int64_t rows = t_end - t_begin, area = rows * block_outputs;
    const uint64_t bytes = static_cast<uint64_t>(area) * sizeof(float);
    float *sums = scratch, *totals = scratch + area;
    for (int64_t block = begin; block < end; block++) {
        const uint8_t* p = static_cast<const uint8_t*>(a.codes) + block * (a.depth / Codes::depth * Codes::bytes);
        __builtin_memset(totals, 0, bytes);
        for (int64_t g = 0; g < a.groups; g++) {
            __builtin_memset(sums, 0, bytes);
            for (int64_t k = 0, depth; k < a.group; k += depth, p += depth / Codes::depth * Codes::bytes) {
                depth = k + float_chunk < a.group ? float_chunk : a.group - k;
                for (int64_t t = t_begin; t < t_end; t += a.tile) {
                    const int64_t count = t + a.tile < t_end ? a.tile : t_end - t, at = (t - t_begin) * block_outputs;
                    const float* x = a.x + t * a.depth + (g * a.group + k) * count;
                    float_span<float_tile, Codes>(count, a.table, x, p, depth, sums + at);
                    if (a.scales == nullptr || k + depth < a.group) continue;
                    const float* x_sums = a.zeros ? a.x_sums + t * a.groups + g * count : nullptr;
                    end_group(a, block, g, count, x_sums, sums + at, totals + at, block_outputs);
                }
            }
        }
        for (int64_t t = 0; t < rows; t++) finish(a, t_begin + t, block, (a.scales ? totals : sums) + t * block_outputs);
    }
}

template <class Codes>
void linear_float(const FloatArgs& a, int64_t begin, int64_t end, int64_t t_begin, int64_t t_end, float* scratch) {
    const int64_t rows = t_end - t_begin;
    if (a.tile <= whole_rows) {
        const int64_t step = rows > a.tile ? 1 : end - begin;  // a block of weights stays in the L2 cache for all tiles
        for (int64_t block = begin; block < end; block += step)
            for (int64_t t = t_begin; t < t_end; t += a.tile)
                float_rows<whole_rows, Codes>(a, t + a.tile < t_end ? a.tile : t_end - t, t, block, block + step);
    } else if constexpr (whole_rows < float_tile) {
        if (rows <= span_rows<Codes>)
            float_spans<Codes>(a, begin, end, t_begin, t_end, scratch);
        else
            float_strips<Codes>(a, begin, end, t_begin, t_end, scratch);
    }
}

// --- rows of x ---

// Transposes columns [begin, end) of `rows` rows: out[k * rows + m] = x[m][k]. Columns from `depth` on are zero.
inline void interleave(const float* x, int64_t stride, int64_t rows, int64_t depth, int64_t begin, int64_t end, float* out) {
    for (int64_t m = 0; m < rows; m++)
        for (int64_t k = begin; k < end; k++) out[k * rows + m] = k < depth ? x[m * stride + k] : 0.0f;
}

// Sums each group of `group` columns of a row, in 16 lanes and a tree, to out[g * out_stride].
inline void group_sums(const float* x, int64_t depth, int64_t group, float* out, int64_t out_stride) {
    for (int64_t k = 0; k < depth; k += group, out += out_stride) {
        const int64_t end = k + group < depth ? k + group : depth;
        V sum = zero();
        for (int64_t i = k; i < end; i += lanes) sum = add(sum, load_n(x + i, end - i));
        *out = reduce_add(sum);
    }
}
