// The loops of sampling for any processor.

#include "sampling.h"

namespace sameseed {
namespace {  // each unit has its own copy, compiled with other instructions

#include "sampling_body.h"

}  // namespace

const SamplingLoops* sampling_portable() { return &sampling_loops; }

}  // namespace sameseed
