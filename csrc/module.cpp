// Python bindings of the native kernels: the module foretoken._native.

#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>

#include <string>

namespace nb = nanobind;

namespace {

std::string build_info() {
    return "compiler " __VERSION__;
}

}  // namespace

NB_MODULE(_native, m) {
    m.def("build_info", &build_info, "The compiler that built this module.");
}
