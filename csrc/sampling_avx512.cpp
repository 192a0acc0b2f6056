// The loops of sampling for x86 with AVX-512.

#include "sampling.h"

namespace sameseed {
namespace {  // this unit's own copy: other units compile it with other instructions

#include "sampling_body.h"

}  // namespace

const SamplingLoops* sampling_avx512() { return &sampling_loops; }

}  // namespace sameseed
