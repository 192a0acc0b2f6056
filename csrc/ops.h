// The ops that the Python bindings call. Each checks its arguments, cuts the work into tasks, and runs them on the
// pool.

#pragma once

#include "attention.h"
#include "kernels.h"

namespace sameseed {

// `residual`, if not null, is added to the normed rows, and the sum is multiplied by `factor`.
void rms_norm(const float* x, int64_t x_stride, const float* weight, float eps, float* out, int64_t rows, int64_t width,
              const float* residual = nullptr, int64_t residual_stride = 0, float factor = 1.0f);
void rope(const float* x, int64_t x_stride, const int32_t* positions, const float* table, int64_t table_rows, float* out,
          int64_t rows, int64_t heads, int64_t dim);
void silu_mul(const float* gate_up, int64_t stride, float* out, int64_t rows, int64_t width);
void gelu_mul(const float* gate_up, int64_t stride, float* out, int64_t rows, int64_t width);
void clamped_mul(const float* gate_up, int64_t stride, float limit, float* out, int64_t rows, int64_t width);
void softcap(float* x, float cap, int64_t rows, int64_t width);

// Arguments of rope_store(). The rows of `qkv` hold q, k and v side by side. q and k are normalized per head (if norms
// are given) and get rotary positions; v may be normalized too. k and v are stored in the cache, q in q_out [T, H, D]. If
// `stores` is false, the rows hold q alone. The bits are those of rms_norm, rope and store_kv called one after the other.
struct RopeStore {
    const float* qkv;
    int64_t stride, heads;
    const float *q_norm, *k_norm, *v_norm;  // [D] or null
    float eps;
    const int32_t* positions;
    const float* table;
    int64_t table_rows;
    const int32_t* slots;
    Cache cache;
    bool stores;
    float* q_out;
    int64_t rows;
};
void rope_store(const RopeStore& args);

}  // namespace sameseed
