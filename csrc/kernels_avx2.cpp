// The kernels for x86 with AVX2, FMA and F16C.

#include <immintrin.h>

#include <type_traits>

#include "kernels.h"

// GCC 12 warns wrongly about the "undefined" operands of its own intrinsics.
#pragma GCC diagnostic ignored "-Wuninitialized"
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"

namespace sameseed {
namespace {  // each unit has its own copy of every body, compiled with other instructions

#include "unroll.h"
#include "vec_avx2.h"
#include "codes_avx2.h"
#include "int_avx2.h"
#include "pairs_avx2.h"

#include "rows_body.h"
#include "linear_body.h"
#include "codes_body.h"
#include "kv4_body.h"
#include "scores_body.h"
#include "float_body.h"
#include "pairs_body.h"
#include "quantize_body.h"
#include "integer_body.h"
#include "super_body.h"
#include "attention_body.h"
#include "attention_places_body.h"
#include "attention_pairs_body.h"
#include "attention_integer_body.h"
#include "table_body.h"

}  // namespace

const Kernels* kernels_avx2() {
    static constexpr Kernels table = make_table("avx2");
    return &table;
}

}  // namespace sameseed
