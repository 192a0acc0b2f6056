// Sampling, above the loops of sampling_body.h. This part is the same for every instruction set.
//
// A row of logits (say 128k) is read once for the maxima of its chunks. After that, bounds allow most chunks to be
// skipped:
// - top-k: the k-th largest chunk maximum is a lower bound of the k-th largest logit;
// - top-p: tokens below (1 - p) of the mean weight are outside the nucleus; the others are put in buckets by weight;
// - noise: its bits give an upper bound, so logarithms are computed only for tokens that can still win.

#include "sampling.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <functional>
#include <limits>
#include <stdexcept>
#include <vector>

#include "isa.h"

namespace sameseed {

const SamplingLoops* sampling_portable();

namespace {

#include "sampling_body.h"

constexpr double infinity = std::numeric_limits<double>::infinity();

const SamplingLoops& loops() {
    try {
        return *instruction_set().sampling();
    } catch (const std::invalid_argument&) {  // invalid SAMESEED_ISA: the backend reports it
        return *sampling_portable();
    }
}

template <class X>
struct Row {
    const X* logits;
    int64_t vocab;
    double temperature, max;
    std::vector<double> maxima;  // of the chunks

    explicit Row(const SamplingArgs& args)
        : logits(static_cast<const X*>(args.logits)),
          vocab(args.vocab),
          temperature(args.temperature),
          maxima((args.vocab + sampling_chunk - 1) / sampling_chunk) {
        loops().maxima[args.wide](logits, vocab, maxima.data());
        max = -infinity;
        for (const double m : maxima) max = m <= max ? max : m;  // a NaN may stay or be replaced; is_finite() checks
    }
    bool is_finite() const {
        for (const double m : maxima)
            if (m != m) return false;
        return max > -infinity && max < infinity;
    }
    double scaled(double x) const { return (x - max) / temperature; }

    double weigh(double floor, double* weights) const {
        constexpr bool wide = sizeof(X) == sizeof(double);
        return loops().weigh[wide](logits, vocab, maxima.data(), max, temperature, floor, weights);
    }
    // The scaled logit. If it is below the floor, it is lowered by `less`; infinity excludes it.
    double lowered(double x, double floor, double less) const {
        const double value = scaled(x);
        return value >= floor ? value : value - less;
    }
    int64_t end_of(size_t chunk) const { return std::min<int64_t>(vocab, (chunk + 1) * sampling_chunk); }

    int64_t first_best() const {
        const size_t chunk = std::find(maxima.begin(), maxima.end(), max) - maxima.begin();
        int64_t t = chunk * sampling_chunk;
        while (static_cast<double>(logits[t]) != max) ++t;
        return t;
    }
};

// The k-th largest scaled logit. Scaling keeps the order, so this is the k-th largest logit, scaled.
template <class X>
double kth_largest(const Row<X>& row, int64_t k) {
    double bound = -infinity;  // at most the k-th largest logit, because k chunks have a logit >= bound
    if (k <= static_cast<int64_t>(row.maxima.size())) {
        std::vector<double> sorted = row.maxima;
        std::nth_element(sorted.begin(), sorted.begin() + (k - 1), sorted.end(), std::greater<>());
        bound = sorted[k - 1];
    }
    std::vector<double> best;
    for (size_t c = 0; c < row.maxima.size(); ++c) {
        if (row.maxima[c] < bound) continue;
        for (int64_t t = c * sampling_chunk; t < row.end_of(c); ++t)
            if (row.logits[t] >= bound) best.push_back(row.logits[t]);
    }
    std::nth_element(best.begin(), best.begin() + (k - 1), best.end(), std::greater<>());
    return row.scaled(best[k - 1]);
}

// The `count` largest scores, in descending order. Among equal scores, smaller tokens come first.
class Best {
   public:
    explicit Best(int64_t count) : count_(count) {}

    void add(int64_t token, double score) {
        const auto after = [](const Scored& a, const Scored& b) {
            return a.score != b.score ? a.score > b.score : a.token < b.token;
        };
        const Scored made{token, score};
        if (!kept_.empty() && static_cast<int64_t>(kept_.size()) == count_) {
            if (!after(made, kept_.back())) return;
            kept_.pop_back();
        }
        kept_.insert(std::upper_bound(kept_.begin(), kept_.end(), made, after), made);
        if (static_cast<int64_t>(kept_.size()) == count_) least_ = kept_.back().score;
    }

