// Attention over a cache in int8_a8. The products are exact integers, so their order does not affect the bits. Included
// after attention_places_body.h, quantize_body.h and an int_*.h. Uses the walk, softmax and merge of attention_body.h.
//
// For each query, let c and u be the codes and scale that `quantize` gives for scale * q, and k_t and a_t the codes and
// scale of key t:
//   s_t = ((c . k_t) u) a_t
// For each query and block, let W = max e_t b_t be the largest weight, and v_t the codes of value t:
//   n_t = (e_t b_t) (32767 / W), rounded to nearest even,   o = (sum n_t v_t) (W / 32767)
// As in `quantize`, o is zero if W is below 2^-100, and NaN if W is NaN or infinite. A place that a row does not see
// has n_t = 0.

constexpr int64_t query_code_bytes = wide_codes ? 2 : 1;
constexpr int64_t query_codes_apart = (max_dim + 64) * query_code_bytes;  // bytes from one query to the next
constexpr int64_t weight_codes_apart = key_block + lanes;     // 16-bit weights from one query to the next
constexpr int64_t panel_places = block_outputs;               // keys of a panel
constexpr int64_t panel_quad = panel_places * 4;              // bytes of four columns of a panel
constexpr int64_t codes_ahead = 64;                           // keys are prefetched this many places ahead

struct CodeWalk {
    Walk& w;
    Places<int8> places;
    int64_t depth;                      // dim rounded up to 64
    int32_t* sums;                      // [queries][padded]
    float *q_scales, *weight_scales;    // [queries]
    int32_t* starts;                    // [queries]: what sums start from, because panels hold key codes + 128
    int8_t* q;                          // [queries][query_codes_apart]
    int16_t* weights;                   // [queries][weight_codes_apart]
    uint8_t* keys;                      // [depth / 4][32 keys][4 columns]
    int8_t* values;                     // [128 pairs of places][depth][2]

    CodeWalk(Walk& walk, float* scratch) : w(walk), places(walk, round_up(walk.a.dim, 64)), depth(places.depth) {
        sums = reinterpret_cast<int32_t*>(scratch);
        q_scales = scratch + max_queries * w.padded, weight_scales = q_scales + max_queries;
        starts = reinterpret_cast<int32_t*>(weight_scales + max_queries);
        q = reinterpret_cast<int8_t*>(starts + max_queries);
        weights = reinterpret_cast<int16_t*>(q + max_queries * query_codes_apart);
        keys = reinterpret_cast<uint8_t*>(weights + max_queries * weight_codes_apart);
        values = reinterpret_cast<int8_t*>(keys + panel_places * depth);
        places.edges = reinterpret_cast<int8*>(values + key_block * depth);
        const V scale = set1(w.a.scale);
        for (int64_t c = 0; c < w.queries; c++) {
            const float* row = w.a.q + (w.tile.row_begin + w.row_of[c]) * w.a.q_stride + w.head(c) * w.a.dim;
            float* scaled_row = w.q + c * w.padded;
            for (int64_t d = 0; d < w.a.dim; d += lanes) store(scaled_row + d, mul(load_n(row + d, w.a.dim - d), scale));
            int8_t* codes = q + c * query_codes_apart;
            constexpr int64_t apart = code_step * query_code_bytes;
            __builtin_memset(codes, 0, static_cast<uint64_t>(depth * query_code_bytes));
            quantize(scaled_row, w.a.dim, w.a.dim, 128, codes, apart, q_scales + c, starts + c, 1);
            for (int64_t d = 0; wide_codes && d < depth; d += code_step) widen_codes(codes + d * query_code_bytes);
        }
    }
};

// scores[M][stride] of queries [c, c + M) with the 32 keys of the panel.
template <int M>
void score_panel(const CodeWalk& p, int64_t c, float* scores, int64_t stride) {
    for (int64_t half = 0; half < 2; half += halves) {
        I sums[M][halves];
        unroll<M>([&](auto m)
                      INLINE_LAMBDA { unroll<halves>([&](auto h) INLINE_LAMBDA { sums[m][h] = set1_int(p.starts[c + m]); }); });
        const uint8_t* keys = p.keys + half * 64;
        const int8_t* q = p.q + c * query_codes_apart;
        for (int64_t d = 0; d < p.depth; d += 4, keys += panel_quad) {
            Codes codes[halves];
            unroll<halves>([&](auto h) INLINE_LAMBDA { codes[h] = load_codes(keys + h * 64); });
            unroll<M>([&](auto m) INLINE_LAMBDA {
                add_dots<false, m % 2 == 1>(sums[m], codes, q + m * query_codes_apart + d * query_code_bytes);
            });
        }
        unroll<M>([&](auto m) INLINE_LAMBDA {
            const V scale = set1(p.q_scales[c + m]);
            unroll<halves>([&](auto h) INLINE_LAMBDA {
                store(scores + m * stride + (half + h) * lanes, mul(to_floats(sums[m][h]), scale));
            });
        });
    }
}

