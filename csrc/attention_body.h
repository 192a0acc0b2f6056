// Attention over the paged cache. Included like linear_body.h.
//
// The arithmetic, for one query at logical position p: keys go in blocks of 64 logical positions. In a block,
//   s_t = (scale q) . k_t,  m = max s_t,  e_t = exp(s_t - m),  l = sum e_t,  o = sum e_t v_t (t ascending),
// and the blocks' (m, l, o) are merged in ascending order; the result is o / l. Neither the place of a key in the cache,
// nor the other rows, nor who shares a tile enters: a draft node's ancestors stand at the positions after the known tokens.
// (Blockwise softmax: Milakov and Gimelshein, 2018; Dao et al., 2022.)

// Scores of `count` queries against `num_keys` keys; scores[query][key].
template <class T>
void score_keys(const float* q, int64_t q_stride, int64_t count, const T* const* keys, int64_t num_keys, int64_t dim,
                float* scores) {
    const int64_t whole = dim / lanes * lanes;
    for (int64_t j = 0; j < num_keys; j += 4) {
        const T* k[4];
        for (int i = 0; i < 4; i++) k[i] = keys[j + i < num_keys ? j + i : num_keys - 1];
        for (int64_t c = 0; c < count; c++) {
            V sums[4] = {zero(), zero(), zero(), zero()};
            const float* query = q + c * q_stride;
            for (int64_t d = 0; d < whole; d += lanes) {
                V qd = load(query + d);
                for (int i = 0; i < 4; i++) sums[i] = fma(qd, load(k[i] + d), sums[i]);
            }
            if (whole < dim) {
                V qd = load(query + whole);
                for (int i = 0; i < 4; i++) sums[i] = fma(qd, load_n(k[i] + whole, dim - whole), sums[i]);
            }
            float four[4];
            reduce_add4(sums[0], sums[1], sums[2], sums[3], four);
            for (int64_t i = 0; i < 4 && j + i < num_keys; i++) scores[c * key_block + j + i] = four[i];
        }
    }
}

// out[query] += sum over keys, ascending, of weight[query][key] * value[key].
template <int Q, int C, class T>
void add_values_tile(const float* weights, const T* const* values, int64_t num_keys, int64_t d, int64_t left, float* out,
                     int64_t out_stride) {
    V sums[Q * C];
    for (int q = 0; q < Q; q++)
        for (int c = 0; c < C; c++) sums[q * C + c] = load(out + q * out_stride + d + c * lanes);
    for (int64_t j = 0; j < num_keys; j++) {
        V v[C];
        for (int c = 0; c < C; c++) v[c] = load_n(values[j] + d + c * lanes, left - c * lanes);
        for (int q = 0; q < Q; q++) {
            V e = set1(weights[q * key_block + j]);
            for (int c = 0; c < C; c++) sums[q * C + c] = fma(e, v[c], sums[q * C + c]);
        }
    }
    for (int q = 0; q < Q; q++)
        for (int c = 0; c < C; c++) store(out + q * out_stride + d + c * lanes, sums[q * C + c]);
}

template <int C, class T>
void add_values_columns(const float* weights, int64_t count, const T* const* values, int64_t num_keys, int64_t d, int64_t left,
                        float* out, int64_t out_stride) {
    constexpr int Q = query_registers / C > 1 ? query_registers / C : 1;
    int64_t q = 0;
    for (; q + Q <= count; q += Q)
        add_values_tile<Q, C, T>(weights + q * key_block, values, num_keys, d, left, out + q * out_stride, out_stride);
    for (; q < count; q++)
        add_values_tile<1, C, T>(weights + q * key_block, values, num_keys, d, left, out + q * out_stride, out_stride);
}

template <class T>
void add_values(const float* weights, int64_t count, const T* const* values, int64_t num_keys, int64_t dim, float* out,
                int64_t out_stride) {
    int64_t d = 0;
    for (; d + 4 * lanes <= dim; d += 4 * lanes)
        add_values_columns<4, T>(weights, count, values, num_keys, d, dim - d, out, out_stride);
    for (; d + 2 * lanes <= dim; d += 2 * lanes)
        add_values_columns<2, T>(weights, count, values, num_keys, d, dim - d, out, out_stride);
    for (; d < dim; d += lanes) add_values_columns<1, T>(weights, count, values, num_keys, d, dim - d, out, out_stride);
}

