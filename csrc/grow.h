// Draft trees that a model grows level by level (EAGLE-2), all levels in one call; a chain is one of width 1. The
// specification is in sameseed/drafters: what a tree keeps, which nodes run next and where they lie in the cache (_tree.py,
// eagle.py), and how a chain ends (_chains.py).

#pragma once

#include <cstdint>
#include <functional>
#include <tuple>
#include <vector>

#include "plan.h"

namespace sameseed {

// One sequence's tree, and how what comes next is drawn (SamplingArgs).
struct GrowingTree {
    int64_t size;          // nodes that are wanted
    int64_t depth;         // levels
    int64_t width, count;  // nodes of a level that run, and children of each
    bool exact;            // children are what the model itself would choose (`choices`), else `likely`
    int64_t limit;         // tokens from here on are none of them
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

// The model's passes, each a level of all trees.
struct TreePasses {
    int64_t vocab, width;  // of a row of logits, of features (0: the model takes none)
    int64_t block_size;
    const float *logits, *features;        // after the last known row of each tree: [B, vocab], [B, width]
    float* input;                          // where the plan reads the features of each row's parent
    float *level_logits, *level_features;  // where it leaves those of a level, of the sum of all widths at most
};

// Tokens, parents (-1: the last known token) and path probabilities of the likeliest nodes, parents first.
using GrownTree = std::tuple<std::vector<int64_t>, std::vector<int64_t>, std::vector<double>>;

// The path probabilities of chains that could go on, each from its first token: shall they not?
using Ends = std::function<bool(const std::vector<std::vector<double>>&)>;

// `ends`, of chains only, is asked before each pass; empty: nobody is.
std::vector<GrownTree> grow_trees(Plan& plan, const TreePasses& passes, const std::vector<GrowingTree>& given, const Ends& ends);

}  // namespace sameseed
