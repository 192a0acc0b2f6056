// The ops that the Python bindings call. Each checks its arguments, cuts the work into tasks, and runs them on the
// pool.

#include "ops.h"

#include "tasks.h"

namespace sameseed {
void rms_norm(const float* x, int64_t x_stride, const float* weight, float eps, float* out, int64_t rows, int64_t width,
              const float* residual, int64_t residual_stride, float factor) {
    const Kernels& table = kernels();
    by_rows(rows, width, [&](int64_t begin, int64_t end) {
        table.rms_norm(x + begin * x_stride, x_stride, weight, eps, end - begin, width, out + begin * width);
        if (residual == nullptr) return;
        for (int64_t t = begin; t < end; t++) {
            const float* other = residual + t * residual_stride;
            for (int64_t i = 0; i < width; i++) out[t * width + i] = (other[i] + out[t * width + i]) * factor;
        }
    });
}

void rope(const float* x, int64_t x_stride, const int32_t* positions, const float* table_data, int64_t table_rows, float* out,
          int64_t rows, int64_t heads, int64_t dim) {
    check("position", positions, rows, table_rows);
    const Kernels& table = kernels();
    by_rows(rows, heads * dim, [&](int64_t begin, int64_t end) {
        table.rope(x + begin * x_stride, x_stride, positions + begin, table_data, end - begin, heads, dim,
                   out + begin * heads * dim);
    });
}

void silu_mul(const float* gate_up, int64_t stride, float* out, int64_t rows, int64_t width) {
    const Kernels& table = kernels();
    by_rows(rows, 4 * width, [&](int64_t begin, int64_t end) {
        table.silu_mul(gate_up + begin * stride, stride, end - begin, width, out + begin * width);
    });
}

void gelu_mul(const float* gate_up, int64_t stride, float* out, int64_t rows, int64_t width) {
    const Kernels& table = kernels();
    by_rows(rows, 4 * width, [&](int64_t begin, int64_t end) {
        table.gelu_mul(gate_up + begin * stride, stride, end - begin, width, out + begin * width);
    });
}

void softcap(float* x, float cap, int64_t rows, int64_t width) {
    const Kernels& table = kernels();
    by_rows(rows, 4 * width, [&](int64_t begin, int64_t end) { table.softcap(x + begin * width, cap, (end - begin) * width); });
}

void clamped_mul(const float* gate_up, int64_t stride, float limit, float* out, int64_t rows, int64_t width) {
    const Kernels& table = kernels();
    by_rows(rows, 4 * width, [&](int64_t begin, int64_t end) {
        table.clamped_mul(gate_up + begin * stride, stride, limit, end - begin, width, out + begin * width);
    });
}

}  // namespace sameseed
