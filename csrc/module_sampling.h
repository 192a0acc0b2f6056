// Python bindings of sampling.

#pragma once

#include <nanobind/nanobind.h>

namespace foretoken {

void bind_sampling(nanobind::module_& m);

}  // namespace foretoken
