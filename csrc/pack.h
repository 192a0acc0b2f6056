// Layouts of packed weights. A block has 32 outputs, and a step of the product reads whole cache lines in memory order:
//
//   nibbles  [O/32][K/8][2][16 outputs][4]  byte j: codes of columns j (low half) and j + 4 (high half) of the step
//   bytes    [O/32][K/4][2][16 outputs][4]  int8 code + 128
//   planes   two arrays laid out as nibbles (int8n): the high and the low halves of code + 136
//   high     [O/32][K/P][2][16 outputs][4]  bits of codes above the lowest four; P = 32 columns if one bit, 16 if two;
//            byte j has the bits of columns j, j + 4, j + 8, ..., starting at its lowest bits
//   steps    int8 [O/32][K/2P][2][16 outputs][2]: the steps of two sub-blocks side by side; minima likewise
//   pairs    [O/32][K/2][32 outputs][2]     fp8 codes, or bf16 numbers
//   scales   [O/32][K/G][32], zeros uint8 [O/32][K/G][32]
//
// O is padded to a multiple of 32. If a row has one group, K is padded to a multiple of 8. Padding has codes that mean
// zero.

#pragma once

#include "linear.h"

namespace sameseed {

// Converts codes [O, K] (rows `stride` bytes apart; int4 and nf4 as uint8 0..15, or int8) to blocks and back. `zeros`
// [O, K/G] are the codes that mean zero; null: 8 for nibbles, 0 for bytes.
struct PackArgs {
    const uint8_t* plain;
    uint8_t* packed;
    const uint8_t* zeros;
    int64_t outputs, depth, groups, stride;
    bool nibbles;
};
void pack_codes(const PackArgs& args);
void unpack_codes(const PackArgs& args, uint8_t* plain);

void pack_block(const PackArgs& args, int64_t block);

// Encodes and packs weights [O, K] (fp32, bf16 or fp16; rows `stride` elements apart). The bits are those of encoding
// in sameseed/formats and then packing. Scales are float32 (`wide_scales`) or bfloat16.
struct EncodeArgs {
    const void* weight;
    Format source;
    int64_t stride, outputs, depth, group;
    bool nibbles, asymmetric, wide_scales;
    uint8_t* packed;
    void* scales;
    uint8_t* zeros;  // or null
    uint8_t* low;    // int8n: the plane of low nibbles (`packed` is the plane of high nibbles); else null
};
void encode_packed(const EncodeArgs& args);

// Decodes row `o` of a packed weight with a scale per group to floats [K]: (code - zero) * scale, less the minimum.
void decode_packed_row(const Weight& weight, int64_t o, float* out);

// Where the bits above the lowest four of a code are, in a plane whose bytes span P = `part` columns.
inline int64_t high_at(int64_t o, int64_t k, int64_t depth, int64_t part) {
    return (o / block_outputs * (depth / part) + k / part) * 128 + o % block_outputs * 4 + k % 4;
}

// Packs the bits above the lowest four of contiguous codes [O, K] of `bits` bits into a plane. unpack_high adds them to
// the nibbles in `plain`. Codes of two bits, shifted left by four, are stored only in such a plane.
void pack_high(const uint8_t* plain, uint8_t* high, int64_t outputs, int64_t depth, int64_t bits);
void unpack_high(const uint8_t* high, uint8_t* plain, int64_t outputs, int64_t depth, int64_t bits);

// Decodes row `o` of a packed K-quant to floats [K]: scale * step * (code - zero) - least * minimum.
void decode_super_row(const Weight& weight, int64_t o, float* out);

// Converts elements [O, K] of 1 or 2 bytes (rows `stride` elements apart) to pairs and back.
void pack_pairs(const void* plain, void* packed, int64_t outputs, int64_t depth, int64_t stride, int64_t element);
void unpack_pairs(const void* packed, void* plain, int64_t outputs, int64_t depth, int64_t element);

// Decodes row `o` of a packed nf4, mxfp4, fp8 or bf16 weight to floats [K].
void decode_float_row(const Weight& weight, int64_t o, float* out);

// The values of the 16 codes of nf4 or mxfp4. For all other formats the values of int4 codes: -8 to 7.
const float* nibble_values(Format format);

}  // namespace sameseed
