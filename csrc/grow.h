// Draft trees that a draft model grows level by level (EAGLE-2), with all levels in one call. A chain is a tree of
// width 1; its siblings are leaves. sameseed/drafters has the specification: which nodes a tree keeps, which nodes run
// next and their places in the cache (_tree.py, eagle.py), and how a chain ends (_chains.py).

#pragma once

#include <cstdint>
#include <functional>
#include <tuple>
#include <vector>

#include "plan.h"

namespace sameseed {

// The tree of one sequence, and the parameters for drawing its tokens (SamplingArgs).
struct GrowingTree {
    int64_t size;          // number of nodes wanted
    int64_t depth;         // number of levels
    int64_t width, count;  // nodes per level that run through the model; children of each
    bool exact;            // a chain of what the model itself chooses (`first_choices`), with leaves; else `likely`
    int64_t limit;         // tokens >= limit are not used
    double least;          // no node follows a token of a lower probability; siblings below it are left out
    bool greedy;
    double temperature, floor;
    int64_t top_k;
    double top_p;
    std::vector<uint64_t> keys;   // keys of the noise, by level
    const int32_t* ids;           // target tokens of a draft head's own vocabulary, or null
    std::vector<int64_t> ending;  // tokens that end the sequence, so they get no children
    int64_t num_cached;           // cached rows of the sequence; nodes are stored after them
    std::vector<int32_t> blocks;
};

// The buffers of the draft model's passes. Each pass runs one level of all trees.
struct TreePasses {
    int64_t vocab, width;  // length of a row of logits, of features (0: the model takes no features)
    int64_t block_size;
    const float *logits, *features;        // for the last known row of each tree: [B, vocab], [B, width]
    float* input;                          // the plan reads the features of each row's parent here
    float *level_logits, *level_features;  // the plan writes a level's results here; rows: at most the sum of widths
};

// Tokens, parents (-1: the last known token) and path probabilities of the likeliest nodes. Parents come before
// children.
using GrownTree = std::tuple<std::vector<int64_t>, std::vector<int64_t>, std::vector<double>>;

// Decides whether all chains end now. Its argument: for each chain that could go on, the path probabilities of its
// tokens, first token first.
using Ends = std::function<bool(const std::vector<std::vector<double>>&)>;

// Grows the trees. `ends` is for chains only and is called before each pass; if empty, chains grow to their full depth.
std::vector<GrownTree> grow_trees(Plan& plan, const TreePasses& passes, const std::vector<GrowingTree>& given, const Ends& ends);

}  // namespace sameseed
