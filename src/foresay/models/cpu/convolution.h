// Causal convolutions of few taps around a sublayer, of its input and of its output (DFlash2).
//
// A token's kernels are a fixed one plus a projection of the sublayer's input, shared by the channels of a group. Taps reach the tokens
// of the same row in this pass alone. A token's sums have the order of the taps.

#pragma once

#include "experts.h"

namespace foresay {

struct Convolution {
    int64_t taps, groups;
    Product projection; // [2 * taps * groups, hidden]
    const float *base;  // [2, taps, hidden]
};

constexpr int64_t MOST_TAPS = 64;

inline void check(const Convolution &c, int64_t hidden) {
    require(c.taps > 0 && c.taps <= MOST_TAPS, "taps", c.taps, "in [1, 64]");
    require(c.groups > 0 && c.groups <= hidden && hidden % c.groups == 0, "groups", c.groups, "a divisor of hidden");
    check_shape("convolution", c.projection, 2 * c.taps * c.groups, hidden);
    check_pointer("base", c.base);
}

// out[n] = the convolution of x [N, hidden] at token n. side: 0 for a sublayer's input, 1 for its output. deltas: [N, 2, taps, groups].
// rows: [N] the row of each token; those of a row follow each other.
inline void convolve(const Convolution &c, int64_t side, const float *x, const float *deltas, const int64_t *rows, int64_t n,
                     int64_t hidden, float *out) {
    int64_t size = hidden / c.groups;
    const float *delta = deltas + (2 * n + side) * c.taps * c.groups, *base = c.base + side * c.taps * hidden;
    float *sum = out + n * hidden;
    std::memset(sum, 0, hidden * sizeof(float));
    for (int64_t tap = 0; tap < c.taps && tap <= n && rows[n - tap] == rows[n]; tap++) {
        const float *seen = x + (n - tap) * hidden, *fixed = base + tap * hidden;
        for (int64_t group = 0; group < c.groups; group++) {
            float moving = delta[tap * c.groups + group];
#pragma omp simd
            for (int64_t i = group * size; i < (group + 1) * size; i++) sum[i] += (fixed[i] + moving) * seen[i];
        }
    }
}

} // namespace foresay