    double least() const { return least_; }  // smaller scores cannot be among the best
    int64_t first() const { return kept_.empty() ? -1 : kept_.front().token; }

    // Shares exp(score - largest score) / total, for at most `count` tokens. If `total` is 0, it is the sum over the
    // kept scores.
    std::vector<Choice> shares(int64_t count, double total = 0.0) const {
        std::vector<Choice> found;
        for (const Scored& s : kept_) found.push_back({s.token, std::exp(s.score - kept_.front().score)});
        if (total == 0.0)
            for (const Choice& c : found) total += c.share;
        for (Choice& c : found) c.share /= total;
        if (static_cast<int64_t>(found.size()) > count) found.resize(count);
        return found;
    }

   private:
    struct Scored {
        int64_t token;
        double score;
    };

    int64_t count_;
    std::vector<Scored> kept_;
    double least_ = -infinity;
};

// Searches for the largest scaled logits plus Gumbel noise.
class NoisySearch {
   public:
    // `ids`: the token whose noise each place of the row uses; null: the place itself.
    NoisySearch(uint64_t key, const int32_t* ids, int64_t count) : best(count), key_(key), ids_(ids) {}

    Best best;

    void consider(int64_t at, double value) {
        const uint64_t z = splitmix(key_, ids_ == nullptr ? at : ids_[at]);
        const int zeros = ~z == 0 ? 64 : __builtin_clzll(~z);
        if (value + bound(zeros) >= best.least()) best.add(at, value + gumbel(z));
    }

    // Whether one of these places, whose values are at most `value`, can still win. Their noise is checked in one loop.
    bool may_hold_winner(double value, int64_t first, int64_t count) const {
        const double least = best.least(), missing = (least - value) / log_2 - 2.0;
        int zeros = missing > most_zeros ? most_zeros : missing > 0.0 ? static_cast<int>(missing) : 0;
        while (zeros <= most_zeros && value + bound(zeros) < least) ++zeros;
        if (zeros > most_zeros) return false;
        if (zeros == 0) return true;
        const uint64_t rarest = ids_ == nullptr ? loops_.rarest(key_, first, count) : loops_.rarest_of(key_, ids_ + first, count);
        return rarest < uint64_t{1} << (64 - zeros);
    }

   private:
    static constexpr double log_2 = 0.6931471805599453;
    static constexpr int most_zeros = 52;

    static double gumbel(uint64_t z) {
        const double u = (static_cast<double>(z >> 11) + 0.5) * 0x1p-53;
        return -std::log(-std::log(std::min(u, 1.0 - 0x1p-53)));
    }

    // Upper bound of the noise if w = ~z has `zeros` leading zeros. Proof: w >= 2^(63 - zeros), and u <= ((z >> 11) +
    // 1) 2^-53, also after rounding. So 1 - u >= (w >> 11) 2^-53 >= 2^-(zeros + 1). With more than 52 zeros, the limit
    // of u gives 1 - u >= 2^-53. Since -log(u) >= 1 - u, the noise is at most -log(1 - u) <= (zeros + 1) log 2. The
    // error of the two logarithms, below 1e-13, is a small part of the margin 1e-9. Rounding is monotonic, so value +
    // noise <= value + bound also holds for the rounded sums.
    static double bound(int zeros) { return (std::min(zeros, most_zeros) + 1) * log_2 + 1e-9; }

