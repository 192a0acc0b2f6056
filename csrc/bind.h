// Binds a C++ struct as a Python class whose constructor takes every field by keyword.
//
// Pointers to memory are passed as an address (0: null), enums as their number, everything else unchanged.

#pragma once

#include <nanobind/nanobind.h>

#include <cstdint>
#include <type_traits>

namespace sameseed {

template <class T>
constexpr bool is_memory =
    std::is_pointer_v<T> && (std::is_void_v<std::remove_pointer_t<T>> || std::is_arithmetic_v<std::remove_pointer_t<T>>);
template <class T>
using Given = std::conditional_t<is_memory<T>, uintptr_t, std::conditional_t<std::is_enum_v<T>, int, T>>;

template <class T>
T taken(Given<T> value) {
    if constexpr (is_memory<T>)
        return reinterpret_cast<T>(value);
    else
        return static_cast<T>(value);
}

template <class S, class T>
struct Field {
    const char* name;
    T S::* member;
};
template <class S, class T>
Field<S, T> field(const char* name, T S::* member) {
    return {name, member};
}

template <class S, class... T>
void bind_struct(nanobind::module_& m, const char* name, const char* doc, Field<S, T>... fields) {
    nanobind::class_<S>(m, name, doc).def("__init__", [fields...](S* self, Given<T>... values) {
        new (self) S{};
        ((self->*fields.member = taken<T>(values)), ...);
    }, nanobind::kw_only(), nanobind::arg(fields.name)...);
}

}  // namespace sameseed
