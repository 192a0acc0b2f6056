// The two products of attention: queries with keys, and softmax weights with values. Included like linear_body.h.
//
// Keys and values are read in one of two forms. Stored rows are widened to float32 in registers each time they are
// used. Panels hold up to `panel_keys` rows that were widened once, for tiles with many queries. Both give the same
// bits.

template <class T>
constexpr bool scaled = false;
template <>
constexpr bool scaled<int8> = true;
template <>
constexpr bool scaled<e4m3> = true;
template <>
constexpr bool scaled<e5m2> = true;

constexpr int64_t rows_ahead = 16;  // rows to prefetch ahead; rows are scattered, so hardware does not prefetch them

// Whether rows are decoded in registers, with a scale per row.
template <class T>
constexpr bool decoded = std::is_same_v<T, nibbles4>;

template <class T>
INLINE void prefetch_row(const T* row, int64_t dim) {
    const char* p = reinterpret_cast<const char*>(row);
    const int64_t bytes = decoded<T> ? dim / 2 + 2 : dim * static_cast<int64_t>(sizeof(T));
    for (int64_t i = 0; i < bytes; i += 64) prefetch_far(p + i);
    if (bytes % 64 != 0) prefetch_far(p + bytes - 1);  // a row may begin in the middle of a line
}

// Prefetches rows [j + rows_ahead, j + rows_ahead + n), as far as they are below `total`.
template <class T>
INLINE void prefetch_rows(const T* const* rows, int64_t j, int64_t n, int64_t total, int64_t dim) {
    const int64_t end = j + rows_ahead + n < total ? j + rows_ahead + n : total;
    for (int64_t i = j + rows_ahead; i < end; i++) prefetch_row(rows[i], dim);
}

// Prefetches the positions that are read next (AttentionTile), a few cache lines at a time between the tiles of the
// current products. It takes all heads of a position before the next position, because memory is faster in order than
// by heads.
struct Ahead {
    const AttentionArgs& a;
    const AttentionTile& tile;
    int64_t bytes = 0;                         // bytes of the keys of one position, all heads
    int64_t at_scores = 0, at_values = 0;      // lines to prefetch per score tile and per value tile
    int64_t position, place = 0;               // the position being prefetched, and its place in its cache block
    int64_t offset = 0;                        // bytes of this position that have been prefetched
    int64_t row = 0;                           // byte offset of this position in the cache

    Ahead(const AttentionArgs& args, const AttentionTile& t) : a(args), tile(t), position(t.next_begin) {}
    void find() {
        place = position % a.block_size;
        row = (tile.next_table[position / a.block_size] * a.block_size + place) * bytes;
    }
    // Sets the lines per tile so that all lines are prefetched after `scores` score tiles and `values` value tiles.
    void plan(int64_t position_bytes, int64_t scores, int64_t values) {
        bytes = position_bytes;
        if (position < tile.next_end) find();
        const int64_t lines = (tile.next_end - tile.next_begin) * ((bytes + 63) / 64);  // and as many of values
        at_scores = lines <= 0 ? 0 : (lines + 2 * scores - 1) / (2 * scores);
        at_values = lines <= 0 ? 0 : (lines + 2 * values - 1) / (2 * values);
    }
    INLINE void fetch(int64_t count) {
        if (count > 0 && position < tile.next_end) fetch_some(count);
    }
    void fetch_some(int64_t count) {
        for (int64_t end; count > 0 && position < tile.next_end; count -= (end - offset + 63) / 64, offset = end) {
            if (offset >= bytes) {
                offset = 0, position++, row += bytes;
                if (position == tile.next_end) return;
                if (++place == a.block_size) find();
            }
            end = offset + 64 * count < bytes ? offset + 64 * count : bytes;
            const char *k = static_cast<const char*>(a.k) + row, *v = static_cast<const char*>(a.v) + row;
            for (int64_t i = offset; i < end; i += 64) prefetch_far(k + i), prefetch_far(v + i);
        }
    }
};

