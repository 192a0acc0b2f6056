// Attention over the paged cache. Included like linear_body.h.
//
// The arithmetic, for one query at logical position p: keys go in blocks of 64 logical positions. In a block,
//   s_t = (scale q) . k_t,  m = max s_t,  e_t = exp(s_t - m),  l = sum e_t,  o = sum e_t v_t (t ascending),
// and the blocks' (m, l, o) are merged in ascending order; the result is o / l. Neither the place of a key in the cache,
// nor the other rows, nor who shares a tile enters: a draft node's ancestors stand at the positions after the known tokens.
// (Blockwise softmax: Milakov and Gimelshein, 2018; Dao et al., 2022.)

// Q <= 4 queries against four keys, two of which share a vector as two rows of weights do in `linear`; scores[query][key].
template <int Q, class T>
INLINE void score_tile(const float* q, int64_t q_stride, const T* const (&keys)[4], int64_t dim, float* scores) {
    V sums[8];  // query * 2 + pair of keys
    unroll<8>([&](auto i) INLINE_LAMBDA { sums[i] = zero(); });
    auto multiply = [&](const float* x, const T* const(&k)[4], int64_t at) INLINE_LAMBDA {
        const RowPair<T> pairs[2] = {{k[0] + at, k[1] + at}, {k[2] + at, k[3] + at}};
        V part[2] = {pairs[0].first(), pairs[1].first()};
        unroll<Q>([&](auto c) INLINE_LAMBDA {
            const V xc = load_twice(x + c * q_stride);
            unroll<2>([&](auto p) INLINE_LAMBDA { accumulate(sums[c * 2 + p], part[p], xc); });
        });
        unroll<2>([&](auto p) INLINE_LAMBDA { part[p] = pairs[p].second(); });
        unroll<Q>([&](auto c) INLINE_LAMBDA {
            const V xc = load_twice(x + c * q_stride + depth_step / 2);
            unroll<2>([&](auto p) INLINE_LAMBDA { accumulate(sums[c * 2 + p], part[p], xc); });
        });
    };
    int64_t d = 0;
    for (; d + depth_step <= dim; d += depth_step) multiply(q + d, keys, d);
    if (d < dim) {
        T padded[4][depth_step] = {};
        for (int i = 0; i < 4; i++)
            for (int64_t j = d; j < dim; j++) padded[i][j - d] = keys[i][j];
        multiply(q + d, {padded[0], padded[1], padded[2], padded[3]}, 0);
    }
    float totals[16];
    reduce_halves8(sums, totals);
    unroll<Q>([&](auto c) INLINE_LAMBDA { __builtin_memcpy(scores + c * score_stride, totals + c * 4, 4 * sizeof(float)); });
}

// Scores of `count` queries against `num_keys` keys; scores[query][key]. A row of scores has room for three keys more.
template <class T>
void score_keys(const float* q, int64_t q_stride, int64_t count, const T* const* keys, int64_t num_keys, int64_t dim,
                float* scores) {
    for (int64_t j = 0; j < num_keys; j += 4) {
        const T* four[4];
        for (int i = 0; i < 4; i++) four[i] = keys[j + i < num_keys ? j + i : num_keys - 1];
        int64_t c = 0;
        auto tile = [&](auto queries) INLINE_LAMBDA {
            for (; c + queries <= count; c += queries)
                score_tile<queries, T>(q + c * q_stride, q_stride, four, dim, scores + c * score_stride + j);
        };
        tile(Index<query_tile>{});
        tile(Index<3>{});
        tile(Index<2>{});
        tile(Index<1>{});
    }
}

