// Python bindings of the native kernels: the module sameseed._native.
//
// Tensors come as addresses, sizes and strides (in elements), already checked by sameseed/ops/cpu.py: so the module needs
// no PyTorch headers and a call costs little. The GIL is released while a kernel runs.

#include <nanobind/nanobind.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <string>
#include <utility>
#include <vector>

#include "attention.h"
#include "limits.h"
#include "linear.h"
#include "module_plan.h"
#include "module_sampling.h"
#include "ops.h"
#include "pack.h"
#include "pool.h"

namespace nb = nanobind;

namespace sameseed {
namespace {

template <class T>
T* at(uintptr_t address) {
    return reinterpret_cast<T*>(address);
}

void py_weight(Weight* self, int format, bool integer_rows, int64_t outputs, int64_t depth, int64_t group, int64_t stride,
               uintptr_t codes, uintptr_t scales, int scale_format, uintptr_t zeros, uintptr_t low) {
    new (self) Weight{static_cast<Format>(format), integer_rows,         outputs,
                      depth,                       group,                stride,
                      at<const void>(codes),       at<const void>(scales), static_cast<Format>(scale_format),
                      at<const uint8_t>(zeros),    at<const uint8_t>(low)};
}

void py_linear(int kind, uintptr_t x, int64_t x_stride, uintptr_t norm_weight, float eps, uintptr_t index, int64_t index_limit,
               const Weight& weight, uintptr_t bias, uintptr_t residual, uintptr_t out, int64_t rows) {
    linear({{static_cast<RowSource::Kind>(kind), at<const float>(x), x_stride, at<const float>(norm_weight), eps,
             at<const int32_t>(index), index_limit},
            &weight,
            at<const float>(bias),
            at<const float>(residual),
            at<float>(out),
            rows});
}

void py_rms_norm(uintptr_t x, int64_t x_stride, uintptr_t weight, float eps, uintptr_t out, int64_t rows, int64_t width) {
    rms_norm(at<const float>(x), x_stride, at<const float>(weight), eps, at<float>(out), rows, width);
}

void py_rope(uintptr_t x, int64_t x_stride, uintptr_t positions, uintptr_t table, int64_t table_rows, uintptr_t out, int64_t rows,
             int64_t heads, int64_t dim) {
    rope(at<const float>(x), x_stride, at<const int32_t>(positions), at<const float>(table), table_rows, at<float>(out), rows,
         heads, dim);
}

void py_silu_mul(uintptr_t gate_up, int64_t stride, uintptr_t out, int64_t rows, int64_t width) {
    silu_mul(at<const float>(gate_up), stride, at<float>(out), rows, width);
}

void py_embedding(uintptr_t token_ids, const Weight& weight, uintptr_t out, int64_t rows) {
    embedding(at<const int32_t>(token_ids), weight, at<float>(out), rows);
}

Cache cache_at(uintptr_t k, uintptr_t v, uintptr_t k_scale, uintptr_t v_scale, int64_t num_slots, int64_t kv_heads, int64_t dim,
               int format) {
    return {at<void>(k), at<void>(v), at<float>(k_scale), at<float>(v_scale), num_slots, kv_heads, dim,
            static_cast<KvFormat>(format)};
}

PackArgs pack_args(uintptr_t plain, uintptr_t packed, uintptr_t zeros, int64_t outputs, int64_t depth, int64_t groups, int64_t stride,
                   bool nibbles) {
    return {at<const uint8_t>(plain), at<uint8_t>(packed), at<const uint8_t>(zeros), outputs, depth, groups, stride, nibbles,
            static_cast<uint8_t>(nibbles ? 8 : 0)};
}

void py_pack_codes(uintptr_t plain, uintptr_t packed, uintptr_t zeros, int64_t outputs, int64_t depth, int64_t groups, int64_t stride,
                   bool nibbles) {
    pack_codes(pack_args(plain, packed, zeros, outputs, depth, groups, stride, nibbles));
}

void py_unpack_codes(uintptr_t packed, uintptr_t plain, int64_t outputs, int64_t depth, bool nibbles) {
    unpack_codes(pack_args(0, packed, 0, outputs, depth, 1, depth, nibbles), at<uint8_t>(plain));
}

void py_encode_packed(uintptr_t weight, int source, int64_t stride, int64_t outputs, int64_t depth, int64_t group, bool nibbles,
                      bool asymmetric, bool wide_scales, uintptr_t packed, uintptr_t scales, uintptr_t zeros, uintptr_t low) {
    encode_packed({at<const void>(weight), static_cast<Format>(source), stride, outputs, depth, group, nibbles, asymmetric,
                   wide_scales, at<uint8_t>(packed), at<void>(scales), at<uint8_t>(zeros), at<uint8_t>(low)});
}

void py_pack_pairs(uintptr_t plain, uintptr_t packed, int64_t outputs, int64_t depth, int64_t stride, int64_t element) {
    pack_pairs(at<const void>(plain), at<void>(packed), outputs, depth, stride, element);
}

void py_unpack_pairs(uintptr_t packed, uintptr_t plain, int64_t outputs, int64_t depth, int64_t element) {
    unpack_pairs(at<const void>(packed), at<void>(plain), outputs, depth, element);
}

void py_rope_store(uintptr_t qkv, int64_t stride, int64_t heads, uintptr_t q_norm, uintptr_t k_norm, float eps,
                   uintptr_t positions, uintptr_t table, int64_t table_rows, uintptr_t slots, uintptr_t k_cache, uintptr_t v_cache,
                   uintptr_t k_scale, uintptr_t v_scale, int64_t num_slots, int64_t kv_heads, int64_t dim, int format,
                   uintptr_t q_out, int64_t rows) {
    rope_store({at<const float>(qkv), stride, heads, kv_heads, dim, at<const float>(q_norm), at<const float>(k_norm), eps,
                at<const int32_t>(positions), at<const float>(table), table_rows, at<const int32_t>(slots)},
               cache_at(k_cache, v_cache, k_scale, v_scale, num_slots, kv_heads, dim, format), at<float>(q_out), rows);
}

void py_store_kv(uintptr_t k, int64_t k_stride, uintptr_t v, int64_t v_stride, uintptr_t k_cache, uintptr_t v_cache,
                 uintptr_t k_scale, uintptr_t v_scale, int64_t num_slots, int64_t kv_heads, int64_t dim, int format,
                 uintptr_t slots, int64_t rows) {
    const Cache cache = cache_at(k_cache, v_cache, k_scale, v_scale, num_slots, kv_heads, dim, format);
    store_kv(at<const float>(k), k_stride, at<const float>(v), v_stride, cache, at<const int32_t>(slots), rows);
}

void py_move_kv(uintptr_t k_cache, uintptr_t v_cache, uintptr_t k_scale, uintptr_t v_scale, int64_t num_slots, int64_t kv_heads,
                int64_t dim, int format, uintptr_t source, uintptr_t target, int64_t count) {
    const Cache cache = cache_at(k_cache, v_cache, k_scale, v_scale, num_slots, kv_heads, dim, format);
    move_kv(cache, at<const int32_t>(source), at<const int32_t>(target), count);
}

void py_attention(uintptr_t q, int64_t q_stride, uintptr_t k_cache, uintptr_t v_cache, uintptr_t k_scale, uintptr_t v_scale,
                  int64_t num_slots, int64_t kv_heads, int64_t dim, int format, int64_t block_size, int64_t heads,
                  uintptr_t positions, uintptr_t tree_mask, uintptr_t row_offsets, uintptr_t kv_lens, uintptr_t block_tables,
                  int64_t table_stride, int64_t num_seqs, int64_t rows, float scale, int64_t window, uintptr_t out) {
    const AttentionArgs args{at<const float>(q),
                             at<const void>(k_cache),
                             at<const void>(v_cache),
                             at<const float>(k_scale),
                             at<const float>(v_scale),
                             at<float>(out),
                             at<const int32_t>(positions),
                             at<const int64_t>(tree_mask),
                             q_stride,
                             heads,
                             kv_heads,
                             dim,
                             block_size,
                             window,
                             scale};
    const Sequences sequences{at<const int32_t>(row_offsets), at<const int32_t>(kv_lens), at<const int32_t>(block_tables),
                              num_seqs, table_stride, rows};
    attention(args, static_cast<KvFormat>(format), num_slots / block_size, sequences);
}

std::pair<std::string, std::vector<double>> py_peak_rates(const std::string& kind, double seconds, int repeats) {
    Peak peak = peak_rates(kind, seconds, repeats);
    return {std::move(peak.instruction), std::move(peak.rates)};
}

std::string build_info() {
#if defined(__x86_64__)
    return "compiler " __VERSION__ "; instruction sets avx512vnni avx512 avx2 portable";
#else
    return "compiler " __VERSION__ "; instruction sets portable";
#endif
}

}  // namespace
}  // namespace sameseed

