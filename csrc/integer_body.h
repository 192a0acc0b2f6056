// Integer weights times integer rows. The sum of a group is exact; group sums are scaled and added in a fixed order.
// Included after int_*.h.
//
// A tile multiplies M rows of x with 32 outputs. The lanes of an accumulator are 16 outputs, and a step takes eight
// columns. Weights are unpacked once for all rows of a tile. If there are several tiles, weights are unpacked once for
// all of them, a span of columns at a time.

constexpr int64_t integer_prefetch = 4096;  // bytes
constexpr int64_t write_ahead = 8;  // rows
constexpr int64_t unpack_tiles = 3;  // nibbles are unpacked to memory from this many tiles on; if in two planes, from 2
constexpr int unpack_least = (2 * integer_tile + 1 + 2) / 3;  // rows of their first tile, as tiles are of even height
constexpr int unrolled_rows = 8;  // tiles of so few rows compute a whole piece of x in one turn of the loop

template <class T>
inline V load_part(const T* p, int64_t n) {  // missing lanes are zero
    if (n >= lanes) return load(p);
    T padded[lanes] = {};
    for (int64_t i = 0; i < n; i++) padded[i] = p[i];
    return load(padded);
}
inline void store_part(float* p, V a, int64_t n) {
    if (n >= lanes) return store(p, a);
    float padded[lanes];
    store(padded, a);
    for (int64_t i = 0; i < n; i++) p[i] = padded[i];
}

// Storage of weights in one plane or two. `get` returns the codes of four columns for 16 outputs: quad `quad` of a piece
// of 32 columns, at address w in the first plane.
struct Nibbles {
    static constexpr int64_t bytes = 128;  // of 8 columns in the first plane
    static constexpr int64_t second = 0;   // and in the second
    static constexpr int bits = 4;
    static constexpr bool keeps = false;
    template <int quad>
    static Codes get(const uint8_t* w, const uint8_t*, int64_t half) {
        const Codes pairs = load_codes(w + half * 64);
        return quad % 2 ? high_nibbles(pairs) : low_nibbles(pairs);
    }
};
struct FiveBits : Nibbles {  // the second plane has the fifth bits of a piece
    static constexpr int64_t second = 32;
    static constexpr int bits = 5;
    template <int quad>
    static Codes get(const uint8_t* w, const uint8_t* high, int64_t half) {
        return with_bits<quad - 4, 16>(Nibbles::get<quad>(w, nullptr, half), load_codes(high + half * 64));
    }
};
template <bool fp4>
struct TableCodes : Nibbles {  // indices of iq4_nl's or mxfp4's values, which become bytes
    static constexpr int bits = 8;
    template <int quad>
    static Codes get(const uint8_t* w, const uint8_t*, int64_t half) {
        return look_up(fp4 ? fp4_bytes : iq4_bytes, Nibbles::get<quad>(w, nullptr, half));
    }
};
struct KeptNibbles : Nibbles {  // also written to memory in bytes, for the tiles that follow
    static constexpr bool keeps = true;
};
struct Nested {  // 8-bit codes in two planes: high nibbles and low nibbles
    static constexpr int64_t bytes = 128, second = 128;
    static constexpr int bits = 8;
    static constexpr bool keeps = false;
    template <int quad>
    static Codes get(const uint8_t* w, const uint8_t* low, int64_t half) {
        const Codes high = load_codes(w + half * 64), rest = load_codes(low + half * 64);
        return quad % 2 ? join_high_nibbles(high, rest) : join_low_nibbles(high, rest);
    }
};
template <int code_bits>
struct Bytes {
    static constexpr int64_t bytes = 256, second = 0;
    static constexpr int bits = code_bits;
    static constexpr bool keeps = false;
    template <int quad>
    static Codes get(const uint8_t* w, const uint8_t*, int64_t half) {
        return load_codes(w + quad % 2 * 128 + half * 64);
    }
};

INLINE V load_scales(const char* p, Format format, int64_t i) {
    switch (format) {
        case Format::bf16:
            return load(reinterpret_cast<const bf16*>(p) + i);
        case Format::fp16:
            return load(reinterpret_cast<const fp16*>(p) + i);
        default:
            return load(reinterpret_cast<const float*>(p) + i);
    }
}

