// Attention over the paged cache. Included like linear_body.h.
//
// The arithmetic for one query at logical position p: keys are processed in blocks of 256 logical positions. In a
// block, let a_t and b_t be the scales of key t and value t (scaled formats only), and k_t and v_t the values of their
// codes. Then
//   s_t = a_t ((scale q) . k_t),  m = max s_t,  e_t = exp(s_t - m),  l = sum e_t,  o = sum (e_t b_t) v_t (t ascending),
// and the (m, l, o) of the blocks are merged in ascending order. The result is o / l. A sink is merged before them as
// (sink, 1, 0).
// (Blockwise softmax: Milakov and Gimelshein, 2018; Dao et al., 2022.)
//
// The result is row-invariant: it does not depend on where a key is stored in the cache, on other rows, or on the tile.
// The ancestors of a draft node count as the positions after the known tokens. It does not matter either whether one
// thread processes all blocks or several threads divide them, because the results of a block are computed from that
// block alone.
//
// Rows in 4 bits are decoded to floats, scale included, either in registers or when the row is looked up. If they are
// stored rotated, q is rotated too, and the result is rotated back.

constexpr int64_t few_queries = query_tile;  // up to this many (one tile), keys and values are widened in registers
// Rows of values processed at a time in that case. Value rows are often a power of two apart, so with more rows few of
// them would stay in the L1 cache until all their columns are summed.
constexpr int64_t few_values = 32;

// The state shared by the rows of a tile.
struct Walk {
    const AttentionArgs& a;
    const AttentionTile& tile;
    int64_t group, queries, padded;     // query heads per row; rows * group; dim rounded up to whole vectors
    int64_t row_size;                   // elements of a stored row
    float *q, *total, *block, *panel;   // [queries, padded] three times, [panel_keys, padded]
    float *scores, *key_scales, *value_scales;             // of a block: [queries, score_stride], [score_stride] twice
    float* unpacked;                                       // [2 * key_block, padded]: keys, then values of a block
    float row_max[max_queries], row_sum[max_queries];      // over all blocks so far
    float block_max[max_queries] = {}, block_sum[max_queries] = {};  // of the current block
    int64_t begin[max_queries], end[max_queries];          // what row i sees of the block, relative to its start
    int64_t row_of[max_queries];                           // row of query c; dividing each time would cost too much
    int64_t low, seen;                                     // [low, seen): places of the block that some row sees
    int64_t known, high;                                   // own keys of draft nodes: from `known`; shared: [low, high)
    Ahead ahead;

    Walk(const AttentionArgs& args, const AttentionTile& t, float* scratch)
        : a(args), tile(t), row_size(args.dim), ahead(a, tile) {
        group = t.head_count, queries = t.row_count * group, padded = round_up(a.dim, lanes);
        const int64_t area = max_queries * padded;
        q = scratch, total = q + area, block = total + area, panel = block + area;
        scores = panel + panel_keys * padded;
        key_scales = scores + max_queries * score_stride, value_scales = key_scales + score_stride;
        unpacked = value_scales + score_stride;
        for (int64_t i = 0, c = 0; i < t.row_count; i++)
            for (int64_t g = 0; g < group; g++, c++) row_of[c] = i, row_max[c] = -__builtin_inff(), row_sum[c] = 0.0f;
        for (int64_t c = 0; a.sinks != nullptr && c < queries; c++) row_max[c] = a.sinks[head(c)], row_sum[c] = 1.0f;
        for (int64_t i = 0; i < queries * padded; i += lanes) store(total + i, zero());
    }

