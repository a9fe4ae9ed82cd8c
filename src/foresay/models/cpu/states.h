// States of layers that mix tokens without attention: where they lie, and the checks of their sizes.
//
// A state is not stored after each token. A row has the state at its *base*, the state at its *end*, and in a ring an *entry* for each of
// its last tokens: the inputs of the layers' convolutions, the keys, what was written for them, and the decays. The state at any length in
// between is computed from the base by the updates that were made before, with the same bits. See models/cache/state_cache.py.

#pragma once

#include "model.h"

namespace foresay {

enum MixerKind { GATED_DELTA = 0, SHORT_CONVOLUTION = 1, STATE_SPACE = 2 };

// Order of a gated delta layer's inputs: all queries, keys, values and gates, and apart from them all betas and alphas; or those four and
// these two of each key head.
enum MixerOrder { BY_KIND = 0, BY_KEY_HEAD = 1 };

// Of a state space (Mamba-2), queries and keys are C and B of a group, and values are x. Its inputs are all gates, x, B, C and steps.
struct Mixer {
    int64_t kind, key_heads, value_heads, key_dim, value_dim; // of a short convolution, value_dim is the hidden size, and the others are 0
    int64_t taps, order;
    int64_t state, entry; // offsets of this layer in a row's states and entries, in numbers
    Vector convolution;   // [channels, taps]
    Vector bias;          // [channels]; null for none
    Vector decays, steps; // [value_heads] logarithms of the rates of decay, and what is added to alphas or steps
    Vector norm;          // [value_dim]; of a state space [value_heads * value_dim], normalized by group
    Vector skips;         // [value_heads] factors of x in a state space's output
    Product side;         // [2 * value_heads, hidden] betas and alphas
    int64_t tiled;        // nonzero if the product after it reads first the first value head of each key head, then the second ones
    float eps;
};

// A row of a pass. Lengths are in tokens.
struct StateRow {
    int64_t first, count; // its tokens in the pass
    int64_t length;       // before the pass
    int64_t base, from, end; // see above; the ring has entries of [from, end)
    int64_t next;         // base after the pass, at most `length`
    float *at_base;       // [state_size]
    float *before;        // [tail, entry_size] entries of the tokens before the base, of which only inputs of convolutions are read
    float *at_end;        // [state_size]
    float *ring;          // [slots, entry_size], a token's entry at its position modulo slots
};

struct StateRows {
    int64_t count, slots, tail, state_size, entry_size;
    const StateRow *rows;
};

constexpr int64_t COLUMNS = 32; // of a matrix state, which are stored and processed together
constexpr int64_t CHANNELS = 256; // of a convolution, which are processed together

inline bool has_state(const Mixer &m) { return m.kind != SHORT_CONVOLUTION; }

inline int64_t channels_of(const Mixer &m) {
    return has_state(m) ? 2 * m.key_heads * m.key_dim + m.value_heads * m.value_dim : m.value_dim;
}

inline int64_t inputs_of(const Mixer &m) {
    int64_t steps = m.kind == STATE_SPACE ? m.value_heads : 0;
    return has_state(m) ? channels_of(m) + m.value_heads * m.value_dim + steps : 3 * m.value_dim;
}

inline int64_t outputs_of(const Mixer &m) { return has_state(m) ? m.value_heads * m.value_dim : m.value_dim; }

inline int64_t blocks_of(const Mixer &m) { return (m.value_dim + COLUMNS - 1) / COLUMNS; }

inline int64_t state_size(const Mixer &m) {
    return has_state(m) ? m.value_heads * blocks_of(m) * m.key_dim * COLUMNS : 0;
}

// An entry: inputs of the convolution, and of a layer with a state then keys, written values and decays.
inline int64_t entry_size(const Mixer &m) {
    return channels_of(m) + (has_state(m) ? m.key_heads * m.key_dim + m.value_heads * (m.value_dim + 1) : 0);
}

inline void check(const Mixer &m, int64_t hidden) {
    require(m.kind >= GATED_DELTA && m.kind <= STATE_SPACE, "mixer", m.kind, "in [0, 2]");
    require(m.order == BY_KIND || m.order == BY_KEY_HEAD, "order", m.order, "0 or 1");
    require(m.taps >= 1 && m.taps <= 64, "taps", m.taps, "in [1, 64]");
    check_width("value_dim", m.value_dim);
    if (has_state(m)) {
        for (int64_t one : {m.key_heads, m.value_heads, m.key_dim}) check_width("heads of a state", one);
        if (m.kind == GATED_DELTA) check_shape("side", m.side, 2 * m.value_heads, hidden);
        require(m.value_heads % m.key_heads == 0, "value_heads", m.value_heads, "a multiple of key_heads");
        require(m.key_heads <= MOST / m.key_dim / 4, "key_dim", m.key_dim, "below 2^29 with all key heads");
        require(m.value_heads <= MOST / (m.value_dim + COLUMNS) / 4 / m.key_dim, "value_dim", m.value_dim, "below 2^29 with the whole state");
    } else {
        require(m.value_dim == hidden, "value_dim", m.value_dim, "the hidden size");
    }
    int64_t channels = channels_of(m), heads = has_state(m) ? m.value_heads : 0;
    int64_t skipped = m.kind == STATE_SPACE ? heads : 0, normalized = heads ? (skipped ? heads : 1) * m.value_dim : 0;
    check_pointer("convolution", m.convolution.values);
    check_norm("convolution", m.convolution, channels * m.taps);
    check_norm("bias", m.bias, channels);
    for (const Vector *one : {&m.decays, &m.steps}) {
        require(one->size == heads && (one->values != nullptr) == (heads > 0), "decays", one->size, "the number of value heads");
    }
    require(m.norm.size == normalized && (m.norm.values != nullptr) == (heads > 0), "norm", m.norm.size, "what it normalizes");
    require(m.skips.size == skipped && (m.skips.values != nullptr) == (skipped > 0), "skips", m.skips.size, "the number of value heads");
}

inline void check(const Mixer &m, const StateRows &states) {
    require(m.state >= 0 && m.state <= states.state_size - state_size(m), "state", m.state, "within the states of a row");
    require(m.entry >= 0 && m.entry <= states.entry_size - entry_size(m), "entry", m.entry, "within the entries of a row");
    require(m.taps - 1 <= states.tail, "taps", m.taps, "at most one more than the entries before the base");
}

inline void check(const StateRow &row, const StateRows &states) {
    if (states.state_size > 0) check_pointer("states", row.at_base), check_pointer("states", row.at_end);
    if (states.tail > 0) check_pointer("entries", row.before);
    check_pointer("entries", row.ring);
    bool ordered = row.base >= 0 && row.base <= row.from && row.from <= row.end && row.end - row.from <= states.slots;
    require(ordered && row.end <= int64_t{1} << 62, "end", row.end, "after the base by at most the entries of a row");
    bool known = row.from == row.base || row.end - row.from >= states.tail; // what the convolutions read before the row's end
    require(known, "from", row.from, "that of the base, or before the end by at least the tail");
    bool reached = row.length == row.end || row.length == row.base || (row.from == row.base && row.length >= row.base);
    require(reached && row.length <= row.end, "length", row.length, "that of the base or of an entry after it");
    require(row.next >= row.base && row.next <= row.length, "next", row.next, "in [base, length]");
    require(row.length == row.end || row.next == row.length, "next", row.next, "the length of a row that was truncated");
    require(row.next == row.base || row.next == row.length || row.from == row.base, "next", row.next, "that of the base or of an entry");
}

// Each of the tokens belongs to one of the rows, in their order.
inline void check(const StateRows &states, int64_t tokens) {
    check_rows("rows", states.count);
    bool sized = states.slots > 0 && states.slots <= 1 << 16 && states.tail >= 0 && states.tail <= states.slots;
    require(sized, "slots", states.slots, "in [1, 2^16], and at least the tail");
    for (int64_t one : {states.state_size, states.entry_size}) require(one >= 0 && one <= MOST, "state_size", one, "in [0, 2^31)");
    int64_t first = 0;
    for (int64_t r = 0; r < states.count; r++) {
        const StateRow &row = states.rows[r];
        check(row, states);
        require(row.first == first && row.count > 0 && row.count <= tokens - first, "count", row.count, "the number of a row's tokens");
        first += row.count;
    }
    require(first == tokens, "tokens", tokens, "those of the rows");
}

inline void check_states(const Model &model, const Pass &pass) {
    bool any = false;
    for (int64_t i = 0; i < model.layers; i++) any = any || model.layer[i].mixer != nullptr;
    if (!any || pass.tokens == 0) return;
    check_pointer("states", pass.mixed);
    const StateRows &states = *pass.mixed;
    require(pass.ancestors == nullptr, "ancestors", 1, "null: states have no branches");
    check(states, pass.tokens);
    for (int64_t i = 0; i < model.layers; i++) {
        if (model.layer[i].mixer != nullptr) check(*model.layer[i].mixer, states);
    }
    for (int64_t r = 0; r < states.count; r++) {
        const StateRow &row = states.rows[r];
        for (int64_t i = 0; i < row.count; i++) {
            int64_t n = row.first + i;
            require(pass.positions[n] == row.length + i, "position", pass.positions[n], "that after the one before it");
            require(pass.rows[n] == pass.rows[row.first], "row", pass.rows[n], "the same for all tokens of a row");
        }
    }
}

} // namespace foresay
