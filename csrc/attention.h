// The KV cache and attention over it: the interface that the Python bindings use.

#pragma once

#include "kernels.h"

namespace sameseed {

// One layer of the KV cache: k and v are [num_slots, Hk] rows of kv_row_bytes(); scales are [num_slots, Hk], or null in
// dense formats.
struct Cache {
    void *k, *v;
    float *k_scale, *v_scale;
    int64_t num_slots, kv_heads, dim;
    KvFormat format;
};
void store_kv(const float* k, int64_t k_stride, const float* v, int64_t v_stride, const Cache& cache, const int32_t* slots,
              int64_t rows);
void move_kv(const Cache& cache, const int32_t* source, const int32_t* target, int64_t count);

// The rows and cache blocks of the sequences in a forward pass.
struct Sequences {
    const int32_t *row_offsets, *kv_lens, *block_tables;
    int64_t count, table_stride, rows;
};

// Attention of q [T, H, D] (rows `stride` elements apart) over a cache that is paged in blocks of `block_size` slots.
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
    const float* sinks = nullptr;  // [H], or null (AttentionArgs)
};
void attention(const Attention& attention);

}  // namespace sameseed
