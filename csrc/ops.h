// The ops as Python calls them: check, cut into tasks, run on the pool.

#pragma once

#include "kernels.h"

namespace foretoken {

// The table in use: the best instruction set of this CPU, or what FORETOKEN_ISA or set_isa say.
// Raises std::invalid_argument for a name that is unknown or that this CPU lacks.
const Kernels& kernels();
void set_isa(const char* name);

void linear(const float* x, int64_t x_stride, const void* weight, int64_t weight_stride, Format format, const float* bias,
            float* out, int64_t rows, int64_t outputs, int64_t depth);
void rms_norm(const float* x, int64_t x_stride, const float* weight, float eps, float* out, int64_t rows, int64_t width);
void rope(const float* x, int64_t x_stride, const int32_t* positions, const float* table, int64_t table_rows, float* out,
          int64_t rows, int64_t heads, int64_t dim);
void silu_mul(const float* gate_up, int64_t stride, float* out, int64_t rows, int64_t width);
void embedding(const int32_t* token_ids, const void* weight, int64_t weight_stride, Format format, float* out, int64_t rows,
               int64_t vocabulary, int64_t width);

}  // namespace foretoken
