// The interface of one instruction set's kernels: argument structs, and a table of function pointers.
//
// Letters as in the Python package: T rows, K input width, O outputs, C hidden size, H query heads, Hk KV heads, D head
// dimension.
//
// Every kernel is row-invariant (docs: row-invariant arithmetic): the bits of a row's result depend only on that row's
// content and logical position. Each output is therefore one sum in one fixed order, whatever tile computes it.
// Products with weights and keys use 8 lanes, everything else uses 16. A lane adds its terms in ascending order with
// fused multiply-adds. The lanes are then folded in a tree: l + (l+8), l + (l+4), l + (l+2), l + (l+1). All instruction
// sets keep this order, so they give the same bits.
//
// Products of packed weights with float32 rows use one lane per output instead. Within a group of columns, a sum starts
// at zero and takes the columns in ascending order with fused multiply-adds. At the end of a group, if the weight has
// zero points, sum = fma(middle - zero, sum of the group's x (16 lanes), sum). Then total = fma(sum, scale, total),
// where `total` starts at zero. Formats without scales have one group, and total = sum.
//
// Products of packed bf16 weights with rows rounded to bf16 use one lane per output, too. A sum takes the pairs of
// columns in ascending order, and the odd column of a pair before the even one. Each term is a fused multiply-add whose
// operands and result are flushed: subnormals become zero. This is what vdpbf16ps computes.

#pragma once

#include <cstdint>
#include <utility>