template <int M = integer_tile>
inline void score_some(const CodeWalk& p, int64_t c, int64_t count, float* scores, int64_t stride) {
    if constexpr (M > 1) {
        if (count < M) return score_some<M - 1>(p, c, count, scores, stride);
    }
    score_panel<M>(p, c, scores, stride);
}

// scores[count][stride] of queries [c, c + count) with the keys at places [from, to). `from` is a multiple of 32.
inline void score_codes(CodeWalk& p, int64_t c, int64_t count, int64_t from, int64_t to, float* scores, int64_t stride) {
    for (int64_t place = from; place < to; place += panel_places, scores += panel_places) {
        for (int64_t j = 0; j < panel_places; j += lanes) {
            const int8* rows[lanes];
            p.places.take_keys(place + j, codes_ahead, rows);
            for (int64_t d = 0; d < p.depth; d += 64)
                transpose_words<0x80808080u>(rows, d, p.keys + d / 4 * panel_quad + j * 4, panel_quad);
        }
        for (int64_t m = 0, n; m < count; m += n) {
            n = count - m < integer_tile ? count - m : integer_tile;
            score_some(p, c + m, n, scores + m * stride, stride);
        }
    }
}

// Quantizes the softmax weights of query c to 16 bits. Places in [low, high) outside [begin, end), which it does not
// see, get 0.
inline void quantize_weights(CodeWalk& p, int64_t c, int64_t begin, int64_t end, int64_t low, int64_t high) {
    float* scores = p.w.scores + c * score_stride;
    int16_t* codes = p.weights + c * weight_codes_apart;
    const int64_t first = begin / lanes * lanes;
    V largest = zero();
    for (int64_t j = first; j < end; j += lanes) {
        V e = load(scores + j);
        if (j < begin || j + lanes > end) store(scores + j, e = keep(e, begin - j, end - j, zero()));
        largest = max_magnitude(largest, e);
    }
    const int32_t bits = reduce_magnitude(largest);
    float top;
    __builtin_memcpy(&top, &bits, sizeof top);
    const bool finite = bits < 0x7f800000, used = finite && top >= 0x1p-100f;
    p.weight_scales[c] = used ? top / 32767.0f : finite ? 0.0f : __builtin_nanf("");
    const V inverse = set1(used ? 32767.0f / top : 0.0f), magic = set1(12582912.0f);
    for (int64_t j = low / lanes * lanes; j < high; j += lanes) {
        const bool counts = used && j >= first && j < end;
        store_low_words(codes + j, counts ? add(mul(load(scores + j), inverse), magic) : magic);
    }
}

// Adds weights times the values of the panel to the sums of Q queries, in C vectors of columns.
template <int Q, int C>
INLINE void add_columns(const CodeWalk& p, const int16_t* weights, const int8_t* values, int64_t pairs, int32_t* sums) {
    I total[Q * C];
    unroll<Q * C>([&](auto i) INLINE_LAMBDA { total[i] = load_ints(sums + i / C * p.w.padded + i % C * lanes); });
    for (int64_t i = 0; i < pairs; i++, weights += 2, values += 2 * p.depth) {
        I v[C];
        unroll<C>([&](auto c) INLINE_LAMBDA { v[c] = widen_pairs(values + 2 * c * lanes); });
        unroll<Q>([&](auto q) INLINE_LAMBDA {
            const I n = set1_pair(weights + q * weight_codes_apart);
            unroll<C>([&](auto c) INLINE_LAMBDA { total[q * C + c] = add_pairs(total[q * C + c], v[c], n); });
        });
    }
    unroll<Q * C>([&](auto i) INLINE_LAMBDA { store_ints(sums + i / C * p.w.padded + i % C * lanes, total[i]); });
}

