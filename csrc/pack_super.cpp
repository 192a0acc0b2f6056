// Weights in super-blocks: packing the bits above the lowest four, and decoding rows to floats.

#include <cstring>

#include "ops.h"
#include "pack.h"
#include "tasks.h"

namespace sameseed {

// Four codes of a row are one word; `extra` bits of each lie together, those of later words above those of earlier ones.
void pack_high(const uint8_t* plain, uint8_t* high, int64_t outputs, int64_t depth, int64_t bits) {
    const int64_t blocks = round_up(outputs, block_outputs) / block_outputs, extra = bits - 4, part = 32 / extra;
    const int64_t block_bytes = depth / part * 128;
    const uint32_t mask = 0x01010101u * ((1u << extra) - 1);
    by_rows(blocks, depth * block_outputs, [&](int64_t begin, int64_t end) {
        std::memset(high + begin * block_bytes, 0, static_cast<size_t>((end - begin) * block_bytes));
        for (int64_t o = begin * block_outputs; o < std::min(end * block_outputs, outputs); o++)
            for (int64_t k = 0; k < depth; k += part) {
                uint32_t codes, packed = 0;
                for (int64_t i = 0; i < part; i += 4) {
                    std::memcpy(&codes, plain + o * depth + k + i, 4);
                    packed |= (codes >> 4 & mask) << i / 4 * extra;
                }
                std::memcpy(high + high_at(o, k, depth, part), &packed, 4);
            }
    });
}

void unpack_high(const uint8_t* high, uint8_t* plain, int64_t outputs, int64_t depth, int64_t bits) {
    const int64_t extra = bits - 4, part = 32 / extra;
    const uint32_t mask = 0x01010101u * ((1u << extra) - 1);
    by_rows(outputs, depth, [&](int64_t begin, int64_t end) {
        for (int64_t o = begin; o < end; o++)
            for (int64_t k = 0; k < depth; k += part) {
                uint32_t codes, packed;
                std::memcpy(&packed, high + high_at(o, k, depth, part), 4);
                for (int64_t i = 0; i < part; i += 4) {
                    std::memcpy(&codes, plain + o * depth + k + i, 4);
                    codes |= (packed >> i / 4 * extra & mask) << 4;
                    std::memcpy(plain + o * depth + k + i, &codes, 4);
                }
            }
    });
}

void decode_super_row(const Weight& w, int64_t o, float* out) {
    const int64_t part = super_part(w.format), supers = w.depth / super_columns, scale_bytes = bytes_of(w.scale_format);
    const bool two_bits = w.format == Format::q2_k;
    const int64_t extra = part == 16 ? 2 : 1, mask = (1 << extra) - 1, zero = w.format == Format::q6_k ? 32 : 0;
    const uint8_t* high = two_bits ? static_cast<const uint8_t*>(w.codes) : w.high;
    const int64_t block = o / block_outputs, in_block = o % block_outputs;
    const uint8_t* codes = static_cast<const uint8_t*>(w.codes) + block * w.depth / 8 * 128 + in_block * 4;
    const auto decode = kernels().decode[static_cast<int>(w.scale_format)];
    const auto scaled = [&](const void* scales, const int8_t* multiples, int64_t i) {
        float scale;
        const int64_t at = (block * supers + i * part / super_columns) * block_outputs + in_block;
        decode(static_cast<const char*>(scales) + at * scale_bytes, 1, &scale);
        const int64_t pair = block * (w.depth / part / 2) + i / 2;
        return scale * static_cast<float>(multiples[(pair * block_outputs + in_block) * 2 + i % 2]);
    };
    for (int64_t i = 0; i < w.depth / part; i++) {
        const float scale = scaled(w.scales, w.steps, i), least = w.minima ? scaled(w.least, w.minima, i) : 0.0f;
        for (int64_t k = i * part; k < (i + 1) * part; k++) {
            const uint8_t byte = two_bits ? 0 : codes[k / 8 * 128 + k % 4];
            int64_t code = k % 8 < 4 ? byte & 15 : byte >> 4;
            if (high) code |= (high[high_at(o, k, w.depth, part)] >> k % part / 4 * extra & mask) << (two_bits ? 0 : 4);
            out[k] = static_cast<float>(code - zero) * scale - least;
        }
    }
}

}  // namespace sameseed