// Whether the products of these codes are first added by `add_quad` for the eight quads of a piece of x, then by
// `add_steps`.
template <class W>
constexpr bool fold_first = W::bits < 8 && !dots_add_four;

constexpr int16_t once_each[2] = {1, 1};

// Bytes of a code of x.
template <class W>
constexpr int64_t x_bytes = wide_codes && W::bits == 8 ? 2 : 1;

// Adds a step: quads `first` and `first` + 1 of a piece.
template <int M, int sets, class W, int first>
INLINE void multiply_codes(const uint8_t* w, const uint8_t* low, uint8_t* kept, const int8_t* x, I (&sums)[sets][M][halves]) {
    unroll<2>([&](auto quad) INLINE_LAMBDA {
        Codes codes[halves];
        unroll<halves>([&](auto h) INLINE_LAMBDA {
            codes[h] = W::template get<first + quad>(w, low, h);
            if constexpr (W::keeps) store_codes(kept + quad * 128 + h * 64, codes[h]);
        });
        unroll<M>([&](auto m) INLINE_LAMBDA {
            if constexpr (fold_first<W>)
                unroll<halves>([&](auto h) INLINE_LAMBDA {
                    sums[0][m][h] = add_quad(sums[0][m][h], codes[h], x + m * code_step + quad * 4);
                });
            else
                add_dots<(W::bits < 8), m % 2 == 1>(sums[quad % sets][m], codes, x + (m * code_step + quad * 4) * x_bytes<W>);
        });
    });
}

