// The ops as Python calls them: check, cut into tasks, run on the pool.

#include "ops.h"

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <stdexcept>
#include <string>

#include "pool.h"
#include "tasks.h"

namespace foretoken {
namespace {

std::atomic<const Kernels*> chosen{nullptr};

#if defined(__x86_64__)
bool has_avx512() {
    return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
           __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("f16c");
}
bool has_avx2() {
    return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
}
#endif

const Kernels* find(const std::string& name) {
#if defined(__x86_64__)
    if (name == "avx512" && has_avx512()) return kernels_avx512();
    if (name == "avx2" && has_avx2()) return kernels_avx2();
    const char* best = has_avx512() ? "avx512" : has_avx2() ? "avx2" : "portable";
#else
    const char* best = "portable";
#endif
    if (name == "portable") return kernels_portable();
    if (name == "auto") return find(best);
    if (name == "avx512" || name == "avx2")
        throw std::invalid_argument("this CPU lacks the instruction set '" + name + "'; its best is '" + best + "'");
    throw std::invalid_argument("unknown instruction set '" + name + "'; choose auto, avx512, avx2 or portable");
}

int64_t bytes_of(Format format) { return format == Format::fp32 ? 4 : 2; }

}  // namespace

const Kernels& kernels() {
    const Kernels* table = chosen.load(std::memory_order_relaxed);
    if (table == nullptr) {
        const char* forced = std::getenv("FORETOKEN_ISA");
        table = find(forced != nullptr && *forced != '\0' ? forced : "auto");
        chosen.store(table, std::memory_order_relaxed);
    }
    return *table;
}

void set_isa(const char* name) { chosen.store(find(name), std::memory_order_relaxed); }

void linear(const float* x, int64_t x_stride, const void* weight, int64_t weight_stride, Format format, const float* bias,
            float* out, int64_t rows, int64_t outputs, int64_t depth) {
    if (rows == 0) return;
    const Kernels& table = kernels();
    const int f = static_cast<int>(format);
    const int64_t padded = round_up(depth, depth_step);
    // Few rows make tiles of even height (9 = 5 + 4): a tile of one row costs nearly what a tile of four does.
    const int64_t full = table.row_tile, strip = 8 * full;
    const int64_t few = (rows + full - 1) / full, tile = rows <= strip ? (rows + few - 1) / few : full;
    float* packed = scratch(0, rows * padded);
    by_rows((rows + tile - 1) / tile, tile * padded / 4, [&](int64_t begin, int64_t end) {
        for (int64_t t = begin * tile; t < std::min(end * tile, rows); t += tile)
            table.pack[f](x + t * x_stride, x_stride, std::min(tile, rows - t), depth, packed + t * padded);
    });

    const LinearArgs args{packed, weight, bias, out, weight_stride, rows, outputs, depth, tile};
    // A few tasks a thread, of at most 128 KB of weights, in multiples of 24 outputs (whole tiles for any row count).
    const int64_t row_bytes = std::max<int64_t>(1, depth * bytes_of(format));
    const int64_t wanted = std::min<int64_t>(outputs / (4 * num_threads()), 128 * 1024 / row_bytes);
    const int64_t columns_per_task = std::max<int64_t>(24, wanted / 24 * 24);
    const int64_t columns = (outputs + columns_per_task - 1) / columns_per_task;
    const int64_t rows_per_task = rows <= strip ? rows : strip, strips = (rows + rows_per_task - 1) / rows_per_task;
    run_tasks(columns * strips, outputs * depth * (3 + rows) > 4 * serial_cost, [&](int64_t i) {
        const int64_t o = i % columns * columns_per_task, t = i / columns * rows_per_task;
        table.linear[f](args, o, std::min(outputs, o + columns_per_task), t, std::min(rows, t + rows_per_task));
    });
}

void rms_norm(const float* x, int64_t x_stride, const float* weight, float eps, float* out, int64_t rows, int64_t width) {
    const Kernels& table = kernels();
    by_rows(rows, width, [&](int64_t begin, int64_t end) {
        table.rms_norm(x + begin * x_stride, x_stride, weight, eps, end - begin, width, out + begin * width);
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

void embedding(const int32_t* token_ids, const void* weight, int64_t weight_stride, Format format, float* out, int64_t rows,
               int64_t vocabulary, int64_t width) {
    check("token id", token_ids, rows, vocabulary);
    const Kernels& table = kernels();
    const char* base = static_cast<const char*>(weight);
    for (int64_t t = 0; t < rows; t++)
        table.decode[static_cast<int>(format)](base + token_ids[t] * weight_stride * bytes_of(format), width, out + t * width);
}

}  // namespace foretoken
