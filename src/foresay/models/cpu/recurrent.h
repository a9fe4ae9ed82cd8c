// Layers that mix tokens by a state instead of attention: the gated delta rule (Qwen3-Next, Qwen3.5), state spaces (Mamba-2, in Granite
// 4) and short convolutions (LFM2).
//
// Tokens are processed one after the other in prompts and in single steps alike, each by the same functions in the same order, so that a
// token's bits depend neither on the pass that it is in nor on the number of threads. Columns of a matrix state are independent of each
// other, and so are heads, rows and channels of a convolution.

#pragma once

#include "attention.h"
#include "multiply.h"
#include "states.h"

#include <algorithm>

namespace foresay {

// Numbers of a pass between the products of a layer, [N, .] each. factors: of what is written, the betas or the steps.
struct Mixing {
    std::vector<float> inputs, side, mixed, decays, factors, written, out, tails;
    std::vector<float> rates, steps, norm, skips;
};

// Where the queries, keys and values begin in a token's channels.
struct ChannelOrder {
    int64_t query, key, value;

    explicit ChannelOrder(const Mixer &m) {
        int64_t keys = m.key_heads * m.key_dim, values = m.value_heads * m.value_dim;
        if (m.kind == STATE_SPACE) value = 0, key = values, query = values + keys;
        else query = 0, key = keys, value = 2 * keys;
    }
};

// Where the inputs of a gated delta layer begin in a token's product.
struct DeltaInputs {
    const Mixer &m;
    int64_t keys = m.key_heads * m.key_dim, values = m.value_heads * m.value_dim, group = m.value_heads / m.key_heads;
    int64_t unit = 2 * m.key_dim + 2 * group * m.value_dim; // of a key head
    bool by_head = m.order == BY_KEY_HEAD;

