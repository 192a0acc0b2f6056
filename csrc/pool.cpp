// The thread pool. After a call, workers spin for a moment, because the next call usually comes within microseconds.
// Then they sleep.

#include "pool.h"

#include <pthread.h>
#include <sched.h>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <fstream>
#include <memory>
#include <mutex>
#include <set>
#include <stdexcept>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace sameseed {
namespace {

// About the time that Python takes between two forward passes of a small model. It is measured with the clock and not
// in spins, because a pause instruction takes 10 nanoseconds on one processor and 40 on another.
constexpr std::chrono::microseconds idle_before_sleep{400};
constexpr int spins_between_looks = 64;  // spins between reads of the clock
constexpr int spins_before_yield = 2000;

inline void relax() {
#if defined(__x86_64__)
    _mm_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
}

// Rounding and denormal modes are per thread. Workers use the caller's mode; else bits would depend on which thread ran
// a task.
inline uint32_t float_mode() {
#if defined(__x86_64__)
    return _mm_getcsr() & ~0x3fu;  // without the sticky exception flags
#else
    return 0;
#endif
}
inline void set_float_mode([[maybe_unused]] uint32_t mode) {
#if defined(__x86_64__)
    if (float_mode() != mode) _mm_setcsr(mode);
#endif
}

class Pool {
   public:
    explicit Pool(int threads) : threads_(threads) {
        for (int i = 1; i < threads; i++) workers_.emplace_back(&Pool::loop, this);
    }

    ~Pool() {
        {
            std::lock_guard<std::mutex> lock(sleep_mutex_);
            stop_.store(true, std::memory_order_relaxed);
        }
        wake_.notify_all();
        for (std::thread& worker : workers_) worker.join();
    }

    int threads() const { return threads_; }

    // Only one thread at a time may call this.
    void run(Task task, const void* context, int64_t count) {
        // The previous job is done and no thread works on it any more, so its fields may be overwritten.
        task_.store(task, std::memory_order_relaxed);
        context_.store(context, std::memory_order_relaxed);
        count_.store(count, std::memory_order_relaxed);
        mode_.store(float_mode(), std::memory_order_relaxed);
        done_.store(0, std::memory_order_relaxed);
        const uint64_t job = (ticket_.load(std::memory_order_relaxed) >> 32) + 1;
        ticket_.store(job << 32 | static_cast<uint64_t>(count), std::memory_order_seq_cst);
        if (sleepers_.load(std::memory_order_seq_cst) > 0) {
            {
                std::lock_guard<std::mutex> lock(sleep_mutex_);
            }
            wake_.notify_all();
        }
        work();
        for (int spins = 0; done_.load(std::memory_order_acquire) != count; spins++) {
            if (spins < spins_before_yield)
                relax();
            else
                sched_yield();  // a worker with a task has lost its core
        }
    }

   private:
    // The ticket is (job number, tasks left). A thread claims a task by decrementing it. If the fields were read for an
    // older job, the job number differs and the claim fails.
    bool work() {
        bool worked = false;
        uint64_t ticket = ticket_.load(std::memory_order_acquire);
        while ((ticket & 0xffffffffu) != 0) {
            const Task task = task_.load(std::memory_order_relaxed);
            const void* context = context_.load(std::memory_order_relaxed);
            const int64_t count = count_.load(std::memory_order_relaxed);
            const uint32_t mode = mode_.load(std::memory_order_relaxed);
            if (!ticket_.compare_exchange_weak(ticket, ticket - 1, std::memory_order_acq_rel, std::memory_order_acquire))
                continue;
            set_float_mode(mode);
            task(context, count - static_cast<int64_t>(ticket & 0xffffffffu));
            done_.fetch_add(1, std::memory_order_release);
            worked = true;
            ticket = ticket_.load(std::memory_order_acquire);
        }
        return worked;
    }

    bool has_work() const { return (ticket_.load(std::memory_order_seq_cst) & 0xffffffffu) != 0; }

    void loop() {
        using clock = std::chrono::steady_clock;
        clock::time_point since;
        for (int spins = 0; !stop_.load(std::memory_order_relaxed);) {
            if (work()) {
                spins = 0;
            } else if (++spins % spins_between_looks != 0) {
                relax();
            } else if (spins == spins_between_looks) {
                since = clock::now();
            } else if (clock::now() - since > idle_before_sleep) {
                sleep();
                spins = 0;
            }
        }
    }

