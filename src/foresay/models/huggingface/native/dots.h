// Matrix products with weights that lie where a model keeps them, row after row: nothing is packed, nothing is held twice.
//
// A vector of one output's weights meets one of x, so that each sum has an accumulator of its own, whose lanes are put together in one
// order at the end: the bits of a row depend neither on the rows beside it nor on how many threads there are.

#pragma once

#include "numbers.h"
#include "products.h"

namespace foresay {

#if defined(__AVX512F__)
constexpr int DOT_ROWS = 4, DOT_OUTPUTS = 4, ALONE = 8;
#else
constexpr int DOT_ROWS = 2, DOT_OUTPUTS = 4, ALONE = 4;
#endif

inline Floats vector_of(const float *place) { return load<Floats>(place); }

inline Floats vector_of(const bf16 *place) {
    Words wide = __builtin_convertvector(load<Shorts>(reinterpret_cast<const uint16_t *>(place)), Words) << 16;
    return reinterpret_cast<Floats>(wide);
}

// The lanes' sum: halves onto halves.
inline float together(Floats sum) {
    alignas(64) float lanes[LANES];
    std::memcpy(lanes, &sum, sizeof sum);
    for (int half = LANES / 2; half > 0; half /= 2)
        for (int i = 0; i < half; i++) lanes[i] += lanes[i + half];
    return lanes[0];
}

// The last numbers of a row, filled up with zeros to a vector.
template <class T> inline Floats rest_of(const T *place, int64_t count) {
    T padded[LANES] = {};
    std::memcpy(padded, place, count * sizeof(T));
    return vector_of(padded);
}

// out [ROWS, .] = x [ROWS, stride] times the weights of OUTPUTS outputs.
template <class T, int ROWS, int OUTPUTS>
inline void dots(const T *const *weights, const float *x, int64_t stride, int64_t depth, float *out, int64_t width) {
    Floats sum[ROWS][OUTPUTS] = {};
    int64_t whole = depth / LANES * LANES;
    auto add = [&](const Floats *weight, int row, Floats one) {
#pragma GCC unroll 8
        for (int o = 0; o < OUTPUTS; o++) sum[row][o] += weight[o] * one;
    };
    for (int64_t k = 0; k < whole; k += LANES) {
        Floats weight[OUTPUTS];
#pragma GCC unroll 8
        for (int o = 0; o < OUTPUTS; o++) weight[o] = vector_of(weights[o] + k);
#pragma GCC unroll 4
        for (int r = 0; r < ROWS; r++) add(weight, r, load<Floats>(x + r * stride + k));
    }
    if (whole < depth) {
        Floats weight[OUTPUTS];
        for (int o = 0; o < OUTPUTS; o++) weight[o] = rest_of(weights[o] + whole, depth - whole);
        for (int r = 0; r < ROWS; r++) add(weight, r, rest_of(x + r * stride + whole, depth - whole));
    }
    for (int r = 0; r < ROWS; r++)
        for (int o = 0; o < OUTPUTS; o++) out[r * width + o] = together(sum[r][o]);
}

// As `dots`, of `rows` rows.
template <class T, int OUTPUTS, int MOST>
inline void dots_of_rows(const T *const *weights, const float *x, int64_t stride, int64_t depth, int64_t rows, float *out, int64_t width) {
    int64_t r = 0;
    for (; r + MOST <= rows; r += MOST) dots<T, MOST, OUTPUTS>(weights, x + r * stride, stride, depth, out + r * width, width);
    for (; r < rows; r++) dots<T, 1, OUTPUTS>(weights, x + r * stride, stride, depth, out + r * width, width);
}

// out[m, n] for the outputs of one panel and some rows of x. weights: of each output; bias: likewise, null for none.
template <class T> void row_product(const Product &p, const float *x, int64_t stride, int64_t rows, int64_t panel, float *out) {
    int64_t first = panel * PANEL, count = p.outputs - first < PANEL ? p.outputs - first : PANEL, o = 0;
    const T *const *weights = static_cast<const T *const *>(p.weights) + first;
    float *place = out + first;
    if (rows == 1) {
        for (; o + ALONE <= count; o += ALONE) dots_of_rows<T, ALONE, 1>(weights + o, x, stride, p.depth, rows, place + o, p.outputs);
    }
    for (; o + DOT_OUTPUTS <= count; o += DOT_OUTPUTS) {
        dots_of_rows<T, DOT_OUTPUTS, DOT_ROWS>(weights + o, x, stride, p.depth, rows, place + o, p.outputs);
    }
    for (; o < count; o++) dots_of_rows<T, 1, DOT_ROWS>(weights + o, x, stride, p.depth, rows, place + o, p.outputs);
    if (p.bias == nullptr) return;
    const T *const *bias = static_cast<const T *const *>(p.bias) + first;
    for (int64_t r = 0; r < rows; r++)
        for (int64_t i = 0; i < count; i++) place[r * p.outputs + i] += read(*bias[i]);
}

} // namespace foresay
