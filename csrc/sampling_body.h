// The hot loops of sampling, written so that the compiler turns them into vectors. Included once per instruction set.

constexpr uint64_t golden = 0x9E3779B97F4A7C15;

// SplitMix64 (Steele, Lea and Flood, 2014): output number `token` of the stream `key`.
inline uint64_t splitmix(uint64_t key, int64_t token) {
    uint64_t z = (static_cast<uint64_t>(token) + 1) * golden + key;
    z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9;
    z = (z ^ z >> 27) * 0x94D049BB133111EB;
    return z ^ z >> 31;
}

// exp(x) for x <= 0 within 1.5 units of the last place: 2^k by bits, the rest by Taylor's series to the 13th power (its error
// is below 2^-57 for |r| <= log(2) / 2). Exactly 1 at 0, and 0 from -708 down, where results would be denormal.
inline double exp_falling(double x) {
    constexpr double shift = 0x1.8p52;  // adding it leaves the nearest integer in the low bits
    const double moved = x * 0x1.71547652b82fep0 + shift;
    const double k = moved - shift;
    const double r = (x - k * 0x1.62e42fee00000p-1) - k * 0x1.a39ef35793c76p-33;  // log(2) in two parts
    double p = 1.0 / 6227020800;
    p = p * r + 1.0 / 479001600;
    p = p * r + 1.0 / 39916800;
    p = p * r + 1.0 / 3628800;
    p = p * r + 1.0 / 362880;
    p = p * r + 1.0 / 40320;
    p = p * r + 1.0 / 5040;
    p = p * r + 1.0 / 720;
    p = p * r + 1.0 / 120;
    p = p * r + 1.0 / 24;
    p = p * r + 1.0 / 6;
    p = p * r + 0.5;
    p = p * r + 1.0;
    p = p * r + 1.0;
    uint64_t bits;
    __builtin_memcpy(&bits, &moved, 8);
    bits = (bits + 1023) << 52;  // the sign and exponent of `moved` leave at the top
    double power;
    __builtin_memcpy(&power, &bits, 8);
    const double e = p * power;
    return x < -708.0 ? 0.0 : e;
}

template <class X>
double chunk_max(const X* x, int64_t count) {
    constexpr int64_t lanes = 16;
    X most[lanes];
    int32_t bad[lanes];
    for (int64_t l = 0; l < lanes; ++l) most[l] = -__builtin_inff(), bad[l] = 0;
    int64_t i = 0;
    for (; i + lanes <= count; i += lanes)
        for (int64_t l = 0; l < lanes; ++l) {
            most[l] = x[i + l] > most[l] ? x[i + l] : most[l];
            bad[l] |= x[i + l] != x[i + l];
        }
    for (; i < count; ++i) {
        most[0] = x[i] > most[0] ? x[i] : most[0];
        bad[0] |= x[i] != x[i];
    }
    for (int64_t l = 1; l < lanes; ++l) {
        most[0] = most[l] > most[0] ? most[l] : most[0];
        bad[0] |= bad[l];
    }
    return bad[0] ? __builtin_nan("") : static_cast<double>(most[0]);
}

template <class X>
void chunk_maxima(const void* logits, int64_t vocab, double* maxima) {
    const X* x = static_cast<const X*>(logits);
    for (int64_t first = 0; first < vocab; first += sampling_chunk)
        *maxima++ = chunk_max(x + first, vocab - first < sampling_chunk ? vocab - first : sampling_chunk);
}

template <class X>
double weigh(const void* logits, int64_t vocab, const double* maxima, double max, double temperature, double floor) {
    constexpr double negligible = -80.0;  // 2^31 tokens of e^-80 are less than a unit in the last place of 1
    constexpr int64_t lanes = 8;
    const double least = floor > negligible ? floor : negligible;
    double sums[lanes] = {};
    double weights[sampling_chunk];
    for (int64_t first = 0, c = 0; first < vocab; first += sampling_chunk, ++c) {
        if ((maxima[c] - max) / temperature < least) continue;
        const X* x = static_cast<const X*>(logits) + first;
        const int64_t count = vocab - first < sampling_chunk ? vocab - first : sampling_chunk;
        for (int64_t i = 0; i < count; ++i) {
            const double scaled = (static_cast<double>(x[i]) - max) / temperature;
            const double weight = exp_falling(scaled);
            weights[i] = scaled < floor ? 0.0 : weight;
        }
        for (int64_t i = count; i < sampling_chunk; ++i) weights[i] = 0.0;
        for (int64_t i = 0; i < sampling_chunk; i += lanes)
            for (int64_t l = 0; l < lanes; ++l) sums[l] += weights[i + l];
    }
    return ((sums[0] + sums[4]) + (sums[2] + sums[6])) + ((sums[1] + sums[5]) + (sums[3] + sums[7]));
}

inline uint64_t rarest(uint64_t key, int64_t first, int64_t count) {
    uint64_t least = ~uint64_t{0};
    for (int64_t i = 0; i < count; ++i) {
        const uint64_t w = ~splitmix(key, first + i);
        least = w < least ? w : least;
    }
    return least;
}

constexpr SamplingLoops sampling_loops = {{chunk_maxima<float>, chunk_maxima<double>}, {weigh<float>, weigh<double>}, rarest};
