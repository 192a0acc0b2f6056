// Products of one kernel family that are computed together: first the rows of all of them, then the blocks of all.
//
// A Job is one product. It has `product`, room() (floats of scratch memory, a multiple of 16), place(memory),
// prepare(row), blocks(), most() (blocks of a task), and run(begin, end) for some of its blocks.

#pragma once

#include <vector>

#include "linear.h"
#include "ops.h"
#include "tasks.h"

namespace sameseed {

// Blocks [begin, end) of a job.
struct Cut {
    int64_t job, begin, end;
};

template <class Job>
void run_jobs(const Product* products, int64_t count) {
    thread_local std::vector<Job> job_buffer;
    thread_local std::vector<Cut> cut_buffer;
    std::vector<Job>& jobs = job_buffer;  // thread_local names would mean other objects in workers
    std::vector<Cut>& cuts = cut_buffer;
    jobs.clear(), cuts.clear();
    int64_t room = 0, rows = 0, blocks = 0, work = 0, passes = 0;
    for (int64_t i = 0; i < count; i++) {
        const Product& p = products[i];
        if (p.rows == 0) continue;
        Job& job = jobs.emplace_back(p);
        job.first_row = rows;
        room += job.room(), rows += p.rows, blocks += job.blocks();
        work += p.weight->outputs * p.weight->depth * (2 + p.rows);
        passes = p.source.passes() * p.weight->depth;
    }
    float* memory = scratch(packed_area, room);
    for (Job& job : jobs) {
        job.place(memory);
        memory += job.room();
    }
    by_rows(rows, passes, [&](int64_t begin, int64_t end) {
        const auto after = [](int64_t row, const Job& job) { return row < job.first_row; };
        auto job = std::upper_bound(jobs.begin(), jobs.end(), begin, after) - 1;
        for (int64_t t = begin; t < end; t++) {
            if (t - job->first_row == job->product.rows) job++;
            job->prepare(t - job->first_row);
        }
    });
    // Long tasks come first, because starting to stream weights has a cost. Later tasks are ever shorter, so that all
    // threads finish at about the same time.
    const int64_t parts = 2 * num_threads();
    for (int64_t i = 0; i < static_cast<int64_t>(jobs.size()); i++)
        for (int64_t at = 0, end = jobs[i].blocks(), n; at < end; at += n, blocks -= n) {
            n = std::min({end - at, jobs[i].most(), std::max<int64_t>(1, blocks / parts)});
            cuts.push_back({i, at, at + n});
        }
    run_tasks(static_cast<int64_t>(cuts.size()), work > 16 * serial_cost,
              [&](int64_t i) { jobs[cuts[i].job].run(cuts[i].begin, cuts[i].end); });
}

}  // namespace sameseed
