// The loops of sampling for x86 with AVX-512.

#include "sampling.h"

namespace sameseed {
namespace {  // each unit has its own copy, compiled with other instructions

#include "sampling_body.h"

}  // namespace

const SamplingLoops* sampling_avx512() { return &sampling_loops; }

}  // namespace sameseed
