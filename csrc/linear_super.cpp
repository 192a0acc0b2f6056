// Linear layers with weights in super-blocks (K-quants) and integer rows. Quantizes rows of x into tiles, with sums of
// their codes over sub-blocks.

#include "linear.h"
#include "ops.h"
#include "tasks.h"

namespace sameseed {
namespace {

// Sums every P = `part` codes of row m of a tile of M rows: sums[K/2P][M][2], from codes [K/32][M][32].
void sum_parts(const int8_t* codes, int64_t M, int64_t m, int64_t depth, int64_t part, int16_t* sums) {
    for (int64_t k = 0; k < depth; k += part) {
        const int8_t* x = codes + (k / code_step * M + m) * code_step + k % code_step;
        int16_t sum = 0;
        for (int64_t i = 0; i < part; i++) sum = static_cast<int16_t>(sum + x[i]);
        const int64_t index = k / part;
        sums[(index / 2 * M + m) * 2 + index % 2] = sum;
    }
}

}  // namespace

void linear_super(const Product& p) {
    const Kernels& table = kernels();
    const Weight& w = *p.weight;
    const int64_t rows = p.rows, depth = w.depth, groups = depth / super_columns, part = super_part(w.format);
    const int64_t tiles = (rows + table.super_tile - 1) / table.super_tile, tile = (rows + tiles - 1) / tiles;

    // The scratch area holds scales, starts (not used), codes and sums. Codes and sums begin at multiples of 64 bytes.
    const int64_t scale_room = round_up(2 * rows * groups, 16);
    float* x_scales = scratch(packed_area, scale_room + rows * depth / 4 + rows * depth / part / 2);
    int32_t* starts = reinterpret_cast<int32_t*>(x_scales + rows * groups);
    int8_t* codes = reinterpret_cast<int8_t*>(x_scales + scale_room);
    int16_t* sums = reinterpret_cast<int16_t*>(codes + rows * depth);
    const int64_t passes = p.source.gated() ? 8 : p.source.kind == RowSource::norm ? 4 : 2;  // over a row
    by_rows(rows, passes * depth, [&](int64_t begin, int64_t end) {
        for (int64_t t = begin; t < end; t++) {
            const int64_t first = t / tile * tile, m = t - first, M = std::min(tile, rows - first);
            const RowView x = prepare_rows(p.source, depth, t, t + 1, scratch(rows_area, depth));
            table.quantize(x.x, depth, super_columns, 0, codes + first * depth + m * code_step, M * code_step,
                           x_scales + first * groups + m, starts + first * groups + m, M);
            sum_parts(codes + first * depth, M, m, depth, part, sums + first * depth / part);
        }
    });

    const uint8_t* plane = static_cast<const uint8_t*>(w.codes);
    const bool two_bits = w.format == Format::q2_k;
    const SuperArgs args{two_bits ? nullptr : plane,
                         two_bits ? plane : w.high,
                         w.steps,
                         w.minima,
                         w.scales,
                         w.least,
                         w.scale_format,
                         codes,
                         x_scales,
                         sums,
                         p.bias,
                         p.residual,
                         p.out,
                         rows,
                         w.outputs,
                         depth,
                         part,
                         tile};
    const int64_t blocks = round_up(w.outputs, block_outputs) / block_outputs;
    const int64_t block_bytes = depth * block_outputs / (two_bits ? 4 : w.high ? 1 : 2);
    const int64_t most = rows * depth > integer_cache ? std::max<int64_t>(1, integer_cache / block_bytes) : blocks;
    const std::vector<int64_t>& ends = cut_blocks(blocks, most);
    run_tasks(static_cast<int64_t>(ends.size()), w.outputs * depth * (2 + rows) > 16 * serial_cost, [&](int64_t i) {
        table.super(args, i == 0 ? 0 : ends[i - 1], ends[i], scratch(integer_area, rows * block_outputs));
    });
}

}  // namespace sameseed