// Replace the scores [begin, end) of a block by exp(score - max), the others by 0; returns the sum.
inline float soften(float* scores, int64_t begin, int64_t end, float* block_max) {
    const V lowest = set1(-__builtin_inff());
    V s[4], top = lowest;
    for (int i = 0; i < 4; i++) {
        s[i] = keep(load(scores + i * lanes), begin - i * lanes, end - i * lanes, lowest);
        top = max(top, s[i]);
    }
    *block_max = reduce_max(top);
    for (int i = 0; i < 4; i++) {
        s[i] = keep(exponential(sub(s[i], set1(*block_max))), begin - i * lanes, end - i * lanes, zero());
        store(scores + i * lanes, s[i]);
    }
    return reduce_add(add(add(s[0], s[1]), add(s[2], s[3])));
}

// What the rows of a tile share while they walk the blocks.
template <class T>
struct Walk {
    const AttentionArgs& a;
    const AttentionTile& tile;
    int64_t group, padded;                   // query heads a row; dim rounded up to vectors
    float *q, *total, *block, *scores;       // [queries, padded] three times, [queries, key_block]
    float row_max[max_queries], row_sum[max_queries];

    const T* at(const void* base, int64_t index) const {
        const int64_t slot = tile.block_table[index / a.block_size] * a.block_size + index % a.block_size;
        return static_cast<const T*>(base) + (slot * a.kv_heads + tile.kv_head) * a.dim;
    }
    int64_t position(int64_t i) const { return a.positions[tile.row_begin + i]; }
    int64_t first_visible(int64_t i) const { return position(i) < a.window ? 0 : position(i) - a.window + 1; }
};

template <class T>
void load_queries(Walk<T>& w) {
    const V scale = set1(w.a.scale);
    for (int64_t i = 0; i < w.tile.row_count; i++)
        for (int64_t g = 0; g < w.group; g++) {
            const float* q = w.a.q + (w.tile.row_begin + i) * w.a.q_stride + (w.tile.head_begin + g) * w.a.dim;
            const int64_t c = i * w.group + g;
            for (int64_t d = 0; d < w.padded; d += lanes) {
                store(w.q + c * w.padded + d, mul(load_n(q + d, w.a.dim - d), scale));
                store(w.total + c * w.padded + d, zero());
            }
            w.row_max[c] = -__builtin_inff();
            w.row_sum[c] = 0.0f;
        }
}

// Merge a block's partial result of query c into its running one.
template <class T>
void merge(Walk<T>& w, int64_t c, float block_max, float block_sum) {
    const float top = w.row_max[c] > block_max ? w.row_max[c] : block_max;
    float pair[lanes] = {w.row_max[c] - top, block_max - top};
    store(pair, exponential(load(pair)));
    const V old_factor = set1(pair[0]), new_factor = set1(pair[1]);
    w.row_sum[c] = __builtin_fmaf(block_sum, pair[1], w.row_sum[c] * pair[0]);
    w.row_max[c] = top;
    for (int64_t d = 0; d < w.padded; d += lanes) {
        float* total = w.total + c * w.padded + d;
        store(total, fma(load(w.block + c * w.padded + d), new_factor, mul(load(total), old_factor)));
    }
}

// Storage places of a draft node's own keys: its ancestors and itself, at positions kv_len, kv_len + 1, ...
template <class T>
int64_t own_keys(const Walk<T>& w, int64_t i, int64_t begin, int64_t end, const T** keys, const T** values) {
    uint64_t mask = static_cast<uint64_t>(w.a.tree_mask[w.tile.row_begin + i]);
    int64_t position = w.tile.kv_len, n = 0;
    for (; mask && position < end; mask &= mask - 1, position++) {
        if (position < begin) continue;
        const int64_t index = w.tile.kv_len + __builtin_ctzll(mask);
        keys[n] = w.at(w.a.k, index);
        values[n++] = w.at(w.a.v, index);
    }
    return n;
}

