// Draft trees, with all levels in one call. One pass of the plan runs one level of all trees; its results make the next
// level.

#include "grow.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <stdexcept>

#include "sampling.h"

namespace sameseed {
namespace {

constexpr int64_t most_places = 64;  // the ancestors of a row must fit into one 64-bit mask

// The candidate nodes of a tree in the order in which they were added, so parents come before their children.
class Tree {
   public:
    struct Node {
        int64_t token, parent, row;  // row: the parent's row among the tree's rows of the pass
        double score;                // log probability of the path
        bool ended;
        uint64_t mask;  // cache places of the node and its ancestors; 0: the node did not run
    };

    Node& operator[](int64_t i) { return nodes_[i]; }
    int64_t num_places() const { return num_places_; }

    void begin_level() { level_ = count(); }
    void add(int64_t token, int64_t parent, int64_t row, double log_prob, bool ended) {
        const double score = log_prob + (parent < 0 ? 0.0 : nodes_[parent].score);
        if (score > -INFINITY) nodes_.push_back({token, parent, row, score, ended, 0});
    }

    // Chooses at most `width` nodes of the last level to run next, likeliest first. They must be among the tree's
    // `size` likeliest nodes. Gives each of them a place in the cache.
    std::vector<int64_t> expand(int64_t width, int64_t size) {
        std::vector<int64_t> chosen;
        if (count() > size) {
            for (const int64_t i : likeliest(size))
                if (i >= level_ && !nodes_[i].ended) chosen.push_back(i);
        } else {
            for (int64_t i = level_; i < count(); ++i)
                if (!nodes_[i].ended) chosen.push_back(i);
        }
        const int64_t room = std::max<int64_t>(0, std::min(width, most_places - num_places_));
        std::sort(chosen.begin(), chosen.end(), [&](int64_t a, int64_t b) { return before(a, b); });
        if (static_cast<int64_t>(chosen.size()) > room) chosen.resize(room);
        for (const int64_t i : chosen) {
            const int64_t parent = nodes_[i].parent;
            nodes_[i].mask = (parent < 0 ? 0 : nodes_[parent].mask) | uint64_t{1} << num_places_++;
        }
        return chosen;
    }

    // The path probabilities of the nodes on the path from the root to node i.
    std::vector<double> path(int64_t i) const {
        std::vector<double> found;
        for (; i >= 0; i = nodes_[i].parent) found.push_back(std::exp(nodes_[i].score));
        std::reverse(found.begin(), found.end());
        return found;
    }

    GrownTree best(int64_t size) const {
        GrownTree found;
        auto& [tokens, parents, sure] = found;
        const std::vector<int64_t> kept = likeliest(size);
        for (const int64_t i : kept) {
            const Node& node = nodes_[i];
            tokens.push_back(node.token);
            parents.push_back(node.parent < 0 ? -1 : std::lower_bound(kept.begin(), kept.end(), node.parent) - kept.begin());
            sure.push_back(std::exp(node.score));
        }
        return found;
    }

   private:
    int64_t count() const { return static_cast<int64_t>(nodes_.size()); }
    bool before(int64_t a, int64_t b) const {  // among equal scores, the node that was added first
        return nodes_[a].score != nodes_[b].score ? nodes_[a].score > nodes_[b].score : a < b;
    }
    std::vector<int64_t> likeliest(int64_t size) const {
        std::vector<int64_t> all(nodes_.size());
        for (int64_t i = 0; i < count(); ++i) all[i] = i;
        if (count() > size) {
            std::nth_element(all.begin(), all.begin() + size, all.end(), [&](int64_t a, int64_t b) { return before(a, b); });
            all.resize(size);
            std::sort(all.begin(), all.end());
        }
        return all;
    }

