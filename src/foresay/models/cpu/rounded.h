// Activations rounded to 8 bits: x = scale * level with levels in [-127, 127]. Numbers share a scale in groups of 32, or of 256 where they
// are multiplied by weights whose scales are multiples of a scale for 256.

#pragma once

#include "quantized.h"

#include <cmath>

namespace foresay {

// Sums of the levels of SUPER numbers: for each 16, then for each 32.
constexpr int64_t SUMS_OF_16 = SUPER / 16, SUPER_SUMS = SUMS_OF_16 + SUPER / GROUP;

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

// Rounds COUNT numbers, of which the first `count` are given and the others 0. sums: receives the sums of the levels of each 16.
template <int COUNT> inline float round_numbers(const float *x, int64_t count, int8_t *levels, int32_t (&sums)[COUNT / 16]) {
    float padded[COUNT];
    if (count < COUNT) {
        std::memset(padded, 0, sizeof padded), std::memcpy(padded, x, count * sizeof(float));
        x = padded;
    }
    Rounding by = rounding_of(x, COUNT);
    for (int part = 0; part < COUNT / 16; part++) {
        int32_t sum = 0;
#pragma omp simd reduction(+ : sum)
        for (int i = 0; i < 16; i++) {
            int32_t level = by.level(x[part * 16 + i]);
            levels[part * 16 + i] = static_cast<int8_t>(level);
            sum += level;
        }
        sums[part] = sum;
    }
    return by.scale;
}

// Rounds the numbers of a token in groups of 32: levels [depth], scales and sums of the rounded numbers [depth / 32].
inline void round_groups(const float *x, int64_t depth, int8_t *levels, float *scales, float *sums) {
    for (int64_t from = 0, g = 0; from < depth; from += GROUP, g++) {
        int32_t of_levels[GROUP / 16];
        scales[g] = round_numbers<GROUP>(x + from, depth - from, levels + from, of_levels);
        sums[g] = scales[g] * static_cast<float>(of_levels[0] + of_levels[1]);
    }
}

// The same in groups of SUPER; sums: of the levels, [depth / SUPER, SUPER_SUMS].
inline void round_supers(const float *x, int64_t depth, int8_t *levels, float *scales, int16_t *sums) {
    for (int64_t from = 0, g = 0; from < depth; from += SUPER, g++, sums += SUPER_SUMS) {
        int32_t of_levels[SUMS_OF_16];
        scales[g] = round_numbers<SUPER>(x + from, depth - from, levels + from, of_levels);
        for (int i = 0; i < SUMS_OF_16; i++) sums[i] = static_cast<int16_t>(of_levels[i]);
        for (int i = 0; i < SUPER / GROUP; i++) sums[SUMS_OF_16 + i] = static_cast<int16_t>(of_levels[2 * i] + of_levels[2 * i + 1]);
    }
}

// Rounded activations of some tokens, from the first depth of a block on. Strides are those between tokens.
template <class Sum> struct Rounded {
    const int8_t *levels;
    const float *scales;
    const Sum *sums;
    int64_t stride, scale_stride, sum_stride;

    Rounded from(int64_t row) const {
        return {levels + row * stride, scales + row * scale_stride, sums + row * sum_stride, stride, scale_stride, sum_stride};
    }
};

using RoundedGroups = Rounded<float>;
using RoundedSupers = Rounded<int16_t>;

// Adds a group's part to LANES sums. dots: sums of level * level; scale, offset: of the weights; x_scale, x_sum: of the activations.
inline void add_group(float *sums, Ints dots, Floats scale, Floats offset, float x_scale, float x_sum) {
    Floats sum = load<Floats>(sums);
    sum += __builtin_convertvector(dots, Floats) * scale * x_scale;
    sum += offset * x_sum;
    store(sums, sum);
}

// Adds integers times the scales of weights and activations to LANES sums.
inline void add_super(float *sums, Ints total, Floats scale, float x_scale) {
    Floats sum = load<Floats>(sums), by = scale * x_scale;
    sum += __builtin_convertvector(total, Floats) * by;
    store(sums, sum);
}

} // namespace foresay
