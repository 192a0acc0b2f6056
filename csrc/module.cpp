// Python bindings of the native kernels: the module sameseed._native.
//
// Tensors are passed as addresses, sizes and strides (in elements), already checked by sameseed/ops/cpu.py. So the
// module needs no PyTorch headers, and a call costs little. The GIL is released while a kernel runs. An op of a forward
// pass is a struct. A module function runs it, and the method of Plan with the same name records it.

#include <nanobind/nanobind.h>
#include <nanobind/stl/function.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <cstring>
#include <string>
#include <utility>
#include <vector>

#include "attention.h"
#include "bind.h"
#include "blocks.h"
#include "delta.h"
#include "experts.h"
#include "grow.h"
#include "isa.h"
#include "limits.h"
#include "linear.h"
#include "module_sampling.h"
#include "ops.h"
#include "pack.h"
#include "plan.h"
#include "pool.h"

namespace nb = nanobind;

namespace sameseed {
namespace {

template <class T>
T* at(uintptr_t address) {
    return reinterpret_cast<T*>(address);
}

// Copies x to columns [column, column + width) of `out` [rows, total]. If `out` is null, it copies to the captured
// hidden states of the pass.
struct Columns {
    const float* x;
    int64_t stride, width, column, total;
    float* out;
};

// RMS norm of the rows of x [T, C], which are `stride` elements apart; with a residual, see rms_norm().
struct Norm {
    const float* x;
    int64_t stride, width;
    const float* weight;
    float eps;
    const float* residual;
    int64_t residual_stride;
    float factor;
    float* out;
};

// Caps the logits of the pass [R, width].
struct Cap {
    float cap;
    int64_t width;
};

// Runs a recorded op for one pass, with the fields that differ between passes taken from the pass. The op is passed by
// value, so the recording stays unchanged.
void replay(Embedding op, const Pass& p) {
    op.token_ids = p.token_ids;
    op.rows = p.rows;
    embedding(op);
}

void replay(Product op, const Pass& p) {
    op.rows = p.rows;
    if (op.source.index != nullptr) {  // only the head selects rows
        op.source.index = p.logit_rows;
        op.source.index_limit = p.rows;
        op.out = p.logits;
        op.rows = p.num_logit_rows;
    }
    linear(op);
}

void replay(Experts op, const Pass& p) {
    op.rows = p.rows;
    experts(op);
}

void replay(RopeStore op, const Pass& p) {
    op.positions = p.positions;
    op.slots = p.slots;
    op.rows = p.rows;
    rope_store(op);
}

void replay(Attention op, const Pass& p) {
    op.positions = p.key_positions;
    op.tree_mask = p.tree_mask;
    op.sequences = {p.row_offsets, p.kv_lens, p.block_tables, p.num_seqs, p.table_stride, p.rows};
    attention(op);
}

void replay(Columns op, const Pass& p) {
    float* out = (op.out != nullptr ? op.out : p.hidden) + op.column;
    for (int64_t t = 0; t < p.rows; t++)
        std::memcpy(out + t * op.total, op.x + t * op.stride, static_cast<size_t>(op.width) * sizeof(float));
}

void replay(Norm op, const Pass& p) {
    rms_norm(op.x, op.stride, op.weight, op.eps, op.out, p.rows, op.width, op.residual, op.residual_stride, op.factor);
}

void replay(Cap op, const Pass& p) { softcap(p.logits, op.cap, p.num_logit_rows, op.width); }

template <class Op>  // Delta or ShortConv
Op of_states(Op op, const Pass& p) {
    if (p.states == nullptr) throw std::invalid_argument("a pass of a model with recurrent states must name their slots");
    op.states = p.states;
    op.row_offsets = p.row_offsets;
    op.positions = p.positions;
    op.num_seqs = p.num_seqs;
    op.rows = p.rows;
    return op;
}

void replay(const Delta& op, const Pass& p) { delta(of_states(op, p)); }
void replay(const ShortConv& op, const Pass& p) { short_conv(of_states(op, p)); }

void replay(Gate op, const Pass& p) {
    op.rows = p.rows;
    gate(op);
}

void replay(Take op, const Pass& p) {
    op.rows = p.rows;
    take(op);
}

const char* kind_of(const Embedding&) { return "embedding"; }
const char* kind_of(const Product& op) { return op.source.index != nullptr ? "lm_head" : "linear"; }
const char* kind_of(const Experts&) { return "experts"; }
const char* kind_of(const RopeStore&) { return "rope_store"; }
const char* kind_of(const Attention&) { return "attention"; }
const char* kind_of(const Columns&) { return "columns"; }
const char* kind_of(const Delta&) { return "delta"; }
const char* kind_of(const ShortConv&) { return "conv"; }
const char* kind_of(const Gate&) { return "gate"; }
const char* kind_of(const Take&) { return "take"; }
const char* kind_of(const Norm&) { return "norm"; }
const char* kind_of(const Cap&) { return "softcap"; }

template <class Op>
void record(nb::class_<Plan>& plan, const char* name) {
    plan.def(name, [](Plan& self, Op op) { self.add(kind_of(op), [op](const Pass& p) { replay(op, p); }); });
}

void bind_structs(nb::module_& m) {
    bind_struct(m, "Weight", "A weight [O, K] by address: dense (rows of `stride` elements) or packed.",
                field("format", &Weight::format), field("integer_rows", &Weight::integer_rows),
                field("bf16_rows", &Weight::bf16_rows), field("outputs", &Weight::outputs), field("depth", &Weight::depth),
                field("group", &Weight::group), field("stride", &Weight::stride), field("codes", &Weight::codes),
                field("scales", &Weight::scales), field("scale_format", &Weight::scale_format), field("zeros", &Weight::zeros),
                field("low", &Weight::low), field("high", &Weight::high), field("steps", &Weight::steps),
                field("minima", &Weight::minima), field("least", &Weight::least));
    bind_struct(m, "RowSource", "Where the rows of a product come from; kind 0: plain, 1: normed, 2: gated.",
                field("kind", &RowSource::kind), field("x", &RowSource::x), field("stride", &RowSource::stride),
                field("norm_weight", &RowSource::norm_weight), field("eps", &RowSource::eps), field("index", &RowSource::index),
                field("index_limit", &RowSource::index_limit), field("limit", &RowSource::limit));
    bind_struct(m, "ExpertSet", "Weights of a layer's experts.", field("gate_up", &ExpertSet::gate_up),
                field("down", &ExpertSet::down));
    bind_struct(m, "Experts", "A mixture of experts, plus residual.", field("source", &Experts::source),
                field("router", &Experts::router), field("router_bias", &Experts::router_bias), field("logits", &Experts::logits),
                field("factors", &Experts::factors), field("set", &Experts::set), field("gate_up_bias", &Experts::gate_up_bias),
                field("down_bias", &Experts::down_bias), field("top_k", &Experts::top_k), field("normalize", &Experts::normalize),
                field("chosen_by", &Experts::chosen_by), field("factor", &Experts::factor), field("gate", &Experts::gate),
                field("limit", &Experts::limit), field("residual", &Experts::residual), field("out", &Experts::out),
                field("rows", &Experts::rows));
    bind_struct(m, "Product", "Rows times a weight transposed, plus bias and residual.", field("source", &Product::source),
                field("weight", &Product::weight), field("bias", &Product::bias), field("residual", &Product::residual),
                field("out", &Product::out), field("rows", &Product::rows));
    bind_struct(m, "Embedding", "Rows token_ids of an embedding.", field("token_ids", &Embedding::token_ids),
                field("weight", &Embedding::weight), field("scale", &Embedding::scale), field("out", &Embedding::out),
                field("rows", &Embedding::rows));
    bind_struct(m, "Cache", "A layer of the cache.", field("k", &Cache::k), field("v", &Cache::v),
                field("k_scale", &Cache::k_scale), field("v_scale", &Cache::v_scale), field("num_slots", &Cache::num_slots),
                field("kv_heads", &Cache::kv_heads), field("dim", &Cache::dim), field("format", &Cache::format));
    bind_struct(m, "RopeStore", "Norm and rotate q and k, store k and v.", field("qkv", &RopeStore::qkv),
                field("stride", &RopeStore::stride), field("heads", &RopeStore::heads), field("q_norm", &RopeStore::q_norm),
                field("k_norm", &RopeStore::k_norm), field("v_norm", &RopeStore::v_norm), field("stores", &RopeStore::stores),
                field("eps", &RopeStore::eps), field("positions", &RopeStore::positions), field("table", &RopeStore::table),
                field("table_rows", &RopeStore::table_rows), field("slots", &RopeStore::slots), field("cache", &RopeStore::cache),
                field("q_out", &RopeStore::q_out), field("rows", &RopeStore::rows));
    bind_struct(m, "Sequences", "Rows and blocks of the sequences of a pass.", field("row_offsets", &Sequences::row_offsets),
                field("kv_lens", &Sequences::kv_lens), field("block_tables", &Sequences::block_tables),
                field("count", &Sequences::count), field("table_stride", &Sequences::table_stride),
                field("rows", &Sequences::rows));
    bind_struct(m, "Attention", "Queries over the paged cache.", field("q", &Attention::q), field("stride", &Attention::stride),
                field("heads", &Attention::heads), field("cache", &Attention::cache), field("block_size", &Attention::block_size),
                field("positions", &Attention::positions), field("tree_mask", &Attention::tree_mask),
                field("sequences", &Attention::sequences), field("scale", &Attention::scale), field("window", &Attention::window),
                field("out", &Attention::out), field("sinks", &Attention::sinks));
    bind_struct(m, "Columns", "Columns of `out` [rows, total] from x; out 0: of the hidden states of the pass.",
                field("x", &Columns::x), field("stride", &Columns::stride), field("width", &Columns::width),
                field("column", &Columns::column), field("total", &Columns::total), field("out", &Columns::out));
    bind_struct(m, "DeltaRule", "Gated DeltaNet: rows of x through the states of their sequences.", field("x", &Delta::x),
                field("stride", &Delta::stride), field("conv", &Delta::conv), field("decay", &Delta::decay),
                field("bias", &Delta::bias), field("norm", &Delta::norm), field("eps", &Delta::eps), field("taps", &Delta::taps),
                field("key_heads", &Delta::key_heads), field("value_heads", &Delta::value_heads),
                field("key_dim", &Delta::key_dim), field("value_dim", &Delta::value_dim), field("tiled", &Delta::tiled),
                field("state", &Delta::state), field("log", &Delta::log), field("slots", &Delta::slots),
                field("log_rows", &Delta::log_rows), field("states", &Delta::states), field("row_offsets", &Delta::row_offsets),
                field("positions", &Delta::positions), field("num_seqs", &Delta::num_seqs), field("rows", &Delta::rows),
                field("out", &Delta::out));
    bind_struct(m, "ShortConv", "A short gated convolution over the rows of each sequence.", field("x", &ShortConv::x),
                field("stride", &ShortConv::stride), field("weight", &ShortConv::weight), field("taps", &ShortConv::taps),
                field("width", &ShortConv::width), field("log", &ShortConv::log), field("slots", &ShortConv::slots),
                field("log_rows", &ShortConv::log_rows), field("states", &ShortConv::states),
                field("row_offsets", &ShortConv::row_offsets), field("positions", &ShortConv::positions),
                field("num_seqs", &ShortConv::num_seqs), field("rows", &ShortConv::rows), field("out", &ShortConv::out));
    bind_struct(m, "SigmoidGate", "Rows of x times the sigmoid of a gate.", field("x", &Gate::x), field("gate", &Gate::gate),
                field("stride", &Gate::stride), field("heads", &Gate::heads), field("dim", &Gate::dim),
                field("apart", &Gate::apart), field("out", &Gate::out), field("rows", &Gate::rows));
    bind_struct(m, "Take", "Some columns of x, in the order of `index`.", field("x", &Take::x), field("stride", &Take::stride),
                field("index", &Take::index), field("width", &Take::width), field("out", &Take::out), field("rows", &Take::rows));
    bind_struct(m, "Norm", "Rows of x [T, C] normed.", field("x", &Norm::x), field("stride", &Norm::stride),
                field("width", &Norm::width), field("weight", &Norm::weight), field("eps", &Norm::eps),
                field("residual", &Norm::residual), field("residual_stride", &Norm::residual_stride),
                field("factor", &Norm::factor), field("out", &Norm::out));
    bind_struct(m, "Cap", "The cap of a pass's logits.", field("cap", &Cap::cap), field("width", &Cap::width));
    bind_struct(m, "Pass", "The rows of a pass, as sameseed/batch.py lays them out, and where its results go.",
                field("rows", &Pass::rows), field("num_seqs", &Pass::num_seqs), field("num_logit_rows", &Pass::num_logit_rows),
                field("table_stride", &Pass::table_stride), field("token_ids", &Pass::token_ids),
                field("positions", &Pass::positions), field("key_positions", &Pass::key_positions), field("slots", &Pass::slots),
                field("row_offsets", &Pass::row_offsets), field("kv_lens", &Pass::kv_lens),
                field("block_tables", &Pass::block_tables), field("tree_mask", &Pass::tree_mask),
                field("logit_rows", &Pass::logit_rows), field("logits", &Pass::logits), field("hidden", &Pass::hidden),
                field("states", &Pass::states));
    bind_struct(m, "PackArgs", "Codes to blocks, or back.", field("plain", &PackArgs::plain), field("packed", &PackArgs::packed),
                field("zeros", &PackArgs::zeros), field("outputs", &PackArgs::outputs), field("depth", &PackArgs::depth),
                field("groups", &PackArgs::groups), field("stride", &PackArgs::stride), field("nibbles", &PackArgs::nibbles));
    bind_struct(m, "EncodeArgs", "A dense weight to packed codes.", field("weight", &EncodeArgs::weight),
                field("source", &EncodeArgs::source), field("stride", &EncodeArgs::stride),
                field("outputs", &EncodeArgs::outputs), field("depth", &EncodeArgs::depth), field("group", &EncodeArgs::group),
                field("nibbles", &EncodeArgs::nibbles), field("asymmetric", &EncodeArgs::asymmetric),
                field("wide_scales", &EncodeArgs::wide_scales), field("packed", &EncodeArgs::packed),
                field("scales", &EncodeArgs::scales), field("zeros", &EncodeArgs::zeros), field("low", &EncodeArgs::low));
    bind_struct(m, "BlockRows", "Rows of a matrix in ggml's blocks in an open file, and where they are packed.",
                field("file", &BlockRows::file), field("begin", &BlockRows::begin), field("kind", &BlockRows::kind),
                field("outputs", &BlockRows::outputs), field("depth", &BlockRows::depth), field("order", &BlockRows::order),
                field("codes", &BlockRows::codes), field("high", &BlockRows::high), field("steps", &BlockRows::steps),
                field("minima", &BlockRows::minima), field("scales", &BlockRows::scales), field("least", &BlockRows::least));
}

void bind_growth(nb::module_& m) {
    bind_struct(m, "GrowingTree", "One sequence's draft tree.", field("size", &GrowingTree::size),
                field("depth", &GrowingTree::depth), field("width", &GrowingTree::width), field("count", &GrowingTree::count),
                field("exact", &GrowingTree::exact), field("limit", &GrowingTree::limit), field("least", &GrowingTree::least),
                field("greedy", &GrowingTree::greedy), field("temperature", &GrowingTree::temperature),
                field("floor", &GrowingTree::floor), field("top_k", &GrowingTree::top_k), field("top_p", &GrowingTree::top_p),
                field("keys", &GrowingTree::keys), field("ids", &GrowingTree::ids), field("ending", &GrowingTree::ending),
                field("num_cached", &GrowingTree::num_cached), field("blocks", &GrowingTree::blocks));
    bind_struct(m, "TreePasses", "The passes of a model that grows trees.", field("vocab", &TreePasses::vocab),
                field("width", &TreePasses::width), field("block_size", &TreePasses::block_size),
                field("logits", &TreePasses::logits), field("features", &TreePasses::features),
                field("input", &TreePasses::input), field("level_logits", &TreePasses::level_logits),
                field("level_features", &TreePasses::level_features));
    m.def("grow_trees", &grow_trees, nb::arg("plan"), nb::arg("passes"), nb::arg("trees"), nb::arg("ends").none(),
          nb::call_guard<nb::gil_scoped_release>(),
          "Tokens, parents and path probabilities of draft trees, grown level by level.");
}

void bind_plan(nb::module_& m) {
    auto plan = nb::class_<Plan>(m, "Plan", "Recorded ops; what a pass brings is ignored as they are recorded.");
    plan.def(nb::init<>());
    record<Embedding>(plan, "embedding");
    record<Product>(plan, "product");
    record<Experts>(plan, "experts");
    record<RopeStore>(plan, "rope_store");
    record<Attention>(plan, "attention");
    record<Columns>(plan, "columns");
    record<Norm>(plan, "norm");
    record<Cap>(plan, "cap");
    record<Delta>(plan, "delta");
    record<ShortConv>(plan, "conv");
    record<Gate>(plan, "gate");
    record<Take>(plan, "take");
    plan.def("run", &Plan::run, nb::call_guard<nb::gil_scoped_release>())
        .def("set_timed", &Plan::set_timed)
        .def("seconds", &Plan::seconds)
        .def("__len__", &Plan::size);
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

void py_gelu_mul(uintptr_t gate_up, int64_t stride, uintptr_t out, int64_t rows, int64_t width) {
    gelu_mul(at<const float>(gate_up), stride, at<float>(out), rows, width);
}

void py_softcap(uintptr_t x, float cap, int64_t rows, int64_t width) { softcap(at<float>(x), cap, rows, width); }

void py_clamped_mul(uintptr_t gate_up, int64_t stride, float limit, uintptr_t out, int64_t rows, int64_t width) {
    clamped_mul(at<const float>(gate_up), stride, limit, at<float>(out), rows, width);
}

void py_store_kv(uintptr_t k, int64_t k_stride, uintptr_t v, int64_t v_stride, const Cache& cache, uintptr_t slots,
                 int64_t rows) {
    store_kv(at<const float>(k), k_stride, at<const float>(v), v_stride, cache, at<const int32_t>(slots), rows);
}

void py_move_kv(const Cache& cache, uintptr_t source, uintptr_t target, int64_t count) {
    move_kv(cache, at<const int32_t>(source), at<const int32_t>(target), count);
}

void py_unpack_codes(uintptr_t packed, uintptr_t plain, int64_t outputs, int64_t depth, bool nibbles) {
    unpack_codes({nullptr, at<uint8_t>(packed), nullptr, outputs, depth, 1, depth, nibbles}, at<uint8_t>(plain));
}

void py_pack_high(uintptr_t plain, uintptr_t high, int64_t outputs, int64_t depth, int64_t bits) {
    pack_high(at<const uint8_t>(plain), at<uint8_t>(high), outputs, depth, bits);
}

void py_unpack_high(uintptr_t high, uintptr_t plain, int64_t outputs, int64_t depth, int64_t bits) {
    unpack_high(at<const uint8_t>(high), at<uint8_t>(plain), outputs, depth, bits);
}

void py_pack_pairs(uintptr_t plain, uintptr_t packed, int64_t outputs, int64_t depth, int64_t stride, int64_t element) {
    pack_pairs(at<const void>(plain), at<void>(packed), outputs, depth, stride, element);
}

void py_unpack_pairs(uintptr_t packed, uintptr_t plain, int64_t outputs, int64_t depth, int64_t element) {
    unpack_pairs(at<const void>(packed), at<void>(plain), outputs, depth, element);
}

std::pair<std::string, std::vector<double>> py_peak_rates(const std::string& kind, double seconds, int repeats) {
    Peak peak = peak_rates(kind, seconds, repeats);
    return {std::move(peak.instruction), std::move(peak.rates)};
}

}  // namespace
}  // namespace sameseed

NB_MODULE(_native, m) {
    using namespace sameseed;
    m.doc() = "Native CPU kernels (csrc/). Memory is an address, strides count elements, formats are numbers of enum Format.";
    nb::set_leak_warnings(false);  // commands end without a last search for garbage, so that some objects are left
    const auto unlocked = nb::call_guard<nb::gil_scoped_release>();
    bind_structs(m);
    bind_plan(m);
    bind_growth(m);
    bind_sampling(m);
    m.def("embedding", &embedding, unlocked);
    m.def("product", nb::overload_cast<const Product&>(&linear), unlocked);
    m.def("experts", &experts, unlocked);
    m.def("rope_store", &rope_store, unlocked);
    m.def("attention", &attention, unlocked);
    m.def("delta", &delta, unlocked);
    m.def("conv", &short_conv, unlocked);
    m.def("gate", &gate, unlocked);
    m.def("take", &take, unlocked);
    m.def("rms_norm", &py_rms_norm, unlocked);
    m.def("rope", &py_rope, unlocked);
    m.def("silu_mul", &py_silu_mul, unlocked);
    m.def("gelu_mul", &py_gelu_mul, unlocked);
    m.def("softcap", &py_softcap, unlocked);
    m.def("clamped_mul", &py_clamped_mul, unlocked);
    m.def("store_kv", &py_store_kv, unlocked);
    m.def("move_kv", &py_move_kv, unlocked);
    m.def("pack_codes", &pack_codes, unlocked);
    m.def("unpack_codes", &py_unpack_codes, unlocked);
    m.def("pack_high", &py_pack_high, unlocked);
    m.def("unpack_high", &py_unpack_high, unlocked);
    m.def("encode_packed", &encode_packed, unlocked);
    m.def("read_block_rows", &read_block_rows, unlocked);
    m.def("pack_pairs", &py_pack_pairs, unlocked);
    m.def("unpack_pairs", &py_unpack_pairs, unlocked);
    m.def("kv_row_bytes", [](int format, int64_t dim) { return kv_row_bytes(static_cast<KvFormat>(format), dim); },
          "Bytes of one head's row of the cache.");
    m.def("isa", [] { return std::string(instruction_set().name); }, "The instruction set in use.");
    m.def("set_isa", [](const std::string& name) { set_isa(name); }, "Use this instruction set: auto, or one of build_info.");
    m.def("num_threads", &num_threads, "Threads that a call may use.");
    m.def("set_num_threads", &set_num_threads, "Let a call use this many threads.");
    m.def("limit_threads", &limit_threads, "Let a call of this thread use at most this many threads; 0: no limit.");
    m.def("num_launches", &num_launches, "Sections of kernels that this process has run.");
    m.def("available_cores", &available_cores, "Physical cores that this process may use.");
    m.def("read_rates", &read_rates, unlocked, "Bytes a second of passes over this much memory, by all threads.");
    m.def("peak_rates", &py_peak_rates, unlocked,
          "The CPU's best instruction for int8, fp32 or bf16, and its operations a second.");
    m.def("build_info", [] { return "compiler " __VERSION__ "; instruction sets " + set_names(" "); },
          "The compiler and the instruction sets that this module was built for.");
}
