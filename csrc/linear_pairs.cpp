// Linear layers with packed bf16 weights and rows rounded to bf16. Lays out rows of x in tiles of pairs of columns and
// cuts blocks of 32 outputs into tasks.

#include "linear.h"
#include "ops.h"
#include "tasks.h"

namespace sameseed {
namespace {

constexpr int64_t panel_rows = 384;  // rows of x whose columns of one chunk stay in cache

}  // namespace

void linear_pairs(const Product& p) {
    const Kernels& table = kernels();
    const Weight& w = *p.weight;
    const int64_t rows = p.rows, depth = round_up(w.depth, 8);
    const int64_t tiles = (rows + table.pair_tile - 1) / table.pair_tile, tile = (rows + tiles - 1) / tiles;  // even height
    float* packed = scratch(packed_area, rows * depth);
    by_rows(rows, p.source.passes() * depth, [&](int64_t begin, int64_t end) {
        for (int64_t t = begin; t < end; t++) {
            const int64_t first = t / tile * tile;
            const RowView x = prepare_rows(p.source, w.depth, t, t + 1, scratch(rows_area, w.depth));
            table.pair_row(x.x, w.depth, packed, first * (depth / 2) + t - first, std::min(tile, rows - first));
        }
    });
    const PairArgs a{packed, static_cast<const uint8_t*>(w.codes), p.bias, p.residual, p.out, rows, w.outputs, depth, tile};

    const int64_t blocks = (w.outputs + block_outputs - 1) / block_outputs;
    const int64_t wanted = std::max<int64_t>(1, std::min<int64_t>(8, blocks / (4 * num_threads())));
    const int64_t per_task = wanted >= 4 ? wanted / 4 * 4 : wanted;
    const int64_t columns = (blocks + per_task - 1) / per_task;
    const int64_t height = rows <= tile ? rows : std::max(tile, panel_rows / tile * tile);
    const int64_t panels = (rows + height - 1) / height;
    run_tasks(columns * panels, w.outputs * depth * (3 + rows) > 4 * serial_cost, [&](int64_t i) {
        const int64_t begin = i / panels * per_task, t = i % panels * height, end = std::min(blocks, begin + per_task);
        const int64_t count = std::min(height, rows - t);
        table.linear_pairs(a, begin, end, t, t + count, scratch(strip_area, pair_scratch(end - begin, count)));
    });
}

}  // namespace sameseed