    void sleep() {
        std::unique_lock<std::mutex> lock(sleep_mutex_);
        sleepers_.fetch_add(1, std::memory_order_seq_cst);
        wake_.wait(lock, [this] { return stop_.load(std::memory_order_relaxed) || has_work(); });
        sleepers_.fetch_sub(1, std::memory_order_relaxed);
    }

    const int threads_;
    std::atomic<bool> stop_{false};
    std::atomic<Task> task_{nullptr};
    std::atomic<const void*> context_{nullptr};
    std::atomic<int64_t> count_{0};
    std::atomic<uint32_t> mode_{0};
    alignas(64) std::atomic<uint64_t> ticket_{0};
    alignas(64) std::atomic<int64_t> done_{0};
    alignas(64) std::atomic<int> sleepers_{0};
    std::mutex sleep_mutex_;
    std::condition_variable wake_;
    std::vector<std::thread> workers_;
};

// Never destroyed at exit: the threads end with the process.
std::mutex* run_mutex = new std::mutex;
Pool* pool = nullptr;
std::atomic<int> wanted_threads{0};
std::atomic<int64_t> launches{0};

// A thread with its own limit has its own pool, so two such threads never wait for each other.
thread_local int own_limit = 0;
thread_local std::unique_ptr<Pool> own_pool;

// Runs in a forked child. The parent's threads do not exist there, so the child abandons the parent's pools and starts
// its own.
void forget_pools() {
    run_mutex = new std::mutex;
    pool = nullptr;
    static_cast<void>(own_pool.release());
}

void register_fork() { [[maybe_unused]] static const int registered = pthread_atfork(nullptr, nullptr, forget_pools); }

int quota_cores() {
    std::ifstream file("/sys/fs/cgroup/cpu.max");
    std::string quota;
    double period = 0;
    if (!(file >> quota >> period) || quota == "max" || period <= 0) return 1 << 20;
    const double cores = std::stod(quota) / period;
    return cores < 1 ? 1 : static_cast<int>(cores + 0.999);
}

}  // namespace

int available_cores() {
    cpu_set_t cpus;
    CPU_ZERO(&cpus);
    if (sched_getaffinity(0, sizeof cpus, &cpus) != 0) return 1;
    std::set<std::pair<int, int>> cores;
    for (int cpu = 0; cpu < CPU_SETSIZE; cpu++) {
        if (!CPU_ISSET(cpu, &cpus)) continue;
        const std::string folder = "/sys/devices/system/cpu/cpu" + std::to_string(cpu) + "/topology/";
        std::ifstream package_file(folder + "physical_package_id"), core_file(folder + "core_id");
        int package = -1, core = cpu;
        if (!(package_file >> package) || !(core_file >> core)) package = -1, core = cpu;
        cores.insert({package, core});
    }
    const int physical = static_cast<int>(cores.size()), quota = quota_cores();
    return physical < 1 ? 1 : physical < quota ? physical : quota;
}

int num_threads() {
    int threads = wanted_threads.load(std::memory_order_relaxed);
    if (threads <= 0) {
        threads = available_cores();
        wanted_threads.store(threads, std::memory_order_relaxed);
    }
    return own_limit > 0 && own_limit < threads ? own_limit : threads;
}

void set_num_threads(int threads) {
    if (threads < 1 || threads > 1024)
        throw std::invalid_argument("the number of threads must be 1 to 1024, not " + std::to_string(threads));
    wanted_threads.store(threads, std::memory_order_relaxed);
}

void limit_threads(int threads) {
    if (threads < 0) throw std::invalid_argument("a limit of threads must be 0 (none) or more, not " + std::to_string(threads));
    own_limit = threads;
}

int64_t num_launches() { return launches.load(std::memory_order_relaxed); }

void run_tasks(Task task, const void* context, int64_t count, bool parallel) {
    launches.fetch_add(1, std::memory_order_relaxed);
    const int threads = parallel && count > 1 ? num_threads() : 1;
    if (threads > 1 && own_limit > 0) {
        if (own_pool == nullptr || own_pool->threads() != threads) {
            register_fork();
            own_pool = std::make_unique<Pool>(threads);
        }
        return own_pool->run(task, context, count);
    }
    if (threads > 1) {
        std::unique_lock<std::mutex> lock(*run_mutex, std::try_to_lock);
        if (lock.owns_lock()) {
            if (pool == nullptr || pool->threads() != threads) {
                register_fork();
                delete pool;
                pool = new Pool(threads);
            }
            return pool->run(task, context, count);
        }
    }
    for (int64_t i = 0; i < count; i++) task(context, i);
}

}  // namespace sameseed
