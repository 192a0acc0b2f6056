// Fused ops for the steps between the matrix products of a decoder layer.

#include "ops.h"
#include "tasks.h"

namespace sameseed {

void rope_store(const RopeStore& a) {
    const Cache& cache = a.cache;
    const int64_t rows = a.rows;
    check("position", a.positions, rows, a.table_rows);
    const Kernels& table = kernels();
    const int64_t dim = cache.dim, q_width = a.heads * dim, kv_width = a.stores ? cache.kv_heads * dim : 0;
    float* stored = scratch(rows_area, rows * 2 * kv_width);  // k and, if it is normed, v of each row
    auto rotate = [&](const float* x, int64_t t, int64_t heads, const float* norm, float* out) {
        if (norm != nullptr) {
            float* normed = scratch(packed_area, heads * dim);
            table.rms_norm(x, dim, norm, a.eps, heads, dim, normed);
            x = normed;
        }
        table.rope(x, heads * dim, a.positions + t, a.table, 1, heads, dim, out);
    };
    by_rows(rows, q_width + kv_width, [&](int64_t begin, int64_t end) {
        for (int64_t t = begin; t < end; t++) {
            const float* row = a.qkv + t * a.stride;
            rotate(row, t, a.heads, a.q_norm, a.q_out + t * q_width);
            if (!a.stores) continue;
            float *k = stored + t * 2 * kv_width, *v = k + kv_width;
            rotate(row + q_width, t, cache.kv_heads, a.k_norm, k);
            if (a.v_norm != nullptr) table.rms_norm(row + q_width + kv_width, dim, a.v_norm, a.eps, cache.kv_heads, dim, v);
        }
    });
    if (!a.stores) return;
    const bool normed = a.v_norm != nullptr;
    store_kv(stored, 2 * kv_width, normed ? stored + kv_width : a.qkv + q_width + kv_width, normed ? 2 * kv_width : a.stride,
             cache, a.slots, rows);
}

}  // namespace sameseed