    const SamplingLoops& loops_ = loops();
    uint64_t key_;
    const int32_t* ids_;
};

// Options of a search: scaled logits below `floor` are lowered by `less` (infinity: excluded), and places use the noise
// of `ids`.
struct Search {
    uint64_t key;
    double floor;
    double less = infinity;
    const int32_t* ids = nullptr;
};

template <class X>
Best draw(const Row<X>& row, const Search& how, int64_t count) {
    NoisySearch search(how.key, how.ids, count);
    const int64_t best = row.first_best();
    search.consider(best, 0.0);  // a good first score excludes most others
    for (size_t c = 0; c < row.maxima.size(); ++c) {
        const double most = row.lowered(row.maxima[c], how.floor, how.less);
        const int64_t first = c * sampling_chunk;
        if (most == -infinity || !search.may_hold_winner(most, first, row.end_of(c) - first)) continue;
        for (int64_t t = first; t < row.end_of(c); ++t) {
            const double value = row.lowered(row.logits[t], how.floor, how.less);
            if (t != best && value > -infinity) search.consider(t, value);
        }
    }
    return search.best;
}

// The border of the nucleus: tokens with a larger weight are inside, and so are the first `num_equal` tokens of equal
// weight.
struct Border {
    double weight;
    int64_t num_equal;
};

// The bucket of a weight in (0, 1]. There are 32 buckets per power of two; the largest weights come first.
size_t bucket_of(double weight) {
    int64_t bits, one;
    const double unit = 1.0;
    std::memcpy(&bits, &weight, sizeof(bits));
    std::memcpy(&one, &unit, sizeof(one));
    return static_cast<size_t>(std::max<int64_t>(0, one - bits) >> 47);
}

// The smallest set of largest weights whose sum reaches `target`. Buckets are added from the top, and only the bucket
// with the border is sorted. for_each(f) calls f(token, weight) for every weight >= `bound`.
template <class ForEach>
Border nucleus(const ForEach& for_each, double bound, double target) {
    std::vector<double> sums(bucket_of(bound) + 1);
    for_each([&](int64_t, double weight) { sums[bucket_of(weight)] += weight; });
    while (sums.back() == 0.0) sums.pop_back();  // the first bucket is not empty: it holds the largest weight, 1
    double reached = 0.0;
    size_t last = 0;
    while (last + 1 < sums.size() && reached + sums[last] < target) reached += sums[last++];
    std::vector<double> falling;
    for_each([&](int64_t, double weight) {
        if (bucket_of(weight) == last) falling.push_back(weight);
    });
    std::sort(falling.begin(), falling.end(), std::greater<>());
    size_t count = 0;
    while (count < falling.size() && (count == 0 || reached < target)) reached += falling[count++];
    const double weight = falling[count - 1];
    const auto above = std::lower_bound(falling.begin(), falling.end(), weight, std::greater<>()) - falling.begin();
    return {weight, static_cast<int64_t>(count) - above};
}

// The nucleus of a row: its border and the weights [V]. The weights of chunks below `least` are undefined.
struct Nucleus {
    const double* weights;
    double least;
    Border border;
};

// Calls f(token, weight) for each weight >= `bound`. Skips chunks below `least`, which have no such weights.
template <class X, class F>
void for_weights(const Row<X>& row, const double* weights, double bound, double least, F f) {
    for (size_t c = 0; c < row.maxima.size(); ++c) {
        if (row.scaled(row.maxima[c]) < least) continue;
        for (int64_t t = c * sampling_chunk; t < row.end_of(c); ++t)
            if (weights[t] >= bound) f(t, weights[t]);
    }
}

template <class X>
Nucleus nucleus_of(const Row<X>& row, double top_p, double floor) {
    thread_local std::vector<double> kept;  // reused, because new pages would cost more than the exponentials
    if (static_cast<int64_t>(kept.size()) < row.vocab) kept.resize(row.vocab);
    const double* weights = kept.data();
    const double total = row.weigh(floor, kept.data());
    const double bound = (1.0 - top_p) * total / static_cast<double>(row.vocab);
    // The bound as a logarithm, with a margin. Chunks that weigh() skipped are below it, so their tokens are not in the
    // nucleus.
    const double least = std::max({floor, negligible, std::log(bound) - 1e-9});
    const auto for_each = [&](auto f) { for_weights(row, weights, bound, least, f); };
    const Border border = nucleus(for_each, bound, top_p * total);
    return {weights, std::max(least, std::log(border.weight) - 1e-9), border};
}

template <class X>
Best draw_from_nucleus(const Row<X>& row, const SamplingArgs& args, double floor, int64_t count) {
    Nucleus found = nucleus_of(row, args.top_p, floor);
    Border& border = found.border;
    NoisySearch search(args.key, nullptr, count);
    for_weights(row, found.weights, border.weight, found.least, [&](int64_t token, double weight) {
        if (weight > border.weight || border.num_equal-- > 0) search.consider(token, row.scaled(row.logits[token]));
    });
    return search.best;
}

// The scaled logit below which min-p or top-k exclude tokens.
template <class X>
double floor_of(const Row<X>& row, const SamplingArgs& args) {
    return args.top_k > 0 && args.top_k < args.vocab ? std::max(args.floor, kth_largest(row, args.top_k)) : args.floor;
}

template <class X>
Best drawn(const Row<X>& row, const SamplingArgs& args, int64_t count) {
    const double floor = floor_of(row, args);
    return args.top_p < 1.0 ? draw_from_nucleus(row, args, floor, count) : draw(row, {args.key, floor}, count);
}

template <class X>
int64_t choose_from(const SamplingArgs& args, bool greedy) {
    const Row<X> row(args);
    if (!row.is_finite()) return -1;
    return greedy ? row.first_best() : drawn(row, args, 1).first();
}

template <class X>
std::vector<Choice> choices_from(const SamplingArgs& args, bool greedy, int64_t count) {
    const Row<X> row(args);
    if (!row.is_finite()) return {};
    if (!greedy) return drawn(row, args, std::max(count, share_among)).shares(count);
    Best best(count);
    for (size_t c = 0; c < row.maxima.size(); ++c) {
        if (row.scaled(row.maxima[c]) < best.least()) continue;
        for (int64_t t = c * sampling_chunk; t < row.end_of(c); ++t)
            if (row.logits[t] > -infinity) best.add(t, row.scaled(row.logits[t]));
    }
    return best.shares(count, row.weigh(-infinity, nullptr));
}

// Greedy: as choices_from. Sampled: truncation is soft, i.e. excluded tokens are lowered by `left_out`, because the
// target's nucleus may be larger than the draft's.
template <class X>
std::vector<Choice> likely_in(const SamplingArgs& args, bool greedy, const int32_t* ids, int64_t count) {
    if (greedy) return choices_from<X>(args, true, count);
    const Row<X> row(args);
    if (!row.is_finite()) return {};
    double floor = floor_of(row, args);
    if (args.top_p < 1.0) floor = nucleus_of(row, args.top_p, floor).least;
    return draw(row, {args.key, floor, left_out, ids}, std::max(count, share_among)).shares(count);
}

template <class X>
double probability_in(const SamplingArgs& args, int64_t token) {
    const Row<X> row(args);
    if (!row.is_finite()) return std::numeric_limits<double>::quiet_NaN();
    return exp_falling(std::max(nothing, row.scaled(row.logits[token]))) / row.weigh(-infinity, nullptr);
}

}  // namespace

int64_t choose(const SamplingArgs& args, bool greedy) {
    if (args.vocab < 1) throw std::invalid_argument("a row of logits must hold at least one token");
    return args.wide ? choose_from<double>(args, greedy) : choose_from<float>(args, greedy);
}

std::vector<Choice> choices(const SamplingArgs& args, bool greedy, int64_t count) {
    if (args.vocab < 1 || count < 1) throw std::invalid_argument("a row of logits and a count must be at least one token");
    return args.wide ? choices_from<double>(args, greedy, count) : choices_from<float>(args, greedy, count);
}

namespace {

// Calls `found_in` for each row and writes the tokens and shares that it returns.
template <class Found>
void for_rows(const SamplingArgs& args, int64_t num_rows, const int32_t* ids, int64_t count, int64_t* tokens, double* shares,
              Found found_in) {
    if (args.vocab < 1 || count < 1) throw std::invalid_argument("a row of logits and a count must be at least one token");
    SamplingArgs row = args;
    for (int64_t r = 0; r < num_rows; ++r) {
        row.logits = static_cast<const char*>(args.logits) + r * args.vocab * (args.wide ? sizeof(double) : sizeof(float));
        const std::vector<Choice> found = found_in(row);
        for (int64_t i = 0; i < count; ++i, ++tokens, ++shares) {
            const Choice c = i < static_cast<int64_t>(found.size()) ? found[i] : Choice{0, 0.0};
            *tokens = ids == nullptr || c.share == 0.0 ? c.token : ids[c.token];
            *shares = c.share;
        }
    }
}

}  // namespace

void likely(const SamplingArgs& args, bool greedy, int64_t num_rows, const int32_t* ids, int64_t count, int64_t* tokens,
            double* shares) {
    for_rows(args, num_rows, ids, count, tokens, shares, [&](const SamplingArgs& row) {
        return row.wide ? likely_in<double>(row, greedy, ids, count) : likely_in<float>(row, greedy, ids, count);
    });
}

void first_choices(const SamplingArgs& args, bool greedy, int64_t num_rows, const int32_t* ids, int64_t count, int64_t* tokens,
                   double* shares) {
    for_rows(args, num_rows, ids, count, tokens, shares, [&](const SamplingArgs& row) { return choices(row, greedy, count); });
}

double probability(const SamplingArgs& args, int64_t token) {
    if (token < 0 || token >= args.vocab) throw std::out_of_range("the token lies outside the row of logits");
    return args.wide ? probability_in<double>(args, token) : probability_in<float>(args, token);
}

}  // namespace sameseed
