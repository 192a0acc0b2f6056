// What the kernels of one instruction set offer: arguments, and a table of function pointers.
//
// Letters as in the Python package: T rows, K input width, O outputs, C hidden, H/Hk heads and KV heads, D head dimension.
//
// The law that every kernel obeys (docs: row-invariant arithmetic): the bits of a row's result depend on that row's
// content and logical position alone. So each output is one sum in one fixed order, whatever tile computes it: products
// with weights and keys have 8 lanes, all else 16; a lane adds its terms in ascending order with a fused multiply-add; then lanes fold in a tree,
// l + (l+8), l + (l+4), l + (l+2), l + (l+1). All instruction sets keep to that order, so they give the same bits.
//
// Products of packed weights with float32 rows have a lane for each output instead: within a group of columns one sum, from
// zero, takes the columns in ascending order with a fused multiply-add. At a group's end, if the weight has zero points,
// sum = fma(middle - zero, sum of the group's x (16 lanes), sum); then total = fma(sum, scale, total), from zero. Formats
// without scales have one group and total = sum.
//
// Products of packed bf16 weights with rows rounded to bf16 have a lane for each output too. A sum takes the pairs of columns
// in ascending order, of a pair the odd column first; each term is a fused multiply-add whose operands and result are
// flushed: subnormals count as zero. That is what vdpbf16ps computes.

#pragma once

#include <cstdint>

namespace sameseed {

// The dense formats come first: they index the tables of kernels below.
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
    q2_k = 13
};
constexpr int num_formats = 14;

constexpr int64_t bytes_of(Format format) {  // of one number of a dense format
    return format == Format::fp32 ? 4 : 2;
}

struct bf16 {
    uint16_t bits;
};
struct fp16 {
    uint16_t bits;
};

// Formats of the cache: the dense ones, codes with a float32 scale for each token and head, bf16 whose products are those of
// pairs (attention_pairs_body.h), and int8 whose products are integers (attention_integer_body.h).
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

constexpr int64_t kv_outliers(int64_t dim) { return dim < 64 ? 1 : dim / 32; }  // of a row of int4_sparse

// Bytes of one head's row; sameseed/formats/_kv4.py says what those of the 4-bit formats are.
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
struct e4m3 {  // 4 exponent bits, 3 of mantissa; no infinity, NaN where all 7 bits are set
    uint8_t bits;
};
struct e5m2 {  // the upper half of a half precision number
    uint8_t bits;
};

// out[T, O] = x[T, K] * w[O, K]^T + bias[O] + residual[T, O]
struct LinearArgs {
    const float* packed;  // x in tiles of `tile` rows (the last may have fewer), each as `pack` wrote it
    const void* weight;
    const float* bias;  // or null
    const float* residual;  // [T, O], contiguous, or null; may be `out`
    float* out;  // [T, O], contiguous
    int64_t weight_stride;
    int64_t rows, outputs, depth, tile;
};

// The same for weights packed as pack.h says, and float32 rows.
struct FloatArgs {
    const float* x;  // in tiles of `tile` rows (the last may have fewer), each [depth][rows of the tile]
    const float* x_sums;  // by tile [groups][rows of the tile]: sums of x over a group; only with zeros
    const void* codes;  // as pack.h says
    const void* scales;  // [blocks][groups][32], or null
    Format scale_format;
    const uint8_t* zeros;  // [blocks][groups][32], or null: all at `middle`
    const uint8_t* nans;  // [blocks][32], not 0 where an output has a NaN among its weights; or null
    const float* table;  // values of the 16 nibbles
    float middle, factor;  // factor: of every scale
    const float* bias;
    const float* residual;
    float* out;
    int64_t rows, outputs, depth, group, groups, tile;  // depth = group * groups, padded
};

// The same for packed bf16 weights, and rows rounded to bf16.
struct PairArgs {
    const void* x;  // in tiles of `tile` rows (the last may have fewer), each [depth / 2][rows of the tile] pairs of columns
    const uint8_t* weight;  // as pack.h says
    const float* bias;
    const float* residual;
    float* out;
    int64_t rows, outputs, depth, tile;  // depth padded to a multiple of 8
};

// out[T, O] = x[T, K] * w[O, K]^T + bias[O] + residual[T, O], w packed as pack.h says, x as codes int8. In tile i, of M <=
// `tile` rows, x lies as [K/32][M][32] (zero-padded), its scales as [K/G][M], and the integers that sums start from,
// -zero * (sum of the group's codes), as [K/G][M]; where the weight has zero points, `starts` leaves them out. Beside weights
// of 8 bits a piece of 32 codes may take 64 bytes (`wide_codes`).
struct IntegerArgs {
    const uint8_t* codes;  // [O/32][K/8][2][16][4] nibbles, or [O/32][K/4][2][16][4] bytes
    const uint8_t* low;  // as `codes`: the nibbles below them, which make bytes of both; or null
    bool nibbles;
    const void* scales;  // [O/32][K/G][32]
    Format scale_format;
    const uint8_t* zeros;  // [O/32][K/G][32] or null
    const int8_t* x;
    const float* x_scales;
    const int32_t* starts;
    const float* bias;  // [O] or null
    const float* residual;  // [T, O], contiguous, or null; may be `out`
    float* out;  // [T, O], contiguous
    int64_t rows, outputs, depth, group, tile;  // depth and group rounded up to 8
};

