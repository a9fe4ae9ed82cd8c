// Packing of a GGUF file's blocks into the layout of quantized.h, row by row. Levels and scales are only rearranged.

#pragma once

#include "quantized.h"

namespace foresay {

enum Block { Q4_0 = 0, Q4_1 = 1, Q4_K = 2, Q5_0 = 3, Q5_1 = 4, Q5_K = 5, Q6_K = 6, Q8_0 = 7, MXFP4 = 8, IQ4_NL = 9, UNPACKED = 10 };

struct BlockLayout {
    int64_t weights, bytes; // of a block
    Levels bits;
    Scaling scaling;
};

// From UNPACKED on: types that are taken apart before (low_bits.py), to 256 weights each: the float16 scale and offset, 16 multiples of the
// scale, 16 of the offset, and 256 bytes with a level or code each.
constexpr BlockLayout LAYOUTS[] = {
    {32, 18, LEVELS_4, SCALE},      {32, 20, LEVELS_4, SCALE_OFFSET}, {256, 144, LEVELS_4, MULTIPLES},    {32, 22, LEVELS_6, SCALE},
    {32, 24, LEVELS_6, SCALE_OFFSET}, {256, 176, LEVELS_6, MULTIPLES},  {256, 210, LEVELS_6, MULTIPLES_16}, {32, 34, LEVELS_8, SCALE},
    {32, 17, LEVELS_4, EXPONENTS},  {32, 18, CODES_4_WIDE, SCALE},    {256, 292, LEVELS_2, OFFSETS_16},   {256, 292, LEVELS_3, MULTIPLES_16},
    {256, 292, CODES_3, MULTIPLES_16}, {256, 292, CODES_4, MULTIPLES_16}, {256, 292, CODES_4_WIDE, MULTIPLES_16},
    {256, 292, CODES_4_ODD, MULTIPLES_16},
};
constexpr int64_t TYPES = sizeof LAYOUTS / sizeof *LAYOUTS;

inline uint32_t word_at(const uint8_t *place) {
    uint32_t out;
    std::memcpy(&out, place, sizeof out);
    return out;
}

constexpr uint32_t NIBBLES = 0x0f0f0f0fu, BITS = 0x01010101u, TWO_BITS = 0x03030303u;

// Spreads four bits to the lowest bits of four bytes.
inline uint32_t spread(uint32_t bits) { return ((bits & 15u) * 0x00204081u) & BITS; }

// 16 bytes: the low halves are the first 16 levels, the high halves the last 16.
inline void split_nibbles(const uint8_t *place, uint32_t *fours) {
    for (int i = 0; i < 4; i++) {
        uint32_t two = word_at(place + 4 * i);
        fours[i] = two & NIBBLES, fours[4 + i] = two >> 4 & NIBBLES;
    }
}

// Reads the levels of group g of 32 weights of a row, four levels a word; those of signed types are shifted to be at least 0.
inline void read_levels(int64_t kind, const uint8_t *row, int64_t g, uint32_t *fours) {
    const BlockLayout &layout = LAYOUTS[kind];
    int64_t groups = layout.weights / GROUP;
    const uint8_t *block = row + g / groups * layout.bytes;
    int j = static_cast<int>(g % groups);
    switch (kind) {
        case MXFP4: return split_nibbles(block + 1, fours);
        case IQ4_NL:
        case Q4_0: return split_nibbles(block + 2, fours);
        case Q4_1: return split_nibbles(block + 4, fours);
        case Q5_0:
        case Q5_1: {
            const uint8_t *upper = block + (kind == Q5_0 ? 2 : 4);
            split_nibbles(upper + 4, fours);
            for (int i = 0; i < 8; i++) {
                fours[i] |= spread(word_at(upper) >> (4 * i)) << 4;
                if (kind == Q5_0) fours[i] += 16 * BITS; // from -16 .. 15 to those of 6 bits, 32 + (-16 .. 15)
            }
            return;
        }
        case Q4_K:
        case Q5_K: {
            const uint8_t *upper = block + 16, *lower = block + (kind == Q4_K ? 16 : 48) + j / 2 * 32;
            for (int i = 0; i < 8; i++) {
                fours[i] = word_at(lower + 4 * i) >> (j % 2 * 4) & NIBBLES;
                if (kind == Q5_K) fours[i] |= (word_at(upper + 4 * i) >> j & BITS) << 4;
            }
            return;
        }
        case Q6_K: {
            const uint8_t *lower = block + j / 4 * 64 + j % 2 * 32, *upper = block + 128 + j / 4 * 32;
            for (int i = 0; i < 8; i++) {
                fours[i] = word_at(lower + 4 * i) >> (j % 4 / 2 * 4) & NIBBLES;
                fours[i] |= (word_at(upper + 4 * i) >> (j % 4 * 2) & TWO_BITS) << 4;
            }
            return;
        }
        case Q8_0:
            for (int i = 0; i < 8; i++) fours[i] = word_at(block + 2 + 4 * i) ^ 0x80808080u;
            return;
        default:
            for (int i = 0; i < 8; i++) fours[i] = word_at(block + 36 + 32 * j + 4 * i);
    }
}

// Stores the levels of group g of output r. levels: those of the panel, zero before.
inline void place_levels(Levels bits, const uint32_t *fours, int64_t g, int64_t r, uint8_t *levels) {
    uint32_t *words = reinterpret_cast<uint32_t *>(levels);
    int upper_output = r >= 16;
    for (int64_t i = 0; i < 8; i++) {
        int64_t unit = g * 8 + i;
        int64_t width = width_of(bits), odd = unit % 2;
        if (width < 4) {
            uint32_t *base = width == 2 ? words + unit / 2 * 16 : words + unit / 4 * 48;
            base[(width == 2 ? 0 : unit / 2 % 2 * 16) + r % 16] |= (fours[i] & TWO_BITS) << (2 * upper_output + 4 * odd);
            if (width == 3) base[32 + r % 16] |= (fours[i] >> 2 & BITS) << (upper_output + 2 * odd + 4 * (unit / 2 % 2));
        } else if (width == 4) {
            words[unit * 16 + r % 16] |= fours[i] << (4 * upper_output);
        } else if (bits == LEVELS_6) {
            uint32_t *three = words + unit / 2 * 48 + r % 16;
            three[odd * 16] |= (fours[i] & NIBBLES) << (4 * upper_output);
            three[32] |= (fours[i] >> 4 & TWO_BITS) << (2 * upper_output + 4 * odd);
        } else {
            words[unit * 32 + r] = fours[i];
        }
    }
}

inline void copy_half(const uint8_t *from, uint8_t *place, int64_t r) { std::memcpy(place + 2 * r, from, 2); }

// Stores the scales of all blocks of output r. scales: those of the panel.
inline void place_scales(int64_t kind, const uint8_t *row, int64_t blocks, int64_t r, uint8_t *scales) {
    const BlockLayout &layout = LAYOUTS[kind];
    for (int64_t b = 0; b < blocks; b++) {
        const uint8_t *block = row + b * layout.bytes;
        uint8_t *place = scales + b * scale_bytes(layout.scaling, layout.weights);
        if (kind >= UNPACKED) {
            bool offsets = layout.scaling == OFFSETS_16;
            copy_half(block, place, r);
            if (offsets) copy_half(block + 2, place + 64, r);
            for (int i = 0; i < 16; i++) {
                uint8_t *multiples = place + (offsets ? 128 + 64 * i : 64 + 32 * i) + r;
                multiples[0] = block[4 + i];
                if (offsets) multiples[32] = block[20 + i];
            }
            continue;
        }
        if (layout.scaling == MULTIPLES_16) {
            copy_half(block + 208, place, r);
            for (int i = 0; i < 16; i++) place[64 + 32 * i + r] = block[192 + i];
            continue;
        }
        if (layout.scaling == EXPONENTS) {
            place[r] = *block;
            continue;
        }
        copy_half(block, place, r);
        if (layout.scaling == SCALE) continue;
        copy_half(block + 2, place + 64, r);
        if (layout.scaling == SCALE_OFFSET) continue;
        const uint8_t *six = block + 4; // 6-bit multiples of the scale and of the offset, for 8 groups
        for (int j = 0; j < 4; j++) {
            uint8_t *low = place + 128 + 64 * j + r, *high = low + 4 * 64;
            low[0] = six[j] & 63, low[32] = six[4 + j] & 63;
            high[0] = static_cast<uint8_t>((six[8 + j] & 15) | six[j] >> 6 << 4);
            high[32] = static_cast<uint8_t>(six[8 + j] >> 4 | six[4 + j] >> 6 << 4);
        }
    }
}

// Packs `count` rows of blocks into a panel. rows: the address of each; levels, scales: those of the panel, zero before.
inline void pack_panel(int64_t kind, const uint8_t *const *rows, int64_t count, int64_t depth, uint8_t *levels, uint8_t *scales) {
    for (int64_t r = 0; r < count; r++) {
        for (int64_t g = 0; g < depth / GROUP; g++) {
            uint32_t fours[8];
            read_levels(kind, rows[r], g, fours);
            place_levels(LAYOUTS[kind].bits, fours, g, r, levels);
        }
        place_scales(kind, rows[r], depth / LAYOUTS[kind].weights, r, scales);
    }
}

} // namespace foresay
