// Helpers shared by the ops: cutting rows into tasks, scratch memory, and checks of indices that the kernels use
// unchecked.

#pragma once

#include <algorithm>
#include <cstdint>
#include <stdexcept>
#include <string>
#include <vector>

#include "kernels.h"
#include "pool.h"

namespace sameseed {

constexpr int64_t serial_cost = 24 * 1024;  // multiplications (or equal work) below which waking a thread costs more

// Scratch memory of this thread, aligned to 64 bytes. It only grows. Each use has its own area, so uses never overlap.
enum Area { rows_area, packed_area, sums_area, strip_area, attention_area, partial_area, integer_area, expert_area, num_areas };
inline float* scratch(Area area, int64_t floats) {
    thread_local std::vector<float> buffers[num_areas];
    std::vector<float>& buffer = buffers[area];
    if (static_cast<int64_t>(buffer.size()) < floats + 16) buffer.resize(floats + floats / 2 + 16);
    return reinterpret_cast<float*>((reinterpret_cast<uintptr_t>(buffer.data()) + 63) & ~uintptr_t{63});
}

// Cuts `rows` rows into tasks of about `serial_cost` each and runs f(begin, end) for each task.
template <class F>
void by_rows(int64_t rows, int64_t cost_per_row, const F& f) {
    const int64_t per_task = std::max<int64_t>(1, serial_cost / std::max<int64_t>(1, cost_per_row));
    const int64_t tasks = (rows + per_task - 1) / per_task;
    run_tasks(tasks, tasks > 1, [&](int64_t i) { f(i * per_task, std::min(rows, (i + 1) * per_task)); });
}

[[noreturn]] inline void out_of_range(const char* what, int64_t value, int64_t limit) {
    throw std::out_of_range(std::string(what) + " " + std::to_string(value) + " is outside 0.." + std::to_string(limit - 1));
}

inline void check(const char* what, const int32_t* values, int64_t count, int64_t limit) {
    for (int64_t i = 0; i < count; i++)
        if (values[i] < 0 || values[i] >= limit) out_of_range(what, values[i], limit);
}

}  // namespace sameseed
