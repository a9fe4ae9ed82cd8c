// Products of many tokens with a panel of weights by matrix instructions, where the processor has them.
//
// Sums of 8-bit levels are exact integers, so they are the same with and without these instructions, and whichever is faster is used.
// Products of bfloat16 numbers are rounded in another order, which depends on the depth alone, so that all of a pass use them or none.

#pragma once

#include "amx.h"
#include "numbers.h"
#include "rounded.h"

namespace foresay {

constexpr int64_t TILE_ROWS = 16, TILE_DEPTH = 32, TILE_BYTES = 64; // depths: of bfloat16 numbers, and of bytes

#if defined(FORESAY_TILES)

// A thread's registers while it multiplies: sums of two blocks of rows (0, 1 and 2, 3) by the two halves of a panel, the rows of x (4
// and 5), and the halves of the panel (6 and 7).
class Tiles {
  public:
    // first, second: rows of the blocks, at most TILE_ROWS; bytes: of a row of x.
    Tiles(int64_t first, int64_t second, int64_t bytes) {
        TileShapes shapes;
        auto shape = [&](int tile, int64_t rows, int64_t width) {
            shapes.rows[tile] = static_cast<uint8_t>(rows), shapes.bytes[tile] = static_cast<uint16_t>(rows > 0 ? width : 0);
        };
        for (int tile = 0; tile < 2; tile++) shape(tile, first, 64), shape(tile + 2, second, 64), shape(tile + 6, bytes / 4, 64);
        shape(4, first, bytes), shape(5, second, bytes);
        tile_shapes(shapes);
    }
    ~Tiles() { tile_release(); }
    Tiles(const Tiles &) = delete;
    Tiles &operator=(const Tiles &) = delete;
};

// The same as pair_tiles in products.h; depth is a multiple of TILE_DEPTH.
inline void pairs_by_tiles(const bf16 *weights, const bf16 *x, int64_t stride, int64_t rows, int64_t depth, float *sums) {
    constexpr int64_t WIDTH = PANEL * sizeof(float); // bytes of a row of sums, and of two depths of a panel
    auto add = [&](const bf16 *some, int64_t first, int64_t second, float *low) {
        Tiles owned(first, second, TILE_DEPTH * sizeof(bf16));
        const bf16 *more = some + TILE_ROWS * stride;
        float *high = low + TILE_ROWS * PANEL;
        tile_load<0>(low, WIDTH), tile_load<1>(low + PANEL / 2, WIDTH);
        if (second > 0) tile_load<2>(high, WIDTH), tile_load<3>(high + PANEL / 2, WIDTH);
        for (int64_t k = 0; k < depth; k += TILE_DEPTH) {
            tile_load<6>(weights + k * PANEL, WIDTH), tile_load<7>(weights + k * PANEL + PANEL, WIDTH);
            tile_load<4>(some + k, stride * sizeof(bf16));
            tile_pairs<0, 4, 6>(), tile_pairs<1, 4, 7>();
            if (second == 0) continue;
            tile_load<5>(more + k, stride * sizeof(bf16));
            tile_pairs<2, 5, 6>(), tile_pairs<3, 5, 7>();
        }
        tile_store<0>(low, WIDTH), tile_store<1>(low + PANEL / 2, WIDTH);
        if (second > 0) tile_store<2>(high, WIDTH), tile_store<3>(high + PANEL / 2, WIDTH);
    };
    for (int64_t at = 0; at < rows; at += 2 * TILE_ROWS) {
        int64_t left = rows - at, first = left < TILE_ROWS ? left : TILE_ROWS, second = left - first < TILE_ROWS ? left - first : TILE_ROWS;
        add(x + at * stride, first, second, sums + at * PANEL);
    }
}

// Sums of level * level of GROUP depths, for each group of a block of `depth` depths and each of `rows` rows; the caller owns
// Tiles(TILE_ROWS, 0, GROUP). Calls add(group, row, dots [PANEL]). Levels of x are read up to a multiple of TILE_ROWS rows. next: weights
// that are decoded after these; `bytes` of them are prefetched with each group, because memory does not deliver those of a whole
// block while it is decoded.
template <class F>
inline void dots_by_tiles(const uint8_t *levels, int64_t depth, const int8_t *x, int64_t stride, int64_t rows, const uint8_t *next,
                          int64_t bytes, const F &add) {
    constexpr int64_t WIDTH = PANEL * sizeof(int32_t);
    alignas(64) int32_t dots[TILE_ROWS * PANEL];
    for (int64_t g = 0; g < depth / GROUP; g++, levels += GROUP * PANEL) {
        tile_load<6>(levels, WIDTH), tile_load<7>(levels + WIDTH / 2, WIDTH);
        for (int64_t b = 0; b < bytes; b += 64) __builtin_prefetch(next + g * bytes + b);
        for (int64_t first = 0; first < rows; first += TILE_ROWS) {
            int64_t count = rows - first < TILE_ROWS ? rows - first : TILE_ROWS;
            tile_zero<0>(), tile_zero<1>();
            tile_load<4>(x + first * stride + g * GROUP, stride);
            tile_bytes<0, 4, 6>(), tile_bytes<1, 4, 7>();
            tile_store<0>(dots, WIDTH), tile_store<1>(dots + PANEL / 2, WIDTH);
#pragma GCC unroll 4
            for (int64_t r = 0; r < count; r++) add(g, first + r, dots + r * PANEL);
        }
    }
}

// Sums of x * (low + 256 * high) over SUPER depths, for each of `rows` rows; the caller owns Tiles(TILE_ROWS, TILE_ROWS, TILE_BYTES). low:
// unsigned bytes, high: signed ones, laid out as levels. Calls add(first row, number of rows, sums of low, sums of high), both
// [TILE_ROWS, PANEL]. Levels of x are read up to a multiple of TILE_ROWS rows.
template <class F>
inline void super_dots_by_tiles(const uint8_t *low, const uint8_t *high, const int8_t *x, int64_t stride, int64_t rows, const F &add) {
    constexpr int64_t WIDTH = PANEL * sizeof(int32_t);
    alignas(64) int32_t dots[2][TILE_ROWS * PANEL];
    for (int64_t first = 0; first < rows; first += TILE_ROWS) {
        tile_zero<0>(), tile_zero<1>(), tile_zero<2>(), tile_zero<3>();
        for (int64_t k = 0; k < SUPER; k += TILE_BYTES) {
            tile_load<4>(x + first * stride + k, stride);
            tile_load<6>(low + k * PANEL, WIDTH), tile_load<7>(low + k * PANEL + WIDTH / 2, WIDTH);
            tile_bytes<0, 4, 6>(), tile_bytes<1, 4, 7>();
            tile_load<6>(high + k * PANEL, WIDTH), tile_load<7>(high + k * PANEL + WIDTH / 2, WIDTH);
            tile_signed_bytes<2, 4, 6>(), tile_signed_bytes<3, 4, 7>();
        }
        tile_store<0>(dots[0], WIDTH), tile_store<1>(dots[0] + PANEL / 2, WIDTH);
        tile_store<2>(dots[1], WIDTH), tile_store<3>(dots[1] + PANEL / 2, WIDTH);
        add(first, rows - first < TILE_ROWS ? rows - first : TILE_ROWS, dots[0], dots[1]);
    }
}

#else

constexpr bool tiles_allowed() { return false; }

#endif

} // namespace foresay