    std::vector<Node> nodes_;
    int64_t level_ = 0, num_places_ = 0;
};

// A tree with nodes that ran in the last pass. Its rows of that pass begin at row `first`.
struct Running {
    int64_t tree, first;
    std::vector<int64_t> nodes;
};

void add_children(Tree& tree, const Running& running, const GrowingTree& how, int64_t level, const float* logits, int64_t vocab) {
    const int64_t rows = static_cast<int64_t>(running.nodes.size());
    std::vector<int64_t> tokens(rows * how.count);
    std::vector<double> shares(rows * how.count);
    SamplingArgs args{logits + running.first * vocab, false, vocab, how.temperature, how.floor, how.top_k, how.top_p, 0};
    if (!how.greedy) args.key = how.keys.at(level);
    (how.exact ? first_choices : likely)(args, how.greedy, rows, how.ids, how.count, tokens.data(), shares.data());
    tree.begin_level();
    if (how.exact && tokens[0] >= how.limit) return;  // a chain ends before a token that cannot be used
    for (int64_t i = 0; i < rows * how.count; ++i) {
        if (tokens[i] >= how.limit) continue;
        const bool leaf = how.exact && i > 0, unsure = shares[i] < how.least;
        if (leaf && unsure) continue;
        const bool ended = leaf || unsure || std::find(how.ending.begin(), how.ending.end(), tokens[i]) != how.ending.end();
        tree.add(tokens[i], running.nodes[i / how.count], i / how.count, std::log(shares[i]), ended);
    }
}

// The rows of a level, laid out as in sameseed/batch.py.
struct Level {
    std::vector<int32_t> token_ids, positions, slots, row_offsets{0}, kv_lens, logit_rows;
    std::vector<int64_t> masks;
    std::vector<const std::vector<int32_t>*> blocks;

    void add(const GrowingTree& how, Tree& tree, const std::vector<int64_t>& nodes, int64_t block_size) {
        int64_t row = how.num_cached + tree.num_places() - static_cast<int64_t>(nodes.size());
        for (const int64_t i : nodes) {
            const Tree::Node& node = tree[i];
            token_ids.push_back(node.token);
            positions.push_back(how.num_cached + __builtin_popcountll(node.mask) - 1);
            slots.push_back(how.blocks.at(row / block_size) * block_size + row % block_size);
            logit_rows.push_back(logit_rows.size());
            masks.push_back(static_cast<int64_t>(node.mask));
            ++row;
        }
        row_offsets.push_back(token_ids.size());
        kv_lens.push_back(how.num_cached);
        blocks.push_back(&how.blocks);
    }

    void run(Plan& plan, const TreePasses& passes) const {
        size_t stride = 0;
        for (const auto* own : blocks) stride = std::max(stride, own->size());
        std::vector<int32_t> tables(stride * blocks.size());
        for (size_t b = 0; b < blocks.size(); ++b) std::copy(blocks[b]->begin(), blocks[b]->end(), tables.begin() + b * stride);
        const int64_t rows = static_cast<int64_t>(token_ids.size());
        plan.run({rows, static_cast<int64_t>(blocks.size()), rows, static_cast<int64_t>(stride), token_ids.data(),
                  positions.data(), positions.data(), slots.data(), row_offsets.data(), kv_lens.data(), tables.data(),
                  masks.data(), logit_rows.data(), passes.level_logits, passes.level_features});
    }
};

}  // namespace

std::vector<GrownTree> grow_trees(Plan& plan, const TreePasses& passes, const std::vector<GrowingTree>& given, const Ends& ends) {
    std::vector<Tree> trees(given.size());
    std::vector<Running> running;
    for (size_t i = 0; i < given.size(); ++i) running.push_back({static_cast<int64_t>(i), static_cast<int64_t>(i), {-1}});
    const float *logits = passes.logits, *features = passes.features;
    for (int64_t level = 0;; ++level) {
        Level next;
        std::vector<Running> going;
        for (const Running& r : running) {
            const GrowingTree& how = given[r.tree];
            Tree& tree = trees[r.tree];
            add_children(tree, r, how, level, logits, passes.vocab);
            const std::vector<int64_t> nodes = tree.expand(level + 1 < how.depth ? how.width : 0, how.size);
            if (nodes.empty()) continue;
            const int64_t first = static_cast<int64_t>(next.token_ids.size());
            for (size_t i = 0; i < nodes.size(); ++i)
                std::memcpy(passes.input + (first + i) * passes.width, features + (r.first + tree[nodes[i]].row) * passes.width,
                            static_cast<size_t>(passes.width) * sizeof(float));
            next.add(how, tree, nodes, passes.block_size);
            going.push_back({r.tree, first, nodes});
        }
        running = std::move(going);
        if (running.empty()) break;
        if (ends) {
            std::vector<std::vector<double>> paths;
            for (const Running& r : running) paths.push_back(trees[r.tree].path(r.nodes.front()));
            if (ends(paths)) break;
        }
        next.run(plan, passes);
        logits = passes.level_logits;
        features = passes.level_features;
    }
    std::vector<GrownTree> grown;
    for (size_t i = 0; i < given.size(); ++i) grown.push_back(trees[i].best(given[i].size));
    return grown;
}

}  // namespace sameseed
