// Weights in 2 to 8 bits: their layout, and decoding of a few depths of a panel to bytes and float32 scales.
//
// A weight is scale * level + offset. Scales and offsets belong to a group of 32 weights of one output, or of 16. They are kept as the
// file has them: float16 numbers, 6- and 8-bit multiples of float16 numbers that 256 weights share, or exponents of two.

#pragma once

#include "vectors.h"

namespace foresay {

constexpr int64_t PANEL = 32, GROUP = 32, SUPER = 256, ROWS_AT_ONCE = 96;
constexpr int VECTORS = PANEL / LANES;

// LEVELS_*: bits of a level. Weights of a panel, in units of 64 bytes:
//   2 bits: for 8 depths a unit, whose byte 4 i + d has outputs i and 16 + i at depth d in its lowest bits, then those at depth 4 + d
//   3 bits: for 16 depths three units: two of the lowest 2 bits as above, then one of the third bits: of the outputs i and 16 + i at
//           depths d, 4 + d, 8 + d and 12 + d
//   4 bits: for 4 depths a unit, whose byte 4 i + d has output i at depth d in its low half, and output 16 + i in its high half
//   6 bits: for 8 depths three units: the low 4 bits of two times 4 depths as above, then the upper 2 bits of the same four vectors
//   8 bits: for 4 depths two units: byte 4 i + d of both is output i at depth d
// FLOATS_4: 4-bit floats (E2M1) in the layout of 4 bits. Twice such a number is an integer from -12 to 12; 12 more is its level.
// CODES_*: indices of a table of levels, in the layouts of 3 bits (IQ2) and 4 bits (IQ3_XXS; IQ3_S, CODES_4_ODD; IQ4, CODES_4_WIDE).
enum Levels { LEVELS_2 = 2, LEVELS_3 = 3, LEVELS_4 = 4, FLOATS_4 = 5, LEVELS_6 = 6, LEVELS_8 = 8, CODES_3 = 9, CODES_4 = 10, CODES_4_WIDE = 11, CODES_4_ODD = 12 };

constexpr bool is_code(int64_t kind) { return kind >= CODES_3; }

constexpr int64_t width_of(int64_t kind) { return kind == CODES_3 ? 3 : kind == FLOATS_4 || is_code(kind) ? 4 : kind; }

// Scales of a panel. The offset of SCALE and MULTIPLES_16 is that of signed levels: -2^(bits - 1) * scale. EXPONENTS are the scales of
// FLOATS_4 alone, which `bits` of a product counts as 4.
//   SCALE         for 32 depths: float16 scales [32]
//   SCALE_OFFSET  for 32 depths: float16 scales [32], float16 offsets [32]
//   MULTIPLES     for 256 depths: float16 scales [32], float16 offsets [32], then for 32 depths each: multiples of the scale [32], and of
//                 the offset, which is subtracted, [32]; unsigned bytes
//   MULTIPLES_16  for 256 depths: float16 scales [32], then for 16 depths each: multiples of the scale [32], signed bytes
//   OFFSETS_16    for 256 depths: as MULTIPLES, but for 16 depths each
//   EXPONENTS     for 32 depths: bytes e [32] of scales 2^(e - 128), half of the numbers' own because levels are doubled
enum Scaling { SCALE = 0, SCALE_OFFSET = 1, MULTIPLES = 2, MULTIPLES_16 = 3, EXPONENTS = 4, OFFSETS_16 = 5 };

constexpr int64_t level_bytes(int64_t kind, int64_t depth) { return PANEL * depth * width_of(kind) / 8; }

constexpr int64_t kind_of_levels(int64_t bits, int64_t scaling) { return scaling == EXPONENTS ? FLOATS_4 : bits; }

constexpr int64_t scale_bytes(int64_t scaling, int64_t depth) {
    return scaling == SCALE ? depth / GROUP * 64
         : scaling == SCALE_OFFSET ? depth / GROUP * 128
         : scaling == MULTIPLES ? depth / SUPER * (128 + 8 * 64)
         : scaling == OFFSETS_16 ? depth / SUPER * (128 + 16 * 64)
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

// True for levels that are signed bytes once they are decoded.
constexpr bool is_signed(int64_t kind) { return SIGNED_8 && (kind == LEVELS_8 || is_code(kind)); }

// The level that stands for 0, of kinds without offsets.
constexpr int zero_of(int64_t kind) {
    return is_signed(kind) ? 0 : kind == FLOATS_4 ? 12 : kind == LEVELS_8 || is_code(kind) ? 128 : 1 << (kind - 1);
}

// The scale of a code's level, by which that of 256 weights is multiplied.
constexpr float factor_of(int64_t kind) { return kind == CODES_3 ? 0.125f : kind == CODES_4 ? 0.25f : 1.0f; }

// Levels by code; those of CODES_* are 128 more.
template <int KIND> struct Table;
template <> struct Table<FLOATS_4> {
    alignas(16) static constexpr uint8_t LEVELS[16] = {12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0};
};
template <> struct Table<CODES_3> {
    alignas(16) static constexpr uint8_t LEVELS[16] = {85, 103, 120, 136, 153, 171};
};
template <> struct Table<CODES_4> {
    alignas(16) static constexpr uint8_t LEVELS[16] = {66, 76, 84, 92, 100, 108, 116, 124, 132, 140, 148, 156, 164, 172, 180, 190};
};
template <> struct Table<CODES_4_ODD> {
    alignas(16) static constexpr uint8_t LEVELS[16] = {113, 115, 117, 119, 121, 123, 125, 127, 129, 131, 133, 135, 137, 139, 141, 143};
};
template <> struct Table<CODES_4_WIDE> {
    alignas(16) static constexpr uint8_t LEVELS[16] = {1, 24, 45, 63, 79, 93, 106, 118, 129, 141, 153, 166, 181, 197, 217, 241};
};

// The levels of codes in the low half of each byte.
template <int KIND> inline Words table_levels(Words codes) {
    const uint8_t *levels = Table<KIND>::LEVELS;
#if defined(__AVX512BW__)
    __m512i table = _mm512_broadcast_i32x4(_mm_load_si128(reinterpret_cast<const __m128i *>(levels)));
    return reinterpret_cast<Words>(_mm512_shuffle_epi8(table, reinterpret_cast<__m512i>(codes)));
#elif defined(__AVX2__) && !defined(__AVX512F__)
    __m256i table = _mm256_broadcastsi128_si256(_mm_load_si128(reinterpret_cast<const __m128i *>(levels)));
    return reinterpret_cast<Words>(_mm256_shuffle_epi8(table, reinterpret_cast<__m256i>(codes)));
#elif defined(__aarch64__)
    return reinterpret_cast<Words>(vqtbl1q_u8(vld1q_u8(levels), reinterpret_cast<uint8x16_t>(codes)));
#else
    uint8_t bytes[sizeof codes];
    std::memcpy(bytes, &codes, sizeof codes);
    for (uint8_t &one : bytes) one = levels[one & 15];
    return load<Words>(bytes);
#endif
}

// Depths ahead at which weights are prefetched that are multiplied as they are decoded.
constexpr int64_t near_of(int64_t kind) { return width_of(kind) < 4 ? SUPER : SUPER / 2; }

// Levels of a panel, from a first unit on, which need decoding. AHEAD: depths further on of which those are prefetched, or 0.
template <int BITS, int64_t AHEAD = near_of(BITS)> struct Packed {
    static constexpr int PARTS = width_of(BITS) == 3 ? 4 : 2; // times four depths that are stored together
    const uint8_t *weights;

    // Decodes the levels of four depths for COUNT vectors of outputs from vector FIRST on. The depths are 4 * (four + part) and those
    // after it; four is a multiple of PARTS, and part, a constant for the compiler, is less.
    template <int FIRST, int COUNT> __attribute__((always_inline)) void at(int64_t four, int part, Words (&out)[COUNT]) const {
        constexpr int HALVES = 16 / LANES, WIDTH = width_of(BITS); // vectors of 16 outputs; bits
        constexpr int64_t BYTES = level_bytes(BITS, 4 * PARTS), LATER = level_bytes(BITS, AHEAD);
        int odd = part % 2, later = part / 2; // the second of two times 4 depths, and of two times 8
        const uint8_t *base = weights + four / PARTS * BYTES, *upper = base + 128;
        const uint8_t *unit = base + (WIDTH == 2 ? 0 : WIDTH == 3 ? later * 64 : odd * (WIDTH == 8 ? 128 : 64));
        if constexpr (FIRST == 0 && AHEAD > 0) {
            if (WIDTH > 3 || odd == 0) __builtin_prefetch(unit + LATER);
            if ((WIDTH == 3 || WIDTH == 6) && part == 0) __builtin_prefetch(upper + LATER);
            if constexpr (WIDTH == 8) __builtin_prefetch(unit + 64 + LATER);
        }
        auto moved = [](Words x, int left) { return left >= 0 ? x << left : x >> -left; };
        for (int i = 0; i < COUNT; i++) {
            int v = FIRST + i, high = v / HALVES;
            int64_t at = v % HALVES * LANES * 4;
            if constexpr (WIDTH == 8) out[i] = load<Words>(unit + v * LANES * 4);
            else if constexpr (WIDTH < 4) out[i] = moved(load<Words>(unit + at), -2 * high - 4 * odd) & 0x03030303u;
            else out[i] = load<Words>(unit + at) >> (4 * high) & 0x0f0f0f0fu;
            if constexpr (WIDTH == 6) out[i] |= moved(load<Words>(upper + at), 4 - 2 * high - 4 * odd) & 0x30303030u;
            if constexpr (WIDTH == 3) out[i] |= moved(load<Words>(upper + at), 2 - high - 2 * odd - 4 * later) & 0x04040404u;
            if constexpr (BITS == FLOATS_4 || is_code(BITS)) out[i] = table_levels<BITS>(out[i]);
            if constexpr (is_signed(BITS)) out[i] ^= 0x80808080u;
        }
    }
};

// Levels that were decoded before.
struct Plain {
    static constexpr int PARTS = 2;
    const uint8_t *levels;

    template <int FIRST, int COUNT> __attribute__((always_inline)) void at(int64_t four, int part, Words (&out)[COUNT]) const {
        for (int i = 0; i < COUNT; i++) out[i] = load<Words>(levels + (four + part) * 128 + (FIRST + i) * LANES * 4);
    }
};

template <int BITS, int64_t AHEAD = SUPER> inline void decode_levels(const uint8_t *weights, int64_t depth, uint8_t *out) {
    Packed<BITS, AHEAD> packed{weights};
    for (int64_t four = 0; four < depth / 4; four += packed.PARTS) {
#pragma GCC unroll 4
        for (int part = 0; part < packed.PARTS; part++) {
            Words levels[VECTORS];
            packed.template at<0, VECTORS>(four, part, levels);
            for (int v = 0; v < VECTORS; v++) store(out + (four + part) * 128 + v * LANES * 4, levels[v]);
        }
    }
}

// Decodes the scales and offsets of `depth` depths from depth `from` of the panel on, a multiple of SUPER; depth is a multiple of 32.
// factor: of the scales for 256.
template <int SCALING>
inline void decode_scales(const uint8_t *records, int64_t from, int64_t depth, float minus, float factor, float *out) {
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
    } else if constexpr (SCALING == MULTIPLES || SCALING == OFFSETS_16) {
        constexpr int64_t DEPTH = SCALING == MULTIPLES ? GROUP : 16;
        Floats scale[VECTORS], offset[VECTORS];
        for (int v = 0; v < VECTORS; v++) scale[v] = half_at(0, v), offset[v] = half_at(64, v);
        records += 128;
        for (int64_t k = 0; k < depth; k += DEPTH, out += 2 * PANEL, records += 64) {
            for (int v = 0; v < VECTORS; v++) {
                store(out + v * LANES, scale[v] * __builtin_convertvector(widened(records + v * LANES), Floats));
                store(out + PANEL + v * LANES, -(offset[v] * __builtin_convertvector(widened(records + 32 + v * LANES), Floats)));
            }
        }
    } else {
        Floats scale[VECTORS];
        for (int v = 0; v < VECTORS; v++) scale[v] = half_at(0, v) * factor;
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

inline void decode_scales(int64_t kind, int64_t scaling, const uint8_t *scales, int64_t from, int64_t depth, float *out) {
    float minus = -static_cast<float>(zero_of(kind)), factor = factor_of(kind);
    switch (scaling) {
        case SCALE: return decode_scales<SCALE>(scales, from, depth, minus, factor, out);
        case SCALE_OFFSET: return decode_scales<SCALE_OFFSET>(scales, from, depth, minus, factor, out);
        case MULTIPLES: return decode_scales<MULTIPLES>(scales, from, depth, minus, factor, out);
        case EXPONENTS: return decode_scales<EXPONENTS>(scales, from, depth, minus, factor, out);
        case OFFSETS_16: return decode_scales<OFFSETS_16>(scales, from, depth, minus, factor, out);
        default: return decode_scales<MULTIPLES_16>(scales, from, depth, minus, factor, out);
    }
}

// Calls body with a kind of levels as a compile-time constant.
template <class F> inline void with_kind(int64_t kind, const F &body) {
    switch (kind) {
        case LEVELS_2: return body(Constant<LEVELS_2>());
        case LEVELS_3: return body(Constant<LEVELS_3>());
        case LEVELS_4: return body(Constant<LEVELS_4>());
        case FLOATS_4: return body(Constant<FLOATS_4>());
        case LEVELS_6: return body(Constant<LEVELS_6>());
        case CODES_3: return body(Constant<CODES_3>());
        case CODES_4: return body(Constant<CODES_4>());
        case CODES_4_WIDE: return body(Constant<CODES_4_WIDE>());
        case CODES_4_ODD: return body(Constant<CODES_4_ODD>());
        default: return body(Constant<LEVELS_8>());
    }
}

// weights: of the first depth.
inline void decode_levels(int64_t kind, const uint8_t *weights, int64_t depth, uint8_t *out) {
    with_kind(kind, [&](auto one) { decode_levels<decltype(one)::value>(weights, depth, out); });
}

// True for scales that are multiples of a scale for SUPER weights.
constexpr bool of_supers(int64_t scaling) { return scaling == MULTIPLES || scaling == MULTIPLES_16 || scaling == OFFSETS_16; }

constexpr int64_t group_of(int64_t scaling) { return scaling == MULTIPLES_16 || scaling == OFFSETS_16 ? 16 : GROUP; }

// Decodes the same depths further, to float32 weights [to - from, 32].
inline void decode_floats(int64_t kind, int64_t scaling, const Decoded &block, int64_t depth, float *out) {
    int64_t group = group_of(scaling);
    for (int64_t k = 0; k < depth; k += 4) {
        const float *scales = block.scales + k / group * 2 * PANEL;
        for (int v = 0; v < VECTORS; v++) {
            Words four = load<Words>(block.levels + (k * PANEL + v * LANES * 4));
            Floats scale = load<Floats>(scales + v * LANES), offset = load<Floats>(scales + PANEL + v * LANES);
            for (int d = 0; d < 4; d++) {
                Words top = four << (24 - 8 * d);
                Ints level = is_signed(kind) ? reinterpret_cast<Ints>(top) >> 24 : reinterpret_cast<Ints>(top >> 24);
                store(out + (k + d) * PANEL + v * LANES, scale * __builtin_convertvector(level, Floats) + offset);
            }
        }
    }
}

} // namespace foresay
