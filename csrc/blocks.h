// Matrices in ggml's blocks: read from their file and packed, as sameseed/models/gguf and ops/_packed.py do it.

#pragma once

#include <cstdint>

namespace sameseed {

enum class BlockKind { q4_0, q4_1, q5_0, q5_1, q8_0, iq4_nl, q4_k, q5_k, q6_k };

// Rows of a matrix [O, K]: the first lies `begin` bytes into the open file `file`; row o of the result is row order[o]
// of these (null: row o). The results have the layouts of pack.h; those that a kind does not have are null.
struct BlockRows {
    int file;
    int64_t begin;
    int kind;  // BlockKind
    int64_t outputs, depth;
    const int64_t* order;
    uint8_t *codes, *high;
    int8_t *steps, *minima;
    uint16_t *scales, *least;  // fp16
};

// Raises invalid_argument for an unknown kind, bad_alloc, or runtime_error (its text goes on after the tensor's name)
// where the file cannot be read, ends too early, or holds a scale that is infinite or NaN.
void read_block_rows(const BlockRows& rows);

}  // namespace sameseed
