// A plan: the ops of one forward pass, recorded once and replayed in one call for any number of rows.
//
// Everything that differs between passes is in Pass. All other addresses, weights and strides are those of the
// recording. A step calls the same function as a direct call, so replaying changes no bit.

#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "linear.h"
#include "ops.h"

namespace sameseed {

// The rows of a pass, laid out as in sameseed/batch.py, and the buffers for its two results.
struct Pass {
    int64_t rows, num_seqs, num_logit_rows, table_stride;
    const int32_t *token_ids, *positions, *key_positions, *slots, *row_offsets, *kv_lens, *block_tables;
    const int64_t* tree_mask;  // or null
    const int32_t* logit_rows;
    float* logits;  // [num_logit_rows, V]
    float* hidden;  // captured hidden states [rows, captured width], or null if none are captured
    const int32_t* states = nullptr;  // [3, num_seqs] (delta.h), or null
};

class Plan {
   public:
    using Step = std::function<void(const Pass&)>;

    void add(const char* kind, Step step) { steps_.push_back({kind, std::move(step), 0.0}); }
    void run(const Pass& pass);

    // set_timed() switches timing on or off and resets it. seconds() returns the time of each kind of step since then.
    void set_timed(bool timed);
    std::vector<std::pair<std::string, double>> seconds() const;
    int64_t size() const { return static_cast<int64_t>(steps_.size()); }

   private:
    struct Entry {
        const char* kind;
        Step step;
        double seconds;
    };
    std::vector<Entry> steps_;
    bool timed_ = false;
};

}  // namespace sameseed
