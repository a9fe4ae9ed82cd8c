// Matrix products with frozen weights: out[m, n] = sum over k of x[m, k] * w[n, k].
//
// Every sum runs over k in a fixed order, in one accumulator of float32, so the bits of a row depend neither on other rows nor on the
// number of threads. Weights are stored in panels of 32 outputs, so that a vector of them is multiplied by the same numbers of x.
// Activations are float32, or are rounded first: to bfloat16 for bfloat16 weights, to 8 bits for quantized weights (integers.h).

#pragma once

#include "integers.h"
#include "numbers.h"

namespace foresay {

// MOST_TILE_ROWS: most rows whose sums are kept in registers. From SPLIT rows on a tile is half a panel wide, because the sums of a
// whole width would leave none of 16 registers for the weights.
#if defined(__AVX512F__)
constexpr int MOST_TILE_ROWS = 12, SPLIT = 1 << 20;
#elif defined(__AVX2__)
constexpr int MOST_TILE_ROWS = 6, SPLIT = 4;
#else
constexpr int MOST_TILE_ROWS = 2, SPLIT = 1 << 20;
#endif
constexpr int64_t ROWS_AT_ONCE = 96;

enum Format { FLOAT32 = 0, BFLOAT16 = 1, QUANTIZED = 2, FLOAT32_ROWS = 3, BFLOAT16_ROWS = 4 };
enum Activations { AS_FLOAT32 = 0, AS_BFLOAT16 = 1, AS_INT8 = 2 };

// Weights [outputs, depth]. Panels are stored consecutively, and outputs are padded to a multiple of 32.
//   float32: [panel, depth, 32]
//   bfloat16: [panel, depth / 2, 32, 2]; depth is padded to a multiple of 2
//   quantized: levels and scales as in quantized.h; depth is padded to a multiple of 32
//   float32_rows, bfloat16_rows: [outputs] addresses of the weights of each output, rows of `depth` numbers; the bias likewise,
//         [outputs] addresses of numbers. See dots.h.
// `next` has further outputs of the same x, whose weights are in another format; null for none.
struct Product {
    int64_t format, outputs, depth, bits, scaling, activations;
    const void *weights;
    const void *scales;
    const void *bias; // [outputs] float32; null for none
    const Product *next;
};

// Reads the weights of a panel at two consecutive depths; COUNT vectors from the FIRST on.
template <class T> struct Weights;

template <> struct Weights<float> {
    const float *panel;
    template <int FIRST, int COUNT> inline void at(int64_t k, Floats (&low)[COUNT], Floats (&high)[COUNT]) const {
        for (int v = 0; v < COUNT; v++) {
            low[v] = load<Floats>(panel + k * PANEL + (FIRST + v) * LANES);
            high[v] = load<Floats>(panel + (k + 1) * PANEL + (FIRST + v) * LANES);
        }
    }
};

template <> struct Weights<bf16> {
    const bf16 *panel;
    template <int FIRST, int COUNT> inline void at(int64_t k, Floats (&low)[COUNT], Floats (&high)[COUNT]) const {
        for (int v = 0; v < COUNT; v++) {
            Words pairs = load<Words>(panel + k * PANEL + (FIRST + v) * LANES * 2);
            low[v] = low_halves(pairs), high[v] = high_halves(pairs);
        }
    }
};

// Adds the products of ROWS rows with COUNT vectors of one panel to sums [rows, 32], over depths [0, depth).
template <class T, int ROWS, int FIRST, int COUNT>
inline void float_tile(const Weights<T> &weights, const float *x, int64_t stride, int64_t depth, float *sums) {
    Floats sum[ROWS][COUNT];
    for (int r = 0; r < ROWS; r++)
        for (int v = 0; v < COUNT; v++) sum[r][v] = load<Floats>(sums + r * PANEL + (FIRST + v) * LANES);
    auto add = [&](int64_t k, const Floats(&weight)[COUNT]) {
#pragma GCC unroll 16
        for (int r = 0; r < ROWS; r++) {
            float one = x[r * stride + k];
#pragma GCC unroll 8
            for (int v = 0; v < COUNT; v++) sum[r][v] += weight[v] * one;
        }
    };
    Floats low[COUNT], high[COUNT];
    int64_t k = 0;
    for (; k + 2 <= depth; k += 2) {
        weights.template at<FIRST, COUNT>(k, low, high);
        add(k, low), add(k + 1, high);
    }
    if (k < depth) { // the weights of an odd depth are padded
        weights.template at<FIRST, COUNT>(k, low, high);
        add(k, low);
    }
    for (int r = 0; r < ROWS; r++)
        for (int v = 0; v < COUNT; v++) store(sums + r * PANEL + (FIRST + v) * LANES, sum[r][v]);
}

// The same with activations rounded to bfloat16, [rows, stride] with an even stride; depth is even.
template <int ROWS, int FIRST, int COUNT>
inline void pair_tile(const bf16 *weights, const bf16 *x, int64_t stride, int64_t depth, float *sums) {
    Floats sum[ROWS][COUNT];
    for (int r = 0; r < ROWS; r++)
        for (int v = 0; v < COUNT; v++) sum[r][v] = load<Floats>(sums + r * PANEL + (FIRST + v) * LANES);
    for (int64_t k = 0; k < depth; k += 2) {
        Words pairs[COUNT];
#pragma GCC unroll 8
        for (int v = 0; v < COUNT; v++) pairs[v] = load<Words>(weights + k * PANEL + (FIRST + v) * LANES * 2);
#pragma GCC unroll 16
        for (int r = 0; r < ROWS; r++) {
            Words one = repeated(x + r * stride + k);
#pragma GCC unroll 8
            for (int v = 0; v < COUNT; v++) sum[r][v] = add_pairs(sum[r][v], pairs[v], one);
        }
    }
    for (int r = 0; r < ROWS; r++)
        for (int v = 0; v < COUNT; v++) store(sums + r * PANEL + (FIRST + v) * LANES, sum[r][v]);
}

// Runs body(number of rows as a compile-time constant, index of the first) over tiles of rows.
template <class F> inline void row_tiles(int64_t rows, const F &body) {
    int64_t first = 0;
#define TILE(N) \
    if constexpr (N <= MOST_TILE_ROWS) for (; rows - first >= N; first += N) body(std::integral_constant<int, N>(), first);
    TILE(12) TILE(8) TILE(6) TILE(5) TILE(4) TILE(3) TILE(2) TILE(1)
#undef TILE
}

template <class T> void float_tiles(const T *panel, const float *x, int64_t stride, int64_t rows, int64_t depth, float *sums) {
    Weights<T> weights{panel};
    row_tiles(rows, [&](auto count, int64_t first) {
        constexpr int N = decltype(count)::value;
        if constexpr (N < SPLIT) {
            float_tile<T, N, 0, VECTORS>(weights, x + first * stride, stride, depth, sums + first * PANEL);
        } else {
            float_tile<T, N, 0, VECTORS / 2>(weights, x + first * stride, stride, depth, sums + first * PANEL);
            float_tile<T, N, VECTORS / 2, VECTORS / 2>(weights, x + first * stride, stride, depth, sums + first * PANEL);
        }
    });
}

inline void pair_tiles(const bf16 *panel, const bf16 *x, int64_t stride, int64_t rows, int64_t depth, float *sums) {
#if defined(FORESAY_TILES)
    if (tiles_allowed()) {
        int64_t whole = depth / TILE_DEPTH * TILE_DEPTH;
        pairs_by_tiles(panel, x, stride, rows, whole, sums);
        panel += whole * PANEL, x += whole, depth -= whole;
    }
#endif
    row_tiles(rows, [&](auto count, int64_t first) {
        constexpr int N = decltype(count)::value;
        if constexpr (N < SPLIT) {
            pair_tile<N, 0, VECTORS>(panel, x + first * stride, stride, depth, sums + first * PANEL);
        } else {
            pair_tile<N, 0, VECTORS / 2>(panel, x + first * stride, stride, depth, sums + first * PANEL);
            pair_tile<N, VECTORS / 2, VECTORS / 2>(panel, x + first * stride, stride, depth, sums + first * PANEL);
        }
    });
}

} // namespace foresay
