// Linear layers with weights in super-blocks (K-quants) and integer rows. Quantizes rows of x into tiles, with sums of
// their codes over sub-blocks.

#include "linear_jobs.h"

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

struct SuperJob {
    Product product;
    int64_t first_row = 0;
    int64_t rows, depth, groups, part, tile, scale_room;
    float* x_scales = nullptr;
    int32_t* starts = nullptr;
    int8_t* codes = nullptr;
    int16_t* sums = nullptr;

    explicit SuperJob(const Product& p)
        : product(p),
          rows(p.rows),
          depth(p.weight->depth),
          groups(depth / super_columns),
          part(super_part(p.weight->format)),
          scale_room(round_up(2 * rows * groups, 16)) {
        const int64_t tiles = (rows + kernels().super_tile - 1) / kernels().super_tile;
        tile = (rows + tiles - 1) / tiles;
    }
    int64_t room() const { return round_up(scale_room + rows * depth / 4 + rows * depth / part / 2, 16); }
    // The memory holds scales, starts (not used), codes and sums. Codes and sums begin at multiples of 64 bytes.
    void place(float* memory) {
        x_scales = memory;
        starts = reinterpret_cast<int32_t*>(x_scales + rows * groups);
        codes = reinterpret_cast<int8_t*>(x_scales + scale_room);
        sums = reinterpret_cast<int16_t*>(codes + rows * depth);
    }
    void prepare(int64_t t) const {
        const int64_t first = t / tile * tile, m = t - first, M = std::min(tile, rows - first);
        const RowView x = prepare_rows(product.source, depth, t, t + 1, scratch(rows_area, depth));
        kernels().quantize(x.x, depth, super_columns, 0, codes + first * depth + m * code_step, M * code_step,
                           x_scales + first * groups + m, starts + first * groups + m, M);
        sum_parts(codes + first * depth, M, m, depth, part, sums + first * depth / part);
    }
    int64_t blocks() const { return round_up(product.weight->outputs, block_outputs) / block_outputs; }
    int64_t most() const {
        const Weight& w = *product.weight;
        const int64_t block_bytes = depth * block_outputs / (w.format == Format::q2_k ? 4 : w.high ? 1 : 2);
        return rows * depth > integer_cache ? std::max<int64_t>(1, integer_cache / block_bytes) : blocks();
    }
    void run(int64_t begin, int64_t end) const {
        const Product& p = product;
        const Weight& w = *p.weight;
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
        kernels().super(args, begin, end, scratch(integer_area, rows * block_outputs));
    }
};

}  // namespace

void linear_super(const Product* products, int64_t count) { run_jobs<SuperJob>(products, count); }

}  // namespace sameseed
