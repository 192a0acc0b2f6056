// The ops as Python calls them: check, cut into tasks, run on the pool.

#include "ops.h"

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <cstring>
#include <stdexcept>
#include <string>
#include <vector>

#include "tasks.h"

namespace foretoken {
namespace {

std::atomic<const Kernels*> chosen{nullptr};

#if defined(__x86_64__)
bool has_avx512() {
    return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
           __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("f16c");
}
bool has_vnni() { return has_avx512() && __builtin_cpu_supports("avx512vnni"); }
bool has_avx2() {
    return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
}
#endif

const Kernels* find(const std::string& name) {
#if defined(__x86_64__)
    if (name == "avx512vnni" && has_vnni()) return kernels_avx512vnni();
    if (name == "avx512" && has_avx512()) return kernels_avx512();
    if (name == "avx2" && has_avx2()) return kernels_avx2();
    const char* best = has_vnni() ? "avx512vnni" : has_avx512() ? "avx512" : has_avx2() ? "avx2" : "portable";
#else
    const char* best = "portable";
#endif
    if (name == "portable") return kernels_portable();
    if (name == "auto") return find(best);
    if (name == "avx512vnni" || name == "avx512" || name == "avx2")
        throw std::invalid_argument("this CPU lacks the instruction set '" + name + "'; its best is '" + best + "'");
    throw std::invalid_argument("unknown instruction set '" + name + "'; choose auto, avx512vnni, avx512, avx2 or portable");
}

}  // namespace

const Kernels& kernels() {
    const Kernels* table = chosen.load(std::memory_order_relaxed);
    if (table == nullptr) {
        const char* forced = std::getenv("FORETOKEN_ISA");
        table = find(forced != nullptr && *forced != '\0' ? forced : "auto");
        chosen.store(table, std::memory_order_relaxed);
    }
    return *table;
}

void set_isa(const char* name) { chosen.store(find(name), std::memory_order_relaxed); }

void rms_norm(const float* x, int64_t x_stride, const float* weight, float eps, float* out, int64_t rows, int64_t width) {
    const Kernels& table = kernels();
    by_rows(rows, width, [&](int64_t begin, int64_t end) {
        table.rms_norm(x + begin * x_stride, x_stride, weight, eps, end - begin, width, out + begin * width);
    });
}

void rope(const float* x, int64_t x_stride, const int32_t* positions, const float* table_data, int64_t table_rows, float* out,
          int64_t rows, int64_t heads, int64_t dim) {
    check("position", positions, rows, table_rows);
    const Kernels& table = kernels();
    by_rows(rows, heads * dim, [&](int64_t begin, int64_t end) {
        table.rope(x + begin * x_stride, x_stride, positions + begin, table_data, end - begin, heads, dim,
                   out + begin * heads * dim);
    });
}

void silu_mul(const float* gate_up, int64_t stride, float* out, int64_t rows, int64_t width) {
    const Kernels& table = kernels();
    by_rows(rows, 4 * width, [&](int64_t begin, int64_t end) {
        table.silu_mul(gate_up + begin * stride, stride, end - begin, width, out + begin * width);
    });
}

void store_kv(const float* k, int64_t k_stride, const float* v, int64_t v_stride, const Cache& cache, const int32_t* slots,
              int64_t rows) {
    check("slot", slots, rows, cache.num_slots);
    const auto encode = kernels().encode[static_cast<int>(cache.format)];
    const int64_t bytes = cache.width * bytes_of(cache.format);
    by_rows(rows, 2 * cache.width, [&](int64_t begin, int64_t end) {
        for (int64_t t = begin; t < end; t++) {
            encode(k + t * k_stride, cache.width, static_cast<char*>(cache.k) + slots[t] * bytes);
            encode(v + t * v_stride, cache.width, static_cast<char*>(cache.v) + slots[t] * bytes);
        }
    });
}

void move_kv(const Cache& cache, const int32_t* source, const int32_t* target, int64_t count) {
    check("source slot", source, count, cache.num_slots);
    check("target slot", target, count, cache.num_slots);
    const int64_t bytes = cache.width * bytes_of(cache.format);
    std::vector<char> rows(static_cast<size_t>(count * bytes));  // read all, then write: the order of moves never matters
    for (char* base : {static_cast<char*>(cache.k), static_cast<char*>(cache.v)}) {
        for (int64_t i = 0; i < count; i++) std::memcpy(rows.data() + i * bytes, base + source[i] * bytes, bytes);
        for (int64_t i = 0; i < count; i++) std::memcpy(base + target[i] * bytes, rows.data() + i * bytes, bytes);
    }
}

namespace {

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

}  // namespace

void attention(const AttentionArgs& args, Format format, int64_t num_blocks, const Sequences& sequences) {
    const int64_t group = args.heads / args.kv_heads;
    const int64_t heads_per_tile = std::min(group, max_queries), rows_per_tile = max_queries / heads_per_tile;
    thread_local std::vector<AttentionTile> tile_buffer;
    std::vector<AttentionTile>& tiles = tile_buffer;
    tiles.clear();
    int64_t cost = 0;
    for (int64_t b = 0; b < sequences.count; b++) {
        check_sequence(args, sequences, b, num_blocks);
        const int64_t end = sequences.row_offsets[b + 1], kv_len = sequences.kv_lens[b];
        for (int64_t t = sequences.row_offsets[b]; t < end; t += rows_per_tile) {
            const int64_t count = std::min(rows_per_tile, end - t);
            cost += count * args.heads * args.dim * 2 * (kv_len + 16);
            for (int64_t head = 0, heads; head < args.heads; head += heads) {
                const int64_t kv_head = head / group;
                heads = std::min(heads_per_tile, (kv_head + 1) * group - head);
                const int32_t* block_table = sequences.block_tables + b * sequences.table_stride;
                tiles.push_back({block_table, kv_len, t, count, kv_head, head, heads});
            }
        }
    }
    const auto kernel = kernels().attention[static_cast<int>(format)];
    run_tasks(static_cast<int64_t>(tiles.size()), cost > 4 * serial_cost,
              [&](int64_t i) { kernel(args, tiles[i], scratch(attention_area, attention_scratch(args.dim))); });
}

}  // namespace foretoken