// The same for weights in super-blocks of 256 columns, packed as pack.h says. Rows of x as above, in groups of 256; with the
// sums of their codes over each sub-block, by tile [K/2P][M][2] for sub-blocks of P = `part` columns.
struct SuperArgs {
    const uint8_t* codes;  // nibbles; null for q2_k
    const uint8_t* high;  // the bits above them, or null; of q2_k all bits
    const int8_t* steps;
    const int8_t* minima;  // or null
    const void* scales;  // [O/32][K/256][32]
    const void* least;  // the same; null without minima
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
    const float* q;  // [T, H, D] with a row stride
    const void* k;  // [num_blocks, block_size, Hk] rows of kv_row_bytes, contiguous
    const void* v;
    const float* k_scale;  // [num_blocks, block_size, Hk], contiguous; null for dense formats
    const float* v_scale;
    float* out;  // [T, H, D], contiguous
    const int32_t* positions;  // [T]
    const int64_t* tree_mask;  // [T], or null
    int64_t q_stride, heads, kv_heads, dim, block_size;
    int64_t window;  // keys t > position - window are visible
    float scale;
    bool rotated = false;  // set by attention(): keys and values are stored times a Hadamard matrix (kv4_body.h)
};

// Rows of one sequence, and query heads of one KV head, that walk the cache together: row_count * head_count <= max_queries.
struct AttentionTile {
    const int32_t* block_table;
    int64_t kv_len, row_begin, row_count, kv_head, head_begin, head_count;
    int64_t first_block, end_block;  // the blocks of `key_block` positions that some row sees
    float* partial;  // results of the blocks, attention_partial floats each; null: merge each as it comes
    bool in_parts = false;  // whether several calls share the blocks
    // What somebody will read next, all heads of it, is fetched meanwhile: positions of the sequence that has this table.
    const int32_t* next_table = nullptr;
    int64_t next_begin = 0, next_end = 0;
};

constexpr int64_t lanes = 16;
constexpr int64_t depth_step = 16;  // `linear` takes K in steps of 2 x 8 lanes, because bf16 comes in pairs
constexpr int64_t block_outputs = 32;  // packed weights come in blocks of 32 outputs
constexpr int64_t super_columns = 256;  // of a super-block
constexpr int64_t code_step = 32;  // codes of x come in pieces of 32 along K
constexpr int64_t integer_span = 512;  // columns that many tiles of rows share before the next ones (groups stay whole)
constexpr int64_t integer_cache = 256 * 1024;  // bytes of x codes, or of weights, that should stay in a second-level cache
constexpr int64_t key_block = 256;  // attention sums keys in blocks of this many positions
constexpr int64_t score_stride = key_block + lanes;  // from one query's scores to the next one's
constexpr int64_t panel_keys = 64;  // keys or values that are widened at once, where many queries share them
constexpr int64_t max_queries = 64;  // query vectors (rows x heads of one KV head) in an attention tile
constexpr int64_t max_dim = 512;  // of a head

constexpr int64_t round_up(int64_t n, int64_t multiple) { return (n + multiple - 1) / multiple * multiple; }

struct Kernels {
    const char* name;
    int64_t row_tile;  // the most rows of x that `linear` takes at once

    // Lay `rows` <= row_tile rows of x out for `linear`: for each step of 16 along K (zero-padded), the rows one after another.
    void (*pack[3])(const float* x, int64_t x_stride, int64_t rows, int64_t depth, float* packed);
    // Outputs [o_begin, o_end) of rows [t_begin, t_end); t_begin is a multiple of the tile.
    void (*linear[3])(const LinearArgs&, int64_t o_begin, int64_t o_end, int64_t t_begin, int64_t t_end);

    int64_t float_tile;  // the most rows of a tile of `linear_float`
    // By Format; null for formats that are never packed. Outputs of blocks [begin, end), rows [t_begin, t_end); t_begin is
    // a multiple of the tile. `scratch` holds float_scratch(blocks, rows) floats, aligned to 64 bytes.
    void (*linear_float[num_formats])(const FloatArgs&, int64_t begin, int64_t end, int64_t t_begin, int64_t t_end,
                                      float* scratch);
    void (*interleave)(const float* x, int64_t stride, int64_t rows, int64_t depth, int64_t begin, int64_t end, float* out);
    void (*group_sums)(const float* x, int64_t depth, int64_t group, float* out, int64_t out_stride);

