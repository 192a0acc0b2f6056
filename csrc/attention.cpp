// Stores and moves rows of the KV cache and computes attention: checks arguments, cuts the work into tasks, runs them
// on the thread pool.

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

constexpr int64_t rows_of_a_tile = 32;  // with more, many products would be with keys that only the last rows see
constexpr int64_t tasks_per_thread = 4;
constexpr int64_t blocks_in_order = 4;  // a sequence is read in memory order if it has at least this many blocks
constexpr int64_t merged_by_one = 64;  // merging up to this many blocks is not worth waking another thread

// Checks everything that the kernels use unchecked: offsets, lengths, masks, block numbers. Throws std::out_of_range or
// std::invalid_argument.
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

// Cuts one sequence into tiles: some rows and query heads of one KV head, at most max_queries query vectors.
void add_tiles(const AttentionArgs& a, const Sequences& s, int64_t b, std::vector<AttentionTile>& tiles) {
    const int64_t group = a.heads / a.kv_heads, heads_per_tile = std::min(group, max_queries);
    const int64_t rows_per_tile = std::min(rows_of_a_tile, max_queries / heads_per_tile);
    const int64_t end = s.row_offsets[b + 1];
    // The outer loop is over heads, so that the keys and values of a KV head stay in a core's cache for all its tiles.
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

// A task: blocks [block_begin, block_end) of tiles [tile_begin, tile_end). These are one tile, or all tiles of a
// sequence.
struct Work {
    int64_t tile_begin, tile_end, block_begin, block_end;
};

// Makes a tile of works[i] prefetch a part of the positions that are read after `block`. The tiles of the work divide
// these positions among themselves; this tile takes part number `share`.
void fetch_next(const AttentionArgs& args, const std::vector<AttentionTile>& tiles, const std::vector<Work>& works, int64_t i,
                int64_t block, int64_t share, AttentionTile& tile) {
    const bool last = block + 1 == works[i].block_end;
    if (last && i + 1 == static_cast<int64_t>(works.size())) return;
    const Work& next = works[last ? i + 1 : i];
    const AttentionTile& there = tiles[next.tile_begin];
    const int32_t* positions = args.positions + there.row_begin;
    const int64_t seen = std::min<int64_t>(there.kv_len, *std::max_element(positions, positions + there.row_count) + 1);
    const int64_t start = (last ? next.block_begin : block + 1) * key_block, shares = works[i].tile_end - works[i].tile_begin;
    const int64_t count = std::max<int64_t>(0, std::min(key_block, seen - start));
    tile.next_table = there.block_table;
    tile.next_begin = start + count * share / shares;
    tile.next_end = start + count * (share + 1) / shares;
}

// Floats of the partial results of all blocks of a tile.
int64_t partial_floats(const AttentionArgs& args, const AttentionTile& tile) {
    return (tile.end_block - tile.first_block) * attention_partial(args.dim, tile.row_count * tile.head_count);
}

// Cuts the tiles of all sequences ([begins[b], begins[b + 1]) for sequence b) into works. If the blocks of a tile are
// divided among several works, their partial results are merged later. Returns the number of floats that the partial
// results take. `parallel` says whether there is work for more than one task.
int64_t cut(const AttentionArgs& args, std::vector<AttentionTile>& tiles, const std::vector<int64_t>& begins, bool parallel,
            std::vector<Work>& works) {
    const int64_t wanted = tasks_per_thread * num_threads(), num_tiles = static_cast<int64_t>(tiles.size());
    const int64_t count = static_cast<int64_t>(begins.size()) - 1;
    const auto blocks_of = [&](int64_t t) { return tiles[t].end_block - tiles[t].first_block; };
    // With few rows, reading memory is the bottleneck, and it is faster in memory order: all heads of a block, then the
    // next block.
    const auto in_order = [&](int64_t b) {
        return begins[b] < begins[b + 1] && tiles[begins[b]].row_begin == tiles[begins[b + 1] - 1].row_begin &&
               blocks_of(begins[b]) >= blocks_in_order;
    };
    int64_t ordered = 0, blocks = 0, floats = 0;
    for (int64_t b = 0; b < count; b++) ordered += in_order(b) ? blocks_of(begins[b]) : 0;
    for (int64_t t = 0; t < num_tiles; t++) blocks += blocks_of(t);
    const bool by_blocks = parallel && ordered >= wanted;
    const bool by_tiles = parallel && !by_blocks && num_threads() > 1 && num_tiles < wanted;
    const auto split = [&](int64_t begin, int64_t end, int64_t step) {
        if (end == begin + 1 && blocks_of(begin) <= step)
            return works.push_back({begin, end, tiles[begin].first_block, tiles[begin].end_block});
        for (int64_t first = tiles[begin].first_block; first < tiles[begin].end_block; first += step)
            works.push_back({begin, end, first, std::min(first + step, tiles[begin].end_block)});
        for (int64_t t = begin; t < end; t++) {
            tiles[t].in_parts = true;
            floats += partial_floats(args, tiles[t]);
        }
    };
    for (int64_t b = 0; b < count; b++) {
        if (by_blocks && in_order(b)) {
            split(begins[b], begins[b + 1], ordered / wanted);
            continue;
        }
        for (int64_t t = begins[b]; t < begins[b + 1]; t++)
            split(t, t + 1, by_tiles ? std::max<int64_t>(1, blocks / wanted) : blocks_of(t));
    }
    return floats;
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
        rows.resize(static_cast<size_t>(count * bytes));  // all reads come before all writes, so order is irrelevant
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
    args.sinks = a.sinks;
    args.rotated = format == KvFormat::int4;
    thread_local std::vector<AttentionTile> tile_buffer;
    thread_local std::vector<Work> work_buffer;
    thread_local std::vector<int64_t> begin_buffer;
    std::vector<AttentionTile>& tiles = tile_buffer;  // thread_local names would mean other objects in workers
    std::vector<Work>& works = work_buffer;
    std::vector<int64_t>& begins = begin_buffer;
    tiles.clear(), works.clear(), begins.clear();
    for (int64_t b = 0; b < sequences.count; b++) {
        check_sequence(args, sequences, b, num_blocks);
        begins.push_back(static_cast<int64_t>(tiles.size()));
        add_tiles(args, sequences, b, tiles);
    }
    begins.push_back(static_cast<int64_t>(tiles.size()));
    int64_t cost = 0;
    for (const AttentionTile& tile : tiles) {
        const int64_t last = args.positions[tile.row_begin + tile.row_count - 1];
        cost += tile.row_count * tile.head_count * args.dim * 2 *
                (std::min(last, (tile.end_block - tile.first_block) * key_block) + 16);
    }
    const bool parallel = cost > 4 * serial_cost;
    float* partial = scratch(partial_area, cut(args, tiles, begins, parallel, works));
    for (AttentionTile& tile : tiles) {
        if (!tile.in_parts) continue;
        tile.partial = partial;
        partial += partial_floats(args, tile);
    }
    const Kernels& table = kernels();
    const auto kernel = table.attention[static_cast<int>(format)];
    const auto area = [&] { return scratch(attention_area, attention_scratch(args.dim)); };
    run_tasks(static_cast<int64_t>(works.size()), parallel, [&](int64_t i) {
        const Work& work = works[i];
        if (work.tile_end == work.tile_begin + 1)
            return kernel(args, tiles[work.tile_begin], work.block_begin, work.block_end, area());
        for (int64_t b = work.block_begin; b < work.block_end; b++)
            for (int64_t t = work.tile_begin; t < work.tile_end; t++) {
                AttentionTile tile = tiles[t];
                fetch_next(args, tiles, works, i, b, t - work.tile_begin, tile);
                kernel(args, tile, b, b + 1, area());
            }
    });
    int64_t to_merge = 0;
    for (const AttentionTile& tile : tiles) to_merge += tile.in_parts ? tile.end_block - tile.first_block : 0;
    if (to_merge > 0)
        run_tasks(static_cast<int64_t>(tiles.size()), to_merge > merged_by_one, [&](int64_t i) {
            if (tiles[i].in_parts) table.attention_merge(args, tiles[i], area());
        });
}

}  // namespace sameseed
