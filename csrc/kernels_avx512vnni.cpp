// The integer kernels for x86 with AVX-512 VNNI; the rest is that of AVX-512.

#include <immintrin.h>

#include <type_traits>

#include "kernels.h"

// GCC 12 takes its own intrinsics' "undefined" operands for mistakes.
#pragma GCC diagnostic ignored "-Wuninitialized"
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"

// The bodies have more than this unit needs.
#pragma GCC diagnostic ignored "-Wunused-function"

#define HAS_VNNI

namespace sameseed {
namespace {  // this unit's own copy of every body: other units compile them with other instructions

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
        made.integer = integer;
        made.super_tile = super_tile;
        made.super = super;
        made.attention[static_cast<int>(KvFormat::int8_a8)] = attention_integer;
        return made;
    }();
    return &table;
}

}  // namespace sameseed