    // Spreads the prefetches evenly over the score tiles and value tiles of a block. `element`: bytes of a stored
    // element.
    void plan_ahead(int64_t element) {
        const int64_t tiles = (queries + query_tile - 1) / query_tile, some = queries < query_tile ? queries : query_tile;
        const int64_t step = queries <= few_queries ? few_values : panel_keys;
        ahead.plan(a.kv_heads * row_size * element, tiles * key_block / (2 * key_pairs[some]),
                   tiles * (key_block / step) * ((padded / lanes + value_columns[some] - 1) / value_columns[some]));
    }
    int64_t position(int64_t i) const { return a.positions[tile.row_begin + i]; }
    int64_t head(int64_t c) const { return tile.head_begin + c - row_of[c] * group; }
    bool sees(int64_t i) const { return begin[i] < end[i]; }
    void look(int64_t block_index) {
        const int64_t start = block_index * key_block;
        low = key_block, seen = 0;
        for (int64_t i = 0; i < tile.row_count; i++) {
            const int64_t from = position(i) - a.window + 1 - start, to = position(i) + 1 - start;
            begin[i] = from < 0 ? 0 : from;
            end[i] = to > key_block ? key_block : to;
            if (!sees(i)) continue;
            low = begin[i] < low ? begin[i] : low;
            seen = end[i] > seen ? end[i] : seen;
        }
        known = tile.kv_len - start < 0 ? 0 : tile.kv_len - start;
        high = seen < known ? seen : known;
    }
};

// The type of row that the products read: the stored row, or the floats that it was decoded to.
template <class T>
using Row = std::conditional_t<unpacked_first<T>, float, T>;

// Looks up the keys and values stored at indices [begin, end) of the sequence. The first one has place `at` in the
// block.
template <class T>
void find(Walk& w, int64_t begin, int64_t end, const Row<T>** keys, const Row<T>** values, int64_t at) {
    const AttentionArgs& a = w.a;
    uint32_t block = static_cast<uint32_t>(begin) / static_cast<uint32_t>(a.block_size);
    int64_t place = begin - block * a.block_size;
    for (int64_t i = begin; i < end; block++, place = 0)  // a division per key would cost more than its product
        for (int64_t row = (w.tile.block_table[block] * a.block_size + place) * a.kv_heads + w.tile.kv_head;
             place < a.block_size && i < end; place++, i++, at++, row += a.kv_heads) {
            if constexpr (unpacked_first<T>) {
                float *key = w.unpacked + at * w.padded, *value = key + key_block * w.padded;
                unpack_row(static_cast<const T*>(a.k) + row * w.row_size, a.k_scale[row], a.dim, key);
                unpack_row(static_cast<const T*>(a.v) + row * w.row_size, a.v_scale[row], a.dim, value);
                *keys++ = key;
                *values++ = value;
            } else {
                *keys++ = static_cast<const T*>(a.k) + row * w.row_size;
                *values++ = static_cast<const T*>(a.v) + row * w.row_size;
            }
            if constexpr (scaled<T> || decoded<T>) {
                w.key_scales[at] = a.k_scale[row];
                w.value_scales[at] = a.v_scale[row];
            }
        }
}

// Looks up a draft node's own keys at places [begin, end) of the block. These are the keys of its ancestors and itself,
// at positions kv_len, kv_len + 1, ...
template <class T>
void own_keys(Walk& w, int64_t i, int64_t start, int64_t begin, int64_t end, const Row<T>** keys, const Row<T>** values) {
    uint64_t mask = static_cast<uint64_t>(w.a.tree_mask[w.tile.row_begin + i]);
    for (int64_t at = w.tile.kv_len - start; mask && at < end; mask &= mask - 1, at++) {
        if (at < begin) continue;
        const int64_t index = w.tile.kv_len + __builtin_ctzll(mask);
        find<T>(w, index, index + 1, keys + (at - begin), values + (at - begin), at);
    }
}

template <class T>
void load_queries(Walk& w) {
    const V scale = set1(w.a.scale);
    for (int64_t c = 0; c < w.queries; c++) {
        const int64_t row = w.tile.row_begin + w.row_of[c], head = w.head(c);
        const float* q = w.a.q + row * w.a.q_stride + head * w.a.dim;
        for (int64_t d = 0; d < w.padded; d += lanes) {
            const V part = mul(load_n(q + d, w.a.dim - d), scale);
            store(w.q + c * w.padded + d, paired<T> ? evens_then_odds(part) : part);  // the order of `pack`
        }
        if (w.a.rotated) rotate(w.q + c * w.padded, w.a.dim);
    }
}

