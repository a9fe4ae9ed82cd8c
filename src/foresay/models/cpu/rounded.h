// Activations rounded to 8 bits in groups of 32: x = scale * level with levels in [-127, 127].

#pragma once

#include "quantized.h"

#include <cmath>

namespace foresay {

// Rounded activations of one token: levels [depth], scales [depth / 32], sums of the rounded numbers for each 32, [depth / 32], and for
// each 16, [depth / 16]. depth is a multiple of 32.
struct RoundedRow {
    int8_t *levels;
    float *scales, *sums, *half_sums;
};

// Levels of numbers in 8 bits, in [-127, 127], times a scale. A NaN or an infinite number makes the scale NaN, and so every product.
struct Rounding {
    float scale, inverse;
    bool rounds; // false if the numbers are not finite, or too small to divide by

    int32_t level(float x) const { return rounds ? static_cast<int32_t>(std::nearbyintf(x * inverse)) : 0; }
};

inline Rounding rounding_of(const float *x, int64_t count) {
    Floats tops{}, zeros{};
    float top = 0.0f, finite = 0.0f;
    int64_t whole = count / LANES * LANES;
    for (int64_t i = 0; i < whole; i += LANES) {
        Floats some = load<Floats>(x + i), size = some < 0.0f ? -some : some;
        tops = size > tops ? size : tops, zeros += some * 0.0f;
    }
    for (int64_t i = whole; i < count; i++) top = std::fabs(x[i]) > top ? std::fabs(x[i]) : top, finite += x[i] * 0.0f;
    for (int lane = 0; lane < LANES; lane++) top = tops[lane] > top ? tops[lane] : top, finite += zeros[lane];
    float scale = top / 127.0f + finite, inverse = 127.0f / top;
    return {scale, inverse, scale - scale == 0.0f && inverse - inverse == 0.0f};
}

// Rounds 32 numbers.
inline void round_group(const float *x, int64_t group, const RoundedRow &out) {
    Rounding by = rounding_of(x, GROUP);
    int8_t *levels = out.levels + group * GROUP;
    int32_t sums[2] = {0, 0};
    for (int half = 0; half < 2; half++) {
        int32_t sum = 0;
#pragma omp simd reduction(+ : sum)
        for (int i = 0; i < GROUP / 2; i++) {
            int32_t level = by.level(x[half * 16 + i]);
            levels[half * 16 + i] = static_cast<int8_t>(level);
            sum += level;
        }
        sums[half] = sum;
        out.half_sums[2 * group + half] = by.scale * static_cast<float>(sum);
    }
    out.scales[group] = by.scale;
    out.sums[group] = by.scale * static_cast<float>(sums[0] + sums[1]);
}

inline void round_row(const float *x, int64_t depth, const RoundedRow &out) {
    int64_t groups = depth / GROUP, rest = depth % GROUP;
    for (int64_t g = 0; g < groups; g++) round_group(x + g * GROUP, g, out);
    if (rest == 0) return;
    float padded[GROUP] = {};
    std::memcpy(padded, x + groups * GROUP, rest * sizeof(float));
    round_group(padded, groups, out);
}

// A block of tokens' rounded activations, from the first depth of a block on. Strides are those between tokens.
struct RoundedBlock {
    const int8_t *levels;
    const float *scales, *sums;
    int64_t stride, scale_stride, sum_stride;
};

// Adds a group's part to LANES sums. dots: sums of level * level; scale, offset: of the weights; x_scale, x_sum: of the activations.
inline void add_group(float *sums, Ints dots, Floats scale, Floats offset, float x_scale, float x_sum) {
    Floats sum = load<Floats>(sums);
    sum += __builtin_convertvector(dots, Floats) * scale * x_scale;
    sum += offset * x_sum;
    store(sums, sum);
}

} // namespace foresay
