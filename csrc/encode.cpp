// Dense weights rounded to nearest and packed in one pass, as foretoken/formats/int4.py and int8.py define the codes.

#include <cmath>
#include <cstring>

#include "ops.h"
#include "pack.h"
#include "tasks.h"

namespace foretoken {
namespace {

constexpr float smallest = 0x1p-100f;  // groups below have scale 0

// To the nearest integer, halves to even; |v| < 2^22.
float rounded(float v) { return (v + 12582912.0f) - 12582912.0f; }

float clamped(float v, float low, float high) { return v < low ? low : v > high ? high : v; }

bool finite(const float* x, int64_t n) {
    uint32_t most = 0;
    for (int64_t i = 0; i < n; i++) {
        uint32_t bits;
        std::memcpy(&bits, x + i, 4);
        bits &= 0x7fffffffu;
        most = bits > most ? bits : most;
    }
    return most < 0x7f800000u;
}

// The scale as bfloat16 holds it; 0 or NaN where no codes are to be.
float stored_scale(float size, float steps, bool is_finite) {
    if (!is_finite) return NAN;
    if (size < smallest) return 0.0f;
    const float scale = size / steps;
    uint32_t bits;
    std::memcpy(&bits, &scale, 4);
    bits = (bits + 0x7fffu + (bits >> 16 & 1u)) & 0xffff0000u;
    float stored;
    std::memcpy(&stored, &bits, 4);
    return stored;
}

struct Group {
    float scale;
    uint8_t zero;
};

// One group of n weights as codes: int8 (with a float32 scale for a whole row, else bfloat16), int4 symmetric or not.
Group encode_group(const EncodeArgs& a, const float* x, int64_t n, uint8_t* codes) {
    float low = 0.0f, high = 0.0f;
    for (int64_t i = 0; i < n; i++) {
        low = x[i] < low ? x[i] : low;
        high = x[i] > high ? x[i] : high;
    }
    const bool is_finite = finite(x, n);
    const float most = high > -low ? high : -low;
    if (!a.nibbles && a.wide_scales) {
        const bool used = is_finite && most >= smallest;
        const float inverse = used ? 127.0f / most : 0.0f;
        for (int64_t i = 0; i < n; i++)
            codes[i] = static_cast<uint8_t>(used ? static_cast<int8_t>(clamped(rounded(x[i] * inverse), -127.0f, 127.0f)) : 0);
        return {used ? most / 127.0f : is_finite ? 0.0f : NAN, 0};
    }
    const float scale = !a.nibbles     ? stored_scale(most, 127.0f, is_finite)
                        : a.asymmetric ? stored_scale(high / 15.0f - low / 15.0f, 1.0f, is_finite)
                                       : stored_scale(most, 7.5f, is_finite);
    const bool used = scale > 0.0f;
    if (!a.nibbles) {
        for (int64_t i = 0; i < n; i++)
            codes[i] = static_cast<uint8_t>(used ? static_cast<int8_t>(clamped(rounded(x[i] / scale), -127.0f, 127.0f)) : 0);
        return {scale, 0};
    }
    const float zero = !a.asymmetric ? 8.0f : used ? clamped(rounded(-low / scale), 0.0f, 15.0f) : 0.0f;
    for (int64_t i = 0; i < n; i++)
        codes[i] = static_cast<uint8_t>(used ? clamped(rounded(x[i] / scale) + zero, 0.0f, 15.0f) : zero);
    return {scale, static_cast<uint8_t>(zero)};
}

void store_scale(const EncodeArgs& a, int64_t at, float scale) {
    if (a.wide_scales) {
        static_cast<float*>(a.scales)[at] = scale;
        return;
    }
    uint32_t bits;
    std::memcpy(&bits, &scale, 4);
    static_cast<uint16_t*>(a.scales)[at] = static_cast<uint16_t>(scale != scale ? 0x7fc0u : bits >> 16);  // already rounded
}

}  // namespace

void encode_packed(const EncodeArgs& a) {
    const int64_t padded = round_up(a.depth, 8), groups = a.depth / a.group;
    const int64_t blocks = round_up(a.outputs, block_outputs) / block_outputs;
    const int64_t block_bytes = padded * block_outputs / (a.nibbles ? 2 : 1), row_bytes = a.stride * bytes_of(a.source);
    const auto decode = kernels().decode[static_cast<int>(a.source)];
    by_rows(blocks, a.depth * block_outputs, [&](int64_t begin, int64_t end) {
        float* row = scratch(rows_area, a.depth);
        uint8_t* codes = reinterpret_cast<uint8_t*>(scratch(packed_area, block_outputs * (a.depth + groups) / 4 + 16));
        uint8_t* zeros = codes + block_outputs * a.depth;
        for (int64_t block = begin; block < end; block++) {
            const int64_t first = block * block_outputs, count = std::min(block_outputs, a.outputs - first);
            for (int64_t o = 0; o < block_outputs; o++) {
                if (o < count) decode(static_cast<const char*>(a.weight) + (first + o) * row_bytes, a.depth, row);
                for (int64_t g = 0; g < groups; g++) {
                    const int64_t at = (block * groups + g) * block_outputs + o;
                    Group made{0.0f, 0};
                    if (o < count) made = encode_group(a, row + g * a.group, a.group, codes + o * a.depth + g * a.group);
                    store_scale(a, at, made.scale);
                    if (a.asymmetric) a.zeros[at] = zeros[o * groups + g] = made.zero;
                }
            }
            pack_block({codes, a.packed + block * block_bytes, a.asymmetric ? zeros : nullptr, count, a.depth, groups, a.depth,
                        a.nibbles, static_cast<uint8_t>(a.nibbles ? 8 : 0)},
                       0);
        }
    });
}

}  // namespace foretoken
