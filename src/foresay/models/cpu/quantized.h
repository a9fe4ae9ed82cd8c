// Weights in 4, 6 or 8 bits: their layout, and decoding of a few depths of a panel to bytes and float32 scales.
//
// A weight is scale * level + offset. Scales and offsets belong to a group of 32 weights of one output, or of 16. They are kept as the
// file has them: float16 numbers, 6- and 8-bit multiples of float16 numbers that 256 weights share, or exponents of two.

#pragma once

#include "vectors.h"

namespace foresay {

constexpr int64_t PANEL = 32, GROUP = 32, SUPER = 256, ROWS_AT_ONCE = 96;
constexpr int64_t DEPTHS_AHEAD = 3 * SUPER; // at which weights are prefetched
constexpr int VECTORS = PANEL / LANES;

// LEVELS_*: bits of a level. Weights of a panel, in units of 64 bytes:
//   4 bits: for 4 depths a unit, whose byte 4 i + d has output i at depth d in its low half, and output 16 + i in its high half
//   6 bits: for 8 depths three units: the low 4 bits of two times 4 depths as above, then the upper 2 bits of the same four vectors
//   8 bits: for 4 depths two units: byte 4 i + d of both is output i at depth d
// FLOATS_4: 4-bit floats (E2M1) in the layout of 4 bits. Twice such a number is an integer from -12 to 12; 12 more is its level.
enum Levels { LEVELS_4 = 4, LEVELS_6 = 6, LEVELS_8 = 8, FLOATS_4 = 5 };

// Scales of a panel. The offset of SCALE and MULTIPLES_16 is that of signed levels: -2^(bits - 1) * scale. EXPONENTS are the scales of
// FLOATS_4 alone, which `bits` of a product counts as 4.
//   SCALE         for 32 depths: float16 scales [32]
//   SCALE_OFFSET  for 32 depths: float16 scales [32], float16 offsets [32]
//   MULTIPLES     for 256 depths: float16 scales [32], float16 offsets [32], then for 32 depths each: multiples of the scale [32], and of
//                 the offset, which is subtracted, [32]; unsigned bytes
//   MULTIPLES_16  for 256 depths: float16 scales [32], then for 16 depths each: multiples of the scale [32], signed bytes
//   EXPONENTS     for 32 depths: bytes e [32] of scales 2^(e - 128), half of the numbers' own because levels are doubled
enum Scaling { SCALE = 0, SCALE_OFFSET = 1, MULTIPLES = 2, MULTIPLES_16 = 3, EXPONENTS = 4 };

constexpr int64_t level_bytes(int64_t bits, int64_t depth) { return PANEL * depth * (bits == FLOATS_4 ? 4 : bits) / 8; }

constexpr int64_t kind_of_levels(int64_t bits, int64_t scaling) { return scaling == EXPONENTS ? FLOATS_4 : bits; }

constexpr int64_t scale_bytes(int64_t scaling, int64_t depth) {
    return scaling == SCALE ? depth / GROUP * 64
         : scaling == SCALE_OFFSET ? depth / GROUP * 128
         : scaling == MULTIPLES ? depth / SUPER * (128 + 8 * 64)
         : scaling == EXPONENTS ? depth / GROUP * 32
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

// The levels of 4-bit floats, one in the low half of each byte.
inline Words float_levels(Words codes) {
    alignas(16) static constexpr uint8_t LEVELS[16] = {12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0};
#if defined(__AVX512BW__)
    __m512i table = _mm512_broadcast_i32x4(_mm_load_si128(reinterpret_cast<const __m128i *>(LEVELS)));
    return reinterpret_cast<Words>(_mm512_shuffle_epi8(table, reinterpret_cast<__m512i>(codes)));
#elif defined(__AVX2__) && !defined(__AVX512F__)
    __m256i table = _mm256_broadcastsi128_si256(_mm_load_si128(reinterpret_cast<const __m128i *>(LEVELS)));
    return reinterpret_cast<Words>(_mm256_shuffle_epi8(table, reinterpret_cast<__m256i>(codes)));
#elif defined(__aarch64__)
    return reinterpret_cast<Words>(vqtbl1q_u8(vld1q_u8(LEVELS), reinterpret_cast<uint8x16_t>(codes)));
#else
    uint8_t bytes[sizeof codes];
    std::memcpy(bytes, &codes, sizeof codes);
    for (uint8_t &one : bytes) one = LEVELS[one & 15];
    return load<Words>(bytes);
#endif
}

// Levels of a panel, from a first unit on, which need decoding. PREFETCH: those of DEPTHS_AHEAD depths further on, too.
template <int BITS, bool PREFETCH = true> struct Packed {
    const uint8_t *weights;

    // Decodes the levels of four depths for COUNT vectors of outputs from vector FIRST on. The depths are 4 * (four + odd) and those
    // after it; four is even, and odd, a constant for the compiler, is 0 or 1.
    template <int FIRST, int COUNT> inline void at(int64_t four, int odd, Words (&out)[COUNT]) const {
        constexpr int HALVES = 16 / LANES; // vectors of 16 outputs
        constexpr int64_t EIGHT = level_bytes(BITS, 8);
        const uint8_t *eight = weights + four / 2 * EIGHT, *unit = eight + odd * (BITS == LEVELS_8 ? 128 : 64);
        if constexpr (FIRST == 0 && PREFETCH) {
            constexpr int64_t AHEAD = level_bytes(BITS, DEPTHS_AHEAD);
            __builtin_prefetch(unit + AHEAD);
            if constexpr (BITS == LEVELS_6) if (odd == 0) __builtin_prefetch(eight + 128 + AHEAD);
            if constexpr (BITS == LEVELS_8) __builtin_prefetch(unit + 64 + AHEAD);
        }
        for (int i = 0; i < COUNT; i++) {
            int v = FIRST + i, high = v / HALVES;
            if constexpr (BITS == LEVELS_8) {
                out[i] = load<Words>(unit + v * LANES * 4);
                if (SIGNED_8) out[i] ^= 0x80808080u;
            } else {
                out[i] = load<Words>(unit + v % HALVES * LANES * 4) >> (4 * high) & 0x0f0f0f0fu;
            }
            if constexpr (BITS == FLOATS_4) out[i] = float_levels(out[i]);
            if constexpr (BITS == LEVELS_6) {
                Words two = load<Words>(eight + 128 + v % HALVES * LANES * 4); // upper bits
                int left = 4 - 2 * high - 4 * odd;
                out[i] |= (left >= 0 ? two << left : two >> -left) & 0x30303030u;
            }
        }
    }
};

// Levels that were decoded before.
struct Plain {
    const uint8_t *levels;

    template <int FIRST, int COUNT> inline void at(int64_t four, int odd, Words (&out)[COUNT]) const {
        for (int i = 0; i < COUNT; i++) out[i] = load<Words>(levels + (four + odd) * 128 + (FIRST + i) * LANES * 4);
    }
};

template <int BITS, bool PREFETCH = true> inline void decode_levels(const uint8_t *weights, int64_t depth, uint8_t *out) {
    for (int64_t four = 0; four < depth / 4; four += 2) {
#pragma GCC unroll 2
        for (int odd = 0; odd < 2; odd++) {
            Words levels[VECTORS];
            Packed<BITS, PREFETCH>{weights}.template at<0, VECTORS>(four, odd, levels);
            for (int v = 0; v < VECTORS; v++) store(out + (four + odd) * 128 + v * LANES * 4, levels[v]);
        }
    }
}

// Decodes the scales and offsets of `depth` depths from depth `from` of the panel on, a multiple of SUPER; depth is a multiple of 32.
template <int SCALING> inline void decode_scales(const uint8_t *records, int64_t from, int64_t depth, float minus, float *out) {
    records += scale_bytes(SCALING, from);
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
    } else if constexpr (SCALING == EXPONENTS) {
        for (int64_t k = 0; k < depth; k += GROUP, out += 2 * PANEL, records += 32) {
            for (int v = 0; v < VECTORS; v++) {
                Ints power = widened(records + v * LANES); // a subnormal scale below 2
                Floats scale = reinterpret_cast<Floats>(power < 2 ? (Ints{} + 0x200000) << (power & 1) : (power - 1) << 23);
                store(out + v * LANES, scale), store(out + PANEL + v * LANES, minus * scale);
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

inline void decode_scales(int64_t bits, int64_t scaling, const uint8_t *scales, int64_t from, int64_t depth, float *out) {
    float minus = bits == LEVELS_8 && SIGNED_8 ? 0.0f : scaling == EXPONENTS ? -12.0f : -static_cast<float>(1 << (bits - 1));
    switch (scaling) {
        case SCALE: return decode_scales<SCALE>(scales, from, depth, minus, out);
        case SCALE_OFFSET: return decode_scales<SCALE_OFFSET>(scales, from, depth, minus, out);
        case MULTIPLES: return decode_scales<MULTIPLES>(scales, from, depth, minus, out);
        case EXPONENTS: return decode_scales<EXPONENTS>(scales, from, depth, minus, out);
        default: return decode_scales<MULTIPLES_16>(scales, from, depth, minus, out);
    }
}

// weights: of the first depth.
inline void decode_levels(int64_t bits, int64_t scaling, const uint8_t *weights, int64_t depth, uint8_t *out) {
    switch (kind_of_levels(bits, scaling)) {
        case LEVELS_4: return decode_levels<LEVELS_4>(weights, depth, out);
        case FLOATS_4: return decode_levels<FLOATS_4>(weights, depth, out);
        case LEVELS_6: return decode_levels<LEVELS_6>(weights, depth, out);
        default: return decode_levels<LEVELS_8>(weights, depth, out);
    }
}

// True for scales that are multiples of a scale for SUPER weights.
constexpr bool of_supers(int64_t scaling) { return scaling == MULTIPLES || scaling == MULTIPLES_16; }

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
