// Quantizes dense weights (round to nearest) and packs them in one pass. sameseed/formats/int4.py, int8.py and int8n.py
// specify the codes.

#include <algorithm>
#include <cmath>
#include <cstring>

#include "ops.h"
#include "pack.h"
#include "tasks.h"

namespace sameseed {
namespace {

constexpr float smallest = 0x1p-100f;  // groups whose magnitudes are below it get scale 0

int32_t bits_of(float x) {
    int32_t bits;
    std::memcpy(&bits, &x, 4);
    return bits;
}

// Rounds |v| < 2^22 to the nearest integer, halves to even. After adding 1.5 * 2^23, the low bits of the fraction are
// the integer.
int32_t rounded(float v) { return bits_of(v + 12582912.0f) - 0x4b400000; }

// Here and below, integers are compared and not floats, because compilers can vectorize integer comparisons without
// -ffast-math (float comparisons must respect NaN).
int32_t clamped(int32_t v, int32_t low, int32_t high) { return v < low ? low : v > high ? high : v; }

// The smallest and the largest of n numbers and 0, and whether all numbers are finite.
struct Range {
    float low, high;
    bool finite;
};

Range range_of(const float* x, int64_t n) {
    int32_t low = 0, high = 0;
    for (int64_t i = 0; i < n; i++) {
        const int32_t bits = bits_of(x[i]), key = bits ^ (bits >> 31 & 0x7fffffff);  // ordered like the numbers
        low = key < low ? key : low;
        high = key > high ? key : high;
    }
    Range range{0.0f, 0.0f, high < 0x7f800000 && low > ~0x7f800000};
    low ^= low >> 31 & 0x7fffffff;
    std::memcpy(&range.low, &low, 4);
    std::memcpy(&range.high, &high, 4);
    return range;
}

// The scale size / steps, rounded to bfloat16. 0 if the group is too small, NaN if it is not finite; then all codes
// mean zero.
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

// Quantizes a group of n weights. Codes are int8 (with a float32 scale for a whole row, else bfloat16), int4 (symmetric
// or asymmetric), or int8n plus 136, so that each half of the byte is a code for pack_block.
Group encode_group(const EncodeArgs& a, const float* x, int64_t n, uint8_t* codes) {
    const auto [low, high, is_finite] = range_of(x, n);
    const float most = high > -low ? high : -low;
    if (!a.nibbles && a.wide_scales) {
        const bool used = is_finite && most >= smallest;
        if (used) {
            const float inverse = 127.0f / most;
            for (int64_t i = 0; i < n; i++) codes[i] = static_cast<uint8_t>(clamped(rounded(x[i] * inverse), -127, 127));
        } else {
            std::memset(codes, 0, static_cast<size_t>(n));
        }
        return {used ? most / 127.0f : is_finite ? 0.0f : NAN, 0};
    }
    const float longest = high / 119.0f > -low / 128.0f ? high / 119.0f : -low / 128.0f;  // int8n
    const float scale = a.low          ? stored_scale(longest, 1.0f, is_finite)
                        : !a.nibbles   ? stored_scale(most, 127.0f, is_finite)
                        : a.asymmetric ? stored_scale(high / 15.0f - low / 15.0f, 1.0f, is_finite)
                                       : stored_scale(most, 7.5f, is_finite);
    const bool used = scale > 0.0f;
    const int32_t zero = a.low ? 136 : !a.nibbles ? 0 : !a.asymmetric ? 8 : used ? clamped(rounded(-low / scale), 0, 15) : 0;
    const int32_t least = a.low ? 8 : a.nibbles ? 0 : -127, greatest = a.low ? 255 : a.nibbles ? 15 : 127;
    if (used)
        for (int64_t i = 0; i < n; i++) codes[i] = static_cast<uint8_t>(clamped(rounded(x[i] / scale) + zero, least, greatest));
    else
        std::memset(codes, zero, static_cast<size_t>(n));
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
            PackArgs plane{
                codes,    a.packed + block * block_bytes, a.asymmetric ? zeros : nullptr, count, a.depth, groups, a.depth,
                a.nibbles};
            if (a.low) {  // packing uses the lower half of each byte
                plane.packed = a.low + block * block_bytes;
                pack_block(plane, 0);
                plane.packed = a.packed + block * block_bytes;
                for (int64_t i = 0; i < count * a.depth; i++) codes[i] = static_cast<uint8_t>(codes[i] >> 4);
            }
            pack_block(plane, 0);
        }
    });
}

}  // namespace sameseed
