// Gated DeltaNet (Yang et al., 2024): a recurrent state per sequence, and a short causal convolution before it.
//
// One arithmetic for prompts, decoding and verification: rows are taken one by one in order of position, so a row's
// bits do not depend on how the rows were divided into passes. sameseed/kvcache/state.py says what a slot holds.

#pragma once

#include <cstdint>

namespace sameseed {

// One value head of one sequence: `count` prepared rows, from the state [K, D] of the rows before them.
struct DeltaHead {
    float* state;  // [K, D]
    bool fresh;  // the rows are a sequence's first ones: the state is zero, whatever `state` holds
    const float* rows;  // prepared rows, `stride` floats apart
    int64_t stride, count;
    int64_t unwanted;  // first rows, whose results are known already
    int64_t written;  // the state after so many rows is stored; 0: none
    int64_t q, k, v, beta, decay;  // columns of the head in a row
    int64_t key_dim, value_dim;  // K, D; D is a multiple of 16
    float* out;  // results of the wanted rows, `out_stride` floats apart
    int64_t out_stride;
    const float* norm;  // [D]
    float eps;
};

struct DeltaLoops {
    // out[c] = silu(sum of weight[j][c] * taps[j][c], j ascending); a tap that is null counts as zeros.
    void (*convolve)(const float* const* taps, int64_t count, const float* weight, int64_t width, float* out);
    // Divides each head of x [heads, dim] by its length, and multiplies it by `scale`.
    void (*unit)(float* x, int64_t heads, int64_t dim, float scale);
    // Rows of a head, in order, S being the state:
    //   e = beta (v - decay (S^T k)),  S = decay S + k e^T,  o = S^T q,  out = rms_norm(o).
    // Sums over K have two partial sums, of even and of odd terms. `scratch` holds 64 K floats, aligned to 64 bytes.
    void (*head)(const DeltaHead&, float* scratch);
    // out = x / (1 + e^-gate), for `count` values.
    void (*gate)(const float* x, const float* gate, int64_t count, float* out);
};

// The op. Rows of x [T, ...] hold q and k [Hk K], v [H D], z [H D], b [H], a [H] side by side. Rows of `out` [T, 2 H D]
// hold z, then the normed results.
struct Delta {
    const float* x;
    int64_t stride;
    const float* conv;  // [taps, 2 Hk K + H D]
    const float *decay, *bias;  // [H]: -exp(A_log), dt_bias
    const float* norm;  // [D]
    float eps;
    int64_t taps, key_heads, value_heads, key_dim, value_dim;
    bool tiled;  // value head h reads key head h % Hk (as GGUF orders them), else h / (H / Hk)
    float* state;  // [slots, H, K, D]
    float* log;  // [slots, log_rows, 2 Hk K + H D + 2 H]: rows before the convolution, by position modulo log_rows
    int64_t slots, log_rows;
    const int32_t* states;  // [3, num_seqs]: slot, tokens that the stored state covers, tokens that it will cover
    const int32_t *row_offsets, *positions;
    int64_t num_seqs, rows;
    float* out;
};
void delta(const Delta& args);

// A short gated convolution (LFM2): out[t] = c times the sum of weight[j] * (b v of token t - taps + 1 + j), j ascending.
// Rows of x [T, 3 width] hold b, c and v side by side. Each product and sum is rounded, as in reference.conv.
struct ShortConv {
    const float* x;
    int64_t stride;
    const float* weight;  // [taps, width]
    int64_t taps, width;
    float* log;  // [slots, log_rows, width]: b v of earlier tokens, by position modulo log_rows
    int64_t slots, log_rows;
    const int32_t* states;  // as in Delta; only the slots are read
    const int32_t *row_offsets, *positions;
    int64_t num_seqs, rows;
    float* out;
};
void short_conv(const ShortConv& args);

// out[T, H D] = x[T, H D] * sigmoid(gate), with head h's gate at h * apart of a row of `gate`.
struct Gate {
    const float *x, *gate;
    int64_t stride, heads, dim, apart;
    float* out;
    int64_t rows;
};
void gate(const Gate& args);

// out[t, i] = x[t, index[i]] for `width` columns.
struct Take {
    const float* x;
    int64_t stride;
    const int32_t* index;
    int64_t width;
    float* out;
    int64_t rows;
};
void take(const Take& args);

}  // namespace sameseed
