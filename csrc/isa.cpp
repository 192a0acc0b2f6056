// The instruction sets, best first. A new one is entered here and nowhere else; README.md says what its files must define.
//
// Files named *_<set>.cpp are built for one kind of processor only, with flags that CMakeLists.txt reads in these lines:
//   x86_64 avx2: -mavx2 -mfma -mf16c
//   x86_64 avx512: -mavx2 -mfma -mf16c -mavx512f -mavx512bw -mavx512dq -mavx512vl
//   x86_64 avx512vnni: -mavx2 -mfma -mf16c -mavx512f -mavx512bw -mavx512dq -mavx512vl -mavx512vnni
//   x86_64 avx512bf16: -mavx2 -mfma -mf16c -mavx512f -mavx512bw -mavx512dq -mavx512vl -mavx512bf16

#include "isa.h"

#include <atomic>
#include <cstdlib>
#include <stdexcept>

namespace sameseed {

const Kernels* kernels_portable();
const SamplingLoops* sampling_portable();
LimitLoops limits_portable();
#if defined(__x86_64__)
const Kernels* kernels_avx2();
const Kernels* kernels_avx512();
const Kernels* kernels_avx512vnni();
const SamplingLoops* sampling_avx2();
const SamplingLoops* sampling_avx512();
LimitLoops limits_avx2();
LimitLoops limits_avx512();
LimitLoops limits_avx512vnni();
Arithmetic bf16_avx512bf16();
#endif

namespace {

bool everywhere() { return true; }
#if defined(__x86_64__)
bool has_avx2() { return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c"); }
bool has_avx512() {
    return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
           __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("f16c");
}
bool has_vnni() { return has_avx512() && __builtin_cpu_supports("avx512vnni"); }
#endif

const InstructionSet sets[] = {
#if defined(__x86_64__)
    {"avx512vnni", has_vnni, kernels_avx512vnni, sampling_avx512, limits_avx512vnni},
    {"avx512", has_avx512, kernels_avx512, sampling_avx512, limits_avx512},
    {"avx2", has_avx2, kernels_avx2, sampling_avx2, limits_avx2},
#endif
    {"portable", everywhere, kernels_portable, sampling_portable, limits_portable},
};

std::atomic<const InstructionSet*> chosen{nullptr};

const InstructionSet& find(const std::string& name) {
    if (name == "auto") return best_set();
    for (const InstructionSet& set : sets) {
        if (name != set.name) continue;
        if (set.here()) return set;
        throw std::invalid_argument("this CPU lacks the instruction set '" + name + "'; its best is '" + best_set().name + "'");
    }
    std::string names = "auto, " + set_names(", ");
    names.replace(names.rfind(", "), 2, " or ");
    throw std::invalid_argument("unknown instruction set '" + name + "'; choose " + names);
}

}  // namespace

const InstructionSet& best_set() {
    const InstructionSet* set = sets;
    while (!set->here()) set++;  // the last one is everywhere
    return *set;
}

const InstructionSet& instruction_set() {
    const InstructionSet* set = chosen.load(std::memory_order_relaxed);
    if (set == nullptr) {
        const char* forced = std::getenv("SAMESEED_ISA");
        set = &find(forced != nullptr && *forced != '\0' ? forced : "auto");
        chosen.store(set, std::memory_order_relaxed);
    }
    return *set;
}

void set_isa(const std::string& name) { chosen.store(&find(name), std::memory_order_relaxed); }

const Kernels& kernels() { return *instruction_set().kernels(); }

Arithmetic bf16_arithmetic() {
#if defined(__x86_64__)
    if (__builtin_cpu_supports("avx512bf16") && __builtin_cpu_supports("avx512vl")) return bf16_avx512bf16();
#endif
    return {nullptr, 0, nullptr};
}

std::string set_names(const char* between) {
    std::string names;
    for (const InstructionSet& set : sets) names += (names.empty() ? "" : between) + std::string(set.name);
    return names;
}

}  // namespace sameseed
