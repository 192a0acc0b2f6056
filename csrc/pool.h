// The thread pool that runs the tasks of a kernel call.

#pragma once

#include <cstdint>

namespace sameseed {

// Number of cores that this process may use: the cores of its affinity mask, each counted once despite hyperthreads,
// and at most the CPU quota of its cgroup.
int available_cores();

// Number of threads that a call may use, including the caller. Throws std::invalid_argument if below 1 or above 1024.
void set_num_threads(int threads);
int num_threads();

// Limits the threads of calls from this thread; 0 removes the limit. Threads with a limit each have their own workers,
// so their calls run in parallel. Throws std::invalid_argument if below 0.
void limit_threads(int threads);

using Task = void (*)(const void* context, int64_t task);

// Runs task(context, i) once for each i in [0, count), in no fixed order, and returns when all tasks are done. The
// caller takes part. If another thread is using the same pool, or `parallel` is false, the caller runs all tasks
// itself.
void run_tasks(Task task, const void* context, int64_t count, bool parallel);

// Number of calls of run_tasks in this process.
int64_t num_launches();

template <class F>
void run_tasks(int64_t count, bool parallel, const F& f) {
    run_tasks([](const void* context, int64_t i) { (*static_cast<const F*>(context))(i); }, &f, count, parallel);
}

}  // namespace sameseed
