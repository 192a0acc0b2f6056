// The cache and attention over it, as Python calls them.

#pragma once

#include "kernels.h"

namespace sameseed {

// A layer of the cache: k and v [num_slots, Hk] rows of kv_row_bytes; scales [num_slots, Hk], or null in dense formats.
struct Cache {
    void *k, *v;
    float *k_scale, *v_scale;
    int64_t num_slots, kv_heads, dim;
    KvFormat format;
};
void store_kv(const float* k, int64_t k_stride, const float* v, int64_t v_stride, const Cache& cache, const int32_t* slots,
              int64_t rows);
void move_kv(const Cache& cache, const int32_t* source, const int32_t* target, int64_t count);

// Rows and blocks of the sequences of a pass.
struct Sequences {
    const int32_t *row_offsets, *kv_lens, *block_tables;
    int64_t count, table_stride, rows;
};

// q [T, H, D] (rows of `stride` elements) over the cache, in blocks of `block_size` slots.
struct Attention {
    const float* q;
    int64_t stride, heads;
    Cache cache;
    int64_t block_size;
    const int32_t* positions;  // [T]
    const int64_t* tree_mask;  // [T], or null
    Sequences sequences;
    float scale;
    int64_t window;  // keys t > position - window are visible
    float* out;      // [T, H, D], contiguous
};
void attention(const Attention& attention);

}  // namespace sameseed