// Scores of queries [c, c + count) with the keys, which begin at place `at` of the block.
template <class Keys>
void score_keys(Walk& w, int64_t c, int64_t count, const Keys& keys, int64_t num_keys, int64_t at, bool fetch) {
    for (int64_t n; count > 0; c += n, count -= n, fetch = false) {
        n = count < query_tile ? count : query_tile;
        with_count(n, [&](auto queries) INLINE_LAMBDA {
            score_strip<queries>(w.q + c * w.padded, w.padded, keys, num_keys, w.a.dim, fetch, w.ahead,
                                 w.scores + c * score_stride + at);
        });
    }
}

// Scores of all queries with the shared keys at places [low, high).
template <class T>
void score_shared(Walk& w, const T* const* keys, int64_t low, int64_t high) {
    if (w.queries <= few_queries)
        return score_keys(w, 0, w.queries, Stored<T>{keys, high - low, high - low, w.a.dim, w.key_scales + low}, high - low, low,
                          true);
    for (int64_t s = low; s < high; s += panel_keys) {
        const int64_t n = high - s < panel_keys ? high - s : panel_keys;
        widen_keys(Stored<T>{keys + (s - low), n, 2 * (high - low) - (s - low) - n, w.a.dim, w.key_scales + s}, w.padded,
                   w.panel);
        for (int64_t c = 0, count; c < w.queries; c += count) {
            count = w.queries - c < query_tile ? w.queries - c : query_tile;
            int64_t seen = 0;  // keys of the panel up to the last one that any of these queries sees
            for (int64_t i = w.row_of[c]; i <= w.row_of[c + count - 1]; i++)
                if (w.sees(i) && w.end[i] - s > seen) seen = w.end[i] - s;
            score_keys(w, c, count, KeyPanel{w.panel, w.padded}, seen < n ? seen : n, s, false);
        }
    }
}

// Softmax weights of query c from its scores. Scores outside [begin, end) are ignored.
template <class T>
void soften(Walk& w, int64_t c, int64_t begin, int64_t end) {
    float* scores = w.scores + c * score_stride;
    const int64_t first = begin / lanes * lanes;
    V top = set1(-__builtin_inff());
    for (int64_t j = first; j < end; j += lanes) {
        V s = load(scores + j);
        if constexpr (scaled<T>) s = mul(s, load(w.key_scales + j));
        if (j < begin || j + lanes > end) s = keep(s, begin - j, end - j, set1(-__builtin_inff()));
        if (scaled<T> || j < begin || j + lanes > end) store(scores + j, s);
        top = max(top, s);
    }
    w.block_max[c] = reduce_max(top);
    const V block_max = set1(w.block_max[c]);
    V sum = zero();
    for (int64_t j = first; j < end; j += lanes) {
        V e = exponential(sub(load(scores + j), block_max));
        if (j < begin || j + lanes > end) e = keep(e, begin - j, end - j, zero());
        sum = add(sum, e);
        if constexpr (scaled<T>) e = mul(e, load(w.value_scales + j));
        store(scores + j, e);
    }
    w.block_sum[c] = reduce_add(sum);
}

