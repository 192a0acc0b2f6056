// The list of instruction sets, best first. A new one is added only here; README.md says what its files must define.
//
// Files named *_<set>.cpp are built for one processor family only, with compiler flags that CMakeLists.txt reads from
// these lines:
//   x86_64 avx2: -mavx2 -mfma -mf16c
//   x86_64 amx: -mavx2 -mfma -mf16c -mavx512f -mavx512bw -mavx512dq -mavx512vl -mavx512vnni -mavx512bf16 -mamx-tile -mamx-int8
//   x86_64 avxvnni: -mavx2 -mfma -mf16c -mavxvnni
//   x86_64 avx512: -mavx2 -mfma -mf16c -mavx512f -mavx512bw -mavx512dq -mavx512vl
//   x86_64 avx512vnni: -mavx2 -mfma -mf16c -mavx512f -mavx512bw -mavx512dq -mavx512vl -mavx512vnni
//   x86_64 avx512bf16: -mavx2 -mfma -mf16c -mavx512f -mavx512bw -mavx512dq -mavx512vl -mavx512bf16

#include "isa.h"

#if defined(__x86_64__)
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

#include <atomic>
#include <cstdlib>
#include <stdexcept>

namespace sameseed {

const Kernels* kernels_portable();
const SamplingLoops* sampling_portable();
const DeltaLoops* delta_portable();
LimitLoops limits_portable();
#if defined(__x86_64__)
const Kernels* kernels_avx2();
const Kernels* kernels_avxvnni();
const Kernels* kernels_avx512();
const Kernels* kernels_avx512vnni();
const Kernels* kernels_avx512bf16();
const Kernels* kernels_amx();
const SamplingLoops* sampling_avx2();
const SamplingLoops* sampling_avx512();
const DeltaLoops* delta_avx2();
const DeltaLoops* delta_avx512();
LimitLoops limits_avx2();
LimitLoops limits_avxvnni();
LimitLoops limits_avx512();
LimitLoops limits_avx512vnni();
LimitLoops limits_amx();
Arithmetic bf16_avx512bf16();
#endif

namespace {

bool everywhere() { return true; }
#if defined(__x86_64__)
// Reads CPUID directly. __builtin_cpu_supports depends on a run-time library that differs between compilers.
struct Processor {
    bool avx2 = false, avxvnni = false, avx512 = false, vnni = false, bf16 = false, amx = false;

    // On Linux a process must request permission for AMX tiles: ARCH_REQ_XCOMP_PERM for XFEATURE_XTILEDATA.
    static bool may_use_tiles() {
#if defined(__linux__) && defined(SYS_arch_prctl)
        return syscall(SYS_arch_prctl, 0x1023, 18) == 0;
#else
        return false;
#endif
    }

    Processor() {
        unsigned a, b, c, d, basic, more, saved, high;
        if (!__get_cpuid(1, &a, &b, &basic, &d) || !(basic & bit_OSXSAVE)) return;
        __asm__("xgetbv" : "=a"(saved), "=d"(high) : "c"(0));  // the registers that the system saves for each thread
        const auto all = [](unsigned of, unsigned wanted) { return (of & wanted) == wanted; };
        if (!all(saved, 0x06) || !all(basic, bit_AVX | bit_FMA | bit_F16C)) return;
        if (!__get_cpuid_count(7, 0, &a, &more, &c, &d) || !all(more, bit_AVX2)) return;
        avx2 = true;
        avx512 = all(saved, 0xe6) && all(more, bit_AVX512F | bit_AVX512BW | bit_AVX512DQ | bit_AVX512VL);
        vnni = avx512 && all(c, bit_AVX512VNNI);
        const bool tiles = all(d, 3u << 24) && all(saved, 3u << 17);  // AMX-TILE and AMX-INT8; AMX registers
        if (!__get_cpuid_count(7, 1, &a, &b, &c, &d)) return;
        avxvnni = all(a, bit_AVXVNNI);
        bf16 = avx512 && all(a, bit_AVX512BF16);
        amx = vnni && bf16 && tiles && may_use_tiles();
    }
} const processor;

bool has_avx2() { return processor.avx2; }
#ifdef SAMESEED_EMULATE
bool has_avxvnni() { return processor.avx2; }
bool has_amx() { return processor.avx2; }
constexpr auto amx_sampling = sampling_avx2;
constexpr auto amx_delta = delta_avx2;
#else
bool has_avxvnni() { return processor.avxvnni; }
bool has_amx() { return processor.amx; }
constexpr auto amx_sampling = sampling_avx512;
constexpr auto amx_delta = delta_avx512;
#endif
bool has_avx512() { return processor.avx512; }
bool has_vnni() { return processor.vnni; }
bool has_bf16() { return processor.vnni && processor.bf16; }
#endif

const InstructionSet sets[] = {
#if defined(__x86_64__)
    {"avx512bf16", has_bf16, kernels_avx512bf16, sampling_avx512, limits_avx512vnni, delta_avx512},
    {"avx512vnni", has_vnni, kernels_avx512vnni, sampling_avx512, limits_avx512vnni, delta_avx512},
    {"avx512", has_avx512, kernels_avx512, sampling_avx512, limits_avx512, delta_avx512},
    {"avxvnni", has_avxvnni, kernels_avxvnni, sampling_avx2, limits_avxvnni, delta_avx2},
    {"avx2", has_avx2, kernels_avx2, sampling_avx2, limits_avx2, delta_avx2},
#endif
    {"portable", everywhere, kernels_portable, sampling_portable, limits_portable, delta_portable},
#if defined(__x86_64__)
    // After `portable`, so that it is never chosen automatically: it has not been timed. SAMESEED_ISA selects it.
    {"amx", has_amx, kernels_amx, amx_sampling, limits_amx, amx_delta},
#endif
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
    while (!set->here()) set++;  // ends at `portable`, which every CPU supports
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
    if (processor.bf16) return bf16_avx512bf16();
#endif
    return {nullptr, 0, nullptr};
}

std::string set_names(const char* between) {
    std::string names;
    for (const InstructionSet& set : sets) names += (names.empty() ? "" : between) + std::string(set.name);
    return names;
}

}  // namespace sameseed
