// The integer kernels for x86 with AVX-512 VNNI. All other kernels are those of AVX-512.

#include <immintrin.h>

#include <type_traits>

#include "kernels.h"

// GCC 12 warns wrongly about the "undefined" operands of its own intrinsics.
#pragma GCC diagnostic ignored "-Wuninitialized"
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"

// This unit does not use all functions of the bodies.
#pragma GCC diagnostic ignored "-Wunused-function"

#define HAS_VNNI

namespace sameseed {
namespace {  // each unit has its own copy of every body, compiled with other instructions

#include "unroll.h"
#include "vec_avx512.h"
#include "int_avx512.h"

#include "rows_body.h"
#include "linear_body.h"
#include "codes_body.h"
#include "kv4_body.h"
#include "scores_body.h"
#include "quantize_body.h"
#include "integer_body.h"
#include "super_body.h"
#include "attention_body.h"
#include "attention_places_body.h"
#include "attention_integer_body.h"

}  // namespace

const Kernels* kernels_avx512();

const Kernels* kernels_avx512vnni() {
    static const Kernels table = [] {
        Kernels made = *kernels_avx512();
        made.name = "avx512vnni";
        made.integer_tile = integer_tile;
        made.wide_codes = wide_codes;
        made.integer = integer;
        made.super_tile = super_tile;
        made.super = super;
        made.attention[static_cast<int>(KvFormat::int8_a8)] = attention_integer;
        return made;
    }();
    return &table;
}

}  // namespace sameseed
