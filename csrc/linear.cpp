// Chooses the kernel family for a weight, and prepares the rows of x for all families.

#include "linear.h"

#include <cstring>
#include <stdexcept>

#include "ops.h"
#include "pack.h"
#include "tasks.h"

namespace sameseed {

RowView prepare_rows(const RowSource& s, int64_t depth, int64_t begin, int64_t end, float* buffer) {
    if (s.kind == RowSource::plain && s.index == nullptr) return {s.x + begin * s.stride, s.stride};
    const Kernels& table = kernels();
    for (int64_t t = begin; t < end; t++) {
        const float* x = s.x + (s.index ? s.index[t] : t) * s.stride;
        float* out = buffer + (t - begin) * depth;
        if (s.kind == RowSource::norm)
            table.rms_norm(x, s.stride, s.norm_weight, s.eps, 1, depth, out);
        else if (s.kind == RowSource::silu)
            table.silu_mul(x, s.stride, 1, depth, out);
        else if (s.kind == RowSource::gelu)
            table.gelu_mul(x, s.stride, 1, depth, out);
        else if (s.kind == RowSource::clamped)
            table.clamped_mul(x, s.stride, s.limit, 1, depth, out);
        else
            std::memcpy(out, x, static_cast<size_t>(depth) * sizeof(float));
    }
    return {buffer, depth};
}

void linear(const Product& product) {
    if (product.rows == 0) return;
    if (product.source.index != nullptr) check("row", product.source.index, product.rows, product.source.index_limit);
    switch (product.weight->format) {
        case Format::fp32:
        case Format::bf16:
        case Format::fp16:
            if (product.weight->stride != 0 && !product.weight->bf16_rows) return linear_dense(product);
            if (product.weight->stride != 0) throw std::invalid_argument("a weight whose rows are rounded must be packed");
            return product.weight->bf16_rows ? linear_pairs(product) : linear_float(product);
        case Format::int8:
        case Format::int4:
            return product.weight->integer_rows ? linear_integer(&product, 1) : linear_float(product);
        case Format::int8n:
        case Format::q4_1:
        case Format::q5_0:
        case Format::q5_1:
        case Format::iq4_nl:
            if (product.weight->integer_rows) return linear_integer(&product, 1);
            throw std::invalid_argument("no native kernel for this weight");
        case Format::q2_k:
        case Format::q4_k:
        case Format::q5_k:
        case Format::q6_k:
            if (product.weight->integer_rows) return linear_super(&product, 1);
            throw std::invalid_argument("no native kernel for this weight");
        case Format::mxfp4:
            return product.weight->integer_rows ? linear_integer(&product, 1) : linear_float(product);
        case Format::nf4:
        case Format::fp8_e4m3:
        case Format::fp8_e5m2:
            if (!product.weight->integer_rows) return linear_float(product);
            [[fallthrough]];
        default:
            throw std::invalid_argument("no native kernel for this weight");
    }
}

void linear(const Product* products, int64_t count) {
    const Weight& w = *products->weight;
    const bool super =
        w.format == Format::q2_k || w.format == Format::q4_k || w.format == Format::q5_k || w.format == Format::q6_k;
    if (w.integer_rows && super) return linear_super(products, count);
    if (w.integer_rows) return linear_integer(products, count);
    for (int64_t i = 0; i < count; i++) linear(products[i]);
}

namespace {
void look_up(const Embedding& e) {
    const int32_t* token_ids = e.token_ids;
    const Weight& w = *e.weight;
    float* out = e.out;
    const int64_t rows = e.rows;
    check("token id", token_ids, rows, w.outputs);
    switch (w.format) {
        case Format::fp32:
        case Format::bf16:
        case Format::fp16: {
            if (w.stride == 0) break;
            const auto decode = kernels().decode[static_cast<int>(w.format)];
            const char* base = static_cast<const char*>(w.codes);
            for (int64_t t = 0; t < rows; t++)
                decode(base + token_ids[t] * w.stride * bytes_of(w.format), w.depth, out + t * w.depth);
            return;
        }
        case Format::int8:
        case Format::int4:
        case Format::int8n:
        case Format::q4_1:
        case Format::q5_0:
        case Format::q5_1:
        case Format::iq4_nl:
            return by_rows(rows, w.depth, [&](int64_t begin, int64_t end) {
                for (int64_t t = begin; t < end; t++) decode_packed_row(w, token_ids[t], out + t * w.depth);
            });
        case Format::q2_k:
        case Format::q4_k:
        case Format::q5_k:
        case Format::q6_k:
            return by_rows(rows, w.depth, [&](int64_t begin, int64_t end) {
                for (int64_t t = begin; t < end; t++) decode_super_row(w, token_ids[t], out + t * w.depth);
            });
        case Format::nf4:
        case Format::mxfp4:
        case Format::fp8_e4m3:
        case Format::fp8_e5m2:
            break;
        default:
            throw std::invalid_argument("no native kernel for this embedding");
    }
    by_rows(rows, w.depth, [&](int64_t begin, int64_t end) {
        for (int64_t t = begin; t < end; t++) decode_float_row(w, token_ids[t], out + t * w.depth);
    });
}
}  // namespace

void embedding(const Embedding& e) {
    look_up(e);
    if (e.scale != 1.0f)
        for (int64_t i = 0; i < e.rows * e.weight->depth; i++) e.out[i] *= e.scale;
}

}  // namespace sameseed
