// Activations of the tokens of a pass, as a product reads them, and the product with one panel of weights.

#pragma once

#include "dots.h"
#include "products.h"

#include <optional>
#include <vector>

namespace foresay {

constexpr int64_t rounded_up(int64_t depth, int64_t to) { return (depth + to - 1) / to * to; }

// x [rows, stride], and the same rounded for products whose activations are not float32.
class Inputs {
  public:
    const float *x = nullptr;
    int64_t rows = 0, stride = 0;

    // Describes the input of a product, and makes room for rounded numbers.
    void describe(const Product &p, const float *place, int64_t row_stride, int64_t count) {
        x = place, stride = row_stride, rows = count, depth_ = p.depth, kind_ = p.activations;
        even_ = rounded_up(depth_, 2);
        if (kind_ == AS_BFLOAT16) pairs_.resize(rows * even_);
        if (kind_ != AS_INT8) return;
        bool supers = false, groups = false;
        for (const Product *part = &p; part != nullptr; part = part->next) (of_supers(part->scaling) ? supers : groups) = true;
        groups_.resize(groups ? rows : 0, rounded_up(depth_, GROUP), GROUP, 1);
        supers_.resize(supers ? rows : 0, rounded_up(depth_, SUPER), SUPER, SUPER_SUMS);
    }

    // Rounds the numbers of one row, if the product needs it.
    void round(int64_t row) {
        const float *numbers = x + row * stride;
        if (kind_ == AS_BFLOAT16) {
            bf16 *out = pairs_.data() + row * even_;
            for (int64_t i = 0; i < depth_; i++) write(out[i], numbers[i]);
            if (even_ > depth_) out[depth_] = bf16{0};
        } else if (kind_ == AS_INT8) {
            auto into = [&](auto &room, auto round) {
                if (!room.scales.empty()) round(numbers, depth_, room.levels_of(row), room.scales_of(row), room.sums_of(row));
            };
            into(groups_, round_groups), into(supers_, round_supers);
        }
    }

    bool rounds() const { return kind_ != AS_FLOAT32; }

    const bf16 *pairs(int64_t row) const { return pairs_.data() + row * even_; }
    int64_t pair_stride() const { return even_; }

    // Rounded numbers from a row and depth on, a multiple of SUPER.
    RoundedGroups groups(int64_t row, int64_t depth) const { return groups_.from(row, depth); }
    RoundedSupers supers(int64_t row, int64_t depth) const { return supers_.from(row, depth); }

  private:
    template <class Sum> struct Room {
        std::vector<int8_t> levels;
        std::vector<float> scales;
        std::vector<Sum> sums;
        int64_t depth, group, width; // numbers of a row, and of a group; sums of a group

        void resize(int64_t rows, int64_t new_depth, int64_t new_group, int64_t new_width) {
            depth = new_depth, group = new_group, width = new_width;
            levels.resize(rows == 0 ? 0 : (rows + TILE_ROWS - 1) * depth); // whole tiles are read
            scales.resize(rows * of_row()), sums.resize(rows * of_row() * width);
        }
        int64_t of_row() const { return depth / group; }
        int8_t *levels_of(int64_t row) { return levels.data() + row * depth; }
        float *scales_of(int64_t row) { return scales.data() + row * of_row(); }
        Sum *sums_of(int64_t row) { return sums.data() + row * of_row() * width; }
        Rounded<Sum> from(int64_t row, int64_t at) const {
            int64_t first = row * of_row() + at / group;
            return {levels.data() + row * depth + at, scales.data() + first, sums.data() + first * width, depth, of_row(), of_row() * width};
        }
    };

