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
// whole width would leave none of 16 registers for the weights. Several tiles read DEPTHS_AT_ONCE depths one after the other, the
// first from memory and the others from the first cache. Half a panel prefetches both halves PREFETCHED depths ahead: it skips
// every second cache line, which the processor does not predict.
#if defined(__AVX512F__)
constexpr int MOST_TILE_ROWS = 12, SPLIT = 1 << 20;
#elif defined(__AVX2__)
constexpr int MOST_TILE_ROWS = 6, SPLIT = 3;
#else
constexpr int MOST_TILE_ROWS = 2, SPLIT = 1 << 20;
#endif
constexpr int64_t DEPTHS_AT_ONCE = 64, PREFETCHED = 32;

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

// Reads COUNT vectors of the weights of a panel, from the FIRST on, at an even depth and at the one after it.
template <class T> struct Weights;

template <> struct Weights<float> {
    const float *panel;
    template <int FIRST, int COUNT> inline void even(int64_t k, Floats (&out)[COUNT]) const {
        for (int v = 0; v < COUNT; v++) out[v] = load<Floats>(panel + k * PANEL + (FIRST + v) * LANES);
    }
    template <int FIRST, int COUNT> inline void odd(int64_t k, Floats (&out)[COUNT]) const { even<FIRST>(k + 1, out); }
};

template <> struct Weights<bf16> {
    const bf16 *panel;
    template <int FIRST, int COUNT> inline void even(int64_t k, Floats (&out)[COUNT]) const {
        for (int v = 0; v < COUNT; v++) out[v] = low_halves(load<Words>(panel + k * PANEL + (FIRST + v) * LANES * 2));
    }
    template <int FIRST, int COUNT> inline void odd(int64_t k, Floats (&out)[COUNT]) const {
        const bf16 *again = panel + k * PANEL;
        asm("" : "+r"(again)); // read again: kept from `even`, the pairs would take registers that sums need
        for (int v = 0; v < COUNT; v++) out[v] = high_halves(load<Words>(again + (FIRST + v) * LANES * 2));
    }
};

// Prefetches the weights of a panel at depths k and k + 1; they may lie beyond its end.
template <class T> inline void prefetch_panel(const T *panel, int64_t k) {
    uintptr_t place = reinterpret_cast<uintptr_t>(panel) + k * PANEL * sizeof(T);
    for (size_t line = 0; line < 2 * PANEL * sizeof(T); line += 64) __builtin_prefetch(reinterpret_cast<const void *>(place + line));
}

// Adds the products of ROWS rows with COUNT vectors of one panel to sums [rows, 32], over depths [0, depth).
template <class T, int ROWS, int FIRST, int COUNT>
inline void float_tile(const T *panel, const float *x, int64_t stride, int64_t depth, float *sums) {
    Weights<T> weights{panel};
    Floats sum[ROWS][COUNT], weight[COUNT];
    for (int r = 0; r < ROWS; r++)
        for (int v = 0; v < COUNT; v++) sum[r][v] = load<Floats>(sums + r * PANEL + (FIRST + v) * LANES);
    auto add = [&](int64_t k) {
#pragma GCC unroll 16
        for (int r = 0; r < ROWS; r++) {
            float one = x[r * stride + k];
#pragma GCC unroll 8
            for (int v = 0; v < COUNT; v++) sum[r][v] += weight[v] * one;
        }
    };
    int64_t k = 0;
    for (; k + 2 <= depth; k += 2) {
        if constexpr (FIRST == 0 && COUNT < VECTORS) prefetch_panel(panel, k + PREFETCHED);
        weights.template even<FIRST>(k, weight), add(k);
        weights.template odd<FIRST>(k, weight), add(k + 1);
    }
    if (k < depth) weights.template even<FIRST>(k, weight), add(k); // the weights of an odd depth are padded
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
        if constexpr (FIRST == 0 && COUNT < VECTORS) prefetch_panel(weights, k + PREFETCHED);
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

// Runs body(rows of the tile, first vector, number of vectors, first row, first depth, number of depths), of which the first three are
// compile-time constants, over tiles of about as many rows each.
template <class F> inline void each_tile(int64_t rows, int64_t depth, const F &body) {
    int64_t most = rows < SPLIT && rows <= MOST_TILE_ROWS ? depth : DEPTHS_AT_ONCE;
    for (int64_t from = 0; from < depth; from += most) {
        int64_t some = depth - from < most ? depth - from : most;
        for (int64_t first = 0; first < rows;) {
            int64_t left = rows - first, count = (left + MOST_TILE_ROWS - 1) / MOST_TILE_ROWS, n = (left + count - 1) / count;
#define TILE(N, BELOW)                                                                                                       \
    if constexpr (N <= MOST_TILE_ROWS) {                                                                                     \
        if (n > BELOW && left >= N) {                                                                                        \
            constexpr int WIDTH = N < SPLIT ? VECTORS : VECTORS / 2;                                                         \
            body(Constant<N>(), Constant<0>(), Constant<WIDTH>(), first, from, some);                                        \
            if constexpr (WIDTH < VECTORS) body(Constant<N>(), Constant<WIDTH>(), Constant<WIDTH>(), first, from, some);     \
            first += N;                                                                                                      \
            continue;                                                                                                        \
        }                                                                                                                    \
    }
            TILE(12, 8) TILE(8, 6) TILE(6, 5) TILE(5, 4) TILE(4, 3) TILE(3, 2) TILE(2, 1) TILE(1, 0)
#undef TILE
        }
    }
}

template <class T> void float_tiles(const T *panel, const float *x, int64_t stride, int64_t rows, int64_t depth, float *sums) {
    each_tile(rows, depth, [&](auto n, auto begin, auto width, int64_t first, int64_t from, int64_t some) {
        constexpr int N = decltype(n)::value, BEGIN = decltype(begin)::value, WIDTH = decltype(width)::value;
        float_tile<T, N, BEGIN, WIDTH>(panel + from * PANEL, x + first * stride + from, stride, some, sums + first * PANEL);
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
    each_tile(rows, depth, [&](auto n, auto begin, auto width, int64_t first, int64_t from, int64_t some) {
        constexpr int N = decltype(n)::value, BEGIN = decltype(begin)::value, WIDTH = decltype(width)::value;
        pair_tile<N, BEGIN, WIDTH>(panel + from * PANEL, x + first * stride + from, stride, some, sums + first * PANEL);
    });
}

} // namespace foresay
