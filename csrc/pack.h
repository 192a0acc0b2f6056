// Weights packed for the kernels, 32 outputs in a block, so that a step of the product reads whole cache lines in order:
//
//   nibbles  [O/32][K/8][2][16 outputs][4]  byte j: the code of column j of the step in the low half, of j + 4 in the high one
//   bytes    [O/32][K/4][2][16 outputs][4]  int8 code + 128
//   planes   twice as nibbles, of int8n: the high and the low halves of code + 136
//   high     [O/32][K/P][2][16 outputs][4]  bits of codes above four, P = 32 columns for one bit, 16 for two: byte j has
//            those of columns j, j + 4, j + 8 .. from its lowest bits on
//   steps    int8 [O/32][K/2P][2][16 outputs][2]: of two sub-blocks side by side; minima the same
//   pairs    [O/32][K/2][32 outputs][2]     fp8 codes, or bf16 numbers
//   scales   [O/32][K/G][32], zeros uint8 [O/32][K/G][32]
//
// O is padded to 32 and K, where a row has one group, to 8: with codes that mean zero.

#pragma once

#include "linear.h"

namespace sameseed {

// Codes [O, K] (rows of `stride` bytes: int4 and nf4 as uint8 0..15, int8) to blocks and back.
// `zeros` [O, K/G] say which code means zero; null: 8 of nibbles, 0 of bytes.
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

// Weights [O, K] (fp32, bf16 or fp16, rows of `stride` elements) as codes, packed: bit for bit what encoding in
// sameseed/formats and packing give. Scales are float32 (`wide_scales`) or bfloat16.
struct EncodeArgs {
    const void* weight;
    Format source;
    int64_t stride, outputs, depth, group;
    bool nibbles, asymmetric, wide_scales;
    uint8_t* packed;
    void* scales;
    uint8_t* zeros;  // or null
    uint8_t* low;    // the second plane of int8n, whose first is `packed`; or null
};
void encode_packed(const EncodeArgs& args);

// Row `o` of a packed int4, int8 or int8n weight as floats [K]: (code - zero) * scale.
void decode_packed_row(const Weight& weight, int64_t o, float* out);

// The bits above four of codes [O, K] of `bits` bits, contiguous, to their plane; and back, added to the nibbles in `plain`.
// Codes of two bits, moved up by four, lie in such a plane alone.
void pack_high(const uint8_t* plain, uint8_t* high, int64_t outputs, int64_t depth, int64_t bits);
void unpack_high(const uint8_t* high, uint8_t* plain, int64_t outputs, int64_t depth, int64_t bits);

// Row `o` of a packed K-quant as floats [K]: scale * step * (code - zero) - least * minimum.
void decode_super_row(const Weight& weight, int64_t o, float* out);

// Elements [O, K] of 1 or 2 bytes (rows of `stride` elements) to pairs and back.
void pack_pairs(const void* plain, void* packed, int64_t outputs, int64_t depth, int64_t stride, int64_t element);
void unpack_pairs(const void* packed, void* plain, int64_t outputs, int64_t depth, int64_t element);

// Row `o` of a packed nf4, mxfp4, fp8 or bf16 weight as floats [K].
void decode_float_row(const Weight& weight, int64_t o, float* out);

// Values of the 16 codes of nf4 and mxfp4; for any other format int4's, from its middle.
const float* nibble_values(Format format);

}  // namespace sameseed
