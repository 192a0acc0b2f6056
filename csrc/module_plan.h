// Python binding of Plan.

#pragma once

#include <nanobind/nanobind.h>

namespace foretoken {

void bind_plan(nanobind::module_& m);

}  // namespace foretoken
