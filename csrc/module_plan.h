// Python binding of Plan.

#pragma once

#include <nanobind/nanobind.h>

namespace sameseed {

void bind_plan(nanobind::module_& m);

}  // namespace sameseed
