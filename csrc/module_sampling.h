// Python bindings of sampling.

#pragma once

#include <nanobind/nanobind.h>

namespace sameseed {

void bind_sampling(nanobind::module_& m);

}  // namespace sameseed