    int64_t query(int64_t h) const { return h * (by_head ? unit : m.key_dim); }
    int64_t key(int64_t h) const { return by_head ? h * unit + m.key_dim : keys + h * m.key_dim; }
    int64_t value(int64_t j) const {
        return by_head ? j / group * unit + 2 * m.key_dim + j % group * m.value_dim : 2 * keys + j * m.value_dim;
    }
    int64_t gate(int64_t j) const { return value(j) + (by_head ? group * m.value_dim : values); }
    int64_t beta(int64_t j) const { return by_head ? j / group * 2 * group + j % group : j; }
    int64_t alpha(int64_t j) const { return beta(j) + (by_head ? group : m.value_heads); }
    int64_t output(int64_t j) const { return m.tiled ? j % group * m.key_heads + j / group : j; }
};

// The input of a layer's convolution at a position of a row, at most taps - 1 before the pass; null before the row's first token.
inline const float *input_at(const StateRows &states, const StateRow &row, const Mixer &m, const float *inputs, int64_t position) {
    if (position < 0) return nullptr;
    if (position >= row.length) return inputs + (row.first + position - row.length) * channels_of(m);
    if (position >= row.from) return row.ring + position % states.slots * states.entry_size + m.entry;
    return row.before + (position - row.base + states.tail) * states.entry_size + m.entry;
}

inline float number(const Vector &kept, int64_t i) {
    return kept.is_bf16 ? read(static_cast<const bf16 *>(kept.values)[i]) : static_cast<const float *>(kept.values)[i];
}

// out [N, channels] = the causal convolution of channels [begin, begin + count) of each row, then then(sums of a token).
template <class F>
inline void convolve(const StateRows &states, const Mixer &m, const Mixing &at, int64_t begin, int64_t count, float *out, const F &then) {
    static thread_local std::vector<float> kept;
    kept.resize((m.taps + 1) * count);
    float *weights = kept.data(), *bias = weights + m.taps * count;
    for (int64_t c = 0; c < count; c++) {
        for (int64_t j = 0; j < m.taps; j++) weights[j * count + c] = number(m.convolution, (begin + c) * m.taps + j);
        bias[c] = m.bias.values == nullptr ? 0.0f : number(m.bias, begin + c);
    }
    int64_t channels = channels_of(m);
    for (int64_t r = 0; r < states.count; r++) {
        const StateRow &row = states.rows[r];
        for (int64_t i = 0; i < row.count; i++) {
            float *sum = out + (row.first + i) * channels + begin;
            std::memcpy(sum, bias, count * sizeof(float));
            for (int64_t j = 0; j < m.taps; j++) {
                const float *x = input_at(states, row, m, at.inputs.data(), row.length + i - (m.taps - 1) + j), *w = weights + j * count;
                if (x == nullptr) continue;
                x += begin;
#pragma omp simd
                for (int64_t c = 0; c < count; c++) sum[c] += w[c] * x[c];
            }
            then(sum);
        }
    }
}

inline void apply_silu(float *x, int64_t width) {
#pragma omp simd
    for (int64_t i = 0; i < width; i++) x[i] = x[i] / (1.0f + exponential(-x[i]));
}

// Divides x by its length, and multiplies it by `scale`.
inline void to_unit_length(float *x, int64_t width, float scale) {
    float sum = 0.0f;
#pragma omp simd reduction(+ : sum)
    for (int64_t i = 0; i < width; i++) sum += x[i] * x[i];
    float by = scale / std::sqrt(sum + 1e-6f);
#pragma omp simd
    for (int64_t i = 0; i < width; i++) x[i] *= by;
}

constexpr int STATE_VECTORS = static_cast<int>(COLUMNS / LANES);
constexpr int PARTIAL = LANES >= 16 ? 4 : 2; // sums of a column, each over every PARTIAL-th row
constexpr int UPDATED = LANES >= 16 ? 2 : 1; // the same where rows are updated, which takes more registers

// out [COLUMNS] = x [depth] times a block of columns of a state, [depth, COLUMNS].
inline void read_state(const float *state, const float *x, int64_t depth, float *out) {
    Floats sums[PARTIAL][STATE_VECTORS] = {};
    int64_t i = 0;
    for (; i + PARTIAL <= depth; i += PARTIAL) {
#pragma GCC unroll 4
        for (int p = 0; p < PARTIAL; p++) {
#pragma GCC unroll 8
            for (int v = 0; v < STATE_VECTORS; v++) sums[p][v] += load<Floats>(state + (i + p) * COLUMNS + v * LANES) * x[i + p];
        }
    }
    for (int p = 0; i < depth; i++, p++) {
        for (int v = 0; v < STATE_VECTORS; v++) sums[p][v] += load<Floats>(state + i * COLUMNS + v * LANES) * x[i];
    }
    for (int v = 0; v < STATE_VECTORS; v++) {
        for (int p = 1; p < PARTIAL; p++) sums[0][v] += sums[p][v];
        store(out + v * LANES, sums[0][v]);
    }
}

// state = decay * state + key (outer product) written, and out [COLUMNS] = query [depth] times the result. Not inlined, so that updates
// have the same bits when they are made again.
[[gnu::noinline]] inline void update_state(float *state, const float *key, const float *written, float decay, const float *query,
                                           int64_t depth, float *out) {
    Floats value[STATE_VECTORS], sums[UPDATED][STATE_VECTORS] = {};
    for (int v = 0; v < STATE_VECTORS; v++) value[v] = load<Floats>(written + v * LANES);
    auto update = [&](int64_t i, int p) {
#pragma GCC unroll 8
        for (int v = 0; v < STATE_VECTORS; v++) {
            float *place = state + i * COLUMNS + v * LANES;
            Floats one = load<Floats>(place) * decay + value[v] * key[i];
            store(place, one);
            sums[p][v] += one * query[i];
        }
    };
    int64_t i = 0;
    for (; i + UPDATED <= depth; i += UPDATED) {
#pragma GCC unroll 4
        for (int p = 0; p < UPDATED; p++) update(i + p, p);
    }
    for (int p = 0; i < depth; i++, p++) update(i, p);
    for (int v = 0; v < STATE_VECTORS; v++) {
        for (int p = 1; p < UPDATED; p++) sums[0][v] += sums[p][v];
        store(out + v * LANES, sums[0][v]);
    }
}

// Columns [begin, begin + count) of a value head of a row, and their block of the state.
struct Head {
    const StateRows &states;
    const StateRow &row;
    const Mixer &m;
    int64_t value, begin, count, state;

