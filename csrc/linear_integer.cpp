// Linear layers with integer weights and integer rows. Quantizes rows of x into tiles and cuts blocks of outputs into
// tasks.

#include "linear.h"
#include "ops.h"
#include "tasks.h"

namespace sameseed {

const std::vector<int64_t>& cut_blocks(int64_t blocks, int64_t most) {
    thread_local std::vector<int64_t> ends;
    ends.clear();
    const int64_t parts = 2 * num_threads();
    for (int64_t at = 0; at < blocks;) {
        at += std::min(most, std::max<int64_t>(1, (blocks - at) / parts));
        ends.push_back(at);
    }
    return ends;
}

void linear_integer(const Product& p) {
    const Kernels& table = kernels();
    const Weight& w = *p.weight;
    const bool nested = w.format == Format::int8n, nibbles = w.format != Format::int8, from_table = w.format == Format::iq4_nl;
    const bool whole = w.low || from_table || !nibbles;
    const int64_t rows = p.rows, depth = w.depth, groups = depth / w.group;
    const int64_t padded = round_up(depth, 8), pieces = round_up(depth, code_step);
    const int64_t code_bytes = whole && table.wide_codes ? 2 : 1;
    const int64_t tiles = (rows + table.integer_tile - 1) / table.integer_tile, tile = (rows + tiles - 1) / tiles;
    // With zero points or minima, the kernel multiplies by them later. int8n stores both nibbles plus 8: 16 * 8 + 8 = 136.
    const int32_t middle = w.zeros || w.least ? 1 : w.low ? 136 : w.high ? 16 : from_table || !nibbles ? 128 : 8;

    float* x_scales = scratch(packed_area, rows * (2 * groups + pieces * code_bytes / 4 + 16));
    int32_t* starts = reinterpret_cast<int32_t*>(x_scales + rows * groups);
    int8_t* codes = reinterpret_cast<int8_t*>(x_scales + round_up(2 * rows * groups, 16));
    const int64_t passes = p.source.gated() ? 8 : p.source.kind == RowSource::norm ? 4 : 2;  // over a row
    by_rows(rows, passes * depth, [&](int64_t begin, int64_t end) {
        for (int64_t t = begin; t < end; t++) {
            const int64_t first = t / tile * tile, m = t - first, M = std::min(tile, rows - first);
            const RowView x = prepare_rows(p.source, depth, t, t + 1, scratch(rows_area, depth));
            int8_t* row = codes + (first * pieces + m * code_step) * code_bytes;
            const int64_t apart = M * code_step * code_bytes;
            table.quantize(x.x, depth, w.group, middle, row, apart, x_scales + first * groups + m, starts + first * groups + m,
                           M);
            for (int64_t i = 0; code_bytes == 2 && i < pieces / code_step; i++) table.widen_codes(row + i * apart);
            // High nibbles used alone need a factor of 16. It goes into the scales of the rows; as a power of two it is
            // exact.
            for (int64_t g = 0; nested && !w.low && g < groups; g++) x_scales[first * groups + g * M + m] *= 16.0f;
        }
    });

    const IntegerArgs args{static_cast<const uint8_t*>(w.codes),
                           w.low,
                           w.high,
                           nibbles,
                           from_table,
                           w.scales,
                           w.least,
                           w.scale_format,
                           w.zeros,
                           codes,
                           x_scales,
                           starts,
                           p.bias,
                           p.residual,
                           p.out,
                           rows,
                           w.outputs,
                           padded,
                           groups == 1 ? padded : w.group,
                           tile};
    const int64_t blocks = round_up(w.outputs, block_outputs) / block_outputs,
                  block_bytes = padded * block_outputs / (whole ? 1 : 2);
    // If the rows are processed in several batches, the weights of a task should stay in the L2 cache between batches.
    const int64_t most = rows * padded > integer_cache ? std::max<int64_t>(1, integer_cache / block_bytes) : blocks;
    const std::vector<int64_t>& ends = cut_blocks(blocks, most);
    run_tasks(static_cast<int64_t>(ends.size()), w.outputs * depth * (2 + rows) > 16 * serial_cost, [&](int64_t i) {
        table.integer(args, i == 0 ? 0 : ends[i - 1], ends[i], scratch(integer_area, integer_scratch(rows, args.group)));
    });
}

}  // namespace sameseed
