// Coupled sampling over one row of logits: the native form of sameseed/spec/sampling.py, which is the specification.

#pragma once

#include <cstdint>
#include <vector>

namespace sameseed {

struct SamplingArgs {
    const void* logits;  // [V], contiguous
    bool wide;           // float64 instead of float32
    int64_t vocab;
    double temperature;  // above 0; 1 for greedy
    double floor;        // scaled logits below it are out (the logarithm of min-p); -infinity: all may stay
    int64_t top_k;       // 0 or less, or V and more: off
    double top_p;        // 1: off
    uint64_t key;        // of the noise: sampling.py's noise_key(seed, position)
};

// The chosen token, or -1 if the largest logit is no finite number, or one is NaN.
int64_t choose(const SamplingArgs& args, bool greedy);

struct Choice {
    int64_t token;
    double share;
};

// The tokens that come first, at most `count`, the chosen one before all others; none where `choose` says -1. Shares of the
// exponentials: greedy of all logits, sampled of the logits plus noise of those that come first (at least `share_among`).
std::vector<Choice> choices(const SamplingArgs& args, bool greedy, int64_t count);

constexpr int64_t share_among = 8;

// `choices` for a tree, after each of `num_rows` rows [V] that lie behind each other, from args.logits on. `ids` [V]: the token
// that a place of a row stands for (a head's own vocabulary); null: its own number. What top-k, top-p and min-p leave out of a
// draft's distribution the target may still have: sampled, it comes `left_out` later. Writes tokens and shares [num_rows, count];
// where there is none, token 0 and share 0.
void likely(const SamplingArgs& args, bool greedy, int64_t num_rows, const int32_t* ids, int64_t count, int64_t* tokens,
            double* shares);

constexpr double left_out = 3.0;

// The same of `choices`: what the model itself would choose, its truncation as it is.
void first_choices(const SamplingArgs& args, bool greedy, int64_t num_rows, const int32_t* ids, int64_t count, int64_t* tokens,
                   double* shares);

// Probability of `token` at the temperature; floor, top-k, top-p and noise play no part.
double probability(const SamplingArgs& args, int64_t token);

constexpr int64_t sampling_chunk = 64;  // tokens that are looked at, or passed over, together

// The passes over whole rows, built once per instruction set. All give the same bits: a maximum and integers have no
// rounding, and the sum has 8 lanes whatever the width of a register.
struct SamplingLoops {
    // The largest logit of each chunk, NaN where the chunk holds one. [0]: float32, [1]: float64.
    void (*maxima[2])(const void* logits, int64_t vocab, double* maxima);
    // Sum of exp((x - max) / temperature) over the logits that lie at `floor` or above, once scaled. `weights` [V] takes the
    // terms (below the floor next to nothing), but for chunks that add nothing to the sum; null: they are not wanted.
    double (*weigh[2])(const void* logits, int64_t vocab, const double* maxima, double max, double temperature, double floor,
                       double* weights);
    // The least ~z over `count` tokens from `first` on, z being the generator's output: below it lies no noise's bound.
    uint64_t (*rarest)(uint64_t key, int64_t first, int64_t count);
    // The same over `count` tokens `ids`.
    uint64_t (*rarest_of)(uint64_t key, const int32_t* ids, int64_t count);
};

}  // namespace sameseed