// Computes `halves` halves of a block (16 outputs each), from half `half` on, for M rows.
template <int M, class W>
INLINE void integer_half(const IntegerTile& t, int64_t half) {
    constexpr int sets = fold_first<W> ? 1 : sum_sets<M>;
    constexpr bool bit_plane = W::second > 0 && W::second < W::bytes;  // one vector of it serves a piece of 32 columns
    constexpr int64_t piece_bytes = M * code_step * x_bytes<W>;
    const uint8_t* w = t.codes + half * 64;
    const uint8_t* low = W::second > 0 ? t.low + half * 64 : nullptr;
    uint8_t* kept = W::keeps ? t.bytes + half * 64 : nullptr;
    const int8_t* x = t.x;
    const char *ahead = t.ahead, *ahead_low = t.ahead_low;
    auto state = [&](int m, int h) INLINE_LAMBDA { return t.state + m * block_outputs + (half + h) * lanes; };
    for (int64_t g = 0; g < t.groups; g++) {
        I sums[sets][M][halves];
        const int64_t column = g * block_outputs + half * lanes;
        if (t.split && !t.first)
            unroll<M * halves>([&](auto i) INLINE_LAMBDA {
                sums[0][i / halves][i % halves] = load_ints(reinterpret_cast<const int32_t*>(state(i / halves, i % halves)));
            });
        else if (t.zeros == nullptr)
            unroll<M * halves>([&](auto i) INLINE_LAMBDA {
                sums[0][i / halves][i % halves] = set1_int(t.least == nullptr ? t.starts[g * M + i / halves] : 0);
            });
        else
            unroll<M * halves>([&](auto i) INLINE_LAMBDA {
                sums[0][i / halves][i % halves] =
                    mul_ints(widen_bytes(t.zeros + column + i % halves * lanes), set1_int(t.starts[g * M + i / halves]));
            });
        if constexpr (sets == 2) unroll<M * halves>([&](auto i) INLINE_LAMBDA { sums[1][i / halves][i % halves] = set1_int(0); });

        I dots[fold_first<W> ? 1 : sets][M][halves];
        auto& part = [&]() INLINE_LAMBDA -> auto& {
            if constexpr (fold_first<W>)
                return dots;
            else
                return sums;
        }();
        auto fold = [&]() INLINE_LAMBDA {
            unroll<M * halves>([&](auto i) INLINE_LAMBDA {
                I &sum = sums[0][i / halves][i % halves], &dot = dots[0][i / halves][i % halves];
                sum = add_steps(sum, dot, set1_pair(once_each));
                dot = set1_int(0);
            });
        };
        if constexpr (fold_first<W>)
            unroll<M * halves>([&](auto i) INLINE_LAMBDA { dots[0][i / halves][i % halves] = set1_int(0); });
        auto step = [&](auto j, const int8_t* at) INLINE_LAMBDA {
            unroll<W::bytes / 64>([&](auto i) INLINE_LAMBDA { prefetch(ahead + i * 64); });
            ahead += t.ahead_step;
            if constexpr (W::second == W::bytes) {
                unroll<W::bytes / 64>([&](auto i) INLINE_LAMBDA { prefetch(ahead_low + i * 64); });
                ahead_low += t.ahead_step;
            }
            multiply_codes<M, sets, W, 2 * j>(w, low, kept, at, part);
            w += W::bytes;
            if constexpr (W::keeps) kept += Bytes<8>::bytes;
            if constexpr (W::second == W::bytes) low += W::second;
            if constexpr (fold_first<W> && (2 * j + 2) % fold_quads(W::bits) == 0) fold();
        };
        int64_t left = t.steps;
        if constexpr (M <= unrolled_rows || bit_plane)
            for (; left >= 4; left -= 4, x += piece_bytes) {
                unroll<4>([&](auto j) INLINE_LAMBDA { step(j, x + j * 8 * x_bytes<W>); });
                if constexpr (bit_plane) low += 4 * W::second;
            }
        if constexpr (!bit_plane)  // those have groups of 32 columns, which are whole pieces
            for (; left > 0; left -= 4, x += piece_bytes) {
                const int8_t* at = x;
                for (int64_t j = left < 4 ? left : 4; j > 0; j--, at += 8 * x_bytes<W>) step(Index<0>{}, at);
                if constexpr (fold_first<W>) fold();
            }
        if constexpr (sets == 2)
            unroll<M * halves>([&](auto i) INLINE_LAMBDA {
                I& sum = sums[0][i / halves][i % halves];
                sum = add_ints(sum, sums[1][i / halves][i % halves]);
            });

        if (t.split && !t.last) {
            unroll<M * halves>([&](auto i) INLINE_LAMBDA {
                store_ints(reinterpret_cast<int32_t*>(state(i / halves, i % halves)), sums[0][i / halves][i % halves]);
            });
            continue;
        }
        V scales[halves], least[halves];
        unroll<halves>([&](auto h) INLINE_LAMBDA { scales[h] = load_scales(t.scales, t.scale_format, column + h * lanes); });
        const auto add_group = [&](auto minima) INLINE_LAMBDA {
            unroll<M>([&](auto m) INLINE_LAMBDA {
                const V x_scale = set1(t.x_scales[g * M + m]);
                const V start = set1(minima ? static_cast<float>(t.starts[g * M + m]) : 0.0f);
                unroll<halves>([&](auto h) INLINE_LAMBDA {
                    V total = t.split ? zero() : load(state(m, h));
                    if constexpr (minima) total = fma(start, mul(least[h], x_scale), total);
                    store(state(m, h), fma(to_floats(sums[0][m][h]), mul(scales[h], x_scale), total));
                });
            });
        };
        if (t.least == nullptr) {
            add_group(Index<0>{});
        } else {
            unroll<halves>([&](auto h) INLINE_LAMBDA { least[h] = load_scales(t.least, t.scale_format, column + h * lanes); });
            add_group(Index<1>{});
        }
    }
}

template <int M, class W>
void integer_rows(const IntegerTile& t) {
    for (int64_t half = 0; half < 2; half += halves) integer_half<M, W>(t, half);
}

using TileKernel = void (*)(const IntegerTile&);

// The kernel for this number of rows, which is at least `least`.
template <class W, int least = 1, int M = integer_tile>
inline TileKernel kernel_for(int64_t rows) {
    if constexpr (M == least)
        return integer_rows<M, W>;
    else
        return rows == M ? integer_rows<M, W> : kernel_for<W, least, M - 1>(rows);
}

