#include "module_sampling.h"

#include <nanobind/stl/pair.h>
#include <nanobind/stl/vector.h>

#include "sampling.h"

namespace nb = nanobind;

namespace sameseed {
namespace {

int64_t py_choose(uintptr_t logits, bool wide, int64_t vocab, bool greedy, double temperature, double floor, int64_t top_k,
                  double top_p, uint64_t key) {
    return choose({reinterpret_cast<const void*>(logits), wide, vocab, temperature, floor, top_k, top_p, key}, greedy);
}

std::vector<std::pair<int64_t, double>> py_choices(uintptr_t logits, bool wide, int64_t vocab, bool greedy, double temperature,
                                                   double floor, int64_t top_k, double top_p, uint64_t key, int64_t count) {
    std::vector<std::pair<int64_t, double>> found;
    const void* row = reinterpret_cast<const void*>(logits);
    for (const Choice& c : choices({row, wide, vocab, temperature, floor, top_k, top_p, key}, greedy, count))
        found.emplace_back(c.token, c.share);
    return found;
}

void py_likely(uintptr_t logits, bool wide, int64_t vocab, bool greedy, double temperature, double floor, int64_t top_k,
               double top_p, uint64_t key, int64_t num_rows, uintptr_t ids, int64_t count, uintptr_t tokens, uintptr_t shares) {
    likely({reinterpret_cast<const void*>(logits), wide, vocab, temperature, floor, top_k, top_p, key}, greedy, num_rows,
           reinterpret_cast<const int32_t*>(ids), count, reinterpret_cast<int64_t*>(tokens), reinterpret_cast<double*>(shares));
}

double py_probability(uintptr_t logits, bool wide, int64_t vocab, double temperature, int64_t token) {
    return probability({reinterpret_cast<const void*>(logits), wide, vocab, temperature, 0.0, 0, 1.0, 0}, token);
}

}  // namespace

void bind_sampling(nb::module_& m) {
    const auto unlocked = nb::call_guard<nb::gil_scoped_release>();
    m.def("choose", &py_choose, unlocked, "The token chosen from a row of logits, or -1.");
    m.def("choices", &py_choices, unlocked, "The tokens that come first in a row of logits, with their shares.");
    m.def("likely", &py_likely, unlocked, "What comes first in rows of logits for a tree, with shares.");
    m.def("probability", &py_probability, unlocked, "Probability of a token at a temperature.");
}

}  // namespace sameseed
