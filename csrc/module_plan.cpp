// Python binding of Plan: its methods record what the functions of module.cpp, of the same names and arguments, do.
//
// Arguments that a Pass brings (rows, positions, slots, the batch's tables) are ignored here.

#include "module_plan.h"

#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <cstring>

#include "plan.h"

namespace nb = nanobind;

namespace sameseed {
namespace {

template <class T>
T* at(uintptr_t address) {
    return reinterpret_cast<T*>(address);
}

void record_embedding(Plan& plan, uintptr_t, const Weight& weight, uintptr_t out, int64_t) {
    plan.add("embedding", [w = &weight, out](const Pass& p) { embedding(p.token_ids, *w, at<float>(out), p.rows); });
}

void record_linear(Plan& plan, int kind, uintptr_t x, int64_t x_stride, uintptr_t norm_weight, float eps, uintptr_t index, int64_t,
                   const Weight& weight, uintptr_t bias, uintptr_t residual, uintptr_t out, int64_t) {
    Product product{{static_cast<RowSource::Kind>(kind), at<const float>(x), x_stride, at<const float>(norm_weight), eps,
                           nullptr, 0},
                          &weight,
                          at<const float>(bias),
                          at<const float>(residual),
                          at<float>(out),
                          0};
    if (index != 0) {  // only the head selects rows
        plan.add("lm_head", [product](const Pass& p) mutable {
            product.source.index = p.logit_rows;
            product.source.index_limit = p.rows;
            product.out = p.logits;
            product.rows = p.num_logit_rows;
            linear(product);
        });
        return;
    }
    plan.add("linear", [product](const Pass& p) mutable {
        product.rows = p.rows;
        linear(product);
    });
}

Cache cache_at(uintptr_t k, uintptr_t v, uintptr_t k_scale, uintptr_t v_scale, int64_t num_slots, int64_t kv_heads, int64_t dim,
               int format) {
    return {at<void>(k), at<void>(v), at<float>(k_scale), at<float>(v_scale), num_slots, kv_heads, dim,
            static_cast<KvFormat>(format)};
}

void record_rope_store(Plan& plan, uintptr_t qkv, int64_t stride, int64_t heads, uintptr_t q_norm, uintptr_t k_norm, float eps,
                       uintptr_t, uintptr_t table, int64_t table_rows, uintptr_t, uintptr_t k_cache, uintptr_t v_cache,
                       uintptr_t k_scale, uintptr_t v_scale, int64_t num_slots, int64_t kv_heads, int64_t dim, int format,
                       uintptr_t q_out, int64_t) {
    const Cache cache = cache_at(k_cache, v_cache, k_scale, v_scale, num_slots, kv_heads, dim, format);
    RopeStore args{at<const float>(qkv), stride, heads, kv_heads, dim, at<const float>(q_norm), at<const float>(k_norm), eps,
                   nullptr, at<const float>(table), table_rows, nullptr};
    plan.add("rope_store", [args, cache, q_out](const Pass& p) mutable {
        args.positions = p.positions;
        args.slots = p.slots;
        rope_store(args, cache, at<float>(q_out), p.rows);
    });
}

void record_attention(Plan& plan, uintptr_t q, int64_t q_stride, uintptr_t k_cache, uintptr_t v_cache, uintptr_t k_scale,
                      uintptr_t v_scale, int64_t num_slots, int64_t kv_heads, int64_t dim, int format, int64_t block_size,
                      int64_t heads, uintptr_t, uintptr_t, uintptr_t, uintptr_t, uintptr_t, int64_t, int64_t, int64_t, float scale,
                      int64_t window, uintptr_t out) {
    AttentionArgs args{at<const float>(q), at<const void>(k_cache), at<const void>(v_cache), at<const float>(k_scale),
                       at<const float>(v_scale), at<float>(out), nullptr, nullptr, q_stride, heads, kv_heads, dim, block_size,
                       window, scale};
    plan.add("attention", [args, format, num_slots](const Pass& p) mutable {
        args.positions = p.key_positions;
        args.tree_mask = p.tree_mask;
        attention(args, static_cast<KvFormat>(format), num_slots / args.block_size,
                  {p.row_offsets, p.kv_lens, p.block_tables, p.num_seqs, p.table_stride, p.rows});
    });
}

// Columns [column, column + width) of `out` [rows, total], from x; `out` 0: of the pass's captured hidden states.
void record_columns(Plan& plan, uintptr_t x, int64_t x_stride, int64_t width, int64_t column, int64_t total, uintptr_t out) {
    plan.add("columns", [=](const Pass& p) {
        float* into = (out ? at<float>(out) : p.hidden) + column;
        for (int64_t t = 0; t < p.rows; t++)
            std::memcpy(into + t * total, at<const float>(x) + t * x_stride, static_cast<size_t>(width) * sizeof(float));
    });
}

void run_plan(Plan& plan, int64_t rows, int64_t num_seqs, int64_t num_logit_rows, int64_t table_stride, uintptr_t token_ids,
              uintptr_t positions, uintptr_t key_positions, uintptr_t slots, uintptr_t row_offsets, uintptr_t kv_lens,
              uintptr_t block_tables, uintptr_t tree_mask, uintptr_t logit_rows, uintptr_t logits, uintptr_t hidden) {
    using ints = const int32_t;
    plan.run({rows, num_seqs, num_logit_rows, table_stride, at<ints>(token_ids), at<ints>(positions),
              at<ints>(key_positions), at<ints>(slots),
              at<ints>(row_offsets), at<ints>(kv_lens), at<ints>(block_tables), at<const int64_t>(tree_mask), at<ints>(logit_rows),
              at<float>(logits), at<float>(hidden)});
}

}  // namespace

void bind_plan(nb::module_& m) {
    nb::class_<Plan>(m, "Plan")
        .def(nb::init<>())
        .def("embedding", &record_embedding)
        .def("linear", &record_linear)
        .def("rope_store", &record_rope_store)
        .def("attention", &record_attention)
        .def("columns", &record_columns)
        .def("run", &run_plan, nb::call_guard<nb::gil_scoped_release>())
        .def("set_timed", &Plan::set_timed)
        .def("seconds", &Plan::seconds)
        .def("__len__", &Plan::size);
}

}  // namespace sameseed
