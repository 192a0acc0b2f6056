// Packing of fp8 and bf16 weights in pairs of columns, and decoding of float formats. Plain C++, because it runs once
// per weight.

#include <cstring>
#include <vector>

#include "ops.h"
#include "pack.h"
#include "tasks.h"

namespace sameseed {

namespace {

const float int4_values[16] = {-8, -7, -6, -5, -4, -3, -2, -1, 0, 1, 2, 3, 4, 5, 6, 7};
// Quantiles of the normal distribution (Dettmers et al., 2023, appendix E).
const float nf4_values[16] = {-1.0f,
                              -0.6961928009986877f,
                              -0.5250730514526367f,
                              -0.39491748809814453f,
                              -0.28444138169288635f,
                              -0.18477343022823334f,
                              -0.09105003625154495f,
                              0.0f,
                              0.07958029955625534f,
                              0.16093020141124725f,
                              0.24611230194568634f,
                              0.33791524171829224f,
                              0.44070982933044434f,
                              0.5626170039176941f,
                              0.7229568362236023f,
                              1.0f};
// One sign bit, two exponent bits, one mantissa bit (OCP Microscaling Formats 1.0).
const float mxfp4_values[16] = {0, 0.5f, 1, 1.5f, 2, 3, 4, 6, -0.0f, -0.5f, -1, -1.5f, -2, -3, -4, -6};

constexpr int64_t chunk = 64;  // columns at a time: one or two cache lines of each of 32 rows

template <class T>
T* pair_at(T* packed, int64_t padded, int64_t o, int64_t k) {  // address of output o, even column k
    return packed + o / block_outputs * padded * block_outputs + k * block_outputs + o % block_outputs * 2;
}

template <class T>
void pack_block(const T* plain, T* packed, int64_t outputs, int64_t depth, int64_t stride, int64_t block) {
    const int64_t padded = round_up(depth, 8);
    for (int64_t k = 0; k < padded; k += chunk)
        for (int64_t o = block * block_outputs; o < (block + 1) * block_outputs; o++) {
            const int64_t n = std::min(chunk, padded - k), given = o < outputs ? std::min(n, depth - k) : 0;
            T row[chunk] = {};
            if (given > 0) std::memcpy(row, plain + o * stride + k, static_cast<size_t>(given) * sizeof(T));
            T* out = pair_at(packed, padded, o, k);
            for (int64_t i = 0; i < n; i += 2, out += 2 * block_outputs) std::memcpy(out, row + i, 2 * sizeof(T));
        }
}

template <class T>
void unpack_row(const T* packed, T* out, int64_t depth, int64_t o) {
    const T* in = pair_at(packed, round_up(depth, 8), o, 0);
    for (int64_t k = 0; k < depth; k++) out[k] = in[k / 2 * 2 * block_outputs + k % 2];
}

}  // namespace

const float* nibble_values(Format format) {
    return format == Format::nf4 ? nf4_values : format == Format::mxfp4 ? mxfp4_values : int4_values;
}

void pack_pairs(const void* plain, void* packed, int64_t outputs, int64_t depth, int64_t stride, int64_t element) {
    const int64_t blocks = (outputs + block_outputs - 1) / block_outputs;
    by_rows(blocks, depth * block_outputs, [&](int64_t begin, int64_t end) {
        for (int64_t block = begin; block < end; block++)
            if (element == 1)
                pack_block(static_cast<const uint8_t*>(plain), static_cast<uint8_t*>(packed), outputs, depth, stride, block);
            else
                pack_block(static_cast<const uint16_t*>(plain), static_cast<uint16_t*>(packed), outputs, depth, stride, block);
    });
}

void unpack_pairs(const void* packed, void* plain, int64_t outputs, int64_t depth, int64_t element) {
    by_rows(outputs, depth, [&](int64_t begin, int64_t end) {
        for (int64_t o = begin; o < end; o++)
            if (element == 1)
                unpack_row(static_cast<const uint8_t*>(packed), static_cast<uint8_t*>(plain) + o * depth, depth, o);
            else
                unpack_row(static_cast<const uint16_t*>(packed), static_cast<uint16_t*>(plain) + o * depth, depth, o);
    });
}

void decode_float_row(const Weight& w, int64_t o, float* out) {
    const auto& decode = kernels().decode;
    const int64_t padded = round_up(w.depth, 8), groups = w.depth / w.group;
    std::vector<uint16_t> halves(static_cast<size_t>(w.depth));
    if (w.format == Format::nf4 || w.format == Format::mxfp4) {
        const float* values = nibble_values(w.format);
        const uint8_t* in = static_cast<const uint8_t*>(w.codes) + o / block_outputs * padded * 16 + o % block_outputs * 4;
        for (int64_t k = 0; k < w.depth; k++) out[k] = values[in[k / 8 * 128 + k % 4] >> (k % 8 < 4 ? 0 : 4) & 15];
    } else if (w.format == Format::bf16) {
        unpack_row(static_cast<const uint16_t*>(w.codes), halves.data(), w.depth, o);
        return decode[static_cast<int>(Format::bf16)](halves.data(), w.depth, out);
    } else {
        const bool wide = w.format == Format::fp8_e5m2;  // upper byte of an fp16; e4m3: the value times 2^-8
        std::vector<uint8_t> codes(static_cast<size_t>(w.depth));
        unpack_row(static_cast<const uint8_t*>(w.codes), codes.data(), w.depth, o);
        for (size_t k = 0; k < codes.size(); k++) {
            const uint32_t code = codes[k], sign = (code & 0x80u) << 8;
            halves[k] = static_cast<uint16_t>(wide                      ? code << 8
                                              : (code & 0x7fu) == 0x7fu ? sign | 0x7e00u
                                                                        : sign | (code & 0x7fu) << 7);
        }
        decode[static_cast<int>(Format::fp16)](halves.data(), w.depth, out);
        if (!wide)
            for (int64_t k = 0; k < w.depth; k++) out[k] *= 256.0f;
    }
    for (int64_t g = 0; g < groups; g++) {
        const int64_t at = (o / block_outputs * groups + g) * block_outputs + o % block_outputs;
        float scale;
        decode[static_cast<int>(w.scale_format)](static_cast<const char*>(w.scales) + at * bytes_of(w.scale_format), 1, &scale);
        for (int64_t k = g * w.group; k < (g + 1) * w.group; k++) out[k] *= scale;
    }
}

}  // namespace sameseed
