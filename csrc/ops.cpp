// The ops as Python calls them: check, cut into tasks, run on the pool.

#include "ops.h"

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <cstring>
#include <stdexcept>
#include <string>
#include <vector>

#include "pool.h"

namespace foretoken {
namespace {

constexpr int64_t serial_cost = 24 * 1024;  // multiplications (or as much work) below which waking a thread costs more

std::atomic<const Kernels*> chosen{nullptr};

#if defined(__x86_64__)
bool has_avx512() {
    return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
           __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("f16c");
}
bool has_avx2() {
    return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
}
#endif

const Kernels* find(const std::string& name) {
#if defined(__x86_64__)
    if (name == "avx512" && has_avx512()) return kernels_avx512();
    if (name == "avx2" && has_avx2()) return kernels_avx2();
    const char* best = has_avx512() ? "avx512" : has_avx2() ? "avx2" : "portable";
#else
    const char* best = "portable";
#endif
    if (name == "portable") return kernels_portable();
    if (name == "auto") return find(best);
    if (name == "avx512" || name == "avx2")
        throw std::invalid_argument("this CPU lacks the instruction set '" + name + "'; its best is '" + best + "'");
    throw std::invalid_argument("unknown instruction set '" + name + "'; choose auto, avx512, avx2 or portable");
}

// Memory of this thread that only grows, aligned to 64 bytes.
float* scratch(int slot, int64_t floats) {
    thread_local std::vector<float> buffers[2];
    std::vector<float>& buffer = buffers[slot];
    if (static_cast<int64_t>(buffer.size()) < floats + 16) buffer.resize(floats + floats / 2 + 16);
    return reinterpret_cast<float*>((reinterpret_cast<uintptr_t>(buffer.data()) + 63) & ~uintptr_t{63});
}

int64_t bytes_of(Format format) { return format == Format::fp32 ? 4 : 2; }

// Cut `rows` rows into tasks of about `serial_cost` each and run f(begin, end).
template <class F>
void by_rows(int64_t rows, int64_t cost_per_row, const F& f) {
    const int64_t per_task = std::max<int64_t>(1, serial_cost / std::max<int64_t>(1, cost_per_row));
    const int64_t tasks = (rows + per_task - 1) / per_task;
    run_tasks(tasks, tasks > 1, [&](int64_t i) { f(i * per_task, std::min(rows, (i + 1) * per_task)); });
}

[[noreturn]] void out_of_range(const char* what, int64_t value, int64_t limit) {
    throw std::out_of_range(std::string(what) + " " + std::to_string(value) + " is outside 0.." + std::to_string(limit - 1));
}

void check(const char* what, const int32_t* values, int64_t count, int64_t limit) {
    for (int64_t i = 0; i < count; i++)
        if (values[i] < 0 || values[i] >= limit) out_of_range(what, values[i], limit);
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

void linear(const float* x, int64_t x_stride, const void* weight, int64_t weight_stride, Format format, const float* bias,
            float* out, int64_t rows, int64_t outputs, int64_t depth) {
    if (rows == 0) return;
    const Kernels& table = kernels();
    const int f = static_cast<int>(format);
    const int64_t padded = round_up(depth, depth_step);
    // Few rows make tiles of even height (9 = 5 + 4): a tile of one row costs nearly what a tile of four does.
    const int64_t full = table.row_tile, strip = 8 * full;
    const int64_t few = (rows + full - 1) / full, tile = rows <= strip ? (rows + few - 1) / few : full;
    float* packed = scratch(0, rows * padded);
    by_rows((rows + tile - 1) / tile, tile * padded / 4, [&](int64_t begin, int64_t end) {
        for (int64_t t = begin * tile; t < std::min(end * tile, rows); t += tile)
            table.pack[f](x + t * x_stride, x_stride, std::min(tile, rows - t), depth, packed + t * padded);
    });

    const LinearArgs args{packed, weight, bias, out, weight_stride, rows, outputs, depth, tile};
    // A few tasks a thread, of at most 128 KB of weights, in multiples of 24 outputs (whole tiles for any row count).
    const int64_t row_bytes = std::max<int64_t>(1, depth * bytes_of(format));
    const int64_t wanted = std::min<int64_t>(outputs / (4 * num_threads()), 128 * 1024 / row_bytes);
    const int64_t columns_per_task = std::max<int64_t>(24, wanted / 24 * 24);
    const int64_t columns = (outputs + columns_per_task - 1) / columns_per_task;
    const int64_t rows_per_task = rows <= strip ? rows : strip, strips = (rows + rows_per_task - 1) / rows_per_task;
    run_tasks(columns * strips, outputs * depth * (3 + rows) > 4 * serial_cost, [&](int64_t i) {
        const int64_t o = i % columns * columns_per_task, t = i / columns * rows_per_task;
        table.linear[f](args, o, std::min(outputs, o + columns_per_task), t, std::min(rows, t + rows_per_task));
    });
}

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

void embedding(const int32_t* token_ids, const void* weight, int64_t weight_stride, Format format, float* out, int64_t rows,
               int64_t vocabulary, int64_t width) {
    check("token id", token_ids, rows, vocabulary);
    const Kernels& table = kernels();
    const char* base = static_cast<const char*>(weight);
    for (int64_t t = 0; t < rows; t++)
        table.decode[static_cast<int>(format)](base + token_ids[t] * weight_stride * bytes_of(format), width, out + t * width);
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
              [&](int64_t i) { kernel(args, tiles[i], scratch(1, attention_scratch(args.dim))); });
}

}  // namespace foretoken
