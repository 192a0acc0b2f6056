// The limits of this machine: memory bandwidth, and the peak rate of the arithmetic that the kernels use.
//
// The fraction of a limit that a kernel reaches measures the kernel; milliseconds alone also measure the machine. The
// peaks belong to the best instruction set of the CPU, not to SAMESEED_ISA, because a forced set is not the machine's
// limit.

#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace sameseed {

// A loop that uses only registers. `ops`: operations per round; a multiplication plus an addition counts as two.
struct Arithmetic {
    const char* instruction;
    double ops;
    float (*run)(int64_t rounds);  // the result keeps compilers from removing the work
};

// Reads `bytes` (a multiple of read_step) from a 64-byte aligned address and prefetches `ahead` bytes ahead.
using Read = uint64_t (*)(const char* data, int64_t bytes, int64_t ahead);
constexpr int64_t read_step = 512;

struct LimitLoops {
    Arithmetic int8, fp32;
    Read read;
};

// Bytes per second of `repeats` passes over `bytes` of memory, by all threads, on huge pages if the system provides
// them. Passes use different prefetch distances, because the best distance depends on the machine. rates[i] belongs to
// pass i.
std::vector<double> read_rates(int64_t bytes, int repeats);

// The peak rate of one instruction, by all threads. If the CPU has no such instruction, `instruction` and `rates` are
// empty.
struct Peak {
    std::string instruction;
    std::vector<double> rates;  // operations per second, for each repetition
};
// `kind` is int8, fp32 or bf16. A repetition takes about `seconds`. Throws std::invalid_argument for another kind.
Peak peak_rates(const std::string& kind, double seconds, int repeats);

}  // namespace sameseed
