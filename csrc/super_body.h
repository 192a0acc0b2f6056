// Weights in super-blocks of 256 columns (q2_k, q4_k, q5_k, q6_k) times integer rows. The integer sums of a super-block
// are exact; they are scaled and added in a fixed order. Included after int_*.h and integer_body.h.
//
// For an output and a row, each super-block in turn updates f. Formats with minima first compute
//   f = fma(-(sum over sub-blocks of minimum * (sum of x)), least * scale of x, f).
// Then all formats compute
//   f = fma(sum over sub-blocks of step * (sum of code * x), scale * scale of x, f).

template <int code_bits, int columns, int code_zero, bool has_minima>
struct SuperCodes {
    static constexpr int bits = code_bits, part = columns, zero = code_zero;
    static constexpr bool minima = has_minima;
    static constexpr int pairs = super_columns / (2 * part), quads = part / 4;  // pairs of sub-blocks; quads in one
};
using Super2 = SuperCodes<2, 16, 0, true>;
using Super4 = SuperCodes<4, 32, 0, true>;
using Super5 = SuperCodes<5, 32, 0, true>;
using Super6 = SuperCodes<6, 16, 32, false>;

// Keeps compilers from interleaving two sub-blocks, which needs too many registers.
#define BARRIER asm volatile("" ::: "memory")

// Arguments of one call of a tile kernel: M rows times a block of 32 outputs.
struct SuperTile {
    const uint8_t *codes, *high;
    const int8_t *steps, *minima;
    const char *scales, *least;
    Format scale_format;
    const int8_t* x;
    const float* x_scales;
    const int16_t* x_sums;
    float* state;  // [M][32]: sums so far
    int64_t groups;
};

// Codes of four columns (quad `quad` of a sub-block) for 16 outputs: the nibbles of `line`, with the upper bits from
// `high`. Codes of two bits have no nibbles; all their bits are in `high`.
template <class W, int quad>
INLINE Codes super_codes(const Codes& line, const Codes& high) {
    if constexpr (W::bits == 2) {
        return with_bits<2 * quad, 3>(Codes{}, high);
    } else {
        const Codes low = quad % 2 ? high_nibbles(line) : low_nibbles(line);
        constexpr int extra = W::bits - 4;
        if constexpr (extra == 0)
            return low;
        else
            return with_bits<extra * quad - 4, ((1 << extra) - 1) << 4>(low, high);
    }
}

// The functions below compute H halves of a block (16 outputs each), from half `half` on.

// sums[h][m] = sum over sub-blocks of weight * (sum of x), where `weights` are the minima or the steps of the
// sub-blocks.
template <int M, class W, int H>
INLINE void sum_offsets(const int8_t* weights, const int16_t* x_sums, I (&sums)[H][M]) {
    unroll<H * M>([&](auto i) INLINE_LAMBDA { sums[i / M][i % M] = set1_int(0); });
    int64_t pairs = W::pairs;
    asm("" : "+r"(pairs));  // else compilers unroll the loop, sum in a tree, and run out of registers
    for (int64_t p = 0; p < pairs; p++) {
        I pair[H];
        unroll<H>([&](auto h) INLINE_LAMBDA { pair[h] = widen_pairs(weights + p * 2 * block_outputs + h * 2 * lanes); });
        unroll<M>([&](auto m) INLINE_LAMBDA {
            const I x = set1_pair(x_sums + (p * M + m) * 2);
            unroll<H>([&](auto h) INLINE_LAMBDA { sums[h][m] = add_pairs(sums[h][m], pair[h], x); });
        });
    }
}