    int64_t pair_tile;  // the most rows of a tile of `linear_pairs`
    // A row of x as pairs of bf16 columns (of 8 bytes at most), zero-padded to a multiple of 8 columns: pair i is number
    // at + i * stride of `out`.
    void (*pair_row)(const float* x, int64_t depth, void* out, int64_t at, int64_t stride);
    // Outputs of the blocks [begin, end), rows [t_begin, t_end); t_begin is a multiple of the tile. `scratch` holds
    // pair_scratch(blocks, rows) floats, aligned to 64 bytes.
    void (*linear_pairs)(const PairArgs&, int64_t begin, int64_t end, int64_t t_begin, int64_t t_end, float* scratch);

    int64_t integer_tile;  // the most rows of a tile of `integer`
    bool wide_codes;  // whether `integer` takes rows beside weights of 8 bits as `widen_codes` leaves them
    // A piece of 32 codes to 64 bytes in its place: int16, of each four codes the first, the third, the second, the fourth.
    void (*widen_codes)(int8_t* piece);
    // Quantize a row of x by groups of `group` columns; piece i of 32 codes goes to codes + i * piece_stride. For each group a
    // scale and -sum * middle, `stride` apart.
    void (*quantize)(const float* x, int64_t depth, int64_t group, int32_t middle, int8_t* codes, int64_t piece_stride,
                     float* scales, int32_t* starts, int64_t stride);
    // Outputs of the blocks [begin, end), all rows. `scratch` holds integer_scratch(rows, group) floats.
    void (*integer)(const IntegerArgs&, int64_t begin, int64_t end, float* scratch);
    int64_t super_tile;  // the most rows of a tile of `super`
    // Outputs of the blocks [begin, end), all rows. `scratch` holds 32 floats for each row.
    void (*super)(const SuperArgs&, int64_t begin, int64_t end, float* scratch);

    void (*rms_norm)(const float* x, int64_t x_stride, const float* weight, float eps, int64_t rows, int64_t width, float* out);
    void (*rope)(const float* x, int64_t x_stride, const int32_t* positions, const float* table, int64_t rows, int64_t heads,
                 int64_t dim, float* out);
    void (*silu_mul)(const float* gate_up, int64_t stride, int64_t rows, int64_t width, float* out);
    void (*encode[3])(const float* x, int64_t count, void* codes);  // float32 -> format, to nearest even
    void (*decode[3])(const void* codes, int64_t count, float* x);
    // One cached row [Hk, D] -> codes and, in formats that have them, a scale for each head.
    void (*encode_kv[kv_formats])(const float* x, int64_t heads, int64_t dim, void* codes, float* scales);
    // Blocks [block_begin, block_end) of a tile. Without `partial` these must be all, and the result goes to `out`.
    // `scratch` holds attention_scratch(dim) floats, aligned to 64 bytes.
    void (*attention[kv_formats])(const AttentionArgs&, const AttentionTile&, int64_t block_begin, int64_t block_end,
                                  float* scratch);
    // Merge the partial results of all blocks of a tile into `out`.
    void (*attention_merge)(const AttentionArgs&, const AttentionTile&, float* scratch);
};

constexpr int64_t query_apart = max_dim / 2 + 8;  // pairs of columns from one query's to the next one's
constexpr int64_t weight_apart = key_block / 2 + 8;  // pairs of keys likewise
constexpr int64_t attention_pairs_scratch(int64_t dim) {  // more of it, where keys and values are taken by pairs
    return max_queries * 2 * (query_apart + weight_apart) + (key_block + 2 * max_queries + 32) * round_up(dim, 32);
}
constexpr int64_t attention_scratch(int64_t dim) {
    return attention_pairs_scratch(dim) + (3 * max_queries + panel_keys + 2 * key_block) * round_up(dim, lanes) +
           max_queries * score_stride + 2 * score_stride;
}
constexpr int64_t attention_partial(int64_t dim, int64_t queries) { return 2 * max_queries + queries * round_up(dim, lanes); }

constexpr int64_t float_chunk = 128;  // columns of a strip of decoded weights: 16 KB
constexpr int64_t float_scratch(int64_t blocks, int64_t rows) { return 32 * (float_chunk + 2 * blocks * rows); }

constexpr int64_t pair_chunk = 128;  // columns that all tiles of a panel share before the next ones
constexpr int64_t pair_scratch(int64_t blocks, int64_t rows) { return 32 * blocks * rows; }

constexpr int64_t integer_scratch(int64_t rows, int64_t group) {  // sums of all rows; bytes of one span of weights
    return rows * block_outputs + (group > integer_span ? group : integer_span) * block_outputs / 4;
}

const Kernels& kernels();  // those of the instruction set in use: isa.cpp

}  // namespace sameseed