    Head(const StateRows &all, const StateRow &one, const Mixer &mixer, int64_t head, int64_t block)
        : states(all), row(one), m(mixer), value(head), begin(block * COLUMNS), count(std::min(COLUMNS, mixer.value_dim - begin)),
          state(mixer.state + (head * blocks_of(mixer) + block) * mixer.key_dim * COLUMNS) {}

    int64_t key() const { return value / (m.value_heads / m.key_heads); }

    // Makes the updates of positions [from, to) again, whose entries are in the ring.
    void repeat(float *block, int64_t from, int64_t to) const {
        float written[COLUMNS] = {}, unread[COLUMNS];
        for (int64_t p = from; p < to; p++) {
            const float *entry = row.ring + p % states.slots * states.entry_size + m.entry, *keys = entry + channels_of(m);
            const float *values = keys + m.key_heads * m.key_dim, *decays = values + m.value_heads * m.value_dim;
            std::memcpy(written, values + value * m.value_dim + begin, count * sizeof(float));
            const float *own = keys + key() * m.key_dim;
            update_state(block, own, written, decays[value], own, m.key_dim, unread);
        }
    }

    // Brings the state at the base to `next`, and the state at the end to the row's length.
    void begin_pass() const {
        int64_t size = m.key_dim * COLUMNS;
        float *base = row.at_base + state, *end = row.at_end + state;
        if (row.length == row.end && row.next == row.length) {
            if (row.next > row.base) std::memcpy(base, end, size * sizeof(float));
        } else {
            repeat(base, row.base, row.next);
        }
        if (row.length != row.end) std::memcpy(end, base, size * sizeof(float));
    }