// Adds the values at places [low, high) for queries [c, c + count). Each query adds only the places that it sees; the
// places that all of them see are added together. Unseen values are left out, not multiplied by zero, because 0 * NaN
// is NaN.
template <class Values>
void add_seen(Walk& w, int64_t c, int64_t count, const Values& values, int64_t low, int64_t high, bool fetch) {
    int64_t from[query_tile], to[query_tile], common_from = low, common_to = high;
    for (int64_t n = 0; n < count; n++) {
        const int64_t i = w.row_of[c + n];
        from[n] = w.begin[i] < low ? low : w.begin[i];
        to[n] = w.end[i] > high ? high : w.end[i];
        if (!w.sees(i) || from[n] > to[n]) from[n] = to[n] = high;
        common_from = from[n] > common_from ? from[n] : common_from;
        common_to = to[n] < common_to ? to[n] : common_to;
    }
    if (common_from >= common_to) common_from = common_to = high;
    auto sum = [&](int64_t n, int64_t some, int64_t begin, int64_t end) {
        add_values(w.scores + (c + n) * score_stride + begin, some, values.from(begin - low), end - begin, w.a.dim,
                   w.block + (c + n) * w.padded, w.padded, fetch, w.ahead);
    };
    for (int64_t n = 0; n < count; n++) sum(n, 1, from[n], to[n] < common_from ? to[n] : common_from);
    sum(0, count, common_from, common_to);
    for (int64_t n = 0; n < count; n++) sum(n, 1, from[n] > common_to ? from[n] : common_to, to[n]);
}

template <class T>
void add_shared(Walk& w, const T* const* values, int64_t low, int64_t high) {
    const bool few = w.queries <= few_queries;
    const int64_t step = few ? few_values : panel_keys;
    bool all_seen = true;  // whether every row sees all of [low, high)
    for (int64_t i = 0; i < w.tile.row_count; i++) all_seen = all_seen && w.begin[i] <= low && w.end[i] >= high;
    for (int64_t s = low; s < high; s += step) {
        const int64_t n = high - s < step ? high - s : step;
        const Stored<T> stored{values + (s - low), n, high - s - n, w.a.dim, w.value_scales + s};
        if (few && all_seen) {
            add_values(w.scores + s, w.queries, stored, n, w.a.dim, w.block, w.padded, true, w.ahead);
        } else if (few) {
            add_seen(w, 0, w.queries, stored, s, s + n, true);
        } else {
            widen_values(stored, w.padded, w.panel);
            for (int64_t c = 0, count; c < w.queries; c += count) {
                count = w.queries - c < query_tile ? w.queries - c : query_tile;
                add_seen(w, c, count, ValuePanel{w.panel, w.padded}, s, s + n, false);
            }
        }
    }
}

// Processes the positions of one block for all rows of the tile.
template <class T>
void walk_block(Walk& w, int64_t block_index) {
    const int64_t start = block_index * key_block, rows = w.tile.row_count, group = w.group, dim = w.a.dim;
    const Row<T>*shared[2 * key_block], *own[128];  // keys, then values
    w.look(block_index);
    const int64_t low = w.low, high = w.high, known = w.known;
    const Row<T>** values = shared + (low < high ? high - low : 0);
    if (low < high) {
        find<T>(w, start + low, start + high, shared, values, low);
        score_shared(w, shared, low, high);
    }
    for (int64_t i = 0; i < w.queries * w.padded; i += lanes) store(w.block + i, zero());
    for (int64_t i = 0; i < rows; i++) {
        if (!w.sees(i)) continue;
        const int64_t from = w.begin[i] > known ? w.begin[i] : known, n = w.end[i] - from;
        if (n > 0) {
            own_keys<T>(w, i, start, from, w.end[i], own, own + 64);
            score_keys(w, i * group, group, Stored<Row<T>>{own, n, 0, dim, w.key_scales + from}, n, from, false);
        }
        for (int64_t c = i * group; c < (i + 1) * group; c++) soften<T>(w, c, w.begin[i], w.end[i]);
    }
    if (low < high) add_shared(w, values, low, high);
    for (int64_t i = 0; i < rows; i++) {
        const int64_t from = w.begin[i] > known ? w.begin[i] : known, n = w.end[i] - from;
        if (!w.sees(i) || n <= 0) continue;
        own_keys<T>(w, i, start, from, w.end[i], own, own + 64);
        for (int64_t c = i * group, count, last = c + group; c < last; c += count) {
            count = last - c < query_tile ? last - c : query_tile;
            add_values(w.scores + c * score_stride + from, count, Stored<Row<T>>{own + 64, n, 0, dim, w.value_scales + from}, n,
                       dim, w.block + c * w.padded, w.padded, false, w.ahead);
        }
    }
}

