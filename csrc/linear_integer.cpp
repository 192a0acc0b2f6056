// Linear layers with integer weights and integer rows. Quantizes rows of x into tiles.

#include "linear_jobs.h"

namespace sameseed {
namespace {

struct IntegerJob {
    Product product;
    int64_t first_row = 0;
    bool nested, nibbles, whole;
    IntegerArgs::Table table;
    int64_t rows, depth, groups, padded, pieces, code_bytes, tile;
    int32_t middle;
    float* x_scales = nullptr;
    int32_t* starts = nullptr;
    int8_t* codes = nullptr;

    explicit IntegerJob(const Product& p)
        : product(p),
          nested(p.weight->format == Format::int8n),
          nibbles(p.weight->format != Format::int8),
          table(p.weight->format == Format::iq4_nl  ? IntegerArgs::iq4
                : p.weight->format == Format::mxfp4 ? IntegerArgs::fp4
                                                    : IntegerArgs::plain),
          rows(p.rows),
          depth(p.weight->depth),
          groups(depth / p.weight->group),
          padded(round_up(depth, 8)),
          pieces(round_up(depth, code_step)) {
        const Weight& w = *p.weight;
        whole = w.low || table || !nibbles;
        code_bytes = whole && kernels().wide_codes ? 2 : 1;
        const int64_t tiles = (rows + kernels().integer_tile - 1) / kernels().integer_tile;
        tile = (rows + tiles - 1) / tiles;
        // With zero points or minima, the kernel multiplies by them later. int8n stores both nibbles plus 8: 16 * 8 + 8 =
        // 136.
        middle = w.zeros || w.least ? 1 : w.low ? 136 : w.high ? 16 : table || !nibbles ? 128 : 8;
    }
    int64_t room() const { return round_up(rows * (2 * groups + pieces * code_bytes / 4 + 16), 16); }
    void place(float* memory) {
        x_scales = memory;
        starts = reinterpret_cast<int32_t*>(x_scales + rows * groups);
        codes = reinterpret_cast<int8_t*>(x_scales + round_up(2 * rows * groups, 16));
    }
    void prepare(int64_t t) const {
        const Weight& w = *product.weight;
        const int64_t first = t / tile * tile, m = t - first, M = std::min(tile, rows - first);
        const RowView x = prepare_rows(product.source, depth, t, t + 1, scratch(rows_area, depth));
        int8_t* row = codes + (first * pieces + m * code_step) * code_bytes;
        const int64_t apart = M * code_step * code_bytes;
        kernels().quantize(x.x, depth, w.group, middle, row, apart, x_scales + first * groups + m, starts + first * groups + m,
                           M);
        for (int64_t i = 0; code_bytes == 2 && i < pieces / code_step; i++) kernels().widen_codes(row + i * apart);
        // High nibbles used alone need a factor of 16, mxfp4's doubled values one of 1/2. It goes into the scales of the
        // rows; as a power of two it is exact.
        const float factor = nested && !w.low ? 16.0f : table == IntegerArgs::fp4 ? 0.5f : 1.0f;
        for (int64_t g = 0; factor != 1.0f && g < groups; g++) x_scales[first * groups + g * M + m] *= factor;
    }
    int64_t blocks() const { return round_up(product.weight->outputs, block_outputs) / block_outputs; }
    // If the rows are processed in several batches, the weights of a task should stay in the L2 cache between batches.
    int64_t most() const {
        const int64_t block_bytes = padded * block_outputs / (whole ? 1 : 2);
        return rows * padded > integer_cache ? std::max<int64_t>(1, integer_cache / block_bytes) : blocks();
    }
    void run(int64_t begin, int64_t end) const {
        const Product& p = product;
        const Weight& w = *p.weight;
        const IntegerArgs args{static_cast<const uint8_t*>(w.codes),
                               w.low,
                               w.high,
                               nibbles,
                               table,
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
        kernels().integer(args, begin, end, scratch(integer_area, integer_scratch(rows, args.group)));
    }
};

}  // namespace

void linear_integer(const Product* products, int64_t count) { run_jobs<IntegerJob>(products, count); }

}  // namespace sameseed
