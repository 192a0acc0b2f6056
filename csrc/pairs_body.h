// x * W^T for packed bf16 weights and rows rounded to bf16. Included by each kernels_*.cpp, after its pairs_*.h and
// rows_body.h, inside that unit's namespace.
//
// The lanes of a vector are 16 outputs. A step reads two columns of 32 outputs, in memory order, and serves all rows of
// a tile. If many tiles share the weights, columns are processed in chunks, and sums are stored to memory between
// chunks. Terms are added in the order given in kernels.h, so the tile shape does not affect the bits.

constexpr int64_t pair_prefetch = 8192;  // bytes; so far ahead, tiles of few rows overlap reading and arithmetic
constexpr int64_t pair_bytes = 128;      // bytes of a step (two columns) of a block

void pair_row(const float* x, int64_t depth, void* out, int64_t at, int64_t stride) {
    Pair* to = static_cast<Pair*>(out) + at;
    for (int64_t k = 0; k < round_up(depth, 8); k += lanes) {
        bf16 rounded[lanes];
        store(rounded, k < depth ? load_n(x + k, depth - k) : zero());
        const int64_t n = round_up(depth, 8) - k < lanes ? round_up(depth, 8) - k : lanes;
        for (int64_t i = 0; i < n; i += 2, to += stride) *to = make_pair(rounded[i], rounded[i + 1]);
    }
}

// sums [M][N * 32] += M rows of x times `steps` pairs of columns of N blocks, which are `bytes` apart. With Apart = 1,
// x holds one pair of every row, then the next pair of every row. Otherwise rows are `Apart` pairs apart. Not inlined,
// so that the compiler cannot move this arithmetic out of the scope of FlushSubnormals.
template <int M, int N, int64_t Apart>
__attribute__((noinline)) void pair_piece(const Pair* x, const uint8_t* weight, int64_t bytes, int64_t steps, float* sums,
                                          int64_t stride) {
    constexpr int C = 2 * N;  // vectors of outputs
    V sum[M * C];
    unroll<M>([&](auto m) INLINE_LAMBDA {
        unroll<C>([&](auto c) INLINE_LAMBDA { sum[m * C + c] = load(sums + m * stride + c * lanes); });
    });
    for (int64_t k = 0; k < steps; k++, x += Apart == 1 ? M : 1, weight += pair_bytes) {
        WeightPairs w[C];
        unroll<N>([&](auto n) INLINE_LAMBDA {
            const uint8_t* p = weight + n * bytes;
            if constexpr (Apart == 1) prefetch(p + pair_prefetch), prefetch(p + pair_prefetch + 64);
            w[2 * n] = WeightPairs(p);
            w[2 * n + 1] = WeightPairs(p + 64);
        });
        unroll<M>([&](auto m) INLINE_LAMBDA {
            const RowPairs xm(x[m * Apart]);
            unroll<C>([&](auto c) INLINE_LAMBDA { add_pairs(sum[m * C + c], w[c], xm); });
        });
    }
    unroll<M>([&](auto m) INLINE_LAMBDA {
        unroll<C>([&](auto c) INLINE_LAMBDA { store(sums + m * stride + c * lanes, sum[m * C + c]); });
    });
}

// Multiplies M rows of a tile with `blocks` blocks. Their sums are side by side: [M][stride].
template <int M, int64_t Apart>
void pair_run(const Pair* x, const uint8_t* weight, int64_t bytes, int64_t steps, int64_t blocks, float* sums, int64_t stride) {
    constexpr int N = pair_blocks[M];
    for (; blocks >= N; blocks -= N, weight += N * bytes, sums += N * block_outputs)
        pair_piece<M, N, Apart>(x, weight, bytes, steps, sums, stride);
    if constexpr (N > 1)
        for (; blocks > 0; blocks--, weight += bytes, sums += block_outputs)
            pair_piece<M, 1, Apart>(x, weight, bytes, steps, sums, stride);
}

template <int M, int64_t Apart>
void pair_rows(int64_t rows, const Pair* x, const uint8_t* weight, int64_t bytes, int64_t steps, int64_t blocks, float* sums,
               int64_t stride) {
    if constexpr (M > 0) {
        if (rows == M)
            pair_run<M, Apart>(x, weight, bytes, steps, blocks, sums, stride);
        else
            pair_rows<M - 1, Apart>(rows, x, weight, bytes, steps, blocks, sums, stride);
    }
}

void linear_pairs(const PairArgs& a, int64_t begin, int64_t end, int64_t t_begin, int64_t t_end, float* scratch) {
    const int64_t rows = t_end - t_begin, stride = (end - begin) * block_outputs, bytes = a.depth / 2 * pair_bytes;
    const int64_t chunk = rows > a.tile ? pair_chunk : a.depth;
    const Pair* x = static_cast<const Pair*>(a.x);
    __builtin_memset(scratch, 0, static_cast<uint64_t>(rows * stride) * sizeof(float));
    {
        const FlushSubnormals flushing;
        for (int64_t k = 0; k < a.depth; k += chunk) {
            const int64_t steps = (k + chunk < a.depth ? chunk : a.depth - k) / 2;
            const uint8_t* weight = a.weight + begin * bytes + k / 2 * pair_bytes;
            for (int64_t block = begin; block < end; block += pair_group) {
                const int64_t blocks = block + pair_group < end ? pair_group : end - block;
                for (int64_t t = t_begin; t < t_end; t += a.tile) {
                    const int64_t count = t + a.tile < t_end ? a.tile : t_end - t;
                    float* sums = scratch + (t - t_begin) * stride + (block - begin) * block_outputs;
                    pair_rows<pair_rows_most, 1>(count, x + t * (a.depth / 2) + k / 2 * count, weight + (block - begin) * bytes,
                                                 bytes, steps, blocks, sums, stride);
                }
            }
        }
    }
    for (int64_t t = t_begin; t < t_end; t++)
        for (int64_t o = begin * block_outputs; o < end * block_outputs && o < a.outputs; o += lanes) {
            const int64_t n = a.outputs - o;
            V y = load(scratch + (t - t_begin) * stride + o - begin * block_outputs);
            if (a.bias) y = add(y, load_n(a.bias + o, n));
            if (a.residual) y = add(load_n(a.residual + t * a.outputs + o, n), y);
            store_n(a.out + t * a.outputs + o, y, n);
        }
}
