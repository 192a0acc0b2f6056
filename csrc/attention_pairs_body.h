// Attention over a cache in bf16_a16: queries and softmax weights are rounded to bf16, as the rows of the cache are,
// and both products are computed by pairs_body.h. Included after attention_places_body.h. Uses the walk, softmax and
// merge of attention_body.h.
//
// Scores: lanes are keys, and a sum runs over pairs of columns, so no lanes are folded. Values: lanes are columns, and
// a sum runs over pairs of places (2 i, 2 i + 1) in the block, whichever rows see them. Places that a row does not see
// get weight 0. This is exact only if their values are finite; if one is not, each row is computed alone. A final sum
// of -0 is changed to +0, so that the number of zero terms does not matter.

constexpr int64_t keys_at_once = 64;

struct PairWalk {
    Walk& w;
    Places<bf16> places;
    int64_t depth;                   // dim rounded up to 32
    Pair *q, *weights;               // [queries][query_apart], [queries][weight_apart]
    float* sums;                     // [queries][depth]
    uint8_t *keys, *values;          // panels: [2][depth / 2][32 keys] and [depth / 32][128][32 columns], pairs

    PairWalk(Walk& walk, float* scratch) : w(walk), places(walk, round_up(walk.a.dim, 32)), depth(places.depth) {
        q = reinterpret_cast<Pair*>(scratch), weights = q + max_queries * query_apart;
        sums = scratch + max_queries * 2 * (query_apart + weight_apart);
        keys = reinterpret_cast<uint8_t*>(sums + max_queries * depth);
        values = keys + keys_at_once * depth * 2;
        places.edges = reinterpret_cast<bf16*>(values + key_block * depth * 2);
        const V scale = set1(w.a.scale);
        for (int64_t c = 0; c < w.queries; c++) {
            const float* row = w.a.q + (w.tile.row_begin + w.row_of[c]) * w.a.q_stride + w.head(c) * w.a.dim;
            for (int64_t d = 0; d < depth; d += lanes)
                store_pairs(q + c * query_apart + d / 2, d < w.a.dim ? mul(load_n(row + d, w.a.dim - d), scale) : zero());
        }
    }
};

// scores[count][stride] of queries [c, c + count) with the keys at places [from, to). `from` is a multiple of 64.
inline void score_pairs(PairWalk& p, int64_t c, int64_t count, int64_t from, int64_t to, float* scores, int64_t stride) {
    const int64_t bytes = p.depth / 2 * pair_bytes;
    for (int64_t place = from; place < to; place += keys_at_once, scores += keys_at_once) {
        for (int64_t j = 0; j < keys_at_once; j += lanes) {
            const bf16* rows[lanes];
            p.places.take_keys(place + j, keys_at_once, rows);
            uint8_t* panel = p.keys + j / 32 * bytes + j % 32 * 4;
            for (int64_t d = 0; d < p.depth; d += 32) transpose_words<0>(rows, d, panel + d / 2 * pair_bytes, pair_bytes);
        }
        const FlushSubnormals flushing;
        for (int64_t m = 0, n; m < count; m += n) {
            n = count - m < pair_rows_most ? count - m : pair_rows_most;
            for (int64_t i = 0; i < n; i++)
                for (int64_t j = 0; j < keys_at_once; j += lanes) store(scores + (m + i) * stride + j, zero());
            pair_rows<pair_rows_most, query_apart>(n, p.q + (c + m) * query_apart, p.keys, bytes, p.depth / 2, keys_at_once / 32,
                                                   scores + m * stride, stride);
        }
    }
}

// Rounds the softmax weights of query c at places [begin, end) to bf16 pairs. Other places in [low, high) get 0.
inline void round_weights(PairWalk& p, int64_t c, int64_t begin, int64_t end, int64_t low, int64_t high) {
    for (int64_t j = low / lanes * lanes; j < high; j += lanes) {
        V e = load(p.w.scores + c * score_stride + j);
        if (j < begin || j + lanes > end) e = keep(e, begin - j, end - j, zero());
        store_pairs(p.weights + c * weight_apart + j / 2, e);
    }
}

// Packs the values at places [from, to) into the panel; `from` is even. Returns false if `check` is set and one is not
// finite.
inline bool pack_values(PairWalk& p, int64_t from, int64_t to, bool check) {
    uint32_t broken = 0;
    const bf16* const* at = p.places.values();
    for (int64_t j = from; j < to; j += 2) {
        const bf16 *even = p.places.padded(at[j], 0), *odd = p.places.padded(at[j + 1], 1);
        for (int64_t d = 0; d < p.depth; d += 32) {
            interleave_pairs(even + d, odd + d, p.values + (d / 32 * (key_block / 2) + (j - from) / 2) * pair_bytes);
            for (int64_t i = 0; check && i < 32; i++)
                broken |= static_cast<uint32_t>((even[d + i].bits & 0x7f80) == 0x7f80) | ((odd[d + i].bits & 0x7f80) == 0x7f80);
        }
    }
    return broken == 0;
}
// Adds the packed values times their weights to the sums of queries [c, c + count).
inline void multiply_values(PairWalk& p, int64_t c, int64_t count, int64_t from, int64_t to) {
    const FlushSubnormals flushing;
    for (int64_t m = c, n; m < c + count; m += n) {
        n = c + count - m < pair_rows_most ? c + count - m : pair_rows_most;
        pair_rows<pair_rows_most, weight_apart>(n, p.weights + m * weight_apart + from / 2, p.values, key_block / 2 * pair_bytes,
                                                (to - from + 1) / 2, p.depth / 32, p.sums + m * p.depth, p.depth);
    }
}