// C vectors of columns of Q queries: out[query] += sum over keys, ascending, of weight[query][key] * value[key].
// `width` is that of the columns; less than C vectors of them only where C is 1.
template <int Q, int C, class T>
INLINE void add_values_tile(const float* weights, const T* const* values, int64_t num_keys, int64_t width, float* out,
                            int64_t out_stride, int64_t d) {
    V sums[Q * C];
    unroll<Q * C>([&](auto i) INLINE_LAMBDA { sums[i] = load(out + i / C * out_stride + i % C * lanes); });
    for (int64_t j = 0; j < num_keys; j++) {
        V v[C];
        unroll<C>([&](auto c) INLINE_LAMBDA {
            v[c] = C == 1 ? load_n(values[j] + d, width) : load(values[j] + d + c * lanes);
        });
        unroll<Q>([&](auto q) INLINE_LAMBDA {
            const V e = set1(weights[q * score_stride + j]);
            unroll<C>([&](auto c) INLINE_LAMBDA { accumulate(sums[q * C + c], e, v[c]); });
        });
    }
    unroll<Q * C>([&](auto i) INLINE_LAMBDA { store(out + i / C * out_stride + i % C * lanes, sums[i]); });
}

template <int C, class T>
void add_values_columns(const float* weights, int64_t count, const T* const* values, int64_t num_keys, int64_t width,
                        float* out, int64_t out_stride, int64_t d) {
    constexpr int Q = query_registers / C > 1 ? query_registers / C : 1, half = Q > 3 ? Q / 2 : 1;
    int64_t q = 0;
    auto tile = [&](auto rows) INLINE_LAMBDA {
        for (; q + rows <= count; q += rows)
            add_values_tile<rows, C, T>(weights + q * score_stride, values, num_keys, width, out + q * out_stride, out_stride, d);
    };
    tile(Index<Q>{});
    tile(Index<half>{});
    tile(Index<1>{});
}

template <class T>
void add_values(const float* weights, int64_t count, const T* const* values, int64_t num_keys, int64_t dim, float* out,
                int64_t out_stride) {
    int64_t d = 0;
    for (; d + 4 * lanes <= dim; d += 4 * lanes)
        add_values_columns<4, T>(weights, count, values, num_keys, 4 * lanes, out + d, out_stride, d);
    for (; d + 2 * lanes <= dim; d += 2 * lanes)
        add_values_columns<2, T>(weights, count, values, num_keys, 2 * lanes, out + d, out_stride, d);
    for (; d < dim; d += lanes)
        add_values_columns<1, T>(weights, count, values, num_keys, dim - d, out + d, out_stride, d);
}

// Replace the scores [begin, end) of a block by exp(score - max), the others by 0; returns the sum.
inline float soften(float* scores, int64_t begin, int64_t end, float* block_max) {
    const bool whole = begin == 0 && end == key_block;
    V s[4];
    for (int i = 0; i < 4; i++) {
        s[i] = load(scores + i * lanes);
        if (!whole) s[i] = keep(s[i], begin - i * lanes, end - i * lanes, set1(-__builtin_inff()));
    }
    *block_max = reduce_max(max(max(s[0], s[1]), max(s[2], s[3])));
    for (int i = 0; i < 4; i++) {
        s[i] = exponential(sub(s[i], set1(*block_max)));
        if (!whole) s[i] = keep(s[i], begin - i * lanes, end - i * lanes, zero());
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
    float *q, *total, *block, *scores;       // [queries, padded] three times, [queries, score_stride]
    float row_max[max_queries], row_sum[max_queries];  // of all blocks so far

    // Keys and values stored at indices [begin, end) of the sequence.
    void find(int64_t begin, int64_t end, const T** keys, const T** values) const {
        const int64_t row = a.kv_heads * a.dim;
        uint32_t block = static_cast<uint32_t>(begin) / static_cast<uint32_t>(a.block_size);
        int64_t place = begin - block * a.block_size;
        for (int64_t i = begin; i < end; block++, place = 0)  // a division a key would cost more than its product
            for (int64_t at = (tile.block_table[block] * a.block_size + place) * row + tile.kv_head * a.dim;
                 place < a.block_size && i < end; place++, i++, at += row) {
                *keys++ = static_cast<const T*>(a.k) + at;
                *values++ = static_cast<const T*>(a.v) + at;
            }
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
                const V part = mul(load_n(q + d, w.a.dim - d), scale);
                store(w.q + c * w.padded + d, paired<T> ? evens_then_odds(part) : part);  // as `linear` packs x
                store(w.total + c * w.padded + d, zero());
            }
            w.row_max[c] = -__builtin_inff();
            w.row_sum[c] = 0.0f;
        }
}

