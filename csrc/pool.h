// Threads that share the tasks of one kernel call.

#pragma once

#include <cstdint>

namespace sameseed {

// Cores that this process may use: its affinity mask without hyperthread siblings, at most its cgroup's CPU quota.
int available_cores();

// Threads that a call may use, the caller among them. Raises std::invalid_argument below 1.
void set_num_threads(int threads);
int num_threads();

// Threads that calls of this thread may use at most; 0 takes the limit back. Threads with limits run beside each other,
// each with workers of its own. Raises std::invalid_argument below 0.
void limit_threads(int threads);

using Task = void (*)(const void* context, int64_t task);

// Run task(context, i) for i in [0, count), each once, in no fixed order, and return when all are done. The caller takes
// part. When another thread is using the same pool, or `parallel` is false, the caller does everything itself.
void run_tasks(Task task, const void* context, int64_t count, bool parallel);

template <class F>
void run_tasks(int64_t count, bool parallel, const F& f) {
    run_tasks([](const void* context, int64_t i) { (*static_cast<const F*>(context))(i); }, &f, count, parallel);
}

}  // namespace sameseed