// `count` stored rows of keys or values, followed by `count_ahead` more rows that may be prefetched.
template <class T>
struct Stored {
    using Type = T;
    using Pair = RowPair<T>;
    const T* const* rows;
    int64_t count, count_ahead, dim;
    const float* scales;  // unused; soften() applies the scales

    const T* row(int64_t j) const { return rows[j < count ? j : count - 1]; }
    INLINE void fetch(int64_t j, int64_t n) const { prefetch_rows(rows, j, n, count + count_ahead, dim); }
    int64_t whole() const { return dim / depth_step * depth_step; }
    // two(j) is the pair of keys j and j + 1; part_of() gives its columns [d, d + 16).
    struct Two {
        const T *a, *b;
    };
    Two two(int64_t j) const { return {row(j), row(j + 1)}; }
    static Pair part_of(const Two& rows, int64_t d) { return {rows.a + d, rows.b + d}; }
    Stored from(int64_t j) const { return {rows + j, count - j, count_ahead, dim, scales}; }
    V part(int64_t j, int64_t d) const { return load(rows[j] + d); }
    V part_n(int64_t j, int64_t d) const { return load_n(rows[j] + d, dim - d); }
};

template <>
struct Stored<nibbles4> {
    using Type = nibbles4;
    struct Two {
        const uint8_t *a, *b;
        int64_t half;
        V scales, lowest;
    };
    struct Pair {
        const uint8_t *a, *b;
        int shift;
        V scales, lowest;
        V first() const { return add(mul(load_nibbles(a, b, shift), scales), lowest); }
        V second() const { return add(mul(load_nibbles(a + 8, b + 8, shift), scales), lowest); }
    };
    const nibbles4* const* rows;
    int64_t count, count_ahead, dim;
    const float* scales;

    INLINE void fetch(int64_t j, int64_t n) const { prefetch_rows(rows, j, n, count + count_ahead, dim); }
    int64_t whole() const { return dim; }
    INLINE Two two(int64_t j) const {
        const int64_t i = j < count ? j : count - 1, k = j + 1 < count ? j + 1 : count - 1;
        const uint8_t *a = &rows[i]->byte, *b = &rows[k]->byte;
        return {a, b, dim / 2, set_halves(scales[i], scales[k]), set_halves(lowest_of(a, dim), lowest_of(b, dim))};
    }
    INLINE static Pair part_of(const Two& t, int64_t d) {
        const int64_t at = d < t.half ? d : d - t.half;
        return {t.a + at, t.b + at, d < t.half ? 0 : 4, t.scales, t.lowest};
    }
    Stored from(int64_t j) const { return {rows + j, count - j, count_ahead, dim, scales + j}; }
    INLINE V part(int64_t j, int64_t d) const {
        const uint8_t* row = &rows[j]->byte;
        const int64_t half = dim / 2;
        const V codes = d < half ? load_nibbles(row + d, 0) : load_nibbles(row + d - half, 4);
        return add(mul(codes, set1(scales[j])), set1(lowest_of(row, dim)));
    }
    V part_n(int64_t j, int64_t d) const { return part(j, d); }
};

// Pairs of keys widened to float32. Each step along D holds the two vectors of a RowPair. Zero-padded.
struct KeyPanel {
    using Type = float;
    struct Pair {
        const float* at;
        V first() const { return load(at); }
        V second() const { return load(at + lanes); }
    };
    const float* rows;
    int64_t padded;

    INLINE void fetch(int64_t, int64_t) const {}
    int64_t whole() const { return padded; }
    using Two = const float*;
    Two two(int64_t j) const { return rows + j * padded; }  // j is even
    static Pair part_of(Two at, int64_t d) { return {at + 2 * d}; }
    KeyPanel from(int64_t j) const { return {rows + j * padded, padded}; }
};

// Values widened to float32, in rows of `padded` floats.
struct ValuePanel {
    const float* at;
    int64_t padded;

    INLINE void fetch(int64_t, int64_t) const {}
    ValuePanel from(int64_t j) const { return {at + j * padded, padded}; }
    V part(int64_t j, int64_t d) const { return load(at + j * padded + d); }
    V part_n(int64_t j, int64_t d) const { return part(j, d); }
};

