// What this machine could do at most: reading memory, and the arithmetic that the kernels are made of.
//
// A share of a limit says how good a kernel is, where milliseconds only say how fast the machine was. The peaks follow the
// CPU, not SAMESEED_ISA: a forced instruction set is not the machine's limit.

#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace sameseed {

// A loop over registers alone. `ops` of one round: a multiplication and an addition count as two.
struct Arithmetic {
    const char* instruction;
    double ops;
    float (*run)(int64_t rounds);  // what it returns keeps the work from being left out
};

// Reads `bytes` (a multiple of read_step) from a 64-byte aligned address, asking for the line `ahead` bytes on.
using Read = uint64_t (*)(const char* data, int64_t bytes, int64_t ahead);
constexpr int64_t read_step = 512;

struct LimitLoops {
    Arithmetic int8, fp32;
    Read read;
};

// Bytes a second of `repeats` passes over `bytes` of memory on huge pages (where the system gives them), by all threads.
// Passes differ in how far they prefetch, for the best distance is the machine's affair; rates[i] belongs to pass i.
std::vector<double> read_rates(int64_t bytes, int repeats);

// What one instruction can do, by all threads. `instruction` is empty, and there are no rates, where the CPU has none.
struct Peak {
    std::string instruction;
    std::vector<double> rates;  // operations a second of each repetition
};
// `kind`: int8, fp32 or bf16. A repetition takes about `seconds`. Raises std::invalid_argument for another kind.
Peak peak_rates(const std::string& kind, double seconds, int repeats);

}  // namespace sameseed
