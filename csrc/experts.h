// Mixtures of experts: the router, the choice of experts for each row, and their gated products.
//
// The logits of the router are a product like any other. A row's slots are its `top_k` largest logits, in descending
// order; of equal logits, that of the lower expert comes first. Where the weights are sigmoids, numbers added to them
// choose. The (row, slot) pairs are grouped by expert, and each expert multiplies its pairs with the bits that one pair
// alone has. A row's output is residual + sum, where the sum adds weight * result of its slots in their order. So other
// rows change no bit. Only the weights of chosen experts are read.

#pragma once

#include <vector>

#include "linear.h"

namespace sameseed {

// Weights of the experts of one layer: [2 F, C], the gate's rows before those of `up`, and [C, F].
struct ExpertSet {
    std::vector<Weight> gate_up, down;
};

struct Experts {
    RowSource source;  // plain or normed rows of x [T, C], which the router and the experts read
    const Weight* router;
    const float* router_bias;  // [E] or null
    const float* logits;       // [T, E], where the router reads other rows, or null
    const float* factors;      // [E], of the weights, or null
    const ExpertSet* set;
    const float *gate_up_bias, *down_bias;  // [E, 2 F] and [E, C], or null
    int64_t top_k;
    bool normalize;          // softmax over the chosen logits; else over all. With chosen_by: sigmoids over their sum
    const float* chosen_by;  // [E] or null: the weights are sigmoids times `factor`; with these added, they choose
    float factor;
    RowSource::Kind gate;  // silu, gelu or clamped
    float limit;
    const float* residual;  // [T, C] or null; may be `out`
    float* out;             // [T, C]
    int64_t rows;
};
void experts(const Experts& experts);

}  // namespace sameseed
