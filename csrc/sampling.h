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
    double floor;        // scaled logits below it are excluded (the logarithm of min-p); -infinity: none are
    int64_t top_k;       // 0 or less, or V and more: off
    double top_p;        // 1: off
    uint64_t key;        // key of the noise: sampling.py's noise_key(seed, position)
};

// The chosen token, or -1 if the largest logit is not finite or any logit is NaN.
int64_t choose(const SamplingArgs& args, bool greedy);

struct Choice {
    int64_t token;
    double share;
};

// The best tokens, at most `count`, the chosen one first; empty if `choose` returns -1. A greedy share is the token's
// part of the exponentials of all logits. A sampled share is its part of the exponentials of logit plus noise, summed
// over the best max(count, share_among) tokens.
std::vector<Choice> choices(const SamplingArgs& args, bool greedy, int64_t count);

constexpr int64_t share_among = 8;

// `choices` for draft trees, for each of `num_rows` consecutive rows [V] from args.logits on. `ids` [V] maps a place of
// a row to a token (for a draft head with its own vocabulary); null: the place is the token. The target may still
// choose tokens that top-k, top-p and min-p exclude from the draft's distribution. When sampling, their scaled logits
// are therefore lowered by `left_out` instead of excluded. Writes tokens and shares [num_rows, count]; missing entries
// get token 0 and share 0.
void likely(const SamplingArgs& args, bool greedy, int64_t num_rows, const int32_t* ids, int64_t count, int64_t* tokens,
            double* shares);

constexpr double left_out = 3.0;

// The same as `likely`, but top-k, top-p and min-p exclude tokens, as in `choices`: this is what the model itself would
// choose.
void first_choices(const SamplingArgs& args, bool greedy, int64_t num_rows, const int32_t* ids, int64_t count, int64_t* tokens,
                   double* shares);

// Probability of `token` at the temperature. Ignores floor, top-k, top-p and noise.
double probability(const SamplingArgs& args, int64_t token);

constexpr int64_t sampling_chunk = 64;  // tokens that are examined, or skipped, together

// The loops over whole rows, built once per instruction set. All give the same bits: maxima and integers are not
// rounded, and the sum always has 8 lanes, whatever the register width.
struct SamplingLoops {
    // The largest logit of each chunk, or NaN if the chunk has a NaN. [0]: float32, [1]: float64.
    void (*maxima[2])(const void* logits, int64_t vocab, double* maxima);
    // Sum of exp((x - max) / temperature) over the logits whose scaled value is at least `floor`. The terms are stored
    // in `weights` [V] unless it is null. Terms below the floor are about 0; chunks that add nothing to the sum are not
    // stored.
    double (*weigh[2])(const void* logits, int64_t vocab, const double* maxima, double max, double temperature, double floor,
                       double* weights);
    // The smallest ~z over `count` tokens from `first` on, where z is the generator's output. The smallest ~z belongs
    // to the largest noise.
    uint64_t (*rarest)(uint64_t key, int64_t first, int64_t count);
    // The same over the `count` tokens in `ids`.
    uint64_t (*rarest_of)(uint64_t key, const int32_t* ids, int64_t count);
};

}  // namespace sameseed
