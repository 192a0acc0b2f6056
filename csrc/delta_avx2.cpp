// The loops of Gated DeltaNet for x86 with AVX2.

#include <immintrin.h>

#include "delta.h"
#include "kernels.h"

// GCC 12 warns wrongly about the "undefined" operands of its own intrinsics.
#pragma GCC diagnostic ignored "-Wuninitialized"
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#pragma GCC diagnostic ignored "-Wunused-function"  // most of rows_body.h

namespace sameseed {
namespace {  // each unit has its own copy, compiled with other instructions

#include "unroll.h"
#include "vec_avx2.h"

#include "rows_body.h"
#include "delta_body.h"

}  // namespace

const DeltaLoops* delta_avx2() { return &delta_loops; }

}  // namespace sameseed
