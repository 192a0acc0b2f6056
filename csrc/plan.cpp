// A plan: the ops of one forward pass, recorded once and replayed in one call for any number of rows.

#include "plan.h"

#include <chrono>
#include <map>

namespace sameseed {

void Plan::run(const Pass& pass) {
    if (pass.rows == 0) return;
    if (!timed_) {
        for (const Entry& entry : steps_) entry.step(pass);
        return;
    }
    for (Entry& entry : steps_) {
        const auto start = std::chrono::steady_clock::now();
        entry.step(pass);
        entry.seconds += std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
    }
}

void Plan::set_timed(bool timed) {
    timed_ = timed;
    for (Entry& entry : steps_) entry.seconds = 0.0;
}

std::vector<std::pair<std::string, double>> Plan::seconds() const {
    std::map<std::string, double> sums;
    for (const Entry& entry : steps_) sums[entry.kind] += entry.seconds;
    return {sums.begin(), sums.end()};
}

}  // namespace sameseed
