// The kernels for any processor.

#include <type_traits>

#include "kernels.h"

namespace sameseed {
namespace {  // each unit has its own copy of every body, compiled with other instructions

#include "unroll.h"
#include "vec_portable.h"
#include "codes_portable.h"
#include "int_portable.h"
#include "pairs_portable.h"

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

const Kernels* kernels_portable() {
    static constexpr Kernels table = make_table("portable");
    return &table;
}

}  // namespace sameseed