// sums[h][m] += step * (dot product of a sub-block), for the first (`second` = 0) or second sub-block of a pair.
template <int M, class W, int H, int second>
INLINE void sum_part(const uint8_t* codes, const uint8_t* high, const I (&pair)[H], const int8_t* x, I (&sums)[H][M]) {
    I step[H];
    unroll<H>([&](auto h) INLINE_LAMBDA { step[h] = second ? second_step(pair[h]) : first_step(pair[h]); });
    Codes top[H];
    unroll<H>([&](auto h) INLINE_LAMBDA {
        top[h] = load_codes((W::bits != 4 ? high : codes) + h * 64);
        if constexpr (W::bits != 4 && M > 1) prefetch(high + h * 64 + integer_prefetch / 2);
    });
    I dots[H][M];
    unroll<H * M>([&](auto i) INLINE_LAMBDA { dots[i / M][i % M] = set1_int(0); });
    unroll<W::quads / 2>([&](auto j) INLINE_LAMBDA {
        Codes line[H];
        unroll<H>([&](auto h) INLINE_LAMBDA {
            line[h] = W::bits > 2 ? load_codes(codes + j * 128 + h * 64) : top[h];
            if constexpr (W::bits > 2 && M > 1) prefetch(codes + j * 128 + h * 64 + integer_prefetch);
        });
        unroll<2>([&](auto q) INLINE_LAMBDA {
            Codes four[H];
            unroll<H>([&](auto h) INLINE_LAMBDA { four[h] = super_codes<W, 2 * j + q>(line[h], top[h]); });
            unroll<M>([&](auto m) INLINE_LAMBDA {
                unroll<H>([&](auto h)
                              INLINE_LAMBDA { dots[h][m] = add_quad(dots[h][m], four[h], x + m * code_step + (2 * j + q) * 4); });
            });
        });
        if constexpr ((2 * j + 2) % fold_quads(W::bits) == 0 || 2 * j + 2 == W::quads)
            unroll<H * M>([&](auto i) INLINE_LAMBDA {
                constexpr int h = i / M, m = i % M;
                sums[h][m] = add_steps(sums[h][m], dots[h][m], step[h]);
                dots[h][m] = set1_int(0);
            });
    });
}

// Adds super-block g.
template <int M, class W, int H>
INLINE void add_super_block(const SuperTile& t, int64_t g, int64_t half) {
    const int64_t pair = (g * W::pairs * 2 + half) * block_outputs, column = g * block_outputs + half * lanes;
    const int16_t* x_sums = t.x_sums + g * W::pairs * M * 2;
    float* state = t.state + half * lanes;
    auto add_scaled = [&](const char* scales, const I(&sums)[H][M], bool negative) INLINE_LAMBDA {
        unroll<H>([&](auto h) INLINE_LAMBDA {
            const V scale = load_scales(scales, t.scale_format, column + h * lanes);
            unroll<M>([&](auto m) INLINE_LAMBDA {
                const V sum = to_floats(sums[h][m]);
                float* at = state + m * block_outputs + h * lanes;
                store(at, fma(negative ? sub(zero(), sum) : sum, mul(scale, set1(t.x_scales[g * M + m])), load(at)));
            });
        });
    };
    I sums[H][M];
    sum_offsets<M, W, H>((W::minima ? t.minima : t.steps) + pair, x_sums, sums);
    if constexpr (W::minima) add_scaled(t.least, sums, true);
    unroll<H * M>([&](auto i) INLINE_LAMBDA {
        I& sum = sums[i / M][i % M];
        sum = W::minima ? set1_int(0) : mul_ints(sum, set1_int(-W::zero));
    });
    constexpr int64_t part_bytes = W::quads / 2 * 128;
    const uint8_t* codes = W::bits > 2 ? t.codes + g * super_columns / 8 * 128 + half * 64 : nullptr;
    const uint8_t* high = W::bits != 4 ? t.high + g * super_columns / W::part * 128 + half * 64 : nullptr;
    const int8_t* x = t.x + g * super_columns * M;
    for (int64_t p = 0; p < W::pairs; p++) {
        I steps[H];
        unroll<H>([&](auto h) INLINE_LAMBDA { steps[h] = widen_pairs(t.steps + pair + p * 2 * block_outputs + h * 2 * lanes); });
        constexpr int64_t next = W::part < code_step ? W::part : code_step * M;  // offset of the second sub-block's x
        sum_part<M, W, H, 0>(codes, high, steps, x, sums);
        BARRIER;
        sum_part<M, W, H, 1>(codes + (W::bits > 2 ? part_bytes : 0), high + (W::bits != 4 ? 128 : 0), steps, x + next, sums);
        if constexpr (W::bits > 2) codes += 2 * part_bytes;
        if constexpr (W::bits != 4) high += 256;
        x += 2 * W::part * M;
        BARRIER;
    }
    add_scaled(t.scales, sums, false);
}

