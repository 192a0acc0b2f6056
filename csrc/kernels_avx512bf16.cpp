// Products of bf16 pairs for x86 with AVX512_BF16. All other kernels are those of AVX-512 with VNNI.

#include <immintrin.h>

#include <type_traits>

#include "kernels.h"

// GCC 12 warns wrongly about the "undefined" operands of its own intrinsics.
#pragma GCC diagnostic ignored "-Wuninitialized"
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"

// This unit does not use all functions of the bodies.
#pragma GCC diagnostic ignored "-Wunused-function"

#define HAS_BF16

namespace sameseed {
namespace {  // each unit has its own copy of every body, compiled with other instructions

#include "unroll.h"
#include "vec_avx512.h"
#include "pairs_avx512.h"

#include "rows_body.h"
#include "linear_body.h"
#include "codes_body.h"
#include "kv4_body.h"
#include "scores_body.h"
#include "pairs_body.h"
#include "attention_body.h"
#include "attention_places_body.h"
#include "attention_pairs_body.h"

}  // namespace

const Kernels* kernels_avx512vnni();

const Kernels* kernels_avx512bf16() {
    static const Kernels table = [] {
        Kernels made = *kernels_avx512vnni();
        made.name = "avx512bf16";
        made.pair_tile = pair_rows_most;
        made.pair_row = pair_row;
        made.linear_pairs = linear_pairs;
        made.attention[static_cast<int>(KvFormat::bf16_a16)] = attention_pairs;
        return made;
    }();
    return &table;
}

}  // namespace sameseed