// Unpacks a span of nibbles to bytes, which all tiles then share.
template <class W>
inline void unpack(const uint8_t* codes, const uint8_t* low, int64_t steps, uint8_t* bytes) {
    auto step = [&](auto j) INLINE_LAMBDA {
        unroll<4>([&](auto i) INLINE_LAMBDA { store_codes(bytes + i * 64, W::template get<2 * j + i / 2>(codes, low, i % 2)); });
        codes += W::bytes, bytes += Bytes<W::bits>::bytes;
        if constexpr (W::second == W::bytes) low += W::second;
    };
    for (; steps >= 4; steps -= 4) {
        unroll<4>(step);
        if constexpr (W::second > 0 && W::second < W::bytes) low += 4 * W::second;
    }
    unroll<3>([&](auto j) INLINE_LAMBDA {
        if (j < steps) step(j);
    });
}

// The kernel for M rows. `unpacked`: tiles share unpacked weights.
inline TileKernel choose(const IntegerArgs& a, int64_t M, bool unpacked) {
    if (!unpacked && a.nibbles)
        return a.low                         ? kernel_for<Nested>(M)
               : a.high                      ? kernel_for<FiveBits>(M)
               : a.table == IntegerArgs::fp4 ? kernel_for<TableCodes<true>>(M)
               : a.table                     ? kernel_for<TableCodes<false>>(M)
                                             : kernel_for<Nibbles>(M);
    if constexpr (!dots_add_four)
        if (a.code_bits() < 8) return a.high ? kernel_for<Bytes<5>>(M) : kernel_for<Bytes<4>>(M);
    return kernel_for<Bytes<8>>(M);
}

inline void unpack_any(const IntegerArgs& a, const uint8_t* codes, const uint8_t* second, int64_t steps, uint8_t* bytes) {
    if (a.low) return unpack<Nested>(codes, second, steps, bytes);
    if (a.high) return unpack<FiveBits>(codes, second, steps, bytes);
    if (a.table == IntegerArgs::fp4) return unpack<TableCodes<true>>(codes, second, steps, bytes);
    if (a.table) return unpack<TableCodes<false>>(codes, second, steps, bytes);
    unpack<Nibbles>(codes, second, steps, bytes);
}

// Prefetches the outputs of row t. Rows of the result are far apart, so each one usually needs another page
// translation.
template <class Args>
inline void prefetch_outputs(const Args& a, int64_t block, int64_t t) {
    const int64_t first = t * a.outputs + block * block_outputs;
    for (int64_t i = 0; i < block_outputs; i += lanes) {
        prefetch(a.out + first + i);
        if (a.residual) prefetch(a.residual + first + i);
    }
}

template <class Args>
inline void write_outputs(const Args& a, int64_t block, int64_t t, const float* sums) {
    const int64_t o = block * block_outputs;
    const int64_t count = a.outputs - o < block_outputs ? a.outputs - o : block_outputs;
    const float* residual = a.residual ? a.residual + t * a.outputs + o : nullptr;
    float* out = a.out + t * a.outputs + o;
    for (int64_t i = 0; i < count; i += lanes) {
        V f = load(sums + i);
        if (a.bias) f = add(f, load_part(a.bias + o + i, count - i));
        if (residual) f = add(load_part(residual + i, count - i), f);
        store_part(out + i, f, count - i);
    }
}

