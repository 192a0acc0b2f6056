// Linear layers: where the rows come from, how the weight is stored, what is added at the end.
//
// linear() is one op with three parts. The rows of x are prepared (gathered, normed, or gated as SwiGLU does), laid out for
// the kernel (and quantized where the weight asks for it), multiplied, and bias and residual are added: each part exactly as
// the separate ops compute it, so that fusing them changes no bit.

#pragma once

#include <vector>

#include "kernels.h"

namespace sameseed {

// A weight [O, K] in any format. Dense formats have rows of `stride` elements in `codes`; the others are packed as pack.h says.
struct Weight {
    Format format;
    bool integer_rows;  // quantize the rows of x to int8 before the product
    bool bf16_rows;     // round them to bf16, the weight's own format
    int64_t outputs, depth;
    int64_t group;   // columns that share a scale; `depth` where a row has one
    int64_t stride;  // of dense rows, in elements; 0 where the weight is packed
    const void* codes;
    const void* scales;       // null for dense formats
    Format scale_format;      // fp32, bf16 or fp16
    const uint8_t* zeros;     // or null: the middle of the range
    const uint8_t* low;       // of int8n, whose `codes` are the high nibbles; null where these stand alone
    // Of K-quants, whose `codes` are nibbles (of q2_k pairs of bits) and `scales` those of super-blocks:
    const uint8_t* high;   // the bits of codes above four, or null
    const int8_t* steps;   // multiples of the scale
    const int8_t* minima;  // and of `least`, or null
    const void* least;     // as `scales`
};

// Rows of x: as they are, or rms_norm(x) (then `norm` is its weight [K]), or silu_mul(x) (then x has 2 K columns).
struct RowSource {
    enum Kind : int { plain = 0, norm = 1, silu = 2 } kind;
    const float* x;
    int64_t stride;
    const float* norm_weight;
    float eps;
    const int32_t* index;  // row i of the product comes from row index[i] of x; null: from row i
    int64_t index_limit;   // rows of x that index may name
};

struct Product {
    RowSource source;
    const Weight* weight;
    const float* bias;      // [O] or null
    const float* residual;  // [rows, O], contiguous, or null; may be `out` itself
    float* out;             // [rows, O], contiguous
    int64_t rows;
};

// Raises std::out_of_range for an index outside x, std::invalid_argument for a weight that no kernel serves.
void linear(const Product& product);

// Rows token_ids [T] of an embedding [V, C], as float32 [T, C].
struct Embedding {
    const int32_t* token_ids;
    const Weight* weight;
    float* out;
    int64_t rows;
};
// Raises std::out_of_range.
void embedding(const Embedding& embedding);

// Rows [begin, end) of the source as floats: where they lie, and how far apart. Those that are computed go to `buffer`
// [end - begin, K].
struct RowView {
    const float* x;
    int64_t stride;
};
RowView prepare_rows(const RowSource& source, int64_t depth, int64_t begin, int64_t end, float* buffer);

// The families of kernels; each in a file of its own.
void linear_dense(const Product& product);
void linear_float(const Product& product);    // packed, rows as float32
void linear_pairs(const Product& product);    // packed bf16, rows rounded to bf16
void linear_integer(const Product& product);  // packed int4 or int8, rows quantized
void linear_super(const Product& product);    // the same for K-quants

// Ends of the tasks that `blocks` blocks of at most `most` each make: long runs first, because a stream of weights costs a
// start; then ever shorter ones, so that all threads end together. Of this thread, until its next call.
const std::vector<int64_t>& cut_blocks(int64_t blocks, int64_t most);

// Columns of a sub-block of a K-quant.
constexpr int64_t super_part(Format format) { return format == Format::q2_k || format == Format::q6_k ? 16 : 32; }

}  // namespace sameseed
