// The instruction set in use: its kernels and its loops. isa.cpp lists them all.

#pragma once

#include <string>

#include "kernels.h"
#include "limits.h"
#include "sampling.h"

namespace sameseed {

struct InstructionSet {
    const char* name;
    bool (*here)();  // whether this CPU has it
    const Kernels* (*kernels)();
    const SamplingLoops* (*sampling)();
    LimitLoops (*limits)();
};

// The one in use: the best of this CPU, or what SAMESEED_ISA or set_isa say.
// Raises std::invalid_argument for a name that is unknown or that this CPU lacks.
const InstructionSet& instruction_set();
void set_isa(const std::string& name);

// The best of this CPU, whatever is in use.
const InstructionSet& best_set();

// What multiplies bfloat16 on this CPU; its `run` is null where nothing does.
Arithmetic bf16_arithmetic();

// Names of all that this module was built with, best first.
std::string set_names(const char* between);

}  // namespace sameseed
