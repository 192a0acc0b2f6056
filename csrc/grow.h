// Draft trees that a head grows level by level (EAGLE-2), all levels in one call. sameseed/drafters/_tree.py and eagle.py are
// the specification: what a tree keeps, which nodes run next, where they lie in the cache.

#pragma once

#include <cstdint>
#include <tuple>
#include <vector>

#include "plan.h"

namespace sameseed {

// One sequence's tree, and how what comes next is drawn (SamplingArgs).
struct GrowingTree {
    int64_t size;          // nodes that are wanted
    int64_t depth;         // levels
    int64_t width, count;  // nodes of a level that run, and children of each
    bool greedy;
    double temperature, floor;
    int64_t top_k;
    double top_p;
    std::vector<uint64_t> keys;   // of the noise, by level
    const int32_t* ids;           // the target's tokens of a head's own vocabulary, or null
    std::vector<int64_t> ending;  // tokens after which nothing comes
    int64_t num_cached;           // rows of the sequence; nodes lie behind them
    std::vector<int32_t> blocks;
};

// The head's passes, each a level of all trees.
struct TreePasses {
    int64_t vocab, width;  // of a row of logits, of features
    int64_t block_size;
    const float *logits, *features;        // after the last known row of each tree: [B, vocab], [B, width]
    float* input;                          // where the plan reads the features of each row's parent
    float *level_logits, *level_features;  // where it leaves those of a level, of the sum of all widths at most
};

// Tokens, parents (-1: the last known token) and path probabilities of the likeliest nodes, parents first.
using GrownTree = std::tuple<std::vector<int64_t>, std::vector<int64_t>, std::vector<double>>;

std::vector<GrownTree> grow_trees(Plan& plan, const TreePasses& passes, const std::vector<GrowingTree>& given);

}  // namespace sameseed
