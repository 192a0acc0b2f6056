// The table of one instruction set's kernels. Included like linear_body.h, after all the bodies.

constexpr Kernels make_table(const char* name) {
    return {
        name,
        row_tile,
        {pack<float>, pack<bf16>, pack<fp16>},
        {linear<float>, linear<bf16>, linear<fp16>},
        float_tile,
        {nullptr, linear_float<Bf16Codes>, nullptr, linear_float<ByteCodes>, linear_float<NibbleCodes>, linear_float<NibbleCodes>,
         linear_float<Float8Codes<false>>, linear_float<Float8Codes<true>>, linear_float<NibbleCodes>, nullptr, nullptr, nullptr,
         nullptr},
        interleave,
        group_sums,
        pair_rows_most,
        pair_row,
        linear_pairs,
        integer_tile,
        quantize,
        integer,
        super_tile,
        super,
        rms_norm,
        rope,
        silu_mul,
        {encode<float>, encode<bf16>, encode<fp16>},
        {decode<float>, decode<bf16>, decode<fp16>},
        {encode_dense<float>, encode_dense<bf16>, encode_dense<fp16>, encode_int8, encode_fp8<e4m3>, encode_fp8<e5m2>,
         encode_rotated4, encode_sparse4, encode_dense<bf16>, encode_int8},
        {attention<float>, attention<bf16>, attention<fp16>, attention<int8>, attention<e4m3>, attention<e5m2>,
         attention<rotated4>, attention<sparse4>, attention_pairs, attention_integer},
        attention_merge,
    };
}
