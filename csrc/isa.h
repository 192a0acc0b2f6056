// The instruction set in use, with its kernels and loops. isa.cpp lists all instruction sets.

#pragma once

#include <string>

#include "delta.h"
#include "kernels.h"
#include "limits.h"
#include "sampling.h"

namespace sameseed {

struct InstructionSet {
    const char* name;
    bool (*here)();  // whether this CPU supports it
    const Kernels* (*kernels)();
    const SamplingLoops* (*sampling)();
    LimitLoops (*limits)();
    const DeltaLoops* (*delta)();
};

// The instruction set in use: the best of this CPU, unless SAMESEED_ISA or set_isa chose another.
// Throws std::invalid_argument for an unknown name, or for an instruction set that this CPU lacks.
const InstructionSet& instruction_set();
void set_isa(const std::string& name);

// The best instruction set of this CPU, regardless of the one in use.
const InstructionSet& best_set();

// The measuring loop for bfloat16 products. `run` is null if the CPU has no instruction for them.
Arithmetic bf16_arithmetic();

// Names of all instruction sets that this module was built with, best first, separated by `between`.
std::string set_names(const char* between);

}  // namespace sameseed
