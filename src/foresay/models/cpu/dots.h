// Matrix products that read weights row by row from a model's own memory, without packing or copying them.
//
// A vector of one output's weights is multiplied by a vector of x. Each sum has its own accumulator, whose lanes are added in a fixed
// order at the end, so the bits of a row depend neither on other rows nor on the number of threads.

#pragma once

#include "numbers.h"
#include "products.h"

#include <vector>

namespace foresay {

constexpr int64_t DECODED_ROWS = 8; // from this many rows on, weights are first converted to float32, with the same bits as a result

inline Floats vector_of(const float *place) { return load<Floats>(place); }

inline Floats vector_of(const bf16 *place) { return widened(reinterpret_cast<const uint16_t *>(place)); }

// Loads the last numbers of a row as a vector padded with zeros.
template <class T> inline Floats rest_of(const T *place, int64_t count) {
    T padded[LANES] = {};
    std::memcpy(padded, place, count * sizeof(T));
    return vector_of(padded);
}

// Lane indices of the lower and upper halves of the segments of G lanes in two vectors.
template <int G> struct Segments {
    int32_t low[LANES], high[LANES];
    constexpr Segments() : low{}, high{} {
        for (int i = 0; i < LANES; i++) {
            int within = i % (LANES / 2), from = i / (LANES / 2) * LANES;
            low[i] = from + within / (G / 2) * G + within % (G / 2);
            high[i] = low[i] + G / 2;
        }
    }
};

inline Floats chosen(Floats x, Floats y, Ints places) {
#if defined(__clang__)
    Floats out;
    for (int i = 0; i < LANES; i++) out[i] = places[i] < LANES ? x[places[i]] : y[places[i] - LANES];
    return out;
#else
    return __builtin_shuffle(x, y, places);
#endif
}

// Returns the sum of the lanes of each of LANES vectors, in one lane per vector: adds halves of segments until each is one lane.
template <int G = LANES> inline Floats together(const Floats *sums) {
    static constexpr Segments<G> at;
    Floats half[G / 2];
    for (int i = 0; i < G / 2; i++) {
        Floats x = sums[2 * i], y = sums[2 * i + 1];
        half[i] = chosen(x, y, load<Ints>(at.low)) + chosen(x, y, load<Ints>(at.high));
    }
    if constexpr (G == 2) return half[0];
    else return together<G / 2>(half);
}

// Computes out [ROWS, .] = x [ROWS, stride] times the weights of OUTPUTS outputs; ROWS * OUTPUTS is at most LANES.
template <class T, int ROWS, int OUTPUTS>
inline void dots(const T *const *weights, const float *x, int64_t stride, int64_t depth, float *out, int64_t width) {
    Floats sum[LANES] = {};
    int64_t whole = depth / LANES * LANES;
    for (int64_t k = 0; k < whole; k += LANES) {
        Floats one[ROWS];
#pragma GCC unroll 4
        for (int r = 0; r < ROWS; r++) one[r] = load<Floats>(x + r * stride + k);
#pragma GCC unroll 16
        for (int o = 0; o < OUTPUTS; o++) {
            Floats weight = vector_of(weights[o] + k);
#pragma GCC unroll 4
            for (int r = 0; r < ROWS; r++) sum[r * OUTPUTS + o] += weight * one[r];
        }
    }
    if (whole < depth) {
        for (int o = 0; o < OUTPUTS; o++) {
            Floats weight = rest_of(weights[o] + whole, depth - whole);
            for (int r = 0; r < ROWS; r++) sum[r * OUTPUTS + o] += weight * rest_of(x + r * stride + whole, depth - whole);
        }
    }
    Floats totals = together(sum);
    for (int r = 0; r < ROWS; r++) std::memcpy(out + r * width, reinterpret_cast<const float *>(&totals) + r * OUTPUTS, OUTPUTS * sizeof(float));
}

constexpr int FOURS = LANES / 4, TWOS = LANES / 2;

// The same as `dots` for any number of rows and outputs.
template <class T>
inline void dots_of_rows(const T *const *weights, int64_t outputs, const float *x, int64_t stride, int64_t depth, int64_t rows, float *out, int64_t width) {
#define DOTS(ROWS, OUTPUTS)                                                                                        \
    {                                                                                                              \
        int64_t o = 0;                                                                                             \
        for (; o + OUTPUTS <= outputs; o += OUTPUTS) dots<T, ROWS, OUTPUTS>(weights + o, x, stride, depth, out + o, width); \
        for (; o < outputs; o++) dots<T, ROWS, 1>(weights + o, x, stride, depth, out + o, width);                  \
        x += ROWS * stride, out += ROWS * width, rows -= ROWS;                                                     \
    }
    while (rows >= 4) DOTS(4, FOURS)
    while (rows >= 2) DOTS(2, TWOS)
    if (rows == 1) DOTS(1, LANES)
#undef DOTS
}

// Computes out [rows, width] for the outputs of one panel and `rows` rows of x; see FLOAT32_ROWS and BFLOAT16_ROWS of Product.
template <class T> void row_product(const Product &p, const float *x, int64_t stride, int64_t rows, int64_t panel, float *out, int64_t width) {
    int64_t first = panel * PANEL, count = p.outputs - first < PANEL ? p.outputs - first : PANEL;
    const T *const *weights = static_cast<const T *const *>(p.weights) + first;
    if (rows < DECODED_ROWS) {
        dots_of_rows(weights, count, x, stride, p.depth, rows, out + first, width);
    } else {
        static thread_local std::vector<float> room;
        room.resize(FOURS * p.depth);
        for (int64_t o = 0; o < count; o += FOURS) {
            int64_t some = count - o < FOURS ? count - o : FOURS;
            const float *decoded[FOURS];
            for (int64_t i = 0; i < some; i++) {
                float *place = room.data() + i * p.depth;
                for (int64_t k = 0; k < p.depth; k++) place[k] = read(weights[o + i][k]);
                decoded[i] = place;
            }
            dots_of_rows(decoded, some, x, stride, p.depth, rows, out + first + o, width);
        }
    }
    if (p.bias == nullptr) return;
    const T *const *bias = static_cast<const T *const *>(p.bias) + first;
    for (int64_t r = 0; r < rows; r++)
        for (int64_t i = 0; i < count; i++) out[r * width + first + i] += read(*bias[i]);
}

} // namespace foresay