// Merge the block's partial results of queries [begin, end) into their running ones.
template <class T>
void merge(Walk<T>& w, int64_t begin, int64_t end, const float* block_max, const float* block_sum) {
    const V row_max = load(w.row_max), added_max = load(block_max), top = max(row_max, added_max);
    float kept[max_queries], added[max_queries];
    const V keep_factor = exponential(sub(row_max, top)), add_factor = exponential(sub(added_max, top));
    store(kept, keep_factor);
    store(added, add_factor);
    float tops[max_queries], sums[max_queries];
    store(tops, top);
    store(sums, fma(load(block_sum), add_factor, mul(load(w.row_sum), keep_factor)));
    for (int64_t c = begin; c < end; c++) {
        w.row_max[c] = tops[c];
        w.row_sum[c] = sums[c];
        const V old_factor = set1(kept[c]), new_factor = set1(added[c]);
        for (int64_t d = c * w.padded; d < (c + 1) * w.padded; d += lanes)
            store(w.total + d, fma(load(w.block + d), new_factor, mul(load(w.total + d), old_factor)));
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
        w.find(index, index + 1, keys + n, values + n);
        n++;
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
    if (low < shared) {
        w.find(start + low, start + shared, keys + low, values + low);
        score_keys<T>(w.q, w.padded, rows * group, keys + low, shared - low, dim, w.scores + low);
    }
    for (int64_t i = 0; i < rows; i++) {
        if (begin[i] >= end[i] || end[i] <= known) continue;
        const int64_t from = begin[i] > known ? begin[i] : known;
        const int64_t n = own_keys(w, i, start + from, start + end[i], node_keys, node_values);
        score_keys<T>(w.q + i * group * w.padded, w.padded, group, node_keys, n, dim, w.scores + i * group * score_stride + from);
    }

    float block_max[max_queries] = {}, block_sum[max_queries] = {};
    for (int64_t c = 0; c < rows * group; c++) {
        const int64_t i = c / group;
        if (begin[i] >= end[i]) continue;
        block_sum[c] = soften(w.scores + c * score_stride, begin[i], end[i], block_max + c);
        for (int64_t d = 0; d < w.padded; d += lanes) store(w.block + c * w.padded + d, zero());
    }
    for (int64_t i = 0; i < rows;) {
        // Rows that see the same shared keys go together. An unseen value never meets a sum: 0 * NaN would be NaN.
        const int64_t to = end[i] < known ? end[i] : known;
        int64_t next = i + 1;
        while (next < rows && begin[next] == begin[i] && (end[next] < known ? end[next] : known) == to) next++;
        if (begin[i] < to)
            add_values<T>(w.scores + i * group * score_stride + begin[i], (next - i) * group, values + begin[i], to - begin[i], dim,
                          w.block + i * group * w.padded, w.padded);
        i = next;
    }
    for (int64_t i = 0; i < rows; i++) {
        if (begin[i] >= end[i] || end[i] <= known) continue;
        const int64_t from = begin[i] > known ? begin[i] : known;
        const int64_t n = own_keys(w, i, start + from, start + end[i], node_keys, node_values);
        add_values<T>(w.scores + i * group * score_stride + from, group, node_values, n, dim, w.block + i * group * w.padded,
                      w.padded);
    }
    for (int64_t i = 0; i < rows;) {  // a row that sees nothing of the block keeps what it has
        int64_t next = i;
        while (next < rows && begin[next] < end[next]) next++;
        if (i < next) merge(w, i * group, next * group, block_max, block_sum);
        i = next + 1;
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