namespace sameseed {

// The dense formats come first, because their values index the kernel tables below.
enum class Format : int {
    fp32 = 0,
    bf16 = 1,
    fp16 = 2,
    int8 = 3,
    int4 = 4,
    nf4 = 5,
    fp8_e4m3 = 6,
    fp8_e5m2 = 7,
    mxfp4 = 8,
    int8n = 9,
    q4_k = 10,
    q5_k = 11,
    q6_k = 12,
    q2_k = 13,
    q4_1 = 14,
    q5_0 = 15,
    q5_1 = 16,
    iq4_nl = 17
};
constexpr int num_formats = 18;

constexpr int64_t bytes_of(Format format) {  // bytes of one number in a dense format
    return format == Format::fp32 ? 4 : 2;
}

struct bf16 {
    uint16_t bits;
};
struct fp16 {
    uint16_t bits;
};

// Formats of the KV cache. int8, fp8 and int4 formats store codes with a float32 scale per token and head. bf16_a16 is
// bf16 with products of bf16 pairs (attention_pairs_body.h). int8_a8 is int8 with integer products
// (attention_integer_body.h).
enum class KvFormat : int {
    fp32 = 0,
    bf16 = 1,
    fp16 = 2,
    int8 = 3,
    fp8_e4m3 = 4,
    fp8_e5m2 = 5,
    int4 = 6,
    int4_sparse = 7,
    bf16_a16 = 8,
    int8_a8 = 9
};
constexpr int kv_formats = 10;

constexpr int64_t kv_outliers(int64_t dim) { return dim < 64 ? 1 : dim / 32; }  // stored in a row of int4_sparse

// Bytes of one head's row. The layout of the 4-bit formats is documented in sameseed/formats/_kv4.py.
constexpr int64_t kv_row_bytes(KvFormat format, int64_t dim) {
    switch (format) {
        case KvFormat::fp32:
            return 4 * dim;
        case KvFormat::bf16:
        case KvFormat::fp16:
        case KvFormat::bf16_a16:
            return 2 * dim;
        case KvFormat::int4:
            return dim / 2 + 2;
        case KvFormat::int4_sparse:
            return dim / 2 + 2 + kv_outliers(dim) * (dim > 256 ? 4 : 3);
        default:
            return dim;
    }
}

struct int8 {
    int8_t bits;
};
struct e4m3 {  // 4 exponent bits, 3 mantissa bits; no infinity; NaN if all 7 bits are set
    uint8_t bits;
};
struct e5m2 {  // the upper byte of an fp16 number
    uint8_t bits;
};

// out[T, O] = x[T, K] * w[O, K]^T + bias[O] + residual[T, O]
struct LinearArgs {
    const float* packed;  // x in tiles of `tile` rows (the last may have fewer), as written by `pack`
    const void* weight;
    const float* bias;  // or null
    const float* residual;  // [T, O], contiguous, or null; may be `out`
    float* out;  // [T, O], contiguous
    int64_t weight_stride;
    int64_t rows, outputs, depth, tile;
};

// The same product for packed weights (pack.h has the layouts) and float32 rows.
struct FloatArgs {
    const float* x;  // in tiles of `tile` rows (the last may have fewer), each [depth][rows of the tile]
    const float* x_sums;  // per tile [groups][rows of the tile]: sums of x over a group; used only with `zeros`
    const void* codes;  // packed weights
    const void* scales;  // [blocks][groups][32], or null
    Format scale_format;
    const uint8_t* zeros;  // zero points [blocks][groups][32]; null: every zero point is `middle`
    const uint8_t* nans;  // [blocks][32], nonzero if one of the output's weights is NaN; or null
    const float* table;  // values of the 16 nibbles
    float middle, factor;  // `factor` multiplies every scale
    const float* bias;
    const float* residual;
    float* out;
    int64_t rows, outputs, depth, group, groups, tile;  // depth = group * groups, padded
};

// The same product for packed bf16 weights and rows rounded to bf16.
struct PairArgs {
    const void* x;  // in tiles of `tile` rows (the last may have fewer), each [depth / 2][rows of the tile] pairs of columns
    const uint8_t* weight;  // packed (pack.h)
    const float* bias;
    const float* residual;
    float* out;
    int64_t rows, outputs, depth, tile;  // depth is padded to a multiple of 8
};

// out[T, O] = x[T, K] * w[O, K]^T + bias[O] + residual[T, O], with w packed (pack.h) and x quantized to int8 codes. A
// tile has M <= `tile` rows of x: codes [K/32][M][32] (zero-padded), scales [K/G][M] and `starts` [K/G][M]. `starts`
// holds the integers that the sums start from: -zero * (sum of the group's codes). If the weight has zero points,
// `starts` holds -(sum of the group's codes), and the kernel multiplies it by the zero point. For 8-bit weights, a
// piece of 32 codes takes 64 bytes if `wide_codes` is set.
struct IntegerArgs {
    const uint8_t* codes;  // [O/32][K/8][2][16][4] nibbles, or [O/32][K/4][2][16][4] bytes
    const uint8_t* low;  // same layout: low nibbles of 8-bit codes whose high nibbles are in `codes`; or null
    const uint8_t* high;  // the bits of codes above the nibbles in `codes` (pack.h); or null
    bool nibbles;
    enum Table { plain, iq4, fp4 } table;  // nibbles are indices of iq4_bytes or fp4_bytes
    const void* scales;  // [O/32][K/G][32]
    const void* least;   // minima, same layout and format; or null. `starts` are then -(sum of the group's codes)
    Format scale_format;
    const uint8_t* zeros;  // [O/32][K/G][32] or null
    const int8_t* x;
    const float* x_scales;
    const int32_t* starts;
    const float* bias;  // [O] or null
    const float* residual;  // [T, O], contiguous, or null; may be `out`
    float* out;  // [T, O], contiguous
    int64_t rows, outputs, depth, group, tile;  // depth and group are rounded up to a multiple of 8