template <class T>
void widen_keys(const Stored<T>& keys, int64_t padded, float* panel) {
    [[maybe_unused]] T ends[2][depth_step] = {};
    const int64_t whole = keys.whole();
    [[maybe_unused]] const int64_t rest = keys.dim - whole;
    for (int64_t j = 0; j < keys.count; j += 2, panel += 2 * padded) {
        keys.fetch(j, 2);
        const typename Stored<T>::Two two = keys.two(j);
        for (int64_t d = 0; d < whole; d += depth_step) {
            const typename Stored<T>::Pair pair = keys.part_of(two, d);
            store(panel + 2 * d, pair.first());
            store(panel + 2 * d + lanes, pair.second());
        }
        if constexpr (!decoded<T>) {
            if (rest == 0) continue;
            for (int64_t i = 0; i < rest; i++) ends[0][i] = keys.row(j)[whole + i], ends[1][i] = keys.row(j + 1)[whole + i];
            const RowPair<T> pair{ends[0], ends[1]};
            store(panel + 2 * whole, pair.first());
            store(panel + 2 * whole + lanes, pair.second());
        }
    }
}

template <class T>
void widen_values(const Stored<T>& values, int64_t padded, float* panel) {
    for (int64_t j = 0; j < values.count; j++, panel += padded) {
        values.fetch(j, 1);
        for (int64_t d = 0; d < padded; d += lanes) store(panel + d, values.part_n(j, d));
    }
}

// scores[query][key] of Q queries with 2P keys. Two keys share a vector, as two rows of weights do in `linear`.
template <int Q, int P, class Keys>
INLINE void score_tile(const float* q, int64_t q_stride, const Keys& keys, int64_t dim, float* scores) {
    using Pair = typename Keys::Pair;
    constexpr int count = Q * P, eights = (count + 7) / 8, some = pairs_at_once[Q];
    V all[eights * 8];  // index: query * P + pair of keys
    unroll<eights * 8 - count>([&](auto i) INLINE_LAMBDA { all[count + i] = zero(); });
    const int64_t whole = keys.whole();
    for (int first = 0; first < P; first += some) {
        V sums[Q * some];
        unroll<Q * some>([&](auto i) INLINE_LAMBDA { sums[i] = zero(); });
        auto multiply = [&](const float* x, const Pair(&pairs)[some]) INLINE_LAMBDA {
            V part[some];
            unroll<some>([&](auto p) INLINE_LAMBDA { part[p] = pairs[p].first(); });
            unroll<Q>([&](auto c) INLINE_LAMBDA {
                const V xc = load_twice(x + c * q_stride);
                unroll<some>([&](auto p) INLINE_LAMBDA { accumulate(sums[c * some + p], part[p], xc); });
            });
            unroll<some>([&](auto p) INLINE_LAMBDA { part[p] = pairs[p].second(); });
            unroll<Q>([&](auto c) INLINE_LAMBDA {
                const V xc = load_twice(x + c * q_stride + depth_step / 2);
                unroll<some>([&](auto p) INLINE_LAMBDA { accumulate(sums[c * some + p], part[p], xc); });
            });
        };
        typename Keys::Two twos[some];
        unroll<some>([&](auto p) INLINE_LAMBDA { twos[p] = keys.two(2 * (first + p)); });
        for (int64_t d = 0; d < whole; d += depth_step) {
            Pair pairs[some];
            unroll<some>([&](auto p) INLINE_LAMBDA { pairs[p] = keys.part_of(twos[p], d); });
            multiply(q + d, pairs);
        }
        if constexpr (!std::is_same_v<Keys, KeyPanel> && !decoded<typename Keys::Type>) {
            if (whole < dim) {
                typename Keys::Type padded[2 * some][depth_step] = {};
                for (int i = 0; i < 2 * some; i++)
                    for (int64_t j = whole; j < dim; j++) padded[i][j - whole] = keys.row(2 * first + i)[j];
                Pair pairs[some];
                unroll<some>([&](auto p) INLINE_LAMBDA { pairs[p] = {padded[2 * p], padded[2 * p + 1]}; });
                multiply(q + whole, pairs);
            }
        }
        unroll<Q * some>([&](auto i) INLINE_LAMBDA { all[i / some * P + first + i % some] = sums[i]; });
    }
    float totals[eights * 16];  // the scores of the two keys of sum c * P + p are adjacent
    unroll<eights>([&](auto i) INLINE_LAMBDA {
        V eight[8];
        unroll<8>([&](auto k) INLINE_LAMBDA { eight[k] = all[8 * i + k]; });
        reduce_halves8(eight, totals + 16 * i);
    });
    unroll<Q>([&](auto c)
                  INLINE_LAMBDA { __builtin_memcpy(scores + c * score_stride, totals + c * 2 * P, 2 * P * sizeof(float)); });
}

