// Linear layers with dense weights (fp32, bf16, fp16). Lays out rows of x in tiles and cuts the outputs into tasks.

#include "linear.h"
#include "ops.h"
#include "tasks.h"

namespace sameseed {

void linear_dense(const Product& p) {
    const Kernels& table = kernels();
    const Weight& w = *p.weight;
    const int64_t rows = p.rows, outputs = w.outputs, depth = w.depth;
    const int f = static_cast<int>(w.format);
    const int64_t padded = round_up(depth, depth_step);
    // Few rows are cut into tiles of similar height (9 = 5 + 4), because a tile of one row costs nearly as much as one
    // of four.
    const int64_t full = table.row_tile, strip = 8 * full;
    const int64_t few = (rows + full - 1) / full, tile = rows <= strip ? (rows + few - 1) / few : full;
    float* packed = scratch(packed_area, rows * padded);
    by_rows((rows + tile - 1) / tile, tile * padded / 4, [&](int64_t begin, int64_t end) {
        for (int64_t t = begin * tile; t < std::min(end * tile, rows); t += tile) {
            const int64_t count = std::min(tile, rows - t);
            const RowView x = prepare_rows(p.source, depth, t, t + count, scratch(rows_area, tile * depth));
            table.pack[f](x.x, x.stride, count, depth, packed + t * padded);
        }
    });

    const LinearArgs args{packed, w.codes, p.bias, p.residual, p.out, w.stride, rows, outputs, depth, tile};
    // A few tasks per thread, each with at most 128 KB of weights and a multiple of 24 outputs (whole tiles for any row
    // count).
    const int64_t row_bytes = std::max<int64_t>(1, depth * bytes_of(w.format));
    const int64_t wanted = std::min<int64_t>(outputs / (4 * num_threads()), 128 * 1024 / row_bytes);
    const int64_t columns_per_task = std::max<int64_t>(24, wanted / 24 * 24);
    const int64_t columns = (outputs + columns_per_task - 1) / columns_per_task;
    const int64_t rows_per_task = rows <= strip ? rows : strip, strips = (rows + rows_per_task - 1) / rows_per_task;
    run_tasks(columns * strips, outputs * depth * (3 + rows) > 4 * serial_cost, [&](int64_t i) {
        const int64_t o = i % columns * columns_per_task, t = i / columns * rows_per_task;
        table.linear[f](args, o, std::min(outputs, o + columns_per_task), t, std::min(rows, t + rows_per_task));
    });
}

}  // namespace sameseed