    int code_bits() const { return low || table || !nibbles ? 8 : high ? 5 : 4; }  // as the product sees codes
};

// Arguments of one call of a tile kernel. It computes whole groups or, if `split`, a part of the only group of a row.
struct IntegerTile {
    const uint8_t* codes;
    const uint8_t* low;  // the second plane, or null
    uint8_t* bytes;  // where nibbles are kept in bytes for the tiles that follow
    const int8_t* x;
    const float* x_scales;
    const int32_t* starts;
    const char *scales, *least;  // minima of the groups, or null
    Format scale_format;
    const uint8_t* zeros;
    float* state;  // [M][32]: sums so far; integers (int32) for a split group
    int64_t rows;  // M
    int64_t groups, steps;  // steps of 8 columns in each group
    bool split, first, last;
    const char *ahead, *ahead_low;  // next address to prefetch in each plane; it advances by `ahead_step` per step
    int64_t ahead_step;
};

// The same product for weights in super-blocks of 256 columns (K-quants), packed as in pack.h. Rows of x are laid out
// as for IntegerArgs, in groups of 256 columns. `x_sums` holds the sum of the codes of x over each sub-block of P =
// `part` columns, per tile [K/2P][M][2].
struct SuperArgs {
    const uint8_t* codes;  // low nibbles of the codes; null for q2_k
    const uint8_t* high;  // the bits above the nibbles, or null; for q2_k all bits of the codes
    const int8_t* steps;  // scales of the sub-blocks, as multiples of `scales`
    const int8_t* minima;  // minima of the sub-blocks, as multiples of `least`; or null
    const void* scales;  // [O/32][K/256][32]
    const void* least;  // same layout; null without minima
    Format scale_format;
    const int8_t* x;
    const float* x_scales;
    const int16_t* x_sums;
    const float* bias;  // [O] or null
    const float* residual;  // [T, O], contiguous, or null; may be `out`
    float* out;  // [T, O], contiguous
    int64_t rows, outputs, depth, part, tile;
};

struct AttentionArgs {
    const float* q;  // [T, H, D], rows q_stride elements apart
    const void* k;  // [num_blocks, block_size, Hk] rows of kv_row_bytes(), contiguous; v likewise
    const void* v;
    const float* k_scale;  // [num_blocks, block_size, Hk], contiguous; null for dense formats
    const float* v_scale;
    float* out;  // [T, H, D], contiguous
    const int32_t* positions;  // [T]
    const int64_t* tree_mask;  // [T], or null
    int64_t q_stride, heads, kv_heads, dim, block_size;
    int64_t window;  // keys t > position - window are visible
    float scale;
    const float* sinks = nullptr;  // [H]: a logit per head that joins its softmax without a value; or null
    bool rotated = false;  // set by attention(): keys and values are stored times a Hadamard matrix (kv4_body.h)
};

// Rows of one sequence and query heads of one KV head that read the cache together: row_count * head_count <=
// max_queries.
struct AttentionTile {
    const int32_t* block_table;
    int64_t kv_len, row_begin, row_count, kv_head, head_begin, head_count;
    int64_t first_block, end_block;  // the blocks of `key_block` positions that at least one row sees
    float* partial;  // results per block, attention_partial() floats each; null: merge each block at once
    bool in_parts = false;  // whether the blocks are divided among several calls
    // Positions [next_begin, next_end) of the sequence with block table `next_table` are prefetched for all KV heads
    // while this tile is computed, because some thread reads them next.
    const int32_t* next_table = nullptr;
    int64_t next_begin = 0, next_end = 0;
};

// The sixteen values of iq4_nl plus 128 (ggml's kvalues_iq4nl).
constexpr uint8_t iq4_bytes[16] = {1, 24, 45, 63, 79, 93, 106, 118, 129, 141, 153, 166, 181, 197, 217, 241};

// Twice the sixteen values of mxfp4, plus 128.
constexpr uint8_t fp4_bytes[16] = {128, 129, 130, 131, 132, 134, 136, 140, 128, 127, 126, 125, 124, 122, 120, 116};

constexpr int64_t lanes = 16;
constexpr int64_t depth_step = 16;  // columns of a step of `linear`: 2 x 8 lanes, as bf16 columns are read in pairs
constexpr int64_t block_outputs = 32;  // outputs of a block of packed weights
constexpr int64_t super_columns = 256;  // columns of a super-block
constexpr int64_t code_step = 32;  // columns of a piece of x codes
constexpr int64_t integer_span = 512;  // columns that all row tiles use before the next are read; groups stay whole
constexpr int64_t integer_cache = 256 * 1024;  // bytes of x codes, or of weights, that should stay in the L2 cache
constexpr int64_t key_block = 256;  // attention processes keys in blocks of this many positions
constexpr int64_t score_stride = key_block + lanes;  // floats between the scores of one query and the next
constexpr int64_t panel_keys = 64;  // keys or values converted to float32 at once, for tiles with many queries
constexpr int64_t max_queries = 64;  // query vectors (rows x heads of one KV head) in an attention tile
constexpr int64_t max_dim = 512;  // largest head dimension

constexpr int64_t round_up(int64_t n, int64_t multiple) { return (n + multiple - 1) / multiple * multiple; }

struct Kernels {
    const char* name;
    int64_t row_tile;  // the most rows of x in a tile of `linear`

