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

struct Sequences {
    const int32_t *row_offsets, *kv_lens, *block_tables;
    int64_t count, table_stride, rows;
};
void attention(const AttentionArgs& args, KvFormat format, int64_t num_blocks, const Sequences& sequences);

}  // namespace sameseed
