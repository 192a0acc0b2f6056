// Mixtures of experts: groups (row, slot) pairs by expert and computes the products of all experts together.

#include "experts.h"

#include <cmath>
#include <stdexcept>

#include "ops.h"
#include "tasks.h"

namespace sameseed {
namespace {

constexpr int64_t panel_rows = 512;  // rows whose pairs are in memory at a time

// Experts by descending key; of equal keys, that of the lower expert comes first.
void choose_best(const float* keys, int64_t num_experts, int64_t top_k, int32_t* chosen) {
    for (int64_t j = 0; j < top_k; j++) {
        int32_t best = -1;
        for (int32_t e = 0; e < num_experts; e++)
            if (std::find(chosen, chosen + j, e) == chosen + j && (best < 0 || keys[e] > keys[best])) best = e;
        chosen[j] = best;
    }
}

// As below, for weights that are sigmoids; logits are overwritten.
void choose_by_sigmoids(const Experts& a, float* logits, int64_t num_experts, int32_t* chosen, float* weights) {
    const auto sigmoid = [](float x) { return static_cast<float>(1.0 / (1.0 + std::exp(-static_cast<double>(x)))); };
    thread_local std::vector<float> scores;
    scores.resize(static_cast<size_t>(num_experts));
    for (int64_t e = 0; e < num_experts; e++) {
        scores[e] = sigmoid(logits[e]);
        logits[e] = scores[e] + a.chosen_by[e];
    }
    choose_best(logits, num_experts, a.top_k, chosen);
    float sum = 0.0f;
    for (int64_t j = 0; j < a.top_k; j++) sum += weights[j] = scores[chosen[j]];
    const float divisor = a.normalize ? sum + 1e-6f : 1.0f;
    for (int64_t j = 0; j < a.top_k; j++) weights[j] = weights[j] / divisor * a.factor;
}

// The slots of one row: experts by descending logit and their weights.
void choose_experts(const float* logits, int64_t num_experts, int64_t top_k, bool normalize, int32_t* chosen, float* weights) {
    choose_best(logits, num_experts, top_k, chosen);
    const float top = logits[chosen[0]];
    // In double, so that every machine's library gives the same float.
    const auto exponential = [&](float x) { return static_cast<float>(std::exp(static_cast<double>(x - top))); };
    float sum = 0.0f;
    for (int64_t j = 0; j < top_k; j++) sum += weights[j] = exponential(logits[chosen[j]]);
    if (!normalize) {
        sum = 0.0f;
        for (int64_t e = 0; e < num_experts; e++) sum += exponential(logits[e]);
    }
    for (int64_t j = 0; j < top_k; j++) weights[j] /= sum;
}

void panel(const Experts& a, int64_t begin, int64_t rows) {
    const int64_t depth = a.router->depth, num_experts = a.router->outputs, k = a.top_k, pairs = rows * k;
    const int64_t inner = a.set->gate_up[0].outputs, outputs = a.set->down[0].outputs;
    float* x = scratch(expert_area, round_up(rows * depth, 16) + round_up(pairs * inner, 16) + round_up(pairs * outputs, 16) +
                                        rows * num_experts + pairs);
    float* gate_up = x + round_up(rows * depth, 16);
    float* results = gate_up + round_up(pairs * inner, 16);
    float* logits = results + round_up(pairs * outputs, 16);
    float* weights = logits + rows * num_experts;
    thread_local std::vector<int32_t> int_buffer;
    thread_local std::vector<Product> product_buffer;
    std::vector<Product>& products = product_buffer;  // thread_local names would mean other objects in workers
    int_buffer.assign(static_cast<size_t>(3 * pairs + num_experts + 1), 0);
    int32_t *chosen = int_buffer.data(), *places = chosen + pairs, *row_ids = places + pairs, *starts = row_ids + pairs;

    by_rows(rows, depth, [&](int64_t first, int64_t end) {
        const RowView view = prepare_rows(a.source, depth, begin + first, begin + end, x + first * depth);
        if (view.x != x + first * depth)
            for (int64_t t = first; t < end; t++) std::copy_n(view.x + (t - first) * view.stride, depth, x + t * depth);
    });
    RowSource source{};
    source.x = x, source.stride = depth, source.index_limit = rows;
    if (a.logits)
        std::copy_n(a.logits + begin * num_experts, rows * num_experts, logits);
    else
        linear(Product{source, a.router, a.router_bias, nullptr, logits, rows});
    by_rows(rows, num_experts * k, [&](int64_t first, int64_t end) {
        for (int64_t t = first; t < end; t++) {
            float* row = logits + t * num_experts;
            if (a.chosen_by)
                choose_by_sigmoids(a, row, num_experts, chosen + t * k, weights + t * k);
            else
                choose_experts(row, num_experts, k, a.normalize, chosen + t * k, weights + t * k);
            for (int64_t j = t * k; a.factors && j < (t + 1) * k; j++) weights[j] *= a.factors[chosen[j]];
        }
    });

    for (int64_t i = 0; i < pairs; i++) starts[chosen[i] + 1]++;
    for (int64_t e = 0; e < num_experts; e++) starts[e + 1] += starts[e];
    for (int64_t i = 0; i < pairs; i++) {  // afterwards starts[e] is the end of expert e
        places[i] = starts[chosen[i]]++;
        row_ids[places[i]] = static_cast<int32_t>(i / k);
    }
    const auto multiply = [&](bool down) {
        products.clear();
        for (int64_t e = 0, first = 0; e < num_experts; first = starts[e++]) {
            const int64_t count = starts[e] - first;
            if (count == 0) continue;
            if (down)
                products.push_back({{a.gate, gate_up + first * inner, inner, nullptr, 0.0f, nullptr, count, a.limit},
                                    &a.set->down[e],
                                    a.down_bias ? a.down_bias + e * outputs : nullptr,
                                    nullptr,
                                    results + first * outputs,
                                    count});
            else
                products.push_back({{RowSource::plain, x, depth, nullptr, 0.0f, row_ids + first, rows, 0.0f},
                                    &a.set->gate_up[e],
                                    a.gate_up_bias ? a.gate_up_bias + e * inner : nullptr,
                                    nullptr,
                                    gate_up + first * inner,
                                    count});
        }
        linear(products.data(), static_cast<int64_t>(products.size()));
    };
    multiply(false);
    multiply(true);
    by_rows(rows, outputs * k, [&](int64_t first, int64_t end) {
        for (int64_t t = first; t < end; t++) {
            float* sum = scratch(rows_area, outputs);
            std::fill_n(sum, outputs, 0.0f);
            for (int64_t j = 0; j < k; j++) {
                const float weight = weights[t * k + j], *result = results + places[t * k + j] * outputs;
                for (int64_t c = 0; c < outputs; c++) sum[c] += weight * result[c];
            }
            const float* residual = a.residual ? a.residual + (begin + t) * outputs : nullptr;
            float* out = a.out + (begin + t) * outputs;
            for (int64_t c = 0; c < outputs; c++) out[c] = residual ? residual[c] + sum[c] : sum[c];
        }
    });
}

}  // namespace

void experts(const Experts& a) {
    const int64_t num_experts = a.router->outputs;
    if (a.top_k < 1 || a.top_k > num_experts || static_cast<int64_t>(a.set->gate_up.size()) != num_experts ||
        static_cast<int64_t>(a.set->down.size()) != num_experts)
        throw std::invalid_argument("the router does not fit the experts");
    for (int64_t t = 0; t < a.rows; t += panel_rows) panel(a, t, std::min(panel_rows, a.rows - t));
}

}  // namespace sameseed