    // Lays out `rows` <= row_tile rows of x for `linear`: for each step of 16 along K (zero-padded), one row after the
    // other.
    void (*pack[3])(const float* x, int64_t x_stride, int64_t rows, int64_t depth, float* packed);
    // Computes outputs [o_begin, o_end) of rows [t_begin, t_end). t_begin is a multiple of the tile.
    void (*linear[3])(const LinearArgs&, int64_t o_begin, int64_t o_end, int64_t t_begin, int64_t t_end);

    int64_t float_tile;  // the most rows of x in a tile of `linear_float`
    // Computes the outputs of blocks [begin, end) for rows [t_begin, t_end). t_begin is a multiple of the tile.
    // `scratch` holds float_scratch(blocks, rows) floats, aligned to 64 bytes. Indexed by Format; null for formats that
    // it does not serve.
    void (*linear_float[num_formats])(const FloatArgs&, int64_t begin, int64_t end, int64_t t_begin, int64_t t_end,
                                      float* scratch);
    void (*interleave)(const float* x, int64_t stride, int64_t rows, int64_t depth, int64_t begin, int64_t end, float* out);
    void (*group_sums)(const float* x, int64_t depth, int64_t group, float* out, int64_t out_stride);

    int64_t pair_tile;  // the most rows of x in a tile of `linear_pairs`
    // Converts a row of x to pairs of bf16 columns (at most 8 bytes each), zero-padded to a multiple of 8 columns. Pair
    // i goes to index at + i * stride of `out`.
    void (*pair_row)(const float* x, int64_t depth, void* out, int64_t at, int64_t stride);
    // Computes the outputs of blocks [begin, end) for rows [t_begin, t_end). t_begin is a multiple of the tile.
    // `scratch` holds pair_scratch(blocks, rows) floats, aligned to 64 bytes.
    void (*linear_pairs)(const PairArgs&, int64_t begin, int64_t end, int64_t t_begin, int64_t t_end, float* scratch);

    int64_t integer_tile;  // the most rows of x in a tile of `integer`
    bool wide_codes;  // whether `integer` expects rows converted by `widen_codes` if weights have 8 bits
    // Converts a piece of 32 codes to int16 in place (64 bytes). The order within every four codes becomes first,
    // third, second, fourth.
    void (*widen_codes)(int8_t* piece);
    // Quantizes a row of x in groups of `group` columns. Piece i of 32 codes goes to codes + i * piece_stride. Each
    // group gets a scale and a start (-sum of codes * middle), written `stride` elements after those of the group
    // before.
    void (*quantize)(const float* x, int64_t depth, int64_t group, int32_t middle, int8_t* codes, int64_t piece_stride,
                     float* scales, int32_t* starts, int64_t stride);
    // Computes the outputs of blocks [begin, end) for all rows. `scratch` holds integer_scratch(rows, group) floats.
    void (*integer)(const IntegerArgs&, int64_t begin, int64_t end, float* scratch);
    // A matrix unit's kernel, which `integer` calls for tiles of at least `matrix_rows` rows whose weights are bytes; null if
    // there is none. `release_matrix` ends its use by the calling thread.
    void (*matrix)(const IntegerTile&);
    int64_t matrix_rows;
    void (*release_matrix)();
    int64_t super_tile;  // the most rows of x in a tile of `super`
    // Computes the outputs of blocks [begin, end) for all rows. `scratch` holds 32 floats per row.
    void (*super)(const SuperArgs&, int64_t begin, int64_t end, float* scratch);

