// The loops of sampling for any processor.

#include "sampling.h"

namespace sameseed {
namespace {  // this unit's own copy: other units compile it with other instructions

#include "sampling_body.h"

}  // namespace

const SamplingLoops* sampling_portable() { return &sampling_loops; }

}  // namespace sameseed
