// The hot loops of sampling, written so that the compiler vectorizes them. Included once per instruction set.

constexpr uint64_t golden = 0x9E3779B97F4A7C15;

// Output number `token` of the SplitMix64 stream `key` (Steele, Lea and Flood, 2014).
inline uint64_t splitmix(uint64_t key, int64_t token) {
    uint64_t z = (static_cast<uint64_t>(token) + 1) * golden + key;
    z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9;
    z = (z ^ z >> 27) * 0x94D049BB133111EB;
    return z ^ z >> 31;
}

constexpr double nothing = -708.0;    // exp(-708) is about the smallest normal number
constexpr double negligible = -80.0;  // 2^31 tokens of weight e^-80 add up to less than 1 ulp of 1

// exp(x) for -708 <= x <= 0 within 2 ulp; exactly 1 at 0. x = k log(2) + r. 2^k is made from bits. exp(r) is the Taylor
// series up to power 13, with odd and even powers summed separately; its error is below 2^-57 for |r| <= log(2) / 2.
inline double exp_falling(double x) {
    constexpr double shift = 0x1.8p52;  // adding it leaves the nearest integer in the low bits
    const double moved = x * 0x1.71547652b82fep0 + shift;
    const double k = moved - shift;
    const double r = (x - k * 0x1.62e42fee00000p-1) - k * 0x1.a39ef35793c76p-33;  // log(2) in two parts
    const double s = r * r;
    double odd = s * (1.0 / 6227020800) + 1.0 / 39916800;
    odd = odd * s + 1.0 / 362880;
    odd = odd * s + 1.0 / 5040;
    odd = odd * s + 1.0 / 120;
    odd = odd * s + 1.0 / 6;
    odd = odd * s + 1.0;
    double even = s * (1.0 / 479001600) + 1.0 / 3628800;
    even = even * s + 1.0 / 40320;
    even = even * s + 1.0 / 720;
    even = even * s + 1.0 / 24;
    even = even * s + 0.5;
    uint64_t bits;
    __builtin_memcpy(&bits, &moved, 8);
    bits = (bits + 1023) << 52;  // shifts out the sign and exponent of `moved`
    double power;
    __builtin_memcpy(&power, &bits, 8);
    return (1.0 + (odd * r + even * s)) * power;
}

template <class X>
double chunk_max(const X* x, int64_t count) {
    constexpr int64_t width = 16;
    X most[width];
    int32_t bad[width];
    for (int64_t l = 0; l < width; ++l) most[l] = -__builtin_inff(), bad[l] = 0;
    int64_t i = 0;
    for (; i + width <= count; i += width)
        for (int64_t l = 0; l < width; ++l) {
            most[l] = x[i + l] > most[l] ? x[i + l] : most[l];
            bad[l] |= x[i + l] != x[i + l];
        }
    for (; i < count; ++i) {
        most[0] = x[i] > most[0] ? x[i] : most[0];
        bad[0] |= x[i] != x[i];
    }
    for (int64_t l = 1; l < width; ++l) {
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
double weigh(const void* logits, int64_t vocab, const double* maxima, double max, double temperature, double floor,
             double* weights) {
    constexpr int64_t lanes = 8;
    const double least = floor > negligible ? floor : negligible, lowest = floor > nothing ? floor : nothing;
    double sums[lanes] = {};
    for (int64_t first = 0; first < vocab; first += sampling_chunk) {
        if ((maxima[first / sampling_chunk] - max) / temperature < least) continue;
        const int64_t count = vocab - first < sampling_chunk ? vocab - first : sampling_chunk;
        X read[sampling_chunk];
        for (int64_t i = count; i < sampling_chunk; ++i) read[i] = -__builtin_inff();
        __builtin_memcpy(read, static_cast<const X*>(logits) + first, count * sizeof(X));
        // Two loops, because the compiler would not vectorize a single one: it would branch around
        // exp_falling(nothing).
        double chunk[sampling_chunk];
        for (int64_t i = 0; i < sampling_chunk; ++i) {
            const double scaled = (static_cast<double>(read[i]) - max) / temperature;
            chunk[i] = scaled < lowest ? nothing : scaled;
        }
        for (int64_t i = 0; i < sampling_chunk; ++i) chunk[i] = exp_falling(chunk[i]);
        for (int64_t i = 0; i < sampling_chunk; i += lanes)
            for (int64_t l = 0; l < lanes; ++l) sums[l] += chunk[i + l];
        if (weights != nullptr) __builtin_memcpy(weights + first, chunk, count * sizeof(double));
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

inline uint64_t rarest_of(uint64_t key, const int32_t* ids, int64_t count) {
    uint64_t least = ~uint64_t{0};
    for (int64_t i = 0; i < count; ++i) {
        const uint64_t w = ~splitmix(key, ids[i]);
        least = w < least ? w : least;
    }
    return least;
}

constexpr SamplingLoops sampling_loops = {
    {chunk_maxima<float>, chunk_maxima<double>}, {weigh<float>, weigh<double>}, rarest, rarest_of};
