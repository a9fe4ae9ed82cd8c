// Matrix products of all tokens of a pass, shared among threads.

#pragma once

#include "inputs.h"
#include "pool.h"

#include <algorithm>

namespace foresay {

// Runs body(i) for all i < count.
template <class F> void each(int64_t count, int threads, const F &body) {
    pool().run([](const void *what, int64_t i) { (*static_cast<const F *>(what))(i); }, &body, count, threads);
}

// The same, where a thread takes a run of consecutive i, so that it reads a long piece of memory: first long runs, then ever shorter ones.
template <class F> void each_in_runs(int64_t count, int threads, const F &body) {
    static thread_local std::vector<int64_t> kept;
    std::vector<int64_t> &ends = kept; // the caller's, not a worker's
    ends.assign(1, 0);
    while (ends.back() < count) ends.push_back(ends.back() + std::max<int64_t>(1, (count - ends.back()) / (2 * threads)));
    each(static_cast<int64_t>(ends.size()) - 1, threads, [&, bounds = ends.data()](int64_t run) {
        for (int64_t i = bounds[run]; i < bounds[run + 1]; i++) body(i);
    });
}

constexpr int64_t TOKENS_AT_ONCE = 8;

// Runs body(n) for all tokens, in blocks of TOKENS_AT_ONCE.
template <class F> void each_token(int64_t tokens, int threads, const F &body) {
    each((tokens + TOKENS_AT_ONCE - 1) / TOKENS_AT_ONCE, threads, [&](int64_t block) {
        int64_t first = block * TOKENS_AT_ONCE, last = first + TOKENS_AT_ONCE < tokens ? first + TOKENS_AT_ONCE : tokens;
        for (int64_t n = first; n < last; n++) body(n);
    });
}

inline int64_t all_outputs(const Product &p) {
    int64_t outputs = 0;
    for (const Product *part = &p; part != nullptr; part = part->next) outputs += part->outputs;
    return outputs;
}

inline int64_t panels_of(const Product &p) { return (p.outputs + PANEL - 1) / PANEL; }

// Some rows of the inputs, and the product that reads them.
struct Job {
    const Product *product;
    int64_t first, rows;
};

// out [., width]: for each job, its rows of the inputs times the weights. The inputs are rounded already if the products round them.
void multiply_rounded(const Job *jobs, int64_t count, const Inputs &in, float *out, int64_t width, int threads);

// out [rows, all outputs] = x [rows, stride] times the weights
inline void multiply(const Product &p, const float *x, int64_t stride, int64_t rows, float *out, int threads) {
    static thread_local Inputs kept;
    Inputs &in = kept; // the caller's, not a worker's
    in.describe(p, x, stride, rows);
    if (in.rounds()) each_token(rows, threads, [&](int64_t n) { in.round(n); });
    Job whole{&p, 0, rows};
    multiply_rounded(&whole, 1, in, out, all_outputs(p), threads);
}

} // namespace foresay
