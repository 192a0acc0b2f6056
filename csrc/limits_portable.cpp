// The loops of limits.h in portable C++. Their speed depends on what the compiler makes of them.

#include <cmath>
#include <cstring>

#include "limits.h"

namespace sameseed {
namespace {

constexpr int width = 32;

// Returns `value`, but hides it from the compiler's optimizer.
template <class T>
T opaque(T value) {
    volatile T hidden = value;
    return hidden;
}

float run_int8(int64_t rounds) {
    int8_t x[width];
    uint32_t sum[width] = {};  // unsigned: a long run wraps
    for (int i = 0; i < width; i++) x[i] = opaque<int8_t>(-3);
    for (int64_t r = 0; r < rounds; r++) {
        const int weight = static_cast<uint8_t>(r);
        for (int i = 0; i < width; i++) sum[i] += static_cast<uint32_t>(weight * x[i]);
    }
    float all = 0;
    for (uint32_t s : sum) all += static_cast<float>(s);
    return all;
}

float run_fp32(int64_t rounds) {
    float sum[width] = {};
    const float a = opaque(0.5f), b = opaque(0.25f);
    for (int64_t r = 0; r < rounds; r++)
        for (int i = 0; i < width; i++) {
#ifdef __FP_FAST_FMAF
            sum[i] = std::fma(sum[i], a, b);
#else
            sum[i] = sum[i] * a + b;
#endif
        }
    float all = 0;
    for (float s : sum) all += s;
    return all;
}

uint64_t read(const char* data, int64_t bytes, int64_t ahead) {
    uint64_t sum[8] = {};
    for (int64_t at = 0; at < bytes; at += 64) {
        uint64_t line[8];
        std::memcpy(line, data + at, sizeof line);
#if defined(__GNUC__)
        __builtin_prefetch(data + at + ahead);
#endif
        for (int i = 0; i < 8; i++) sum[i] ^= line[i];
    }
    uint64_t all = 0;
    for (uint64_t s : sum) all ^= s;
    return all;
}

}  // namespace

LimitLoops limits_portable() { return {{"int8 in C++", 2.0 * width, run_int8}, {"fp32 in C++", 2.0 * width, run_fp32}, read}; }

}  // namespace sameseed
