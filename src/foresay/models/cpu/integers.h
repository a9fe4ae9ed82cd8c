// Products of quantized weights with activations that are rounded to 8 bits: sums of a group are exact integers, in any order.
//
// The sum over a group of weight * x is (weight scale) * (x scale) * (sum of level * level) + (weight offset) * (sum of x). Groups are
// added in order, in float32. Where the scales and offsets of groups are multiples of two numbers for SUPER weights, and x has one scale
// for them, the sums of all their groups are added as integers, times the multiples: at most 31 * 127 * 63 * 256 for 5 bits and
// 63 * 127 * 128 * 256 for 6.

#pragma once

#include "group_dots.h"
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
static_assert(VECTORS == WIDEST || VECTORS == 2 * WIDEST);

// sums [ROWS, 32] += products of ROWS tokens with COUNT vectors of outputs, from vector FIRST on, over `groups` groups of 32.
// scales: for each group, scales [32] and offsets [32].
template <int BITS, int ROWS, int FIRST, int COUNT, class L>
inline void byte_tile(const L &levels, const float *scales, int64_t groups, RoundedGroups x, float *sums) {
    sums += FIRST * LANES, scales += FIRST * LANES;
    for (int64_t g = 0; g < groups; g++, scales += 2 * PANEL) {
        Ints dots[ROWS][COUNT];
        dots_of_group<BITS, GROUP, ROWS, FIRST, COUNT>(levels, g * GROUP / 4, x.levels + g * GROUP, x.stride, dots);
        const float *by = x.scales + g, *plus = x.sums + g;
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

// The scales of SUPER depths of a panel: MULTIPLES, OFFSETS_16 or MULTIPLES_16.
template <int SCALING> struct SuperScales {
    static constexpr bool OFFSETS = SCALING != MULTIPLES_16;
    static constexpr int DEPTH = group_of(SCALING), GROUPS = SUPER / DEPTH, PAIRS = GROUPS / 2, HEAD = OFFSETS ? 128 : 64, STEP = OFFSETS ? 64 : 32;
    static constexpr int BYTES = HEAD + GROUPS * STEP;
    const uint8_t *record;
    int zero; // the level that stands for 0, without offsets
    float factor;

    void prefetch_next() const {
        for (int byte = 0; byte < BYTES; byte += 64) __builtin_prefetch(record + BYTES + byte);
    }

    Floats scale(int v) const { return halves(reinterpret_cast<const uint16_t *>(record) + v * LANES) * factor; }
    Floats offset(int v) const { return halves(reinterpret_cast<const uint16_t *>(record + 64) + v * LANES); }
    Ints multiple(int64_t g, int v) const {
        Ints some = widened(record + HEAD + g * STEP + v * LANES);
        return OFFSETS ? some : some << 24 >> 24; // signed
    }
    // The multiples of the offsets of groups 2 * pair and the next one, in the halves of a lane.
    Words pair(int64_t pair, int v) const {
        auto one = [&](int64_t g) { return reinterpret_cast<Words>(OFFSETS ? widened(record + HEAD + g * STEP + 32 + v * LANES) : multiple(g, v)); };
        return (one(2 * pair) & 0xffffu) | one(2 * pair + 1) << 16;
    }
};

// Sets dots [ROWS, COUNT] to what the level that stands for 0 takes from the sums of integers, or adds what offsets add to `sums` and sets
// them to zero.
template <int SCALING, int ROWS, int FIRST, int COUNT>
inline void begin_super(const SuperScales<SCALING> &scales, const RoundedSupers &x, float *sums, Ints (&dots)[ROWS][COUNT]) {
    for (int r = 0; r < ROWS; r++)
        for (int v = 0; v < COUNT; v++) dots[r][v] = Ints{};
    if (!scales.OFFSETS && scales.zero == 0) return;
#pragma GCC unroll 2
    for (int64_t pair = 0; pair < scales.PAIRS; pair++) {
        Words by[COUNT];
        for (int v = 0; v < COUNT; v++) by[v] = scales.pair(pair, FIRST + v);
#pragma GCC unroll 12
        for (int r = 0; r < ROWS; r++) {
            Words one = repeated(x.sums + r * x.sum_stride + (SCALING == MULTIPLES ? SUMS_OF_16 : 0) + 2 * pair);
#pragma GCC unroll 8
            for (int v = 0; v < COUNT; v++) dots[r][v] = add_short_pairs(dots[r][v], by[v], one);
        }
    }
#pragma GCC unroll 12
    for (int r = 0; r < ROWS; r++)
#pragma GCC unroll 8
        for (int v = 0; v < COUNT; v++) {
            if constexpr (SuperScales<SCALING>::OFFSETS) {
                add_super(sums + r * PANEL + v * LANES, dots[r][v], -scales.offset(FIRST + v), x.scales[r * x.scale_stride]);
                dots[r][v] = Ints{};
            } else {
                dots[r][v] *= -scales.zero;
            }
        }
}

// The same as byte_tile for SUPER depths.
template <int BITS, int SCALING, int ROWS, int FIRST, int COUNT, class L>
inline void super_tile(const L &levels, const SuperScales<SCALING> &scales, const RoundedSupers &x, float *sums) {
    constexpr int DEPTH = SuperScales<SCALING>::DEPTH;
    Ints dots[ROWS][COUNT];
    sums += FIRST * LANES;
    if constexpr (FIRST == 0) scales.prefetch_next();
    begin_super<SCALING, ROWS, FIRST, COUNT>(scales, x, sums, dots);
    for (int64_t g = 0; g < scales.GROUPS; g++) {
        Ints by[COUNT];
        for (int v = 0; v < COUNT; v++) by[v] = scales.multiple(g, FIRST + v);
        add_group_dots<BITS, DEPTH, ROWS, FIRST, COUNT>(levels, g * DEPTH / 4, x.levels + g * DEPTH, x.stride, by, dots);
    }
#pragma GCC unroll 12
    for (int r = 0; r < ROWS; r++)
#pragma GCC unroll 8
        for (int v = 0; v < COUNT; v++) {
            add_super(sums + r * PANEL + v * LANES, dots[r][v], scales.scale(FIRST + v), x.scales[r * x.scale_stride]);
        }
}

// Runs body(rows of the tile, first vector, first row), of which the first two are compile-time constants, over a whole panel.
template <int MOST, class F> inline void each_byte_tile(int64_t rows, const F &body) {
    int64_t first = 0;
    auto panel = [&](auto n) {
        body(n, Constant<0>(), first);
        if constexpr (WIDEST < VECTORS) body(n, Constant<WIDEST>(), first);
        first += n.value;
    };
#define TILE(N) if constexpr (N <= MOST) while (rows - first >= N) panel(Constant<N>());
    TILE(12) TILE(9) TILE(8) TILE(7) TILE(6) TILE(5) TILE(4) TILE(3) TILE(2) TILE(1)
#undef TILE
}

// Number of rows that are multiplied by matrix instructions: in whole tiles, and in a last one if that is faster, which has more rows
// where weights are prepared for it alone. supers: for scales that are multiples of one for SUPER weights, by which levels are multiplied
// before.
inline int64_t rows_by_tiles(int64_t rows, bool supers) {
    constexpr int64_t ALONE = 13, ALONE_SUPERS = 40, AFTER_OTHERS = 5;
    if (rows < (supers ? ALONE_SUPERS : ALONE) || !tiles_allowed()) return 0;
    int64_t left = rows % TILE_ROWS;
    return rows < TILE_ROWS || left >= AFTER_OTHERS ? rows : rows - left;
}

// Weights of at most SUPER depths of a panel: levels from the first depth on, scales, and the arithmetic of both with rounded numbers.
//   Groups: scales for each group of 32, decoded to float32; Supers: see SuperScales
template <int BITS> struct Groups {
    using X = RoundedGroups;
    static constexpr bool OF_SUPERS = false;
    static constexpr int KIND = BITS, DEPTH = GROUP;
    const uint8_t *weights;
    int64_t depth;
    const float *scales;

    template <int DOTS, int ROWS, int FIRST, class L> void tile(const L &levels, const X &x, float *sums) const {
        byte_tile<DOTS, ROWS, FIRST, WIDEST>(levels, scales, depth / GROUP, x, sums);
    }
#if defined(FORESAY_TILES)
    void by_tiles(const uint8_t *levels, const X &x, int64_t rows, float *sums) const {
        const uint8_t *next = weights + level_bytes(KIND, SUPER);
        dots_by_tiles(levels, depth, x.levels, x.stride, rows, next, level_bytes(KIND, DEPTH), [&](int64_t g, int64_t r, const int32_t *found) {
            const float *scale = scales + g * 2 * PANEL;
            float by = x.scales[r * x.scale_stride + g], plus = x.sums[r * x.sum_stride + g];
            for (int v = 0; v < VECTORS; v++) {
                Floats one = load<Floats>(scale + v * LANES), offset = load<Floats>(scale + PANEL + v * LANES);
                add_group(sums + r * PANEL + v * LANES, load<Ints>(found + v * LANES), one, offset, by, plus);
            }
        });
    }
#endif
};

template <int BITS, int SCALING> struct Supers {
    using X = RoundedSupers;
    static constexpr bool OF_SUPERS = true;
    static constexpr int KIND = BITS, DEPTH = group_of(SCALING);
    static constexpr int64_t depth = SUPER;
    const uint8_t *weights;
    SuperScales<SCALING> scales;

    template <int DOTS, int ROWS, int FIRST, class L> void tile(const L &levels, const X &x, float *sums) const {
        super_tile<DOTS, SCALING, ROWS, FIRST, WIDEST>(levels, scales, x, sums);
    }
#if defined(FORESAY_TILES)
    // Levels times the multiples of their groups have 16 bits, of which the instructions multiply the lower and the upper byte.
    void by_tiles(const uint8_t *levels, const X &x, int64_t rows, float *sums) const {
        alignas(64) static thread_local uint8_t low[SUPER * PANEL], high[SUPER * PANEL];
        times_multiples(levels, low, high);
        Floats scale[VECTORS];
        for (int v = 0; v < VECTORS; v++) scale[v] = scales.scale(v);
        super_dots_by_tiles(low, high, x.levels, x.stride, rows, [&](int64_t first, int64_t count, const int32_t *of_low, const int32_t *of_high) {
            auto add = [&](auto n, int64_t from) {
                X some = x.from(first + from);
                float *to = sums + (first + from) * PANEL;
                Ints none[n.value][VECTORS];
                if constexpr (SuperScales<SCALING>::OFFSETS) begin_super<SCALING, n.value, 0, VECTORS>(scales, some, to, none);
#pragma GCC unroll 4
                for (int64_t r = 0; r < n.value; r++)
                    for (int v = 0; v < VECTORS; v++) {
                        int64_t at = (from + r) * PANEL + v * LANES;
                        add_super(to + r * PANEL + v * LANES, load<Ints>(of_low + at) + (load<Ints>(of_high + at) << 8), scale[v], some.scales[r * x.scale_stride]);
                    }
            };
            int64_t from = 0;
            for (; from + 4 <= count; from += 4) add(Constant<4>(), from);
            for (; from < count; from++) add(Constant<1>(), from);
        });
    }

  private:
    // The lower and upper bytes of levels, less the one that stands for 0 where there are no offsets, times multiples.
    void times_multiples(const uint8_t *levels, uint8_t *low, uint8_t *high) const {
        typedef int16_t Shorts __attribute__((vector_size(LANES * 4)));
        constexpr int64_t BYTES = level_bytes(KIND, DEPTH);
        Shorts zero = Shorts{} + static_cast<int16_t>(scales.zero);
        for (int64_t g = 0; g < scales.GROUPS; g++) {
            for (int64_t byte = 0; byte < BYTES; byte += 64) __builtin_prefetch(weights + level_bytes(KIND, SUPER) + g * BYTES + byte);
            for (int v = 0; v < VECTORS; v++) {
                Ints one = scales.multiple(g, v);
                Shorts by = reinterpret_cast<Shorts>((one & 0xffff) | one << 16);
#pragma GCC unroll 4
                for (int64_t at = g * DEPTH * PANEL + v * LANES * 4; at < (g + 1) * DEPTH * PANEL; at += 4 * PANEL) {
                    Words four = load<Words>(levels + at);
                    Shorts even = reinterpret_cast<Shorts>(is_signed(KIND) ? four << 8 : four & 0x00ff00ffu), odd = reinterpret_cast<Shorts>(four);
                    if constexpr (is_signed(KIND)) even >>= 8, odd >>= 8;
                    else odd = reinterpret_cast<Shorts>(four >> 8 & 0x00ff00ffu);
                    if constexpr (!SuperScales<SCALING>::OFFSETS) even -= zero, odd -= zero;
                    Words a = reinterpret_cast<Words>(even * by), b = reinterpret_cast<Words>(odd * by);
                    store(low + at, (a & 0x00ff00ffu) | (b & 0x00ff00ffu) << 8);
                    store(high + at, (a >> 8 & 0x00ff00ffu) | (b & 0xff00ff00u));
                }
            }
        }
    }
#endif
};

// The kind of arithmetic for levels that are decoded to unsigned bytes, or to signed ones (8).
constexpr int dots_of(int kind) { return is_code(kind) ? LEVELS_8 : kind < LEVELS_4 ? LEVELS_4 : kind; }

// Most rows for which levels are decoded in registers: two tiles, or few where a table is read or bits are put together.
constexpr int64_t packed_rows(int kind) { return kind < LEVELS_4 || is_code(kind) ? 4 : 2 * MOST_BYTE_ROWS; }

// sums [rows, 32] += products with weights W. With few rows, levels are decoded in registers where they are used; with more, they are
// decoded once to `room` [SUPER * PANEL].
template <class W> inline void byte_products(const W &w, typename W::X x, int64_t rows, float *sums, uint8_t *room) {
    constexpr int KIND = W::KIND, DOTS = dots_of(KIND), PACKED = packed_rows(KIND) < MOST_BYTE_ROWS ? packed_rows(KIND) : MOST_BYTE_ROWS;
    auto by_vectors = [&](auto dots, auto most, const auto &levels, int64_t count) {
        each_byte_tile<decltype(most)::value>(count, [&](auto n, auto first, int64_t row) {
            w.template tile<decltype(dots)::value, decltype(n)::value, decltype(first)::value>(levels, x.from(row), sums + row * PANEL);
        });
    };
    int64_t tiled = rows_by_tiles(rows, W::OF_SUPERS);
    if (tiled == 0) {
        if (rows <= packed_rows(KIND)) return by_vectors(Constant<DOTS>(), Constant<PACKED>(), Packed<KIND>{w.weights}, rows);
        decode_levels<KIND>(w.weights, w.depth, room);
    } else {
#if defined(FORESAY_TILES)
        decode_levels<KIND, 0>(w.weights, w.depth, room);
        w.by_tiles(room, x, tiled, sums);
        x = x.from(tiled), sums += tiled * PANEL;
#endif
    }
    by_vectors(Constant<FORESAY_DOTS(DOTS)>(), Constant<MOST_BYTE_ROWS>(), Plain{room}, rows - tiled);
}

// The same for a kind of levels and scales by groups, whose scales are decoded.
inline void group_products(int64_t kind, const uint8_t *weights, const float *scales, int64_t depth, const RoundedGroups &x, int64_t rows,
                           float *sums, uint8_t *room) {
    switch (kind) {
        case FLOATS_4: return byte_products(Groups<FLOATS_4>{weights, depth, scales}, x, rows, sums, room);
        case LEVELS_4: return byte_products(Groups<LEVELS_4>{weights, depth, scales}, x, rows, sums, room);
        case LEVELS_6: return byte_products(Groups<LEVELS_6>{weights, depth, scales}, x, rows, sums, room);
        case CODES_4_WIDE: return byte_products(Groups<CODES_4_WIDE>{weights, depth, scales}, x, rows, sums, room);
        default: return byte_products(Groups<LEVELS_8>{weights, depth, scales}, x, rows, sums, room);
    }
}

// The same for SUPER depths whose scales are multiples of others.
inline void super_products(int64_t kind, int64_t scaling, const uint8_t *weights, const uint8_t *scales, const RoundedSupers &x, int64_t rows,
                           float *sums, uint8_t *room) {
    auto of = [&](auto one, auto by) {
        byte_products(Supers<decltype(one)::value, decltype(by)::value>{weights, {scales, zero_of(kind), factor_of(kind)}}, x, rows, sums, room);
    };
    if (scaling == OFFSETS_16) return of(Constant<LEVELS_2>(), Constant<OFFSETS_16>());
    if (scaling == MULTIPLES) return kind == LEVELS_4 ? of(Constant<LEVELS_4>(), Constant<MULTIPLES>()) : of(Constant<LEVELS_6>(), Constant<MULTIPLES>());
    switch (kind) {
        case LEVELS_3: return of(Constant<LEVELS_3>(), Constant<MULTIPLES_16>());
        case CODES_3: return of(Constant<CODES_3>(), Constant<MULTIPLES_16>());
        case CODES_4: return of(Constant<CODES_4>(), Constant<MULTIPLES_16>());
        case CODES_4_ODD: return of(Constant<CODES_4_ODD>(), Constant<MULTIPLES_16>());
        case CODES_4_WIDE: return of(Constant<CODES_4_WIDE>(), Constant<MULTIPLES_16>());
        default: return of(Constant<LEVELS_6>(), Constant<MULTIPLES_16>());
    }
}

} // namespace foresay
