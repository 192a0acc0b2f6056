// Linear layers with packed weights and float32 rows. Interleaves the rows of x in tiles and cuts blocks of 32 outputs
// into tasks.

#include "linear.h"
#include "ops.h"
#include "pack.h"
#include "tasks.h"

namespace sameseed {
namespace {

constexpr int64_t depth_multiple = 8;
constexpr int64_t panel_rows = 192;   // rows of x that a task takes at a time
constexpr int64_t columns_per_task = 1024;  // columns of x that one task interleaves

FloatArgs arguments(const Product& p, const Kernels& table) {
    const Weight& w = *p.weight;
    FloatArgs a{};
    a.codes = w.codes;
    a.scales = w.scales;
    a.scale_format = w.scale_format;
    const bool fp8 = w.format == Format::fp8_e4m3 || w.format == Format::fp8_e5m2;
    (fp8 ? a.nans : a.zeros) = w.zeros;
    a.table = nibble_values(w.format);
    a.middle = w.format == Format::int8 ? 128.0f : 8.0f;
    a.factor = w.format == Format::fp8_e4m3 ? 256.0f : 1.0f;
    a.bias = p.bias;
    a.residual = p.residual;
    a.out = p.out;
    a.rows = p.rows;
    a.outputs = w.outputs;
    a.depth = round_up(w.depth, depth_multiple);
    a.group = w.group == w.depth ? a.depth : w.group;
    a.groups = a.depth / a.group;
    const int64_t tiles = (p.rows + table.float_tile - 1) / table.float_tile;
    a.tile = (p.rows + tiles - 1) / tiles;  // tiles of similar height: 16 = 8 + 8
    return a;
}

// Prepares the rows of x and interleaves them in tiles.
void lay_out(const Product& p, const Kernels& table, FloatArgs& a) {
    const int64_t rows = p.rows, depth = p.weight->depth;
    RowView x{p.source.x, p.source.stride};
    if (p.source.kind != RowSource::plain || p.source.index != nullptr) {
        float* prepared = scratch(rows_area, rows * depth);
        const int64_t cost = p.source.gated() ? 4 * depth : depth;
        by_rows(rows, cost,
                [&](int64_t begin, int64_t end) { prepare_rows(p.source, depth, begin, end, prepared + begin * depth); });
        x = {prepared, depth};
    }
    if (a.zeros != nullptr) {
        float* sums = scratch(sums_area, rows * a.groups);
        by_rows(rows, depth, [&](int64_t begin, int64_t end) {
            for (int64_t t = begin; t < end; t++) {
                const int64_t first = t / a.tile * a.tile, height = std::min(a.tile, rows - first);
                table.group_sums(x.x + t * x.stride, depth, a.group, sums + first * a.groups + (t - first), height);
            }
        });
        a.x_sums = sums;
    }
    if (rows == 1 && a.depth == depth) {
        a.x = x.x;
        return;
    }
    float* packed = scratch(packed_area, rows * a.depth);
    const int64_t tiles = (rows + a.tile - 1) / a.tile, pieces = (a.depth + columns_per_task - 1) / columns_per_task;
    run_tasks(tiles * pieces, rows * a.depth > serial_cost, [&](int64_t i) {
        const int64_t t = i / pieces * a.tile, k = i % pieces * columns_per_task;
        table.interleave(x.x + t * x.stride, x.stride, std::min(a.tile, rows - t), depth, k,
                         std::min(a.depth, k + columns_per_task), packed + t * a.depth);
    });
    a.x = packed;
}

}  // namespace

void linear_float(const Product& p) {
    const Kernels& table = kernels();
    const Weight& w = *p.weight;
    FloatArgs a = arguments(p, table);
    lay_out(p, table, a);

    const auto kernel = table.linear_float[static_cast<int>(w.format)];
    const int64_t blocks = (w.outputs + block_outputs - 1) / block_outputs;
    const int64_t most = a.rows > a.tile ? 4 : 8;  // blocks per task
    const int64_t wanted = std::max<int64_t>(1, std::min(most, blocks / (4 * num_threads())));
    const int64_t per_task = wanted >= 4 ? wanted / 4 * 4 : wanted;
    const int64_t columns = (blocks + per_task - 1) / per_task;
    const int64_t height = a.rows <= a.tile ? a.rows : std::max(a.tile, panel_rows / a.tile * a.tile);
    const int64_t panels = (a.rows + height - 1) / height;
    run_tasks(columns * panels, w.outputs * a.depth * (3 + a.rows) > 4 * serial_cost, [&](int64_t i) {
        const int64_t begin = i / panels * per_task, t = i % panels * height;
        kernel(a, begin, std::min(blocks, begin + per_task), t, std::min(a.rows, t + height),
               scratch(strip_area, float_scratch(per_task, height)));
    });
}

}  // namespace sameseed