template <int M, class W>
void super_rows(const SuperTile& t) {
    constexpr int H = super_halves<M>;
    for (int64_t g = 0; g < t.groups; g++)
        for (int64_t half = 0; half < 2; half += H) add_super_block<M, W, H>(t, g, half);
}

using SuperKernel = void (*)(const SuperTile&);

template <class W, int M = super_tile>
inline SuperKernel super_kernel(int64_t rows) {
    if constexpr (M == 1)
        return super_rows<1, W>;
    else
        return rows == M ? super_rows<M, W> : super_kernel<W, M - 1>(rows);
}

// Computes one block of outputs for tiles [begin, end). `sums` holds 32 floats per row of these tiles.
inline void super_block(const SuperArgs& a, int64_t block, int64_t begin, int64_t end, float* sums) {
    const int64_t groups = a.depth / super_columns, pairs = a.depth / (2 * a.part), row = begin * a.tile;
    const int64_t rows = (end * a.tile < a.rows ? end * a.tile : a.rows) - row, first_scale = block * groups * block_outputs;
    __builtin_memset(sums, 0, static_cast<uint64_t>(rows * block_outputs) * sizeof(float));
    SuperTile t{};
    if (a.codes) t.codes = a.codes + block * a.depth / 8 * 128;
    if (a.high) t.high = a.high + block * a.depth / a.part * 128;
    t.steps = a.steps + block * pairs * 2 * block_outputs;
    if (a.minima) t.minima = a.minima + block * pairs * 2 * block_outputs;
    t.scale_format = a.scale_format;
    t.scales = static_cast<const char*>(a.scales) + first_scale * bytes_of(a.scale_format);
    if (a.least) t.least = static_cast<const char*>(a.least) + first_scale * bytes_of(a.scale_format);
    t.groups = groups;
    for (int64_t i = begin; i < end; i++) {
        const int64_t first = i * a.tile, M = a.tile < a.rows - first ? a.tile : a.rows - first;
        t.x = a.x + first * a.depth;
        t.x_scales = a.x_scales + first * groups;
        t.x_sums = a.x_sums + first * pairs * 2;
        t.state = sums + (first - row) * block_outputs;
        const SuperKernel kernel = a.codes == nullptr  ? super_kernel<Super2>(M)
                                   : a.high == nullptr ? super_kernel<Super4>(M)
                                   : a.minima          ? super_kernel<Super5>(M)
                                                       : super_kernel<Super6>(M);
        kernel(t);
    }
    for (int64_t t_row = 0; t_row < rows; t_row++) {
        if (t_row + write_ahead < rows) prefetch_outputs(a, block, row + t_row + write_ahead);
        write_outputs(a, block, row + t_row, sums + t_row * block_outputs);
    }
}

void super(const SuperArgs& a, int64_t begin, int64_t end, float* scratch) {
    const int64_t tiles = (a.rows + a.tile - 1) / a.tile;
    const int64_t fitting = integer_cache / (a.depth * a.tile), batch = fitting > 4 ? fitting : 4;
    for (int64_t i = 0; i < tiles; i += batch)
        for (int64_t block = begin; block < end; block++)
            super_block(a, block, i, i + batch < tiles ? i + batch : tiles, scratch);
}
