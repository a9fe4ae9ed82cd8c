// Weights in 4, 6 or 8 bits: their layout, and decoding of a few depths of a panel to bytes and float32 scales.
//
// A weight is scale * level + offset. Scales and offsets belong to a group of 32 weights of one output, or of 16. They are kept as the
// file has them: float16 numbers, or 6- and 8-bit multiples of float16 numbers that 256 weights share.

#pragma once

#include "vectors.h"

namespace foresay {

constexpr int64_t PANEL = 32, GROUP = 32, SUPER = 256;
constexpr int VECTORS = PANEL / LANES;

// LEVELS_*: bits of a level. Weights of a panel, in units of 64 bytes:
//   4 bits: for 4 depths a unit, whose byte 4 i + d has output i at depth d in its low half, and output 16 + i in its high half
//   6 bits: for 8 depths three units: the low 4 bits of two times 4 depths as above, then the upper 2 bits of the same four vectors
//   8 bits: for 4 depths two units: byte 4 i + d of both is output i at depth d
enum Levels { LEVELS_4 = 4, LEVELS_6 = 6, LEVELS_8 = 8 };

// Scales of a panel. The offset of SCALE and MULTIPLES_16 is that of signed levels: -2^(bits - 1) * scale.
//   SCALE         for 32 depths: float16 scales [32]
//   SCALE_OFFSET  for 32 depths: float16 scales [32], float16 offsets [32]
//   MULTIPLES     for 256 depths: float16 scales [32], float16 offsets [32], then for 32 depths each: multiples of the scale [32], and of
//                 the offset, which is subtracted, [32]; unsigned bytes
//   MULTIPLES_16  for 256 depths: float16 scales [32], then for 16 depths each: multiples of the scale [32], signed bytes
enum Scaling { SCALE = 0, SCALE_OFFSET = 1, MULTIPLES = 2, MULTIPLES_16 = 3 };

constexpr int64_t level_bytes(int64_t bits, int64_t depth) { return PANEL * depth * bits / 8; }

constexpr int64_t scale_bytes(int64_t scaling, int64_t depth) {
    return scaling == SCALE ? depth / GROUP * 64
         : scaling == SCALE_OFFSET ? depth / GROUP * 128
         : scaling == MULTIPLES ? depth / SUPER * (128 + 8 * 64)
                                : depth / SUPER * (64 + 16 * 32);
}

// At most SUPER depths of a panel. levels: for 4 depths each, byte 4 i + d is output i at depth d. scales: for each group, scales [32]
// and offsets [32].
struct Decoded {
    alignas(64) uint8_t levels[SUPER * PANEL];
    alignas(64) float scales[SUPER / 16 * 2 * PANEL];
};

// Without instructions that multiply unsigned by signed bytes exactly, 8-bit levels are decoded to signed bytes with an offset of zero.
#if defined(FORESAY_BYTE_DOTS)
constexpr bool SIGNED_8 = false;
#else
constexpr bool SIGNED_8 = true;
#endif

typedef uint32_t Unit __attribute__((vector_size(64), may_alias, aligned(4)));

// Decodes `depth` depths, a multiple of 8; `weights` is the first unit. Prefetches those of the next SUPER depths.
template <int BITS> inline void decode_levels(const uint8_t *weights, int64_t depth, uint8_t *out) {
    if constexpr (BITS == LEVELS_4) {
        for (int64_t k = 0; k < depth; k += 4, weights += 64, out += 128) {
            __builtin_prefetch(weights + level_bytes(BITS, SUPER));
            Unit both = load<Unit>(weights);
            store(out, both & 0x0f0f0f0fu), store(out + 64, both >> 4 & 0x0f0f0f0fu);
        }
    } else if constexpr (BITS == LEVELS_6) {
        for (int64_t k = 0; k < depth; k += 8, weights += 192, out += 256) {
            for (int line = 0; line < 3; line++) __builtin_prefetch(weights + 64 * line + level_bytes(BITS, SUPER));
            Unit first = load<Unit>(weights), second = load<Unit>(weights + 64), upper = load<Unit>(weights + 128);
            store(out, (first & 0x0f0f0f0fu) | (upper << 4 & 0x30303030u));
            store(out + 64, (first >> 4 & 0x0f0f0f0fu) | (upper << 2 & 0x30303030u));
            store(out + 128, (second & 0x0f0f0f0fu) | (upper & 0x30303030u));
            store(out + 192, (second >> 4 & 0x0f0f0f0fu) | (upper >> 2 & 0x30303030u));
        }
    } else {
        for (int64_t k = 0; k < depth; k += 4, weights += 128, out += 128) {
            for (int half = 0; half < 128; half += 64) {
                __builtin_prefetch(weights + half + level_bytes(BITS, SUPER));
                Unit some = load<Unit>(weights + half);
                store(out + half, SIGNED_8 ? some ^ 0x80808080u : some);
            }
        }
    }
}

// Decodes the scales and offsets of `depth` depths, a multiple of 32. records: those of the first, a multiple of SUPER.
template <int SCALING> inline void decode_scales(const uint8_t *records, int64_t depth, float minus, float *out) {
    auto half_at = [&](int64_t byte, int v) { return halves(reinterpret_cast<const uint16_t *>(records + byte) + v * LANES); };
    if constexpr (SCALING == SCALE || SCALING == SCALE_OFFSET) {
        for (int64_t k = 0; k < depth; k += GROUP, out += 2 * PANEL, records += SCALING == SCALE ? 64 : 128) {
            for (int v = 0; v < VECTORS; v++) {
                Floats scale = half_at(0, v);
                store(out + v * LANES, scale);
                if constexpr (SCALING == SCALE) store(out + PANEL + v * LANES, minus * scale);
                else store(out + PANEL + v * LANES, half_at(64, v));
            }
        }
    } else if constexpr (SCALING == MULTIPLES) {
        Floats scale[VECTORS], offset[VECTORS];
        for (int v = 0; v < VECTORS; v++) scale[v] = half_at(0, v), offset[v] = half_at(64, v);
        records += 128;
        for (int64_t k = 0; k < depth; k += GROUP, out += 2 * PANEL, records += 64) {
            for (int v = 0; v < VECTORS; v++) {
                store(out + v * LANES, scale[v] * __builtin_convertvector(widened(records + v * LANES), Floats));
                store(out + PANEL + v * LANES, -(offset[v] * __builtin_convertvector(widened(records + 32 + v * LANES), Floats)));
            }
        }
    } else {
        Floats scale[VECTORS];
        for (int v = 0; v < VECTORS; v++) scale[v] = half_at(0, v);
        records += 64;
        for (int64_t k = 0; k < depth; k += 16, out += 2 * PANEL, records += 32) {
            for (int v = 0; v < VECTORS; v++) {
                Ints multiple = widened(records + v * LANES) << 24 >> 24; // signed
                Floats product = scale[v] * __builtin_convertvector(multiple, Floats);
                store(out + v * LANES, product), store(out + PANEL + v * LANES, minus * product);
            }
        }
    }
}

// Decodes depths [from, to) of a panel, at most SUPER of them; `from` is a multiple of SUPER, `to` of 32.
// weights, scales: those of the panel.
inline void decode(int64_t bits, int64_t scaling, const uint8_t *weights, const uint8_t *scales, int64_t from, int64_t to, Decoded &out) {
    weights += level_bytes(bits, from), scales += scale_bytes(scaling, from);
    int64_t depth = to - from;
    switch (bits) {
        case LEVELS_4: decode_levels<LEVELS_4>(weights, depth, out.levels); break;
        case LEVELS_6: decode_levels<LEVELS_6>(weights, depth, out.levels); break;
        default: decode_levels<LEVELS_8>(weights, depth, out.levels);
    }
    float minus = bits == LEVELS_8 && SIGNED_8 ? 0.0f : -static_cast<float>(1 << (bits - 1));
    switch (scaling) {
        case SCALE: decode_scales<SCALE>(scales, depth, minus, out.scales); break;
        case SCALE_OFFSET: decode_scales<SCALE_OFFSET>(scales, depth, minus, out.scales); break;
        case MULTIPLES: decode_scales<MULTIPLES>(scales, depth, minus, out.scales); break;
        default: decode_scales<MULTIPLES_16>(scales, depth, minus, out.scales);
    }
}

constexpr int64_t group_of(int64_t scaling) { return scaling == MULTIPLES_16 ? 16 : GROUP; }

// Decodes the same depths further, to float32 weights [to - from, 32].
inline void decode_floats(int64_t bits, int64_t scaling, const Decoded &block, int64_t depth, float *out) {
    int64_t group = group_of(scaling);
    for (int64_t k = 0; k < depth; k += 4) {
        const float *scales = block.scales + k / group * 2 * PANEL;
        for (int v = 0; v < VECTORS; v++) {
            Words four = load<Words>(block.levels + (k * PANEL + v * LANES * 4));
            Floats scale = load<Floats>(scales + v * LANES), offset = load<Floats>(scales + PANEL + v * LANES);
            for (int d = 0; d < 4; d++) {
                Words top = four << (24 - 8 * d);
                Ints level = bits == LEVELS_8 && SIGNED_8 ? reinterpret_cast<Ints>(top) >> 24 : reinterpret_cast<Ints>(top >> 24);
                store(out + (k + d) * PANEL + v * LANES, scale * __builtin_convertvector(level, Floats) + offset);
            }
        }
    }
}

} // namespace foresay