// Computes one block of outputs for tiles [begin, end). `sums` holds 32 floats per row of these tiles, `bytes` a span
// of unpacked weights.
inline void integer_block(const IntegerArgs& a, const Kernels& unit, int64_t block, int64_t begin, int64_t end, float* sums,
                          uint8_t* bytes) {
    const int64_t groups = a.depth / a.group, tiles = end - begin, row = begin * a.tile;
    const int64_t rows = (end * a.tile < a.rows ? end * a.tile : a.rows) - row;
    const int64_t step_bytes = a.nibbles ? Nibbles::bytes : Bytes<8>::bytes;
    const bool plain = !a.low && !a.high && !a.table, matrices = unit.matrix && a.tile >= unit.matrix_rows;
    const bool unpacked = a.nibbles && (matrices || tiles >= (plain ? unpack_tiles : 2)), alone = tiles == 1 && !unpacked;
    const bool split = groups == 1 && !alone && a.depth > integer_span;
    const int64_t scale_bytes = bytes_of(a.scale_format), x_row = round_up(a.depth, code_step);
    // Columns of a span: all columns for one tile, else as many as fit in the L1 cache.
    const int64_t span = alone                     ? a.depth
                         : split                   ? integer_span
                         : a.group >= integer_span ? a.group
                                                   : integer_span / a.group * a.group;
    if (!split) __builtin_memset(sums, 0, static_cast<uint64_t>(rows * block_outputs) * sizeof(float));
    const int64_t start = block * (a.depth / 8) * step_bytes, code_bytes = wide_codes && a.code_bits() == 8 ? 2 : 1;
    for (int64_t k = 0; k < a.depth; k += span) {
        const int64_t width = span < a.depth - k ? span : a.depth - k, g = k / a.group;
        const uint8_t* packed = a.codes + start + k / 8 * step_bytes;
        const uint8_t* low = a.low ? a.low + start + k / 8 * step_bytes : nullptr;
        const uint8_t* high = a.high ? a.high + block * a.depth * 4 + k * 4 : nullptr;
        const bool keep = unpacked && plain && !matrices;  // the first tile unpacks them as it goes
        if (unpacked && !keep) unpack_any(a, packed, low ? low : high, width / 8, bytes);
        IntegerTile t{};
        t.bytes = bytes;
        t.low = unpacked ? nullptr : low ? low : high;
        t.groups = split ? 1 : width / a.group;
        t.steps = split ? width / 8 : a.group / 8;
        t.split = split, t.first = k == 0, t.last = k + width == a.depth;
        t.scale_format = a.scale_format;
        t.scales = static_cast<const char*>(a.scales) + (block * groups + g) * block_outputs * scale_bytes;
        if (a.least) t.least = static_cast<const char*>(a.least) + (block * groups + g) * block_outputs * scale_bytes;
        if (a.zeros) t.zeros = a.zeros + (block * groups + g) * block_outputs;
        for (int64_t i = begin; i < end; i++) {
            const int64_t first = i * a.tile, M = a.tile < a.rows - first ? a.tile : a.rows - first;
            const bool keeps = keep && i == begin;
            t.codes = unpacked && !keeps ? bytes : packed;
            t.x = a.x + (first * x_row + k * M) * code_bytes;
            t.x_scales = a.x_scales + first * groups + g * M;
            t.starts = a.starts + first * groups + g * M;
            t.state = sums + (first - row) * block_outputs;
            t.rows = M;
            if (alone) {  // prefetch the weights that follow
                t.ahead = reinterpret_cast<const char*>(packed) + integer_prefetch;
                t.ahead_low = reinterpret_cast<const char*>(low) + (low ? integer_prefetch : 0);
                t.ahead_step = step_bytes;
            } else {  // the first tile prefetches the next span, the second tile its second plane
                const bool second = low && i == begin + 1;
                const int64_t plane = width / 8 * step_bytes;
                t.ahead_step = i == begin || second ? step_bytes : 0;
                t.ahead = reinterpret_cast<const char*>(second ? low : packed) + (t.ahead_step > 0 ? plane : 0);
            }
            if (keeps)
                kernel_for<KeptNibbles, unpack_least>(M)(t);
            else
                (unit.matrix && M >= unit.matrix_rows ? unit.matrix : choose(a, M, unpacked))(t);
        }
    }
    for (int64_t t = 0; t < rows; t++) {
        if (t + write_ahead < rows) prefetch_outputs(a, block, row + t + write_ahead);
        write_outputs(a, block, row + t, sums + t * block_outputs);
    }
}

void integer(const IntegerArgs& a, int64_t begin, int64_t end, float* scratch) {
    const Kernels& unit = kernels();  // another unit may have the matrix kernel
    const int64_t tiles = (a.rows + a.tile - 1) / a.tile;
    // Tiles per batch: their codes should stay in the L2 cache while all blocks are computed. At least 4, because the
    // weights are read again for each batch.
    const int64_t fitting = integer_cache / (a.depth * a.tile), batch = fitting > 4 ? fitting : 4;
    uint8_t* bytes = reinterpret_cast<uint8_t*>(scratch + a.rows * block_outputs);
    for (int64_t i = 0; i < tiles; i += batch)
        for (int64_t block = begin; block < end; block++)
            integer_block(a, unit, block, i, i + batch < tiles ? i + batch : tiles, scratch, bytes);
    if (unit.matrix) unit.release_matrix();
}