// Merges the results of a block into the running totals. Rows that see nothing of the block stay unchanged.
inline void merge(Walk& w, const float* block_max, const float* block_sum, const float* block) {
    float kept[max_queries], added[max_queries], tops[max_queries], sums[max_queries];
    for (int64_t c = 0; c < w.queries; c += lanes) {
        const V row_max = load(w.row_max + c), added_max = load(block_max + c), top = max(row_max, added_max);
        const V keep_factor = exponential(sub(row_max, top)), add_factor = exponential(sub(added_max, top));
        store(kept + c, keep_factor);
        store(added + c, add_factor);
        store(tops + c, top);
        store(sums + c, fma(load(block_sum + c), add_factor, mul(load(w.row_sum + c), keep_factor)));
    }
    for (int64_t c = 0; c < w.queries; c++) {
        if (!w.sees(w.row_of[c])) continue;
        w.row_max[c] = tops[c];
        w.row_sum[c] = sums[c];
        const V old_factor = set1(kept[c]), new_factor = set1(added[c]);
        for (int64_t d = c * w.padded; d < (c + 1) * w.padded; d += lanes)
            store(w.total + d, fma(load(block + d), new_factor, mul(load(w.total + d), old_factor)));
    }
}

inline void finish(const Walk& w) {
    for (int64_t c = 0; c < w.queries; c++) {
        const int64_t row = w.tile.row_begin + w.row_of[c], head = w.head(c);
        float* out = w.a.out + (row * w.a.heads + head) * w.a.dim;
        const V inverse = set1(1.0f / w.row_sum[c]);
        for (int64_t d = 0; d < w.a.dim; d += lanes)
            store_n(out + d, mul(load(w.total + c * w.padded + d), inverse), w.a.dim - d);
        if (w.a.rotated) rotate(out, w.a.dim);
    }
}

// Merges the results of a block, or stores them as partial results if several calls divide the blocks.
inline void keep_block(Walk& w, int64_t block_index) {
    if (w.tile.partial == nullptr) return merge(w, w.block_max, w.block_sum, w.block);
    float* partial = w.tile.partial + (block_index - w.tile.first_block) * attention_partial(w.a.dim, w.queries);
    __builtin_memcpy(partial, w.block_max, sizeof w.block_max);
    __builtin_memcpy(partial + max_queries, w.block_sum, sizeof w.block_sum);
    __builtin_memcpy(partial + 2 * max_queries, w.block, static_cast<uint64_t>(w.queries * w.padded) * sizeof(float));
}

template <class T>
void attention(const AttentionArgs& a, const AttentionTile& tile, int64_t block_begin, int64_t block_end, float* scratch) {
    if constexpr (std::is_same_v<T, rotated4>)
        if (a.dim % 32 == 0) return attention<nibbles4>(a, tile, block_begin, block_end, scratch);
    Walk w(a, tile, scratch);
    if constexpr (std::is_same_v<T, rotated4> || std::is_same_v<T, nibbles4>) w.row_size = kv_row_bytes(KvFormat::int4, a.dim);
    if constexpr (std::is_same_v<T, sparse4>) w.row_size = kv_row_bytes(KvFormat::int4_sparse, a.dim);
    load_queries<T>(w);
    w.plan_ahead(static_cast<int64_t>(sizeof(T)));
    for (int64_t b = block_begin; b < block_end; b++) {
        walk_block<T>(w, b);
        keep_block(w, b);
    }
    if (tile.partial == nullptr) finish(w);
}

void attention_merge(const AttentionArgs& a, const AttentionTile& tile, float* scratch) {
    Walk w(a, tile, scratch);
    for (int64_t b = tile.first_block; b < tile.end_block; b++) {
        const float* partial = tile.partial + (b - tile.first_block) * attention_partial(a.dim, w.queries);
        w.look(b);
        merge(w, partial, partial + max_queries, partial + 2 * max_queries);
    }
    finish(w);
}
