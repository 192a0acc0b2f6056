// Integer products for x86 with AMX. All other kernels are those of AVX-512 with VNNI and bf16. With SAMESEED_EMULATE,
// they are those of AVX-VNNI, and this unit is built with AVX2.

#include <immintrin.h>

#include <type_traits>

#include "kernels.h"

// GCC 12 warns wrongly about the "undefined" operands of its own intrinsics.
#pragma GCC diagnostic ignored "-Wuninitialized"
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"

// This unit does not use all functions of the bodies.
#pragma GCC diagnostic ignored "-Wunused-function"

#define HAS_VNNI
#ifdef SAMESEED_EMULATE
#include "emulate_amx.h"
#include "emulate_vnni.h"
#endif

namespace sameseed {
namespace {  // each unit has its own copy of every body, compiled with other instructions

#include "unroll.h"
#ifdef SAMESEED_EMULATE
#include "vec_avx2.h"
#include "int_avx2.h"
#else
#include "vec_avx512.h"
#include "int_avx512.h"
#endif

#include "integer_body.h"
#include "integer_tiles_body.h"

}  // namespace

#ifdef SAMESEED_EMULATE
const Kernels* kernels_avxvnni();
static const Kernels* base() { return kernels_avxvnni(); }
constexpr int64_t matrix_rows = 7;  // fewer rows go to the vector kernels of that unit, so at most one more than its tile
#else
const Kernels* kernels_avx512bf16();
static const Kernels* base() { return kernels_avx512bf16(); }
constexpr int64_t matrix_rows = 9;
#endif

const Kernels* kernels_amx() {
    static const Kernels table = [] {
        Kernels made = *base();
        made.name = "amx";
        made.integer_tile = 16;  // rows of a matrix register
        made.matrix = tiled_rows;
        made.matrix_rows = matrix_rows;
        made.release_matrix = release_tiles;
        return made;
    }();
    return &table;
}

}  // namespace sameseed
