// The ops as Python calls them: check, cut into tasks, run on the pool.

#include "ops.h"

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <stdexcept>
#include <string>

#include "tasks.h"

namespace sameseed {
namespace {

std::atomic<const Kernels*> chosen{nullptr};

#if defined(__x86_64__)
bool has_avx512() {
    return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
           __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("f16c");
}
bool has_vnni() { return has_avx512() && __builtin_cpu_supports("avx512vnni"); }
bool has_avx2() {
    return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
}
#endif

const Kernels* find(const std::string& name) {
#if defined(__x86_64__)
    if (name == "avx512vnni" && has_vnni()) return kernels_avx512vnni();
    if (name == "avx512" && has_avx512()) return kernels_avx512();
    if (name == "avx2" && has_avx2()) return kernels_avx2();
    const char* best = has_vnni() ? "avx512vnni" : has_avx512() ? "avx512" : has_avx2() ? "avx2" : "portable";
#else
    const char* best = "portable";
#endif
    if (name == "portable") return kernels_portable();
    if (name == "auto") return find(best);
    if (name == "avx512vnni" || name == "avx512" || name == "avx2")
        throw std::invalid_argument("this CPU lacks the instruction set '" + name + "'; its best is '" + best + "'");
    throw std::invalid_argument("unknown instruction set '" + name + "'; choose auto, avx512vnni, avx512, avx2 or portable");
}

}  // namespace

const Kernels& kernels() {
    const Kernels* table = chosen.load(std::memory_order_relaxed);
    if (table == nullptr) {
        const char* forced = std::getenv("SAMESEED_ISA");
        table = find(forced != nullptr && *forced != '\0' ? forced : "auto");
        chosen.store(table, std::memory_order_relaxed);
    }
    return *table;
}

void set_isa(const char* name) { chosen.store(find(name), std::memory_order_relaxed); }

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

}  // namespace sameseed