// All rows of the tile against positions [start, start + 64).
template <class T>
void walk_block(Walk<T>& w, int64_t start) {
    const int64_t rows = w.tile.row_count, group = w.group, dim = w.a.dim;
    const T *keys[key_block], *values[key_block], *node_keys[key_block], *node_values[key_block];
    int64_t begin[max_queries], end[max_queries];  // what row i sees of the block, relative to its start
    int64_t low = key_block, high = 0;
    for (int64_t i = 0; i < rows; i++) {
        const int64_t from = w.first_visible(i) - start, to = w.position(i) + 1 - start;
        begin[i] = from < 0 ? 0 : from;
        end[i] = to > key_block ? key_block : to;
        if (begin[i] >= end[i]) continue;
        low = begin[i] < low ? begin[i] : low;
        high = end[i] > high ? end[i] : high;
    }
    const int64_t known = w.tile.kv_len - start < 0 ? 0 : w.tile.kv_len - start;  // here begin the nodes' own keys
    const int64_t shared = high < known ? high : known;
    for (int64_t j = low; j < shared; j++) {
        keys[j] = w.at(w.a.k, start + j);
        values[j] = w.at(w.a.v, start + j);
    }
    if (low < shared) score_keys<T>(w.q, w.padded, rows * group, keys + low, shared - low, dim, w.scores + low);
    for (int64_t i = 0; i < rows; i++) {
        if (begin[i] >= end[i] || end[i] <= known) continue;
        const int64_t from = begin[i] > known ? begin[i] : known;
        const int64_t n = own_keys(w, i, start + from, start + end[i], node_keys, node_values);
        score_keys<T>(w.q + i * group * w.padded, w.padded, group, node_keys, n, dim, w.scores + i * group * key_block + from);
    }

    float block_max[max_queries], block_sum[max_queries];
    for (int64_t c = 0; c < rows * group; c++) {
        const int64_t i = c / group;
        if (begin[i] >= end[i]) continue;
        block_sum[c] = soften(w.scores + c * key_block, begin[i], end[i], block_max + c);
        for (int64_t d = 0; d < w.padded; d += lanes) store(w.block + c * w.padded + d, zero());
    }
    for (int64_t i = 0; i < rows;) {
        // Rows that see the same shared keys go together. An unseen value never meets a sum: 0 * NaN would be NaN.
        const int64_t to = end[i] < known ? end[i] : known;
        int64_t next = i + 1;
        while (next < rows && begin[next] == begin[i] && (end[next] < known ? end[next] : known) == to) next++;
        if (begin[i] < to)
            add_values<T>(w.scores + i * group * key_block + begin[i], (next - i) * group, values + begin[i], to - begin[i], dim,
                          w.block + i * group * w.padded, w.padded);
        i = next;
    }
    for (int64_t i = 0; i < rows; i++) {
        if (begin[i] >= end[i]) continue;
        if (end[i] > known) {
            const int64_t from = begin[i] > known ? begin[i] : known;
            const int64_t n = own_keys(w, i, start + from, start + end[i], node_keys, node_values);
            add_values<T>(w.scores + i * group * key_block + from, group, node_values, n, dim, w.block + i * group * w.padded,
                          w.padded);
        }
        for (int64_t c = i * group; c < (i + 1) * group; c++) merge(w, c, block_max[c], block_sum[c]);
    }
}

template <class T>
void attention(const AttentionArgs& a, const AttentionTile& tile, float* scratch) {
    const int64_t padded = round_up(a.dim, lanes), area = max_queries * padded, group = tile.head_count;
    Walk<T> w{a, tile, group, padded, scratch, scratch + area, scratch + 2 * area, scratch + 3 * area, {}, {}};
    load_queries(w);
    int64_t low = INT64_MAX, high = 0;
    for (int64_t i = 0; i < tile.row_count; i++) {
        low = w.first_visible(i) < low ? w.first_visible(i) : low;
        high = w.position(i) + 1 > high ? w.position(i) + 1 : high;
    }
    for (int64_t start = low / key_block * key_block; start < high; start += key_block) walk_block(w, start);
    for (int64_t i = 0; i < tile.row_count; i++)
        for (int64_t g = 0; g < group; g++) {
            const int64_t c = i * group + g;
            float* out = a.out + ((tile.row_begin + i) * a.heads + tile.head_begin + g) * a.dim;
            const V inverse = set1(1.0f / w.row_sum[c]);
            for (int64_t d = 0; d < a.dim; d += lanes)
                store_n(out + d, mul(load(w.total + c * padded + d), inverse), a.dim - d);
        }
}
