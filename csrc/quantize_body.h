// Quantization of rows of x to int8 codes in groups. Included after int_*.h and rows_body.h.

// For each group with a = max |x|: scale = a / 127, code = x * (127 / a), rounded to nearest even. If the group has NaN
// or infinity, its scale is NaN and its codes are 0. If a < 2^-100, scale and codes are 0. So such a row affects no
// other row.
void quantize(const float* x, int64_t depth, int64_t group, int32_t middle, int8_t* codes, int64_t piece_stride, float* scales,
              int32_t* starts, int64_t stride) {
    const V magic = set1(12582912.0f);  // 1.5 * 2^23: adding it rounds to an integer, whose low byte it keeps
    for (int64_t begin = 0; begin < depth; begin += group, x += group, scales += stride, starts += stride) {
        const int64_t n = group < depth - begin ? group : depth - begin;
        V largest = zero();
        for (int64_t i = 0; i < n; i += lanes) largest = max_magnitude(largest, load_n(x + i, n - i));
        const int32_t bits = reduce_magnitude(largest);
        float a;
        __builtin_memcpy(&a, &bits, sizeof a);
        const bool finite = bits < 0x7f800000, used = finite && a >= 0x1p-100f;
        *scales = used ? a / 127.0f : finite ? 0.0f : __builtin_nanf("");
        const V inverse = set1(used ? 127.0f / a : 0.0f);
        V sum = zero();  // exact: a sum of integers that stays below 2^24
        for (int64_t i = 0; i < n; i += lanes) {
            // |x * inverse| is below 127.5, so codes need no clamping.
            const V code = used ? add(mul(load_n(x + i, n - i), inverse), magic) : magic;
            sum = add(sum, sub(code, magic));
            store_low_bytes(codes + (begin + i) / code_step * piece_stride + (begin + i) % code_step, code);
        }
        if (n % code_step > 0 && n % code_step <= lanes)  // zero the rest of the last piece
            __builtin_memset(codes + (begin + n) / code_step * piece_stride + lanes, 0, lanes);
        *starts = -static_cast<int32_t>(reduce_add(sum)) * middle;
    }
}
