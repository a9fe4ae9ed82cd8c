// The products of panels, which take as long to compile as all other kernels together.

#include "multiply.h"

namespace foresay {

void multiply_rounded(const Job *jobs, int64_t count, const Inputs &in, float *out, int64_t width, int threads) {
    static thread_local std::vector<int64_t> kept;
    std::vector<int64_t> &ends = kept; // the caller's, not a worker's
    ends.clear();
    auto blocks_of = [](const Job &job) { return (job.rows + ROWS_AT_ONCE - 1) / ROWS_AT_ONCE; };
    for (int64_t j = 0; j < count; j++) {
        int64_t panels = 0;
        for (const Product *part = jobs[j].product; part != nullptr; part = part->next) panels += panels_of(*part);
        ends.push_back((j == 0 ? 0 : ends.back()) + panels * blocks_of(jobs[j]));
    }
    each_in_runs(count == 0 ? 0 : ends.back(), threads, [&, bounds = ends.data()](int64_t task) {
        int64_t j = std::upper_bound(bounds, bounds + count, task) - bounds;
        const Job &job = jobs[j];
        int64_t blocks = blocks_of(job), i = task - (j == 0 ? 0 : bounds[j - 1]);
        int64_t panel = i / blocks, first = i % blocks * ROWS_AT_ONCE, left = job.rows - first;
        const Product *part = job.product;
        float *place = out;
        for (; panel >= panels_of(*part); part = part->next) panel -= panels_of(*part), place += part->outputs;
        panel_product(*part, in, job.first + first, left < ROWS_AT_ONCE ? left : ROWS_AT_ONCE, panel, place, width);
    });
}

} // namespace foresay