    int64_t kind_ = AS_FLOAT32, depth_ = 0, even_ = 0;
    std::vector<bf16> pairs_;
    Room<float> groups_;
    Room<int16_t> supers_;
};

// sums [rows, 32] of at most ROWS_AT_ONCE rows from `first` on with a panel of quantized weights.
inline void quantized_sums(const Product &p, const Inputs &in, int64_t first, int64_t rows, int64_t panel, float *sums) {
    static thread_local Decoded kept;
    static thread_local std::vector<float> room;
    Decoded &block = kept;
    int64_t whole = rounded_up(p.depth, GROUP);
    int64_t kind = kind_of_levels(p.bits, p.scaling);
    const uint8_t *weights = static_cast<const uint8_t *>(p.weights) + panel * level_bytes(kind, whole);
    const uint8_t *scales = static_cast<const uint8_t *>(p.scales) + panel * scale_bytes(p.scaling, whole);
    bool supers = of_supers(p.scaling);
    if (!in.rounds()) room.resize(SUPER * PANEL);
#if defined(FORESAY_TILES)
    std::optional<Tiles> owned;
    if (in.rounds() && rows_by_tiles(rows, supers) > 0) owned.emplace(TILE_ROWS, supers ? TILE_ROWS : 0, supers ? TILE_BYTES : GROUP);
#endif
    for (int64_t from = 0; from < whole; from += SUPER) {
        int64_t to = from + SUPER < whole ? from + SUPER : whole;
        const uint8_t *levels = weights + level_bytes(kind, from);
        if (in.rounds() && supers) {
            super_products(kind, p.scaling, levels, scales + scale_bytes(p.scaling, from), in.supers(first, from), rows, sums, block.levels);
            continue;
        }
        decode_scales(kind, p.scaling, scales, from, to - from, block.scales);
        if (in.rounds()) {
            group_products(kind, levels, block.scales, to - from, in.groups(first, from), rows, sums, block.levels);
        } else {
            decode_levels(kind, levels, to - from, block.levels);
            decode_floats(kind, p.scaling, block, to - from, room.data());
            int64_t depth = to < p.depth ? to - from : p.depth - from;
            float_tiles<float>(room.data(), in.x + first * in.stride + from, in.stride, rows, depth, sums);
        }
    }
}

// out [depth] = the weights of one output of a quantized product
inline void read_row(const Product &p, int64_t output, float *out) {
    static thread_local Decoded block;
    static thread_local std::vector<float> room;
    room.resize(SUPER * PANEL);
    int64_t whole = rounded_up(p.depth, GROUP), panel = output / PANEL;
    int64_t kind = kind_of_levels(p.bits, p.scaling);
    const uint8_t *weights = static_cast<const uint8_t *>(p.weights) + panel * level_bytes(kind, whole);
    const uint8_t *scales = static_cast<const uint8_t *>(p.scales) + panel * scale_bytes(p.scaling, whole);
    for (int64_t from = 0; from < p.depth; from += SUPER) {
        int64_t to = from + SUPER < whole ? from + SUPER : whole;
        decode_scales(kind, p.scaling, scales, from, to - from, block.scales);
        decode_levels(kind, weights + level_bytes(kind, from), to - from, block.levels);
        decode_floats(kind, p.scaling, block, to - from, room.data());
        for (int64_t k = from; k < to && k < p.depth; k++) out[k] = room[(k - from) * PANEL + output % PANEL];
    }
}

// The same for weights in any format, without `next`.
inline void row_of(const Product &p, int64_t output, float *out) {
    int64_t at = output / PANEL * rounded_up(p.depth, 2) * PANEL, lane = output % PANEL;
    if (p.format == QUANTIZED) return read_row(p, output, out);
    for (int64_t k = 0; k < p.depth; k++) {
        if (p.format == FLOAT32_ROWS) out[k] = static_cast<const float *const *>(p.weights)[output][k];
        else if (p.format == BFLOAT16_ROWS) out[k] = read(static_cast<const bf16 *const *>(p.weights)[output][k]);
        else if (p.format == FLOAT32) out[k] = static_cast<const float *>(p.weights)[at + k * PANEL + lane];
        else out[k] = read(static_cast<const bf16 *>(p.weights)[at + (k / 2 * PANEL + lane) * 2 + k % 2]);
    }
}

// out[m, n] for the outputs of one panel of p, and at most ROWS_AT_ONCE rows from `first` on. out: [rows, width] from the first of p's
// outputs on.
inline void panel_product(const Product &p, const Inputs &in, int64_t first, int64_t rows, int64_t panel, float *out, int64_t width) {
    const float *x = in.x + first * in.stride;
    out += first * width;
    if (p.format == FLOAT32_ROWS) return row_product<float>(p, x, in.stride, rows, panel, out, width);
    if (p.format == BFLOAT16_ROWS) return row_product<bf16>(p, x, in.stride, rows, panel, out, width);
    alignas(64) float sums[ROWS_AT_ONCE * PANEL];
    std::memset(sums, 0, rows * PANEL * sizeof(float));
    int64_t even = rounded_up(p.depth, 2);
    if (p.format == QUANTIZED) {
        quantized_sums(p, in, first, rows, panel, sums);
    } else if (p.format == FLOAT32) {
        float_tiles(static_cast<const float *>(p.weights) + panel * even * PANEL, x, in.stride, rows, p.depth, sums);
    } else if (in.rounds()) {
        pair_tiles(static_cast<const bf16 *>(p.weights) + panel * even * PANEL, in.pairs(first), in.pair_stride(), rows, even, sums);
    } else {
        float_tiles(static_cast<const bf16 *>(p.weights) + panel * even * PANEL, x, in.stride, rows, p.depth, sums);
    }
    int64_t begin = panel * PANEL, count = p.outputs - begin < PANEL ? p.outputs - begin : PANEL;
    const float *bias = static_cast<const float *>(p.bias);
    for (int64_t r = 0; r < rows; r++) {
        float *place = out + r * width + begin, *sum = sums + r * PANEL;
        for (int64_t i = 0; i < count; i++) place[i] = bias == nullptr ? sum[i] : sum[i] + bias[begin + i];
    }
}

} // namespace foresay
