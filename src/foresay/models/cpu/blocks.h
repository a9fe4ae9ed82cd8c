// Packing of a GGUF file's 4-bit blocks into the layout of products.h, row by row. Levels are only rearranged. Scales are copied, or are
// products of two numbers in the file, rounded to float16.

#pragma once

#include "products.h"

#include <cmath>

namespace foresay {

enum Block { Q4_0 = 0, Q4_1 = 1, Q4_K = 2 };

// Converts float32 to float16: rounds to nearest, ties to even; too large numbers become infinite.
inline uint16_t half_of(float value) {
    uint32_t bits;
    std::memcpy(&bits, &value, sizeof bits);
    uint32_t sign = bits >> 16 & 0x8000u, size = bits & 0x7fffffffu;
    if (size >= 0x47800000u) return static_cast<uint16_t>(sign | (size > 0x7f800000u ? 0x7e00u : 0x7c00u));
    if (size < 0x38800000u) { // multiples of 2^-24
        float steps;
        std::memcpy(&steps, &size, sizeof steps);
        return static_cast<uint16_t>(sign | static_cast<uint32_t>(std::nearbyintf(steps * 16777216.0f)));
    }
    uint32_t rounded = size + 0xfffu + (size >> 13 & 1u) - 0x38000000u;
    return static_cast<uint16_t>(sign | rounded >> 13);
}

struct Group {
    uint16_t scale, least; // float16: the scale, and the offset (the weight at level 0)
    uint32_t fours[8];     // the levels at four depths each, one per byte
};

inline uint32_t word_at(const uint8_t *place) {
    uint32_t out;
    std::memcpy(&out, place, sizeof out);
    return out;
}

inline float half_at(const uint8_t *place) {
    uint16_t half;
    std::memcpy(&half, place, sizeof half);
    return wide_half(half);
}

constexpr uint32_t NIBBLES = 0x0f0f0f0fu;

// Group g of a row of 32-weight blocks: a scale, for Q4_1 an offset (`shifted`), and 16 bytes of two levels each.
inline Group small_group(const uint8_t *row, int64_t g, bool shifted) {
    const uint8_t *block = row + g * (shifted ? 20 : 18), *levels = block + (shifted ? 4 : 2);
    Group out;
    float scale = half_at(block);
    out.scale = half_of(scale);
    out.least = half_of(shifted ? half_at(block + 2) : -8.0f * scale);
    for (int i = 0; i < 4; i++) {
        uint32_t two = word_at(levels + 4 * i);
        out.fours[i] = two & NIBBLES, out.fours[4 + i] = two >> 4 & NIBBLES;
    }
    return out;
}

// Group g of a row of 256-weight blocks: eight groups per block, whose scales and offsets are 6-bit multiples of two numbers.
inline Group group_of_eight(const uint8_t *row, int64_t g) {
    const uint8_t *block = row + g / 8 * 144, *six = block + 4, *levels = block + 16 + g % 8 / 2 * 32;
    int i = static_cast<int>(g % 8), j = i % 4;
    uint32_t scale = i < 4 ? six[j] & 63u : (six[8 + j] & 15u) | (six[j] >> 6 << 4);
    uint32_t least = i < 4 ? six[4 + j] & 63u : static_cast<uint32_t>(six[8 + j] >> 4) | (six[4 + j] >> 6 << 4);
    Group out;
    out.scale = half_of(half_at(block) * static_cast<float>(scale));
    out.least = half_of(-(half_at(block + 2) * static_cast<float>(least)));
    for (int k = 0; k < 8; k++) out.fours[k] = word_at(levels + 4 * k) >> (g % 2 * 4) & NIBBLES;
    return out;
}

// Packs one panel: words [depth / 4, 16] and scales [depth / 32, 2, 32], which must be zero before. rows: the address of each row's
// blocks; kinds: their types.
inline void pack_panel(const uint8_t *const *rows, const uint8_t *kinds, int64_t count, int64_t depth, uint32_t *words, uint16_t *scales) {
    for (int64_t r = 0; r < count; r++) {
        uint32_t *place = words + r % 16;
        int shift = r < 16 ? 0 : 4;
        for (int64_t g = 0; g < depth / GROUP; g++) {
            Group group = kinds[r] == Q4_K ? group_of_eight(rows[r], g) : small_group(rows[r], g, kinds[r] == Q4_1);
            scales[g * 2 * PANEL + r] = group.scale, scales[g * 2 * PANEL + PANEL + r] = group.least;
            for (int k = 0; k < 8; k++) place[(g * 8 + k) * 16] |= group.fours[k] << shift;
        }
    }
}

} // namespace foresay
