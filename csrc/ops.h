// The ops as Python calls them: check, cut into tasks, run on the pool.

#pragma once

#include "attention.h"
#include "kernels.h"

namespace sameseed {

void rms_norm(const float* x, int64_t x_stride, const float* weight, float eps, float* out, int64_t rows, int64_t width);
void rope(const float* x, int64_t x_stride, const int32_t* positions, const float* table, int64_t table_rows, float* out,
          int64_t rows, int64_t heads, int64_t dim);
void silu_mul(const float* gate_up, int64_t stride, float* out, int64_t rows, int64_t width);
// q, k and v side by side in the rows of `qkv`: q and k are normed by head (where norms are given) and rotated; k and v
// go to the cache, q to q_out [T, H, D]. Bit for bit rms_norm, rope and store_kv, one after another.
struct RopeStore {
    const float* qkv;
    int64_t stride, heads;
    const float *q_norm, *k_norm;  // [D] or null
    float eps;
    const int32_t* positions;
    const float* table;
    int64_t table_rows;
    const int32_t* slots;
    Cache cache;
    float* q_out;
    int64_t rows;
};
void rope_store(const RopeStore& args);

}  // namespace sameseed