// Adds the values that row i sees at places [from, to), and no others, to the sums of row i.
inline void add_alone(PairWalk& p, int64_t i, int64_t from, int64_t to) {
    const bf16* kept[key_block];
    const bf16** at = p.places.at + key_block;
    __builtin_memcpy(kept, at, sizeof kept);
    for (int64_t j = from; j < round_up(to, 2); j++)
        if (j < p.w.begin[i] || j >= p.w.end[i]) at[j] = zero_row<bf16>;
    pack_values(p, from, to, false);
    multiply_values(p, i * p.w.group, p.w.group, from, to);
    __builtin_memcpy(at, kept, sizeof kept);
}

// Scores and softmax weights of all rows. The rows' own keys (of draft nodes) are scored one row after the other.
inline void weigh(PairWalk& p, int64_t start) {
    Walk& w = p.w;
    const int64_t low = w.low, known = w.known;
    if (low < w.high)
        score_pairs(p, 0, w.queries, low / keys_at_once * keys_at_once, w.high, w.scores + low / keys_at_once * keys_at_once,
                    score_stride);
    for (int64_t i = 0; i < w.tile.row_count; i++) {
        if (w.sees(i) && w.end[i] > known) {
            const int64_t from = p.places.own_begin(i), base = from / keys_at_once * keys_at_once;
            float* own = w.unpacked;  // [group][64]; this format does not use the buffer otherwise
            p.places.place_own(i, start, from);
            for (int64_t place = base; place < w.end[i]; place += keys_at_once) {
                score_pairs(p, i * w.group, w.group, place, place + 1, own, keys_at_once);
                const int64_t first = place > from ? place : from;
                for (int64_t g = 0; g < w.group; g++)
                    for (int64_t j = first; j < place + keys_at_once && j < w.end[i]; j++)
                        w.scores[(i * w.group + g) * score_stride + j] = own[g * keys_at_once + j - place];
            }
            p.places.clear(from, w.end[i]);
        }
        for (int64_t c = i * w.group; c < (i + 1) * w.group; c++) {
            if (w.sees(i)) soften<bf16>(w, c, w.begin[i], w.end[i]);
            round_weights(p, c, w.sees(i) ? w.begin[i] : 0, w.sees(i) ? w.end[i] : 0, low < known ? low : known, w.seen);
        }
    }
}

inline void walk_pairs(PairWalk& p, int64_t block_index) {
    Walk& w = p.w;
    const int64_t start = block_index * key_block, rows = w.tile.row_count;
    w.look(block_index);
    const int64_t low = w.low, high = w.high, known = w.known;
    bool alike = true;
    for (int64_t i = 0; i < rows; i++) alike = alike && w.begin[i] == w.begin[0] && w.end[i] == w.end[0];
    p.places.place_shared(start);
    weigh(p, start);
    if (block_index + 1 < w.tile.end_block) p.places.fetch_next(start + key_block, keys_at_once);

    for (int64_t i = 0; i < w.queries * p.depth; i += lanes) store(p.sums + i, zero());
    // No pair of places in [first, shared) holds a row's own key. A pair of one shared and one own place is left to
    // add_alone.
    const int64_t first = (low < high ? low : known < key_block ? known : key_block) / 2 * 2;
    const int64_t shared = low >= high ? first : w.seen > known ? high / 2 * 2 : high;
    if (first < shared) {
        if (pack_values(p, first, shared, !alike))
            multiply_values(p, 0, w.queries, first, shared);
        else
            for (int64_t i = 0; i < rows; i++) add_alone(p, i, first, shared);
    }
    for (int64_t i = 0; i < rows; i++) {
        if (!w.sees(i) || w.end[i] <= shared) continue;
        const int64_t own = p.places.own_begin(i);
        if (w.end[i] > own) p.places.place_own(i, start, own);
        add_alone(p, i, shared, w.end[i]);
        p.places.clear(own, w.end[i]);
    }
    for (int64_t c = 0; c < w.queries; c++)
        for (int64_t d = 0; d < w.padded; d += lanes)
            store(w.block + c * w.padded + d, add(load(p.sums + c * p.depth + d), zero()));
}

void attention_pairs(const AttentionArgs& a, const AttentionTile& tile, int64_t block_begin, int64_t block_end, float* scratch) {
    Walk w(a, tile, scratch + attention_pairs_scratch(a.dim));
    PairWalk p(w, scratch);
    for (int64_t b = block_begin; b < block_end; b++) {
        walk_pairs(p, b);
        keep_block(w, b);
    }
    if (tile.partial == nullptr) finish(w);
}
