// Tables of the key and value rows of a block, indexed by place, for kernels that process many places at once. Included
// after attention_body.h.

template <class T>
alignas(64) constexpr T zero_row[max_dim + 64] = {};

template <class T>
struct Places {
    Walk& w;
    int64_t depth;              // dim rounded up to 64 bytes
    const T* at[2 * key_block];  // keys by place in the block, then values; `zero_row` for places without a row
    T* edges;                   // [16][depth]: zero-padded copies of rows, used if depth > dim

    Places(Walk& walk, int64_t padded_dim) : w(walk), depth(padded_dim) {
        w.ahead.plan(w.a.kv_heads * w.a.dim * static_cast<int64_t>(sizeof(T)), key_block / lanes, 1);
    }
    const T* const* values() const { return at + key_block; }

    // The row, zero-padded to `depth`. A copy, if needed, is made in row i of `edges`.
    const T* padded(const T* row, int64_t i) {
        if (depth == w.a.dim || row == zero_row<T>) return row;
        T* out = edges + i * depth;
        for (int64_t d = 0; d < depth; d++) out[d] = d < w.a.dim ? row[d] : T{0};
        return out;
    }
    void clear(int64_t from, int64_t to) {
        for (int64_t j = from; j < to; j++) at[j] = at[key_block + j] = zero_row<T>;
    }
    // Enters the shared rows of the block and clears all other places.
    void place_shared(int64_t start) {
        clear(0, key_block);
        if (w.low < w.high) find<T>(w, start + w.low, start + w.high, at + w.low, at + key_block + w.low, w.low);
    }
    // Enters row i's own keys and values, from place `from` on. `clear` removes them.
    void place_own(int64_t i, int64_t start, int64_t from) {
        const T *keys[64], *values[64];
        const int64_t n = w.end[i] - from;
        own_keys<T>(w, i, start, from, w.end[i], keys, values);
        for (int64_t j = 0; j < n; j++) at[from + j] = keys[j], at[key_block + from + j] = values[j];
    }
    int64_t own_begin(int64_t i) const { return w.begin[i] > w.known ? w.begin[i] : w.known; }

    // Gets the 16 keys from `place` on. Prefetches their values, and the keys `ahead` places later.
    void take_keys(int64_t place, int64_t ahead, const T** rows) {
        w.ahead.fetch(2 * w.ahead.at_scores);
        for (int64_t i = 0; i < lanes; i++) {
            const T *next = at[place + i + ahead], *value = at[key_block + place + i];
            if (place + ahead < key_block && next != zero_row<T>) prefetch_row(next, w.a.dim);
            if (value != zero_row<T>) prefetch_row(value, w.a.dim);
            rows[i] = padded(at[place + i], i);
        }
    }
    // Prefetches the first `count` keys of the block that begins at position `begin`.
    void fetch_next(int64_t begin, int64_t count) const {
        const AttentionArgs& a = w.a;
        const int64_t end = begin + count < w.tile.kv_len ? begin + count : w.tile.kv_len;
        for (int64_t i = begin, n; i < end; i += n) {
            const int64_t place = i % a.block_size, row = w.tile.block_table[i / a.block_size] * a.block_size + place;
            n = a.block_size - place;
            for (int64_t j = 0; j < n && i + j < end; j++)
                prefetch_row(static_cast<const T*>(a.k) + ((row + j) * a.kv_heads + w.tile.kv_head) * a.dim, a.dim);
        }
    }
};
