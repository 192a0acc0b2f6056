// Store and move rows of the cache, attend to it: check, cut into tasks, run on the pool.

#include "attention.h"

#include <algorithm>
#include <cstring>
#include <stdexcept>
#include <string>
#include <vector>

#include "ops.h"
#include "pool.h"
#include "tasks.h"

namespace sameseed {
namespace {

constexpr int64_t rows_of_a_tile = 32;  // more would waste products with keys that only the last rows see
constexpr int64_t tasks_per_thread = 4;

// Everything that a kernel would follow blindly: offsets, lengths, masks, block numbers.
void check_sequence(const AttentionArgs& a, const Sequences& s, int64_t b, int64_t num_blocks) {
    const int64_t begin = s.row_offsets[b], end = s.row_offsets[b + 1], kv_len = s.kv_lens[b];
    if (begin < 0 || end < begin || end > s.rows) throw std::out_of_range("row_offsets do not ascend within the batch");
    int64_t highest = -1;  // storage index
    for (int64_t t = begin; t < end; t++) {
        const int64_t position = a.positions[t];
        if (position < 0) throw std::out_of_range("a position is negative");
        if (position < kv_len) {
            highest = std::max(highest, position);
            continue;
        }
        const uint64_t mask = a.tree_mask == nullptr ? 0 : static_cast<uint64_t>(a.tree_mask[t]);
        if (__builtin_popcountll(mask) != position - kv_len + 1)
            throw std::invalid_argument("the tree mask of row " + std::to_string(t) + " does not fit its position " +
                                        std::to_string(position) + " after " + std::to_string(kv_len) + " known tokens");
        highest = std::max<int64_t>(highest, kv_len + 63 - __builtin_clzll(mask));
    }
    const int64_t blocks = highest / a.block_size + (highest >= 0);
    if (blocks > s.table_stride) out_of_range("block index", blocks - 1, s.table_stride);
    check("block", s.block_tables + b * s.table_stride, blocks, num_blocks);
}

// Tiles of one sequence: some rows and the query heads of one KV head, few enough for a kernel.
void add_tiles(const AttentionArgs& a, const Sequences& s, int64_t b, std::vector<AttentionTile>& tiles) {
    const int64_t group = a.heads / a.kv_heads, heads_per_tile = std::min(group, max_queries);
    const int64_t rows_per_tile = std::min(rows_of_a_tile, max_queries / heads_per_tile);
    const int64_t end = s.row_offsets[b + 1];
    // Heads first: the keys and values of one KV head stay in a core's cache while tile after tile reads them.
    for (int64_t head = 0, heads; head < a.heads; head += heads) {
        const int64_t kv_head = head / group;
        heads = std::min(heads_per_tile, (kv_head + 1) * group - head);
        for (int64_t t = s.row_offsets[b]; t < end; t += rows_per_tile) {
            const int64_t rows = std::min(rows_per_tile, end - t);
            const auto [least, most] = std::minmax_element(a.positions + t, a.positions + t + rows);
            const int64_t first = std::max<int64_t>(0, *least - a.window + 1) / key_block, last = *most / key_block;
            tiles.push_back(
                {s.block_tables + b * s.table_stride, s.kv_lens[b], t, rows, kv_head, head, heads, first, last + 1, nullptr});
        }
    }
}

struct Work {
    const AttentionTile* tile;
    int64_t block_begin, block_end;
};

// Fewer tiles than threads can use: share the blocks of each among several tasks, and merge what they find.
void attend_in_parts(const AttentionArgs& args, KvFormat format, std::vector<AttentionTile>& tiles, int64_t blocks) {
    const Kernels& table = kernels();
    const int64_t size = attention_partial(args.dim), wanted = tasks_per_thread * num_threads();
    const int64_t step = std::max<int64_t>(1, blocks / wanted);
    float* partial = scratch(partial_area, blocks * size);
    std::vector<Work> work;
    for (AttentionTile& tile : tiles) {
        tile.partial = partial;
        partial += (tile.end_block - tile.first_block) * size;
        for (int64_t b = tile.first_block; b < tile.end_block; b += step)
            work.push_back({&tile, b, std::min(b + step, tile.end_block)});
    }
    const auto kernel = table.attention[static_cast<int>(format)];
    run_tasks(static_cast<int64_t>(work.size()), true, [&](int64_t i) {
        kernel(args, *work[i].tile, work[i].block_begin, work[i].block_end, scratch(attention_area, attention_scratch(args.dim)));
    });
    run_tasks(static_cast<int64_t>(tiles.size()), blocks > 8 * wanted,
              [&](int64_t i) { table.attention_merge(args, tiles[i], scratch(attention_area, attention_scratch(args.dim))); });
}

}  // namespace

void store_kv(const float* k, int64_t k_stride, const float* v, int64_t v_stride, const Cache& cache, const int32_t* slots,
              int64_t rows) {
    check("slot", slots, rows, cache.num_slots);
    const auto encode = kernels().encode_kv[static_cast<int>(cache.format)];
    const int64_t width = cache.kv_heads * cache.dim, bytes = cache.kv_heads * kv_row_bytes(cache.format, cache.dim);
    by_rows(rows, 2 * width, [&](int64_t begin, int64_t end) {
        for (int64_t t = begin; t < end; t++) {
            const int64_t slot = slots[t], scale = cache.k_scale == nullptr ? 0 : slot * cache.kv_heads;
            encode(k + t * k_stride, cache.kv_heads, cache.dim, static_cast<char*>(cache.k) + slot * bytes,
                   cache.k_scale + scale);
            encode(v + t * v_stride, cache.kv_heads, cache.dim, static_cast<char*>(cache.v) + slot * bytes,
                   cache.v_scale + scale);
        }
    });
}

void move_kv(const Cache& cache, const int32_t* source, const int32_t* target, int64_t count) {
    check("source slot", source, count, cache.num_slots);
    check("target slot", target, count, cache.num_slots);
    std::vector<char> rows;
    auto move = [&](void* at, int64_t bytes) {
        if (at == nullptr) return;
        char* base = static_cast<char*>(at);
        rows.resize(static_cast<size_t>(count * bytes));  // read all, then write: the order of moves never matters
        for (int64_t i = 0; i < count; i++) std::memcpy(rows.data() + i * bytes, base + source[i] * bytes, bytes);
        for (int64_t i = 0; i < count; i++) std::memcpy(base + target[i] * bytes, rows.data() + i * bytes, bytes);
    };
    for (void* codes : {cache.k, cache.v}) move(codes, cache.kv_heads * kv_row_bytes(cache.format, cache.dim));
    for (void* scales : {cache.k_scale, cache.v_scale}) move(scales, cache.kv_heads * static_cast<int64_t>(sizeof(float)));
}

void attention(const Attention& a) {
    const Cache& cache = a.cache;
    const Sequences& sequences = a.sequences;
    const KvFormat format = cache.format;
    const int64_t num_blocks = cache.num_slots / a.block_size;
    AttentionArgs args{a.q,      cache.k, cache.v,        cache.k_scale, cache.v_scale, a.out,    a.positions, a.tree_mask,
                       a.stride, a.heads, cache.kv_heads, cache.dim,     a.block_size,  a.window, a.scale};
    args.rotated = format == KvFormat::int4;
    thread_local std::vector<AttentionTile> tile_buffer;
    std::vector<AttentionTile>& tiles = tile_buffer;  // workers have their own of the former
    tiles.clear();
    for (int64_t b = 0; b < sequences.count; b++) {
        check_sequence(args, sequences, b, num_blocks);
        add_tiles(args, sequences, b, tiles);
    }
    int64_t blocks = 0, most = 0, cost = 0;
    for (const AttentionTile& tile : tiles) {
        const int64_t count = tile.end_block - tile.first_block, last = args.positions[tile.row_begin + tile.row_count - 1];
        blocks += count;
        most = std::max(most, count);
        cost += tile.row_count * tile.head_count * args.dim * 2 * (std::min(last, count * key_block) + 16);
    }
    const bool parallel = cost > 4 * serial_cost;
    const int64_t num_tiles = static_cast<int64_t>(tiles.size());
    if (parallel && most > 1 && num_threads() > 1 && num_tiles < tasks_per_thread * num_threads())
        return attend_in_parts(args, format, tiles, blocks);
    const auto kernel = kernels().attention[static_cast<int>(format)];
    run_tasks(num_tiles, parallel, [&](int64_t i) {
        kernel(args, tiles[i], tiles[i].first_block, tiles[i].end_block, scratch(attention_area, attention_scratch(args.dim)));
    });
}

}  // namespace sameseed