NB_MODULE(_native, m) {
    using namespace sameseed;
    const auto unlocked = nb::call_guard<nb::gil_scoped_release>();
    nb::class_<Weight>(m, "Weight").def("__init__", &py_weight);
    m.def("linear", &py_linear, unlocked);
    m.def("pack_codes", &py_pack_codes, unlocked);
    m.def("encode_packed", &py_encode_packed, unlocked);
    m.def("unpack_codes", &py_unpack_codes, unlocked);
    m.def("pack_pairs", &py_pack_pairs, unlocked);
    m.def("unpack_pairs", &py_unpack_pairs, unlocked);
    m.def("rope_store", &py_rope_store, unlocked);
    m.def("rms_norm", &py_rms_norm, unlocked);
    m.def("rope", &py_rope, unlocked);
    m.def("silu_mul", &py_silu_mul, unlocked);
    m.def("embedding", &py_embedding, unlocked);
    m.def("store_kv", &py_store_kv, unlocked);
    m.def("move_kv", &py_move_kv, unlocked);
    m.def("attention", &py_attention, unlocked);
    bind_plan(m);
    bind_sampling(m);
    m.def("kv_row_bytes", [](int format, int64_t dim) { return kv_row_bytes(static_cast<KvFormat>(format), dim); },
          "Bytes of one head's row of the cache.");
    m.def("isa", [] { return std::string(kernels().name); }, "The instruction set in use.");
    m.def("set_isa", [](const std::string& name) { set_isa(name.c_str()); }, "Use this instruction set: auto, avx512vnni, avx512, avx2, portable.");
    m.def("num_threads", &num_threads, "Threads that a call may use.");
    m.def("set_num_threads", &set_num_threads, "Let a call use this many threads.");
    m.def("limit_threads", &limit_threads, "Let a call of this thread use at most this many threads; 0: no limit.");
    m.def("available_cores", &available_cores, "Physical cores that this process may use.");
    m.def("read_rates", &read_rates, unlocked, "Bytes a second of passes over this much memory, by all threads.");
    m.def("peak_rates", &py_peak_rates, unlocked, "The CPU's best instruction for int8, fp32 or bf16, and its operations a second.");
    m.def("build_info", &build_info, "The compiler and the instruction sets that this module was built for.");
}