// Adds the values at places [from, to) to the sums of queries [c, c + count). `from` is even.
inline void add_code_values(CodeWalk& p, int64_t c, int64_t count, int64_t from, int64_t to) {
    const int8* const* at = p.places.values();
    for (int64_t j = from; j < to; j += 2) {
        const int8 *even = p.places.padded(at[j], 0), *odd = p.places.padded(at[j + 1], 1);
        for (int64_t d = 0; d < p.depth; d += 64) interleave_codes(even + d, odd + d, p.values + (j - from) * p.depth + 2 * d);
    }
    const int64_t pairs = (to - from + 1) / 2, padded = p.w.padded;
    for (int64_t m = c, n; m < c + count; m += n) {
        n = c + count - m < query_tile ? c + count - m : query_tile;
        with_count(n, [&](auto queries) INLINE_LAMBDA {
            constexpr int Q = queries, C = value_columns[Q];
            const int16_t* weights = p.weights + m * weight_codes_apart + from;
            int64_t d = 0;
            for (; d + C * lanes <= padded; d += C * lanes)
                add_columns<Q, C>(p, weights, p.values + 2 * d, pairs, p.sums + m * padded + d);
            for (; d < padded; d += lanes) add_columns<Q, 1>(p, weights, p.values + 2 * d, pairs, p.sums + m * padded + d);
        });
    }
}

// Scores and softmax weights of all rows. The rows' own keys (of draft nodes) are scored one row after the other.
inline void weigh_codes(CodeWalk& p, int64_t start) {
    Walk& w = p.w;
    const int64_t low = w.low / panel_places * panel_places, known = w.known;
    if (w.low < w.high) score_codes(p, 0, w.queries, low, w.high, w.scores + low, score_stride);
    for (int64_t i = 0; i < w.tile.row_count; i++) {
        if (!w.sees(i)) {
            for (int64_t c = i * w.group; c < (i + 1) * w.group; c++) quantize_weights(p, c, 0, 0, low, w.seen);
            continue;
        }
        if (w.end[i] > known) {
            const int64_t from = p.places.own_begin(i);
            float* own = w.unpacked;  // [group][32]; this format does not use the buffer otherwise
            p.places.place_own(i, start, from);
            for (int64_t place = from / panel_places * panel_places; place < w.end[i]; place += panel_places) {
                score_codes(p, i * w.group, w.group, place, place + 1, own, panel_places);
                const int64_t first = place > from ? place : from;
                for (int64_t g = 0; g < w.group; g++)
                    for (int64_t j = first; j < place + panel_places && j < w.end[i]; j++)
                        w.scores[(i * w.group + g) * score_stride + j] = own[g * panel_places + j - place];
            }
            p.places.clear(from, w.end[i]);
        }
        for (int64_t c = i * w.group; c < (i + 1) * w.group; c++) {
            soften<int8>(w, c, w.begin[i], w.end[i]);
            quantize_weights(p, c, w.begin[i], w.end[i], low < known ? low : known, w.seen);
        }
    }
}

inline void walk_codes(CodeWalk& p, int64_t block_index) {
    Walk& w = p.w;
    const int64_t start = block_index * key_block;
    w.look(block_index);
    p.places.place_shared(start);
    weigh_codes(p, start);
    if (block_index + 1 < w.tile.end_block) p.places.fetch_next(start + key_block, codes_ahead);

    __builtin_memset(p.sums, 0, static_cast<uint64_t>(w.queries * w.padded) * sizeof(int32_t));
    if (w.low < w.high) add_code_values(p, 0, w.queries, w.low / 2 * 2, w.high);
    for (int64_t i = 0; i < w.tile.row_count; i++) {
        if (!w.sees(i) || w.end[i] <= w.known) continue;
        // If the first pair also holds a shared place, clear that place here: its value was added above already.
        const int64_t from = p.places.own_begin(i);
        p.places.clear(from / 2 * 2, from);
        p.places.place_own(i, start, from);
        add_code_values(p, i * w.group, w.group, from / 2 * 2, w.end[i]);
        p.places.clear(from, w.end[i]);
    }
    for (int64_t c = 0; c < w.queries; c++) {
        const V scale = set1(p.weight_scales[c]);
        for (int64_t d = c * w.padded; d < (c + 1) * w.padded; d += lanes)
            store(w.block + d, mul(to_floats(load_ints(p.sums + d)), scale));
    }
}

void attention_integer(const AttentionArgs& a, const AttentionTile& tile, int64_t block_begin, int64_t block_end,
                       float* scratch) {
    Walk w(a, tile, scratch + attention_pairs_scratch(a.dim));
    CodeWalk p(w, scratch);
    for (int64_t b = block_begin; b < block_end; b++) {
        walk_codes(p, b);
        keep_block(w, b);
    }
    if (tile.partial == nullptr) finish(w);
}
