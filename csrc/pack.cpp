// Packing and unpacking of integer weights. Plain C++, because it runs once per weight and is limited by memory speed.

#include "pack.h"

#include <cstring>

#include "ops.h"
#include "tasks.h"

namespace sameseed {
namespace {

constexpr int64_t chunk = 64;  // columns at a time: one cache line of each of 32 rows

// The address of column k of output o; k is a multiple of 4 (bytes) or 8 (nibbles).
uint8_t* quad_at(uint8_t* packed, int64_t padded, bool nibbles, int64_t o, int64_t k) {
    const int64_t block = o / block_outputs * padded * block_outputs / (nibbles ? 2 : 1);
    return packed + block + (nibbles ? k / 8 : k / 4) * 128 + o % block_outputs * 4;
}

void pack_chunk(const PackArgs& a, int64_t padded, int64_t o, int64_t k, int64_t n) {
    uint8_t row[chunk];
    const int64_t given = o < a.outputs ? std::min(n, a.depth - k) : 0;
    const int64_t last = a.groups - 1;
    std::memset(row,
                a.zeros && o < a.outputs ? a.zeros[o * a.groups + last]
                : a.nibbles              ? 8
                                         : 0,
                sizeof row);  // K is padded only if there is one group
    if (given > 0) std::memcpy(row, a.plain + o * a.stride + k, static_cast<size_t>(given));
    uint8_t* out = quad_at(a.packed, padded, a.nibbles, o, k);
    uint32_t low, high;
    for (int64_t i = 0; i < n; i += a.nibbles ? 8 : 4, out += 128) {
        std::memcpy(&low, row + i, 4);
        if (a.nibbles) {
            std::memcpy(&high, row + i + 4, 4);
            low = (low & 0x0f0f0f0fu) | (high & 0x0f0f0f0fu) << 4;
        } else {
            low ^= 0x80808080u;
        }
        std::memcpy(out, &low, 4);
    }
}

}  // namespace

void pack_block(const PackArgs& a, int64_t block) {
    const int64_t padded = round_up(a.depth, 8);
    for (int64_t k = 0; k < padded; k += chunk)
        for (int64_t o = block * block_outputs; o < (block + 1) * block_outputs; o++)
            pack_chunk(a, padded, o, k, std::min(chunk, padded - k));
}

void pack_codes(const PackArgs& a) {
    const int64_t blocks = round_up(a.outputs, block_outputs) / block_outputs;
    by_rows(blocks, a.depth * block_outputs, [&](int64_t begin, int64_t end) {
        for (int64_t block = begin; block < end; block++) pack_block(a, block);
    });
}

void unpack_codes(const PackArgs& a, uint8_t* plain) {
    const int64_t padded = round_up(a.depth, 8);
    by_rows(a.outputs, padded, [&](int64_t begin, int64_t end) {
        for (int64_t o = begin; o < end; o++) {
            const uint8_t* in = quad_at(a.packed, padded, a.nibbles, o, 0);
            for (int64_t k = 0; k < a.depth; k++) {
                const uint8_t byte = a.nibbles ? in[k / 8 * 128 + k % 4] : in[k / 4 * 128 + k % 4];
                plain[o * a.stride + k] = static_cast<uint8_t>(!a.nibbles ? byte ^ 0x80 : k % 8 < 4 ? byte & 15 : byte >> 4);
            }
        }
    });
}

void decode_packed_row(const Weight& w, int64_t o, float* out) {
    const bool nested = w.format == Format::int8n, nibbles = w.format != Format::int8, table = w.format == Format::iq4_nl;
    const int64_t padded = round_up(w.depth, 8), groups = w.depth / w.group, scale_bytes = bytes_of(w.scale_format);
    const auto plane = [&](const void* codes) {
        return quad_at(static_cast<uint8_t*>(const_cast<void*>(codes)), padded, nibbles, o, 0);
    };
    const uint8_t *in = plane(w.codes), *low = w.low ? plane(w.low) : nullptr;
    const auto code_at = [&](const uint8_t* codes, int64_t k) -> int32_t {
        const uint8_t byte = nibbles ? codes[k / 8 * 128 + k % 4] : codes[k / 4 * 128 + k % 4];
        return !nibbles ? byte : k % 8 < 4 ? byte & 15 : byte >> 4;
    };
    for (int64_t g = 0; g < groups; g++) {
        const int64_t at = (o / block_outputs * groups + g) * block_outputs + o % block_outputs;
        float scale;
        kernels().decode[static_cast<int>(w.scale_format)](static_cast<const char*>(w.scales) + at * scale_bytes, 1, &scale);
        float least = 0.0f;
        if (w.least)
            kernels().decode[static_cast<int>(w.scale_format)](static_cast<const char*>(w.least) + at * scale_bytes, 1, &least);
        const int32_t zero = w.zeros ? w.zeros[at] : w.least ? 0 : w.high ? 16 : table || !nibbles ? 128 : 8;
        for (int64_t k = g * w.group; k < (g + 1) * w.group; k++) {
            int32_t code = table ? iq4_bytes[code_at(in, k)] : code_at(in, k);
            if (w.high) code |= (w.high[high_at(o, k, w.depth, 32)] >> k % 32 / 4 & 1) << 4;
            code -= zero;
            const float value = static_cast<float>(nested ? 16 * code + (low ? code_at(low, k) - 8 : 0) : code) * scale;
            out[k] = w.least ? value - least : value;
        }
    }
}

}  // namespace sameseed
