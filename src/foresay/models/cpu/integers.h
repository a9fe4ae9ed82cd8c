// Products of quantized weights with activations that are rounded to 8 bits: sums of a group are exact integers, in any order.
//
// The sum over a group of weight * x is (weight scale) * (x scale) * (sum of level * level) + (weight offset) * (sum of x). Groups are
// added in order, in float32.

#pragma once

#include "quantized.h"
#include "rounded.h"
#include "tiles.h"


namespace foresay {

#if defined(__AVX512F__)
constexpr int MOST_BYTE_ROWS = 12, WIDEST = VECTORS; // tokens and vectors of a tile
#elif defined(__AVX2__)
constexpr int MOST_BYTE_ROWS = 4, WIDEST = 2;
#elif defined(__ARM_NEON)
constexpr int MOST_BYTE_ROWS = 4, WIDEST = 4; // 32 registers
#else
constexpr int MOST_BYTE_ROWS = 2, WIDEST = 4;
#endif

// Adds the products of four levels each to the lanes of a sum of 32-bit integers.
#if defined(FORESAY_BYTE_DOTS)
#define FORESAY_DOTS(BITS) 8 // one kind of arithmetic for all levels
inline Ints add_four(Ints sum, Words levels, Words x) {
#if defined(__AVX512F__)
    return reinterpret_cast<Ints>(_mm512_dpbusd_epi32(reinterpret_cast<__m512i>(sum), reinterpret_cast<__m512i>(levels), reinterpret_cast<__m512i>(x)));
#else
    return reinterpret_cast<Ints>(_mm256_dpbusd_avx_epi32(reinterpret_cast<__m256i>(sum), reinterpret_cast<__m256i>(levels), reinterpret_cast<__m256i>(x)));
#endif
}
#elif defined(__ARM_FEATURE_DOTPROD)
#define FORESAY_DOTS(BITS) 8
inline Ints add_four(Ints sum, Words levels, Words x) {
    return reinterpret_cast<Ints>(vdotq_s32(reinterpret_cast<int32x4_t>(sum), reinterpret_cast<int8x16_t>(levels), reinterpret_cast<int8x16_t>(x)));
}
#else
#define FORESAY_DOTS(BITS) BITS
#endif

// Without one: sums of two products in 16 bits, which are then added in pairs. `in_order` keeps the compiler from interleaving steps,
// whose numbers would not fit into the registers.
#if !defined(FORESAY_BYTE_DOTS) && defined(__AVX512BW__)
#define FORESAY_SHORT_SUMS 1
typedef __m512i Integers;
inline Integers two_products(Integers levels, Integers x) { return _mm512_maddubs_epi16(levels, x); }
inline Integers two_products_signed(Integers levels, Integers x) {
    return _mm512_maddubs_epi16(_mm512_abs_epi8(levels), _mm512_mask_sub_epi8(x, _mm512_movepi8_mask(levels), _mm512_setzero_si512(), x));
}
inline Integers add_shorts(Integers x, Integers y) { return _mm512_add_epi16(x, y); }
inline Ints add_in_pairs(Integers x) { return reinterpret_cast<Ints>(_mm512_madd_epi16(x, _mm512_set1_epi16(1))); }
inline void in_order(Integers &x) { asm volatile("" : "+v"(x)); }
#elif !defined(FORESAY_BYTE_DOTS) && defined(__AVX2__) && !defined(__AVX512F__)
#define FORESAY_SHORT_SUMS 1
typedef __m256i Integers;
inline Integers two_products(Integers levels, Integers x) { return _mm256_maddubs_epi16(levels, x); }
inline Integers two_products_signed(Integers levels, Integers x) {
    return _mm256_maddubs_epi16(_mm256_abs_epi8(levels), _mm256_sign_epi8(x, levels));
}
inline Integers add_shorts(Integers x, Integers y) { return _mm256_add_epi16(x, y); }
inline Ints add_in_pairs(Integers x) { return reinterpret_cast<Ints>(_mm256_madd_epi16(x, _mm256_set1_epi16(1))); }
inline void in_order(Integers &x) { asm volatile("" : "+x"(x)); }
#endif

#if defined(__ARM_FEATURE_MATMUL_INT8)
// group_sums below for two tokens and more: an instruction multiplies two tokens by two outputs at 8 depths.
template <int DEPTH, int ROWS, int FIRST, int COUNT, class L>
inline void sums_of_pairs(const L &levels, int64_t first, const int8_t *x, int64_t stride, Ints (&out)[ROWS][COUNT]) {
    int32x4_t sums[(ROWS + 1) / 2][COUNT][2] = {};
#pragma GCC unroll 4
    for (int k = 0; k < DEPTH; k += 8) {
        Words low[COUNT], high[COUNT];
        levels.template at<FIRST, COUNT>(first + k / 4, low), levels.template at<FIRST, COUNT>(first + k / 4 + 1, high);
#pragma GCC unroll 2
        for (int r = 0; r < ROWS; r += 2) {
            const int8_t *one = x + r * stride + k, *other = r + 1 < ROWS ? one + stride : one;
            int8x16_t both = vcombine_s8(vld1_s8(one), vld1_s8(other));
#pragma GCC unroll 4
            for (int v = 0; v < COUNT; v++) {
                uint32x4_t a = reinterpret_cast<uint32x4_t>(low[v]), b = reinterpret_cast<uint32x4_t>(high[v]);
                sums[r / 2][v][0] = vmmlaq_s32(sums[r / 2][v][0], both, vreinterpretq_s8_u32(vzip1q_u32(a, b)));
                sums[r / 2][v][1] = vmmlaq_s32(sums[r / 2][v][1], both, vreinterpretq_s8_u32(vzip2q_u32(a, b)));
            }
        }
    }
    for (int r = 0; r < ROWS; r++)
        for (int v = 0; v < COUNT; v++) {
            int64x2_t a = vreinterpretq_s64_s32(sums[r / 2][v][0]), b = vreinterpretq_s64_s32(sums[r / 2][v][1]);
            out[r][v] = reinterpret_cast<Ints>(r % 2 == 0 ? vzip1q_s64(a, b) : vzip2q_s64(a, b));
        }
}
#endif

// Sum over a group of level * level, for ROWS tokens and COUNT vectors of outputs from vector FIRST on. first: the group's first four
// depths in `levels`. BITS: of the levels.
template <int BITS, int DEPTH, int ROWS, int FIRST, int COUNT, class L>
inline void group_sums(const L &levels, int64_t first, const int8_t *x, int64_t stride, Ints (&out)[ROWS][COUNT]) {
#if defined(__ARM_FEATURE_MATMUL_INT8)
    if constexpr (ROWS > 1) return sums_of_pairs<DEPTH, ROWS, FIRST, COUNT>(levels, first, x, stride, out);
#endif
#if defined(FORESAY_BYTE_DOTS) || defined(__ARM_FEATURE_DOTPROD)
    for (int r = 0; r < ROWS; r++)
        for (int v = 0; v < COUNT; v++) out[r][v] = Ints{};
#pragma GCC unroll 2
    for (int k = 0; k < DEPTH; k += 4) {
        Words four[COUNT];
        levels.template at<FIRST, COUNT>(first + k / 4, four);
#pragma GCC unroll 12
        for (int r = 0; r < ROWS; r++) {
            Words one = repeated(x + r * stride + k);
#pragma GCC unroll 8
            for (int v = 0; v < COUNT; v++) out[r][v] = add_four(out[r][v], four[v], one);
        }
    }
#elif defined(FORESAY_SHORT_SUMS)
    // levels of 4 bits cannot overflow 16 bits within 32 depths, those of 4-bit floats within 16, nor those of 6 bits within 8
    constexpr int SAFE = BITS == LEVELS_4 ? DEPTH : BITS == FLOATS_4 ? 16 : BITS == LEVELS_6 ? 8 : 4;
    for (int r = 0; r < ROWS; r++)
        for (int v = 0; v < COUNT; v++) out[r][v] = Ints{};
#pragma GCC unroll 4
    for (int from = 0; from < DEPTH; from += SAFE) {
        Integers narrow[ROWS][COUNT];
#pragma GCC unroll 8
        for (int k = from; k < from + SAFE; k += 4) {
            Words words[COUNT];
            levels.template at<FIRST, COUNT>(first + k / 4, words);
            Integers four[COUNT];
            for (int v = 0; v < COUNT; v++) four[v] = reinterpret_cast<Integers>(words[v]);
#pragma GCC unroll 12
            for (int r = 0; r < ROWS; r++) {
                Integers one = reinterpret_cast<Integers>(repeated(x + r * stride + k));
                in_order(one);
#pragma GCC unroll 4
                for (int v = 0; v < COUNT; v++) {
                    Integers two = BITS == LEVELS_8 ? two_products_signed(four[v], one) : two_products(four[v], one);
                    narrow[r][v] = k == from ? two : add_shorts(narrow[r][v], two);
                    in_order(narrow[r][v]);
                }
            }
        }
#pragma GCC unroll 12
        for (int r = 0; r < ROWS; r++)
#pragma GCC unroll 4
            for (int v = 0; v < COUNT; v++) out[r][v] += add_in_pairs(narrow[r][v]);
    }
#else
    for (int r = 0; r < ROWS; r++)
        for (int v = 0; v < COUNT; v++) out[r][v] = Ints{};
    for (int k = 0; k < DEPTH; k += 4) {
        Words four[COUNT];
        levels.template at<FIRST, COUNT>(first + k / 4, four);
        for (int v = 0; v < COUNT; v++) {
            for (int d = 0; d < 4; d++) {
                Words top = four[v] << (24 - 8 * d);
                Ints level = BITS == LEVELS_8 ? reinterpret_cast<Ints>(top) >> 24 : reinterpret_cast<Ints>(top >> 24);
                for (int r = 0; r < ROWS; r++) out[r][v] += level * static_cast<int32_t>(x[r * stride + k + d]);
            }
        }
    }
#endif
}

// sums [ROWS, 32] += products of ROWS tokens with COUNT vectors of outputs, from vector FIRST on, over `groups` groups of DEPTH.
// scales: for each group, scales [32] and offsets [32].
template <int BITS, int DEPTH, int ROWS, int FIRST, int COUNT, class L>
inline void byte_tile(const L &levels, const float *scales, int64_t groups, RoundedBlock x, float *sums) {
    sums += FIRST * LANES, scales += FIRST * LANES;
    for (int64_t g = 0; g < groups; g++, scales += 2 * PANEL) {
        Ints dots[ROWS][COUNT];
        group_sums<BITS, DEPTH, ROWS, FIRST, COUNT>(levels, g * DEPTH / 4, x.levels + g * DEPTH, x.stride, dots);
        const float *by = x.scales + g * DEPTH / GROUP, *plus = x.sums + g;
#pragma GCC unroll 12
        for (int r = 0; r < ROWS; r++) {
            float x_scale = *by, x_sum = *plus;
            by += x.scale_stride, plus += x.sum_stride;
#pragma GCC unroll 8
            for (int v = 0; v < COUNT; v++) {
                Floats scale = load<Floats>(scales + v * LANES), offset = load<Floats>(scales + PANEL + v * LANES);
                add_group(sums + r * PANEL + v * LANES, dots[r][v], scale, offset, x_scale, x_sum);
            }
        }
    }
}

template <int BITS, int DEPTH, int ROWS, int FIRST = 0, class L>
inline void byte_tile_of_panel(const L &levels, const float *scales, int64_t groups, const RoundedBlock &x, float *sums) {
    if constexpr (FIRST < VECTORS) {
        byte_tile<BITS, DEPTH, ROWS, FIRST, WIDEST>(levels, scales, groups, x, sums);
        byte_tile_of_panel<BITS, DEPTH, ROWS, FIRST + WIDEST>(levels, scales, groups, x, sums);
    }
}

// The same for any number of rows and a whole panel.
template <int BITS, int DEPTH, class L>
inline void byte_tiles(const L &levels, const float *scales, int64_t depth, RoundedBlock x, int64_t rows, float *sums) {
#define TILE(N)                                                                                                      \
    if constexpr (N <= MOST_BYTE_ROWS) {                                                                             \
        while (rows >= N) {                                                                                          \
            byte_tile_of_panel<BITS, DEPTH, N>(levels, scales, depth / DEPTH, x, sums);                              \
            x.levels += N * x.stride, x.scales += N * x.scale_stride, x.sums += N * x.sum_stride;                    \
            sums += N * PANEL, rows -= N;                                                                            \
        }                                                                                                            \
    }
    TILE(12) TILE(9) TILE(8) TILE(7) TILE(6) TILE(5) TILE(4) TILE(3) TILE(2) TILE(1)
#undef TILE
}

// Number of rows that are multiplied by matrix instructions: in whole tiles, and in a last one if that is faster, which has more rows
// where levels are decoded for it alone.
inline int64_t rows_by_tiles(int64_t rows) {
    constexpr int64_t ALONE = 13, AFTER_OTHERS = 5;
    if (rows < ALONE || !tiles_allowed()) return 0;
    int64_t left = rows % TILE_ROWS;
    return rows < TILE_ROWS || left >= AFTER_OTHERS ? rows : rows - left;
}

// sums [rows, 32] += products of `depth` depths, at most SUPER. weights: of the first depth. With at most two tiles of rows by vectors,
// levels are decoded in registers where they are used; with more, they are decoded once to `room` [SUPER * PANEL].
template <int BITS, int DEPTH>
inline void byte_products(const uint8_t *weights, const float *scales, int64_t depth, RoundedBlock x, int64_t rows, float *sums, uint8_t *room) {
    int64_t tiled = rows_by_tiles(rows);
    if (tiled == 0) {
        if (rows <= 2 * MOST_BYTE_ROWS) return byte_tiles<BITS, DEPTH>(Packed<BITS>{weights}, scales, depth, x, rows, sums);
        decode_levels<BITS>(weights, depth, room);
    } else {
#if defined(FORESAY_TILES)
        decode_levels<BITS, false>(weights, depth, room);
        bytes_by_tiles<DEPTH>(room, scales, depth, x, tiled, sums, weights + level_bytes(BITS, SUPER), level_bytes(BITS, DEPTH));
        x.levels += tiled * x.stride, x.scales += tiled * x.scale_stride, x.sums += tiled * x.sum_stride;
#endif
    }
    byte_tiles<FORESAY_DOTS(BITS), DEPTH>(Plain{room}, scales, depth, x, rows - tiled, sums + tiled * PANEL);
}

inline void byte_products(int64_t bits, int64_t scaling, const uint8_t *weights, const float *scales, int64_t depth, const RoundedBlock &x,
                          int64_t rows, float *sums, uint8_t *room) {
    if (scaling == MULTIPLES_16) return byte_products<LEVELS_6, 16>(weights, scales, depth, x, rows, sums, room);
    switch (kind_of_levels(bits, scaling)) {
        case FLOATS_4: return byte_products<FLOATS_4, 32>(weights, scales, depth, x, rows, sums, room);
        case LEVELS_4: return byte_products<LEVELS_4, 32>(weights, scales, depth, x, rows, sums, room);
        case LEVELS_6: return byte_products<LEVELS_6, 32>(weights, scales, depth, x, rows, sums, room);
        default: return byte_products<LEVELS_8, 32>(weights, scales, depth, x, rows, sums, room);
    }
}

} // namespace foresay