// Scores of Q queries with `num_keys` keys. A row of scores has room for a whole tile of keys at its end.
template <int Q, class Keys>
INLINE void score_strip(const float* q, int64_t q_stride, const Keys& keys, int64_t num_keys, int64_t dim, bool fetch,
                        Ahead& ahead, float* scores) {
    constexpr int P = key_pairs[Q];
    for (int64_t j = 0; j < num_keys; j += 2 * P) {
        if (fetch) keys.fetch(j, 2 * P);
        ahead.fetch(ahead.at_scores);
        score_tile<Q, P>(q, q_stride, keys.from(j), dim, scores + j);
    }
}

// Calls f(Index<Q>{}) with Q = count, for 1 <= count <= query_tile.
template <int Q = query_tile, class F>
INLINE void with_count(int64_t count, const F& f) {
    if constexpr (Q > 1) {
        if (count < Q) return with_count<Q - 1>(count, f);
    }
    f(Index<Q>{});
}

// For C vectors of columns of Q queries: out[query] += sum over keys (ascending) of weight[query][key] * value[key].
template <int Q, int C, bool Whole, class Values>
INLINE void add_values_tile(const float* weights, const Values& values, int64_t num_keys, float* out, int64_t out_stride,
                            int64_t d, bool fetch, Ahead& ahead) {
    ahead.fetch(ahead.at_values);
    if (fetch) values.fetch(0, num_keys);
    V sums[Q * C];
    unroll<Q * C>([&](auto i) INLINE_LAMBDA { sums[i] = load(out + i / C * out_stride + i % C * lanes); });
    for (int64_t j = 0; j < num_keys; j++) {
        V v[C];
        unroll<C>([&](auto c) INLINE_LAMBDA { v[c] = Whole ? values.part(j, d + c * lanes) : values.part_n(j, d + c * lanes); });
        unroll<Q>([&](auto q) INLINE_LAMBDA {
            const V e = set1(weights[q * score_stride + j]);
            unroll<C>([&](auto c) INLINE_LAMBDA { accumulate(sums[q * C + c], e, v[c]); });
        });
    }
    unroll<Q * C>([&](auto i) INLINE_LAMBDA { store(out + i / C * out_stride + i % C * lanes, sums[i]); });
}

template <class Values>
void add_values(const float* weights, int64_t count, const Values& values, int64_t num_keys, int64_t dim, float* out,
                int64_t out_stride, bool fetch, Ahead& ahead) {
    if (num_keys <= 0) return;
    with_count(count, [&](auto queries) INLINE_LAMBDA {
        constexpr int Q = queries, C = value_columns[Q];
        int64_t d = 0;
        for (; d + C * lanes <= dim; d += C * lanes)
            add_values_tile<Q, C, true>(weights, values, num_keys, out + d, out_stride, d, fetch && d == 0, ahead);
        for (; d + lanes <= dim; d += lanes)
            add_values_tile<Q, 1, true>(weights, values, num_keys, out + d, out_stride, d, fetch && d == 0, ahead);
        if (d < dim) add_values_tile<Q, 1, false>(weights, values, num_keys, out + d, out_stride, d, fetch && d == 0, ahead);
    });
}
