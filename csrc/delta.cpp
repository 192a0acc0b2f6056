// Gated DeltaNet: prepares rows, cuts the work into value heads, and keeps the log of rows.

#include "delta.h"

#include <algorithm>
#include <cmath>
#include <cstring>

#include "isa.h"
#include "tasks.h"

namespace sameseed {
namespace {

// Rows of a sequence must follow each other. Throws if row `row` does not, `first` being the sequence's first row.
void check_branch(const int32_t* positions, int64_t first, int64_t row) {
    if (positions[row] != positions[first] + row - first) throw std::out_of_range("a draft that branches has no recurrent state");
}

}  // namespace

void delta(const Delta& a) {
    const int64_t keys = a.key_heads * a.key_dim, values = a.value_heads * a.value_dim, width = 2 * keys + values;
    const int64_t stored = width + 2 * a.value_heads, area = a.key_dim * a.value_dim;
    const auto bytes = [](int64_t floats) { return static_cast<size_t>(floats) * sizeof(float); };
    const DeltaLoops& loops = *instruction_set().delta();
    // Rows of all sequences: the rows of the log that the stored state does not cover, then those of the pass.
    struct Span {
        int64_t slot, base, next, begin, first, end;  // `begin`: position of the first row of the pass; end: after the last
    };
    std::vector<Span> spans(static_cast<size_t>(a.num_seqs));
    std::vector<std::pair<int32_t, int32_t>> places;  // sequence and position of each row
    for (int64_t b = 0; b < a.num_seqs; b++) {
        const int32_t *at = a.states + b, row = a.row_offsets[b];
        Span& s = spans[static_cast<size_t>(b)];
        s = {at[0], at[a.num_seqs], at[2 * a.num_seqs], a.positions[row], static_cast<int64_t>(places.size()), 0};
        s.end = s.begin + a.row_offsets[b + 1] - row;
        if (s.slot < 0 || s.slot >= a.slots) out_of_range("state slot", s.slot, a.slots);
        if (s.base < 0 || s.base > s.next || s.next > s.end || s.base > s.begin || s.begin - s.base + a.taps > a.log_rows ||
            s.end - s.next + a.taps > a.log_rows)
            throw std::out_of_range("the state of a sequence does not fit its rows");
        for (int64_t i = 0; i < s.end - s.begin; i++) check_branch(a.positions, row, row + i);
        for (int64_t p = s.base; p < s.end; p++) places.emplace_back(static_cast<int32_t>(b), static_cast<int32_t>(p));
    }
    const auto log_row = [&](const Span& s, int64_t p) { return a.log + (s.slot * a.log_rows + p % a.log_rows) * stored; };
    const auto count = static_cast<int64_t>(places.size());
    float* prepared = scratch(rows_area, count * stored);
    by_rows(count, 8 * width, [&](int64_t begin, int64_t end) {
        for (int64_t i = begin; i < end; i++) {
            const auto [b, p] = places[static_cast<size_t>(i)];
            const Span& s = spans[static_cast<size_t>(b)];
            const auto source = [&](int64_t q) -> const float* {
                return q < 0 ? nullptr : q < s.begin ? log_row(s, q) : a.x + (a.row_offsets[b] + q - s.begin) * a.stride;
            };
            const float* taps[8];
            for (int64_t j = 0; j < a.taps; j++) taps[j] = source(p - a.taps + 1 + j);
            float* row = prepared + i * stored;
            loops.convolve(taps, a.taps, a.conv, width, row);
            loops.unit(row, a.key_heads, a.key_dim, 1.0f / std::sqrt(static_cast<float>(a.key_dim)));
            loops.unit(row + keys, a.key_heads, a.key_dim, 1.0f);
            const float* gates = source(p) + (p < s.begin ? width : width + values);
            for (int64_t h = 0; h < a.value_heads; h++) {
                const double x = static_cast<double>(gates[a.value_heads + h]) + static_cast<double>(a.bias[h]);
                const double step = x > 20.0 ? x : std::log1p(std::exp(x));
                row[width + h] = static_cast<float>(1.0 / (1.0 + std::exp(-static_cast<double>(gates[h]))));
                row[width + a.value_heads + h] = static_cast<float>(std::exp(static_cast<double>(a.decay[h]) * step));
            }
        }
    });
    const int64_t cost = 4 * count * area / (a.num_seqs > 0 ? a.num_seqs : 1) + area;
    run_tasks(a.num_seqs * a.value_heads, cost * a.value_heads * a.num_seqs > serial_cost, [&](int64_t i) {
        const int64_t b = i / a.value_heads, h = i % a.value_heads;
        const int64_t group = a.value_heads / a.key_heads, key = a.tiled ? h % a.key_heads : h / group;
        const Span& s = spans[static_cast<size_t>(b)];
        float* out = a.out + a.row_offsets[b] * 2 * values;
        for (int64_t t = 0; t < s.end - s.begin; t++)
            std::memcpy(out + t * 2 * values + h * a.value_dim, a.x + (a.row_offsets[b] + t) * a.stride + width + h * a.value_dim,
                        bytes(a.value_dim));
        DeltaHead head{};
        head.state = a.state + (s.slot * a.value_heads + h) * area;
        head.fresh = s.base == 0;
        head.rows = prepared + s.first * stored;
        head.stride = stored;
        head.count = s.end - s.base;
        head.unwanted = s.begin - s.base;
        head.written = s.next - s.base;
        head.q = key * a.key_dim;
        head.k = keys + head.q;
        head.v = 2 * keys + h * a.value_dim;
        head.beta = width + h;
        head.decay = head.beta + a.value_heads;
        head.key_dim = a.key_dim;
        head.value_dim = a.value_dim;
        head.out = out + values + h * a.value_dim;
        head.out_stride = 2 * values;
        head.norm = a.norm;
        head.eps = a.eps;
        loops.head(head, scratch(packed_area, a.key_dim * 64));
    });
    for (int64_t b = 0; b < a.num_seqs; b++) {
        const Span& s = spans[static_cast<size_t>(b)];
        for (int64_t p = std::max(s.begin, s.next - a.taps + 1); p < s.end; p++) {
            const float* x = a.x + (a.row_offsets[b] + p - s.begin) * a.stride;
            std::memcpy(log_row(s, p), x, bytes(width));
            std::memcpy(log_row(s, p) + width, x + width + values, bytes(2 * a.value_heads));
        }
    }
}

void short_conv(const ShortConv& a) {
    const auto first_row = [&](int64_t b) { return a.row_offsets[b]; };
    const auto log_row = [&](int64_t b, int64_t p) { return a.log + (a.states[b] * a.log_rows + p % a.log_rows) * a.width; };
    std::vector<int32_t> sequences(static_cast<size_t>(a.rows));  // of each row
    if (a.taps > a.log_rows + 1) out_of_range("tap", a.taps, a.log_rows + 2);
    if (first_row(0) != 0 || first_row(a.num_seqs) != a.rows) out_of_range("row", first_row(a.num_seqs), a.rows);
    for (int64_t b = 0; b < a.num_seqs; b++) {
        if (a.states[b] < 0 || a.states[b] >= a.slots) out_of_range("state slot", a.states[b], a.slots);
        for (int64_t row = first_row(b); row < first_row(b + 1); row++) {
            check_branch(a.positions, first_row(b), row);
            if (a.positions[row] < 0) throw std::out_of_range("a position is negative");
            sequences[static_cast<size_t>(row)] = static_cast<int32_t>(b);
        }
    }
    by_rows(a.rows, 4 * a.taps * a.width, [&](int64_t begin, int64_t end) {
        for (int64_t row = begin; row < end; row++) {
            const int64_t b = sequences[static_cast<size_t>(row)], first = first_row(b), start = a.positions[first];
            float* out = a.out + row * a.width;
            std::fill_n(out, a.width, 0.0f);
            for (int64_t j = 0; j < a.taps; j++) {
                const int64_t p = start + row - first - a.taps + 1 + j;  // tokens before the sequence count as zeros
                const float* w = a.weight + j * a.width;
                if (p >= start) {
                    const float* x = a.x + (first + p - start) * a.stride;
                    for (int64_t i = 0; i < a.width; i++) out[i] += w[i] * (x[i] * x[2 * a.width + i]);
                } else if (p >= 0) {
                    const float* kept = log_row(b, p);
                    for (int64_t i = 0; i < a.width; i++) out[i] += w[i] * kept[i];
                }
            }
            for (int64_t i = 0; i < a.width; i++) out[i] *= a.x[row * a.stride + a.width + i];
        }
    });
    for (int64_t b = 0; b < a.num_seqs; b++)
        for (int64_t row = std::max<int64_t>(first_row(b), first_row(b + 1) - a.log_rows); row < first_row(b + 1); row++) {
            const float* x = a.x + row * a.stride;
            float* kept = log_row(b, a.positions[row]);
            for (int64_t i = 0; i < a.width; i++) kept[i] = x[i] * x[2 * a.width + i];
        }
}

void take(const Take& a) {
    by_rows(a.rows, a.width, [&](int64_t begin, int64_t end) {
        for (int64_t t = begin; t < end; t++)
            for (int64_t i = 0; i < a.width; i++) a.out[t * a.width + i] = a.x[t * a.stride + a.index[i]];
    });
}

void gate(const Gate& a) {
    const DeltaLoops& loops = *instruction_set().delta();
    by_rows(a.rows, 4 * a.heads * a.dim, [&](int64_t begin, int64_t end) {
        for (int64_t t = begin; t < end; t++)
            for (int64_t h = 0; h < a.heads; h++) {
                const int64_t at = (t * a.heads + h) * a.dim;
                loops.gate(a.x + at, a.gate + t * a.stride + h * a.apart, a.dim, a.out + at);
            }
    });
}

}  // namespace sameseed