    void (*rms_norm)(const float* x, int64_t x_stride, const float* weight, float eps, int64_t rows, int64_t width, float* out);
    void (*rope)(const float* x, int64_t x_stride, const int32_t* positions, const float* table, int64_t rows, int64_t heads,
                 int64_t dim, float* out);
    void (*silu_mul)(const float* gate_up, int64_t stride, int64_t rows, int64_t width, float* out);
    void (*gelu_mul)(const float* gate_up, int64_t stride, int64_t rows, int64_t width, float* out);
    void (*softcap)(float* x, float cap, int64_t count);  // cap * tanh(x / cap), in place
    void (*clamped_mul)(const float* gate_up, int64_t stride, float limit, int64_t rows, int64_t width, float* out);
    void (*encode[3])(const float* x, int64_t count, void* codes);  // float32 -> format, to nearest even
    void (*decode[3])(const void* codes, int64_t count, float* x);
    // Encodes one row [Hk, D] for the cache: codes and, in scaled formats, one scale per head.
    void (*encode_kv[kv_formats])(const float* x, int64_t heads, int64_t dim, void* codes, float* scales);
    // Computes blocks [block_begin, block_end) of a tile. If the tile has no `partial`, these must be all its blocks,
    // and the result goes to `out`. `scratch` holds attention_scratch(dim) floats, aligned to 64 bytes.
    void (*attention[kv_formats])(const AttentionArgs&, const AttentionTile&, int64_t block_begin, int64_t block_end,
                                  float* scratch);
    // Merges the partial results of all blocks of a tile into `out`.
    void (*attention_merge)(const AttentionArgs&, const AttentionTile&, float* scratch);
};

constexpr int64_t query_apart = max_dim / 2 + 8;  // stride between queries, in pairs of columns
constexpr int64_t weight_apart = key_block / 2 + 8;  // stride between queries of softmax weights, in pairs of keys
constexpr int64_t attention_pairs_scratch(int64_t dim) {  // extra scratch of the bf16_a16 and int8_a8 kernels
    return max_queries * 2 * (query_apart + weight_apart) + (key_block + 2 * max_queries + 32) * round_up(dim, 32);
}
constexpr int64_t attention_scratch(int64_t dim) {
    return attention_pairs_scratch(dim) + (3 * max_queries + panel_keys + 2 * key_block) * round_up(dim, lanes) +
           max_queries * score_stride + 2 * score_stride;
}
constexpr int64_t attention_partial(int64_t dim, int64_t queries) { return 2 * max_queries + queries * round_up(dim, lanes); }

constexpr int64_t float_chunk = 128;  // columns of a strip of decoded weights (16 KB)
constexpr int64_t float_scratch(int64_t blocks, int64_t rows) { return 32 * (float_chunk + 2 * blocks * rows); }

constexpr int64_t pair_chunk = 128;  // columns that all tiles of a panel use before the next columns are read
constexpr int64_t pair_scratch(int64_t blocks, int64_t rows) { return 32 * blocks * rows; }

constexpr int64_t integer_scratch(int64_t rows, int64_t group) {  // sums of all rows, and one span of unpacked weights
    return rows * block_outputs + (group > integer_span ? group : integer_span) * block_outputs / 4;
}

const Kernels& kernels();  // of the instruction set in use (isa.cpp)

}  // namespace sameseed
