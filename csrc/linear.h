// Linear layers: the source of the rows, the stored weight, and what is added at the end.
//
// linear() fuses several ops. It prepares the rows of x (gathered, normalized, or gated by SwiGLU), lays them out for
// the kernel (and quantizes them if the weight requires it), multiplies, and adds bias and residual. Each part computes
// exactly what the separate op computes, so fusing changes no bit.

#pragma once

#include "kernels.h"

namespace sameseed {

// A weight [O, K] in any format. Dense formats have rows of `stride` elements in `codes`; packed ones are laid out as
// in pack.h.
struct Weight {
    Format format;
    bool integer_rows;  // quantize the rows of x to int8 before the product
    bool bf16_rows;     // round the rows of x to bf16, the format of the weight
    int64_t outputs, depth;
    int64_t group;   // columns that share a scale; `depth` if a row has one scale
    int64_t stride;  // between dense rows, in elements; 0 if the weight is packed
    const void* codes;
    const void* scales;       // null for dense formats
    Format scale_format;      // fp32, bf16 or fp16
    const uint8_t* zeros;     // zero points; null: the middle of the range
    const uint8_t* low;       // int8n: the low nibbles, if the high nibbles in `codes` are not used alone; else null
    // Fields of llama.cpp's formats.
    const uint8_t* high;   // the bits of codes above the lowest four, or null
    const void* least;     // minima, same layout as `scales`; or null
    // K-quants: their `codes` are nibbles (q2_k: pairs of bits), and `scales` and `least` belong to super-blocks.
    const int8_t* steps;   // scales of sub-blocks, as multiples of the super-block's scale
    const int8_t* minima;  // minima of sub-blocks, as multiples of the super-block's `least`; or null
};

// Rows of x: unchanged (plain), rms_norm(x) with the weight `norm_weight` [K], or gated: silu_mul(x), gelu_mul(x) or
// clamped_mul(x), where x has 2 K columns.
struct RowSource {
    enum Kind : int { plain = 0, norm = 1, silu = 2, gelu = 3, clamped = 4 } kind;
    const float* x;
    int64_t stride;
    const float* norm_weight;
    float eps;
    const int32_t* index;  // row i of the product is computed from row index[i] of x; null: from row i
    int64_t index_limit;   // number of rows of x; indices must be below it
    float limit;           // of clamped_mul

    bool gated() const { return kind >= silu; }
    int64_t passes() const { return gated() ? 8 : kind == norm ? 4 : 2; }  // over a row, to prepare and quantize it
};

struct Product {
    RowSource source;
    const Weight* weight;
    const float* bias;      // [O] or null
    const float* residual;  // [rows, O], contiguous, or null; may be `out` itself
    float* out;             // [rows, O], contiguous
    int64_t rows;
};

// Throws std::out_of_range for an index outside x, std::invalid_argument for a weight that no kernel supports.
void linear(const Product& product);
// Several products with weights of one format, computed together. Their bits are those of single products.
void linear(const Product* products, int64_t count);

// Looks up rows token_ids [T] of an embedding [V, C] as float32 [T, C], times `scale`.
struct Embedding {
    const int32_t* token_ids;
    const Weight* weight;
    float scale;
    float* out;
    int64_t rows;
};
// Throws std::out_of_range for a token id outside the embedding.
void embedding(const Embedding& embedding);

// Rows [begin, end) of the source as floats: their address and stride. Rows that must be computed or gathered are
// written to `buffer` [end - begin, K].
struct RowView {
    const float* x;
    int64_t stride;
};
RowView prepare_rows(const RowSource& source, int64_t depth, int64_t begin, int64_t end, float* buffer);

// The kernel families, one file each.
void linear_dense(const Product& product);
void linear_float(const Product& product);    // packed, rows as float32
void linear_pairs(const Product& product);    // packed bf16, rows rounded to bf16
// The last two compute several products together.
void linear_integer(const Product* products, int64_t count);  // packed integers with a scale per group, rows quantized
void linear_super(const Product* products, int64_t count);    // K-quants, rows quantized

// Columns of a sub-block of a K-quant.
constexpr int64_t super_part(Format format) { return format == Format::q2_k || format == Format::q6_k ? 16 : 32; }

}  // namespace sameseed
