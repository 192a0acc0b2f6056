// Integer weights times integer rows on a matrix unit (AMX). Sums are exact, so their order is free. Included
// after integer_body.h, with the intrinsics of <immintrin.h> or their emulation.
//
// Five AMX tiles are used. Two hold the sums of up to 16 rows and 32 outputs. One holds a piece of 32 columns of the
// rows. Two hold these columns of the weights in bytes, four bytes to a word, which is the layout of packed weights.

struct TileConfig {
    uint8_t palette, first_row, none[14];
    uint16_t bytes[16];  // bytes per row, for each tile
    uint8_t rows[16];
};

inline int64_t& configured_rows() {
    thread_local int64_t rows = 0;
    return rows;
}
inline void configure_tiles(int64_t rows) {
    if (configured_rows() == rows) return;
    const uint8_t m = static_cast<uint8_t>(rows);
    alignas(64) const TileConfig config{1, 0, {}, {64, 64, code_step, 64, 64}, {m, m, m, code_step / 4, code_step / 4}};
    _tile_loadconfig(&config);
    configured_rows() = rows;
}
// Releases the AMX tiles. A thread that sleeps with tiles configured keeps its core out of its low-power state.
inline void release_tiles() {
    if (configured_rows() == 0) return;
    _tile_release();
    configured_rows() = 0;
}

// Adds the rest of a group after its whole pieces, `steps` steps of 8 columns, to sums[2][M][16].
inline void add_rest(const uint8_t* w, const int8_t* x, int64_t M, int64_t steps, int32_t (*sums)[16][lanes]) {
    for (int64_t j = 0; j < 2 * steps; j++)
        for (int64_t half = 0; half < 2; half += halves) {
            Codes codes[halves];
            unroll<halves>([&](auto h) INLINE_LAMBDA { codes[h] = load_codes(w + j * 128 + (half + h) * 64); });
            for (int64_t m = 0; m < M; m++) {
                I sum[halves];
                unroll<halves>([&](auto h) INLINE_LAMBDA { sum[h] = load_ints(sums[half + h][m]); });
                add_dots<false, false>(sum, codes, x + m * code_step + j * 4);
                unroll<halves>([&](auto h) INLINE_LAMBDA { store_ints(sums[half + h][m], sum[h]); });
            }
        }
}

void tiled_rows(const IntegerTile& t) {
    static_assert(!wide_codes, "rows are bytes");
    const int64_t M = t.rows, pieces = t.steps / 4, rest = t.steps % 4;
    configure_tiles(M);
    alignas(64) int32_t sums[2][16][lanes];
    const uint8_t* w = t.codes;
    const int8_t* x = t.x;
    const char* ahead = t.ahead;
    for (int64_t g = 0; g < t.groups; g++) {
        for (int64_t h = 0; h < 2; h++) {
            const int64_t column = g * block_outputs + h * lanes;
            for (int64_t m = 0; m < M; m++) {
                const I start = set1_int(t.least == nullptr ? t.starts[g * M + m] : 0);
                const int32_t* before = reinterpret_cast<const int32_t*>(t.state + m * block_outputs + h * lanes);
                store_ints(sums[h][m], t.split && !t.first  ? load_ints(before)
                                       : t.zeros == nullptr ? start
                                                            : mul_ints(widen_bytes(t.zeros + column), start));
            }
        }
        _tile_loadd(0, sums[0], 64);
        _tile_loadd(1, sums[1], 64);
        for (int64_t piece = 0; piece < pieces; piece++, w += 8 * 128, x += M * code_step) {
            for (int64_t i = 0; i < 4 * t.ahead_step; i += 64) prefetch(ahead + i);
            ahead += 4 * t.ahead_step;
            _tile_loadd(2, x, code_step);
            _tile_loadd(3, w, 128);
            _tile_loadd(4, w + 64, 128);
            _tile_dpbsud(0, 2, 3);  // signed rows, unsigned weights
            _tile_dpbsud(1, 2, 4);
        }
        _tile_stored(0, sums[0], 64);
        _tile_stored(1, sums[1], 64);
        add_rest(w, x, M, rest, sums);
        w += rest * 256;
        for (int64_t h = 0; h < 2; h++) {
            const V scale = load_scales(t.scales, t.scale_format, g * block_outputs + h * lanes);
            const V least = t.least ? load_scales(t.least, t.scale_format, g * block_outputs + h * lanes) : zero();
            for (int64_t m = 0; m < M; m++) {
                float* at = t.state + m * block_outputs + h * lanes;
                const I sum = load_ints(sums[h][m]);
                if (t.split && !t.last) {
                    store_ints(reinterpret_cast<int32_t*>(at), sum);
                    continue;
                }
                const V x_scale = set1(t.x_scales[g * M + m]), start = set1(static_cast<float>(t.starts[g * M + m]));
                V total = t.split ? zero() : load(at);
                if (t.least) total = fma(start, mul(least, x_scale), total);
                store(at, fma(to_floats(sum), mul(scale, x_scale), total));
            }
        }
    }
}
