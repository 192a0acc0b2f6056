// Measures the machine's limits with the loops of limits_*.cpp, on the same thread pool as the kernels.

#include "limits.h"

#include <sys/mman.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstring>
#include <iterator>
#include <new>
#include <stdexcept>

#include "isa.h"
#include "pool.h"

namespace sameseed {
namespace {

constexpr int64_t huge_page = 2 << 20;
constexpr int64_t distances[] = {512, 1024, 2048, 4096};  // bytes to prefetch ahead

Arithmetic find(const std::string& kind) {
    if (kind == "int8") return best_set().limits().int8;
    if (kind == "fp32") return best_set().limits().fp32;
    if (kind == "bf16") return bf16_arithmetic();
    throw std::invalid_argument("unknown arithmetic '" + kind + "'; choose int8, fp32 or bf16");
}

// Newly mapped memory, on huge pages if the system provides them. The user must write it once, so that every page
// exists.
class Pages {
   public:
    explicit Pages(int64_t bytes) : mapped_(bytes + huge_page) {
        base_ = mmap(nullptr, mapped_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        if (base_ == MAP_FAILED) throw std::bad_alloc();
        const uintptr_t first = (reinterpret_cast<uintptr_t>(base_) + huge_page - 1) & ~uintptr_t{huge_page - 1};
        data = reinterpret_cast<char*>(first);
#ifdef MADV_HUGEPAGE
        madvise(data, bytes, MADV_HUGEPAGE);
#endif
    }
    ~Pages() { munmap(base_, mapped_); }
    Pages(const Pages&) = delete;
    Pages& operator=(const Pages&) = delete;

    char* data;

   private:
    void* base_;
    size_t mapped_;
};

template <class F>
double seconds_of(const F& f) {
    const auto start = std::chrono::steady_clock::now();
    f();
    return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

void require(const char* what, bool good) {
    if (!good) throw std::invalid_argument(std::string(what) + " must be above 0");
}

}  // namespace

std::vector<double> read_rates(int64_t bytes, int repeats) {
    require("bytes", bytes > 0);
    require("repeats", repeats > 0);
    const int64_t chunk = 1 << 20, chunks = (bytes + chunk - 1) / chunk;  // small chunks, so that threads end together
    const Read read = best_set().limits().read;
    std::atomic<uint64_t> sink{0};
    // Prefetches may go past the end, because they never fault.
    Pages pages(chunks * chunk);
    run_tasks(chunks, true, [&](int64_t i) { std::memset(pages.data + i * chunk, static_cast<int>(i | 1), chunk); });
    std::vector<double> rates;
    for (int r = 0; r < repeats; r++) {
        const int64_t ahead = distances[r % std::size(distances)];
        const double seconds = seconds_of(
            [&] { run_tasks(chunks, true, [&](int64_t i) { sink.fetch_xor(read(pages.data + i * chunk, chunk, ahead)); }); });
        rates.push_back(static_cast<double>(chunks * chunk) / seconds);
    }
    return rates;
}

Peak peak_rates(const std::string& kind, double seconds, int repeats) {
    require("seconds", seconds > 0);
    require("repeats", repeats > 0);
    const Arithmetic arithmetic = find(kind);
    if (arithmetic.run == nullptr) return {};
    std::atomic<float> sink{0};
    const int64_t tasks = 16 * num_threads();
    const auto pass = [&](int64_t rounds) {
        return seconds_of([&] { run_tasks(tasks, true, [&](int64_t) { sink.store(arithmetic.run(rounds)); }); });
    };
    int64_t rounds = 1000;
    pass(rounds);  // wakes the pool and powers up the execution units
    double took = pass(rounds);
    while (took < seconds / 4 && rounds < int64_t{1} << 40) took = pass(rounds *= 2);
    rounds = std::max<int64_t>(1, static_cast<int64_t>(static_cast<double>(rounds) * seconds / took));
    Peak peak{arithmetic.instruction, {}};
    for (int r = 0; r < repeats; r++)
        peak.rates.push_back(static_cast<double>(tasks) * static_cast<double>(rounds) * arithmetic.ops / pass(rounds));
    return peak;
}

}  // namespace sameseed
