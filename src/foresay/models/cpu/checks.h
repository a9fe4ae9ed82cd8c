// Checks at each entry point that sizes and indices are consistent, before any memory is accessed with them.
//
// Every struct states the sizes of the memory at its pointers; Python takes them from the tensors (structs.address). The checks take a
// few integer comparisons per layer and per token, and none per weight.

#pragma once

#include "attention.h"
#include "blocks.h"
#include "inputs.h"

#include <cstdio>
#include <initializer_list>
#include <stdexcept>

namespace foresay {

constexpr int64_t MOST = (int64_t{1} << 31) - 1; // of a width: the product of two does not overflow
constexpr int64_t MOST_ROWS = 1 << 26, MOST_LAYERS = 1 << 16, MOST_EXPERTS = 1 << 16, MOST_THREADS = 1 << 12;

[[noreturn, gnu::cold, gnu::noinline]] inline void refuse(const char *name, int64_t value, const char *allowed) {
    char text[200];
    std::snprintf(text, sizeof text, "%s = %lld, which must be %s", name, static_cast<long long>(value), allowed);
    throw std::invalid_argument(text);
}

inline void require(bool holds, const char *name, int64_t value, const char *allowed) {
    if (__builtin_expect(!holds, 0)) refuse(name, value, allowed);
}

inline void check_width(const char *name, int64_t value) { require(value > 0 && value <= MOST, name, value, "in [1, 2^31)"); }

inline void check_rows(const char *name, int64_t value) { require(value >= 0 && value <= MOST_ROWS, name, value, "in [0, 2^26]"); }

inline void check_pointer(const char *name, const void *pointer) { require(pointer != nullptr, name, 0, "an address"); }

inline int check_threads(int64_t threads) {
    require(threads > 0 && threads <= MOST_THREADS, "threads", threads, "in [1, 4096]");
    return static_cast<int>(threads);
}

inline void check_part(const Product &p) {
    require(p.format >= FLOAT32 && p.format <= BFLOAT16_ROWS, "format", p.format, "in [0, 4]");
    check_width("outputs", p.outputs);
    check_width("depth", p.depth);
    check_pointer("weights", p.weights);
    bool allowed = p.activations == AS_FLOAT32 || (p.activations == AS_BFLOAT16 && p.format == BFLOAT16) ||
                   (p.activations == AS_INT8 && p.format == QUANTIZED);
    require(allowed, "activations", p.activations, "0 for float32, or 1 for bfloat16 weights, or 2 for quantized weights");
    if (p.format != QUANTIZED) return;
    check_pointer("scales", p.scales);
    require(p.scaling >= SCALE && p.scaling <= OFFSETS_16, "scaling", p.scaling, "in [0, 5]");
    bool plain = p.bits == LEVELS_4 || p.bits == LEVELS_6, fits = false;
    if (p.scaling == SCALE) fits = plain || p.bits == LEVELS_8 || p.bits == CODES_4_WIDE;
    if (p.scaling == SCALE_OFFSET || p.scaling == MULTIPLES) fits = plain;
    if (p.scaling == MULTIPLES_16) fits = p.bits == LEVELS_3 || p.bits == LEVELS_6 || is_code(p.bits);
    if (p.scaling == OFFSETS_16) fits = p.bits == LEVELS_2;
    if (p.scaling == EXPONENTS) fits = p.bits == LEVELS_4;
    require(fits, "bits", p.bits, "a kind of levels that has these scales");
    require(!of_supers(p.scaling) || p.depth % SUPER == 0, "depth", p.depth, "a multiple of 256 with multiples of scales");
}

// A product and those that follow it, whose x is the same.
inline void check(const Product &p) {
    int64_t outputs = 0;
    for (const Product *part = &p; part != nullptr; part = part->next) {
        check_part(*part);
        require(part->depth == p.depth, "depth", part->depth, "the same in all parts of a product");
        require(part->activations == p.activations, "activations", part->activations, "the same in all parts of a product");
        outputs += part->outputs;
        require(outputs <= MOST, "outputs", outputs, "below 2^31 in all parts together");
    }
}

inline void check_pack(int64_t kind, const uint8_t *const *rows, int64_t outputs, int64_t depth) {
    require(kind >= Q4_0 && kind < TYPES, "kind", kind, "a type of blocks");
    check_width("outputs", outputs);
    check_width("depth", depth);
    check_pointer("rows", rows);
    require(depth % LAYOUTS[kind].weights == 0, "depth", depth, "a multiple of the block size");
    for (int64_t i = 0; i < outputs; i++) check_pointer("row", rows[i]);
}

// Numbers of heads and rotated dimensions.
inline void check_heads(const Attention &a) {
    check_width("queries", a.queries);
    check_width("keys", a.keys);
    check_width("dim", a.dim);
    require(a.queries % a.keys == 0, "queries", a.queries, "a multiple of keys");
    require((2 * a.queries + 2 * a.keys) <= MOST / a.dim, "dim", a.dim, "below 2^31 with all heads");
    require((a.cosines == nullptr) == (a.sines == nullptr), "sines", a.sines != nullptr, "given if and only if cosines are");
    if (a.cosines != nullptr) {
        require(a.rotated >= 0 && a.rotated <= a.dim && a.rotated % 2 == 0, "rotated", a.rotated, "even, and at most dim");
    }
    require(a.window >= 0 && a.window <= int64_t{1} << 62, "window", a.window, "in [0, 2^62]");
    require(a.scale_length >= 0, "scale_length", a.scale_length, "at least 0");
}

// Each row of the cache has a block of an addressable size. width: numbers of a slot in all layers; scaled: nonzero if each head of a
// key or value is followed by its scale.
inline void check_store(const Attention &a, int64_t width, int64_t scaled) {
    int64_t end, own = 2 * a.keys * (a.dim + (scaled ? static_cast<int64_t>(sizeof(float)) : 0));
    check_rows("store_rows", a.store_rows);
    check_pointer("blocks", a.blocks);
    check_pointer("capacities", a.capacities);
    require(a.source >= OWN && a.source <= OTHERS, "source", a.source, "in [0, 2]");
    require(width >= own, "store_width", width, "at least that of a layer");
    require(a.offset >= 0 && a.offset <= width - own, "offset", a.offset, "that of a layer of the cache");
    for (int64_t row = 0; row < a.store_rows; row++) {
        int64_t slots = a.capacities[row];
        require(slots >= 0 && slots <= MOST, "capacity", slots, "in [0, 2^31)");
        require(slots == 0 || a.blocks[row] != nullptr, "capacity", slots, "0 for a row without a block");
        bool fits = !__builtin_mul_overflow(width, slots * static_cast<int64_t>(sizeof(float)), &end);
        require(fits, "capacity", slots, "smaller: the block is too large to address");
    }
}

// Each token's row, slot and position are inside the cache, and the columns that it attends to inside this pass.
inline void check_tokens(const Attention &a) {
    check_rows("tokens", a.tokens);
    if (a.tokens == 0) return;
    for (const int64_t *one : {a.rows, a.slots, a.starts, a.positions}) check_pointer("indices of tokens", one);
    if (a.ancestors != nullptr) check_rows("columns", a.columns);
    for (int64_t n = 0; n < a.tokens; n++) {
        int64_t slot = a.slots[n], start = a.starts[n], position = a.positions[n];
        require(a.rows[n] >= 0 && a.rows[n] < a.store_rows, "row", a.rows[n], "a row of the cache");
        int64_t slots = a.capacities[a.rows[n]];
        require(slot >= 0 && slot < slots, "slot", slot, "a slot of the token's row");
        require(start >= 0 && start <= slot, "start", start, "at most the token's slot");
        require(position >= 0 && position < slots, "position", position, "below the slots of a row");
        if (a.ends != nullptr) {
            require(a.ancestors == nullptr, "ends", a.ends[n], "null for trees");
            require(a.ends[n] >= position && a.ends[n] < slots, "end", a.ends[n], "from the token's position on, below the slots of its row");
            bool grows = n == 0 || a.rows[n - 1] != a.rows[n] || a.ends[n - 1] <= a.ends[n];
            require(grows, "end", a.ends[n], "at least that of the previous token in its row");
        }
        if (a.ancestors == nullptr) {
            bool follows = n == 0 || a.rows[n - 1] != a.rows[n] || a.positions[n - 1] <= position;
            require(follows, "position", position, "at least that of the previous token in its row");
        } else {
            int64_t column = slot - start, seen = 0;
            require(column < a.columns, "column", column, "below columns");
            for (int64_t c = 0; c < a.columns; c++) {
                if (!a.ancestors[n * a.columns + c]) continue;
                require(start + c < slots, "column", c, "within the slots of the token's row");
                seen++;
            }
            require(position < start + seen, "position", position, "below its start plus the number of columns that it attends to");
        }
    }
}

} // namespace foresay