    void process(Mixing &at) const {
        float *block = row.at_end + state, seen[COLUMNS] = {}, written[COLUMNS] = {};
        int64_t channels = channels_of(m), width = m.value_heads * m.value_dim;
        bool reads = m.kind == GATED_DELTA;
        float skip = reads ? 0.0f : at.skips[value];
        ChannelOrder in(m);
        for (int64_t n = row.first; n < row.first + row.count; n++) {
            const float *mixed = at.mixed.data() + n * channels, *values = mixed + in.value + value * m.value_dim + begin;
            const float *query = mixed + in.query + key() * m.key_dim, *own = mixed + in.key + key() * m.key_dim;
            float decay = at.decays[n * m.value_heads + value], factor = at.factors[n * m.value_heads + value];
            if (reads) read_state(block, own, m.key_dim, seen);
            for (int64_t c = 0; c < count; c++) written[c] = factor * (reads ? values[c] - decay * seen[c] : values[c]);
            update_state(block, own, written, decay, query, m.key_dim, seen);
            for (int64_t c = 0; c < count && !reads; c++) seen[c] += skip * values[c];
            std::memcpy(at.written.data() + n * width + value * m.value_dim + begin, written, count * sizeof(float));
            std::memcpy(at.out.data() + n * width + value * m.value_dim + begin, seen, count * sizeof(float));
        }
    }
};

// Copies the inputs of the convolutions before the next base, then writes the entries of a row's last tokens.
inline void keep_entries(const StateRows &states, const StateRow &row, const Mixer &m, const Mixing &at, std::vector<float> &room) {
    int64_t channels = channels_of(m), keys = m.key_heads * m.key_dim, width = m.value_heads * m.value_dim;
    if (row.next != row.base) {
        room.assign(states.tail * channels, 0.0f);
        for (int64_t i = states.tail - (m.taps - 1); i < states.tail; i++) {
            const float *x = input_at(states, row, m, at.inputs.data(), row.next - states.tail + i);
            if (x != nullptr) std::memcpy(room.data() + i * channels, x, channels * sizeof(float));
        }
        for (int64_t i = 0; i < states.tail; i++) {
            std::memcpy(row.before + i * states.entry_size + m.entry, room.data() + i * channels, channels * sizeof(float));
        }
    }
    for (int64_t i = std::max<int64_t>(0, row.count - states.slots); i < row.count; i++) {
        float *entry = row.ring + (row.length + i) % states.slots * states.entry_size + m.entry;
        int64_t n = row.first + i;
        std::memcpy(entry, at.inputs.data() + n * channels, channels * sizeof(float));
        if (!has_state(m)) continue;
        std::memcpy(entry + channels, at.mixed.data() + n * channels + ChannelOrder(m).key, keys * sizeof(float));
        std::memcpy(entry + channels + keys, at.written.data() + n * width, width * sizeof(float));
        std::memcpy(entry + channels + keys + width, at.decays.data() + n * m.value_heads, m.value_heads * sizeof(float));
    }
}

inline float softplus(float x) { return x > 20.0f ? x : std::log1p(std::exp(x)); }

inline void widen(const Vector &kept, std::vector<float> &out) {
    out.resize(kept.size);
    Norms::widened(kept, out.data());
}

// Makes room for the numbers of each token and head.
inline void reserve_heads(const Mixer &m, int64_t tokens, Mixing &at) {
    int64_t heads = m.value_heads, width = heads * m.value_dim;
    at.mixed.resize(tokens * channels_of(m)), at.decays.resize(tokens * heads), at.factors.resize(tokens * heads);
    at.written.resize(tokens * width), at.out.resize(tokens * width);
    widen(m.decays, at.rates), widen(m.steps, at.steps), widen(m.norm, at.norm), widen(m.skips, at.skips);
    for (float &rate : at.rates) rate = std::exp(rate);
}

inline void process_heads(const Mixer &m, const StateRows &states, Mixing &at, int threads) {
    int64_t heads = m.value_heads, blocks = blocks_of(m);
    each(states.count * heads * blocks, threads, [&](int64_t task) {
        Head head(states, states.rows[task / (heads * blocks)], m, task / blocks % heads, task % blocks);
        head.begin_pass();
        head.process(at);
    });
}

inline void mix_by_delta(const Mixer &m, const StateRows &states, const float *x, const float *joint, int64_t tokens, float *out, Mixing &at,
                         int threads) {
    DeltaInputs in{m};
    int64_t channels = channels_of(m), width = inputs_of(m), heads = m.value_heads, dim = m.value_dim;
    reserve_heads(m, tokens, at);
    at.side.resize(tokens * 2 * heads);
    multiply(m.side, x, m.side.depth, tokens, at.side.data(), threads);
    each_token(tokens, threads, [&](int64_t n) {
        const float *own = joint + n * width, *side = at.side.data() + n * 2 * heads;
        float *to = at.inputs.data() + n * channels;
        for (int64_t h = 0; h < m.key_heads; h++) {
            std::memcpy(to + h * m.key_dim, own + in.query(h), m.key_dim * sizeof(float));
            std::memcpy(to + in.keys + h * m.key_dim, own + in.key(h), m.key_dim * sizeof(float));
        }
        for (int64_t j = 0; j < heads; j++) {
            std::memcpy(to + 2 * in.keys + j * dim, own + in.value(j), dim * sizeof(float));
            at.decays[n * heads + j] = std::exp(-at.rates[j] * softplus(side[in.alpha(j)] + at.steps[j]));
            at.factors[n * heads + j] = 1.0f / (1.0f + std::exp(-side[in.beta(j)]));
        }
    });
    each(2 * m.key_heads + heads, threads, [&](int64_t head) {
        bool is_value = head >= 2 * m.key_heads;
        int64_t begin = is_value ? 2 * in.keys + (head - 2 * m.key_heads) * dim : head * m.key_dim, count = is_value ? dim : m.key_dim;
        float scale = head < m.key_heads ? 1.0f / std::sqrt(static_cast<float>(m.key_dim)) : 1.0f;
        convolve(states, m, at, begin, count, at.mixed.data(), [=](float *some) {
            apply_silu(some, count);
            if (!is_value) to_unit_length(some, count, scale);
        });
    });
    process_heads(m, states, at, threads);
    each_token(tokens, threads, [&](int64_t n) {
        for (int64_t j = 0; j < heads; j++) {
            const float *own = at.out.data() + (n * heads + j) * dim, *gate = joint + n * width + in.gate(j);
            float *to = out + (n * heads + in.output(j)) * dim, unit = 1.0f / std::sqrt(mean_square(own, dim) + m.eps);
#pragma omp simd
            for (int64_t i = 0; i < dim; i++) to[i] = own[i] * unit * at.norm[i] * (gate[i] / (1.0f + exponential(-gate[i])));
        }
    });
}

// Dao and Gu 2024, Transformers are SSMs: state = decay state + (step x) B^T, output = state C + skip x, then gated, then normalized.
inline void mix_by_state_space(const Mixer &m, const StateRows &states, const float *joint, int64_t tokens, float *out, Mixing &at,
                               int threads) {
    int64_t channels = channels_of(m), heads = m.value_heads, values = heads * m.value_dim, width = inputs_of(m);
    int64_t group = values / m.key_heads;
    reserve_heads(m, tokens, at);
    each_token(tokens, threads, [&](int64_t n) {
        const float *own = joint + n * width, *steps = own + values + channels;
        std::memcpy(at.inputs.data() + n * channels, own + values, channels * sizeof(float));
        for (int64_t j = 0; j < heads; j++) {
            float step = softplus(steps[j] + at.steps[j]);
            at.decays[n * heads + j] = std::exp(-at.rates[j] * step);
            at.factors[n * heads + j] = step;
        }
    });
    each((channels + CHANNELS - 1) / CHANNELS, threads, [&](int64_t part) {
        int64_t count = std::min(CHANNELS, channels - part * CHANNELS);
        convolve(states, m, at, part * CHANNELS, count, at.mixed.data(), [=](float *some) { apply_silu(some, count); });
    });
    process_heads(m, states, at, threads);
    each_token(tokens, threads, [&](int64_t n) {
        const float *own = at.out.data() + n * values, *gate = joint + n * width;
        float *to = out + n * values;
#pragma omp simd
        for (int64_t i = 0; i < values; i++) to[i] = own[i] * (gate[i] / (1.0f + exponential(-gate[i])));
        for (int64_t g = 0; g < values; g += group) {
            float unit = 1.0f / std::sqrt(mean_square(to + g, group) + m.eps);
#pragma omp simd
            for (int64_t i = g; i < g + group; i++) to[i] = to[i] * unit * at.norm[i];
        }
    });
}

inline void mix_by_convolution(const Mixer &m, const StateRows &states, const float *joint, int64_t tokens, float *out, Mixing &at, int threads) {
    int64_t width = m.value_dim;
    each_token(tokens, threads, [&](int64_t n) {
        const float *first = joint + n * 3 * width, *x = first + 2 * width;
        float *to = at.inputs.data() + n * width;
#pragma omp simd
        for (int64_t i = 0; i < width; i++) to[i] = first[i] * x[i];
    });
    each((width + CHANNELS - 1) / CHANNELS, threads, [&](int64_t part) {
        convolve(states, m, at, part * CHANNELS, std::min(CHANNELS, width - part * CHANNELS), out, [](float *) {});
    });
    each_token(tokens, threads, [&](int64_t n) {
        const float *gate = joint + n * 3 * width + width;
        float *to = out + n * width;
#pragma omp simd
        for (int64_t i = 0; i < width; i++) to[i] *= gate[i];
    });
}

// out [N, outputs] = a layer's mixture of the tokens of each row, whose states go on. x: [N, hidden], its input; joint: [N, inputs].
inline void mix(const Mixer &m, const StateRows &states, const float *x, const float *joint, int64_t tokens, float *out, int threads) {
    static thread_local Mixing kept;
    Mixing &at = kept; // the caller's, not a worker's
    at.inputs.resize(tokens * channels_of(m));
    if (m.kind == GATED_DELTA) mix_by_delta(m, states, x, joint, tokens, out, at, threads);
    else if (m.kind == STATE_SPACE) mix_by_state_space(m, states, joint, tokens, out, at, threads);
    else mix_by_convolution(m, states, joint, tokens, out, at, threads);
    for (int64_t r = 0; r < states.count; r++) keep_entries(states, states.rows[r], m, at, at.tails);
}

// Multiplies the heads' outputs by the sigmoids of their gates, which follow each query in the joint product.
inline void gate_heads(const Attention &a, const float *joint, float *out, int threads) {
    int64_t width = 2 * (a.queries + a.keys) * a.dim;
    each_token(a.tokens, threads, [&](int64_t n) {
        for (int64_t h = 0; h < a.queries; h++) {
            const float *gate = joint + n * width + (2 * h + 1) * a.dim;
            float *to = out + (n * a.queries + h) * a.dim;
#pragma omp simd
            for (int64_t i = 0; i < a.dim; i++) to[i] = to[i] / (1.0f + exponential(-gate[i]));
        }
    });
}

} // namespace foresay
