// The structs of a model and of a pass, and the checks of their sizes.

#pragma once

#include "checks.h"
#include "convolution.h"
#include "experts.h"

namespace foresay {

// A norm's weight in the model's own memory.
struct Vector {
    const void *values; // null without a norm
    int64_t size, is_bf16, from_one;
};

struct Mixer;
struct StateRows;
// After its feed-forward a layer adds norm(projection(activation(gate x) * input)), of an input of each token and layer (Gemma 4).
struct LayerInput {
    Product gate, projection;
    Vector norm;
    int64_t width, index; // of an input, and of this layer's among those of a token
};

// Experts next to a dense feed-forward (Gemma 4): the norms of what experts and the router read, of the experts' sum, and of the dense
// output, which are added.
struct ExpertNorms {
    Vector before, router, after, dense;
    Vector scales; // [experts] factors of their weights
    float factor;  // of what the router reads
};

struct Layer {
    Product qkv, output, gate_up, down;
    Vector before_attention, after_attention, before_mlp, after_mlp, query_norm, key_norm, sinks;
    Attention attention; // fields that are the same in all passes
    int64_t turn;        // index of its cosines and sines; -1 for none
    const Experts *experts; // instead of gate_up and down, or next to them; null for none
    int64_t causal;         // 0 if a token attends up to its end; see Attention
    const Convolution *attention_conv, *mlp_conv; // around both halves; null for none
    const Mixer *mixer;     // instead of attention, see states.h; null for attention
    const LayerInput *input; // null for none
    const ExpertNorms *expert_norms; // null unless experts are next to gate_up and down
    float scale;             // of its output
};

// A layer's vectors in float32: the factors of its norms, and its sinks.
struct Norms {
    const float *before_attention, *after_attention, *before_mlp, *after_mlp, *query_norm, *key_norm, *sinks;
    std::vector<float> room;

    void read_from(const Layer &layer) {
        const Vector *const kept[] = {&layer.before_attention, &layer.after_attention, &layer.before_mlp, &layer.after_mlp,
                                      &layer.query_norm, &layer.key_norm, &layer.sinks};
        const float **const found[] = {&before_attention, &after_attention, &before_mlp, &after_mlp, &query_norm, &key_norm, &sinks};
        int64_t size = 0, at = 0;
        for (const Vector *one : kept) size += one->size;
        room.resize(size);
        for (int i = 0; i < 7; i++) {
            *found[i] = kept[i]->values == nullptr ? nullptr : widened(*kept[i], room.data() + at);
            at += kept[i]->size;
        }
    }

    static const float *widened(const Vector &kept, float *out) {
        for (int64_t i = 0; i < kept.size; i++) {
            float value = kept.is_bf16 ? read(static_cast<const bf16 *>(kept.values)[i]) : static_cast<const float *>(kept.values)[i];
            out[i] = kept.from_one ? 1.0f + value : value;
        }
        return out;
    }
};

struct Model {
    int64_t layers, hidden, inner;
    Gate gate;
    float eps, residual_scale;
    Vector last_norm;
    const Layer *layer;
    Vector input_norms[2]; // of the two vectors that the first layer reads; null if it reads x normalized
    int64_t second_is_residual; // nonzero if x starts as the second of these vectors, normalized
};

struct Pass {
    int64_t tokens, columns, threads, cache_kind, turns, store_rows, store_width; // cache_kind: see CacheKind
    const int64_t *rows, *slots, *starts, *positions, *ends; // ends: null for chains and trees
    const uint8_t *ancestors;
    const float *const *cosines; // for each turn, [N, rotated]
    const float *const *sines;
    const int64_t *rotated;
    void *const *blocks; // for each row of the cache; see Attention
    const int64_t *capacities;
    float *x;             // [N, H], overwritten
    float *normed;        // [N, H]
    float *const *states; // hidden states before each layer, [N, H]; null if not requested
    const float *read;    // [N, 2 H] input of the first layer before its norms; null for x normalized
    const StateRows *mixed; // states of the rows, see states.h; null for layers of attention alone
    const float *inputs;  // [N, input_width] inputs of the layers; null without
    int64_t input_width;
};

enum CacheKind { FLOAT32_CACHE = 0, BFLOAT16_CACHE = 1, INT8_CACHE = 2 };

inline void check_cache(int64_t kind) { require(kind >= FLOAT32_CACHE && kind <= INT8_CACHE, "cache", kind, "in [0, 2]"); }

inline Attention at_layer(const Layer &layer, const Norms &norms, const Pass &pass) {
    Attention a = layer.attention;
    a.query_norm = norms.query_norm, a.key_norm = norms.key_norm, a.sinks = norms.sinks;
    a.tokens = pass.tokens, a.columns = pass.columns;
    a.rows = pass.rows, a.slots = pass.slots, a.starts = pass.starts, a.positions = pass.positions, a.ancestors = pass.ancestors;
    a.ends = layer.causal ? nullptr : pass.ends;
    a.store_rows = pass.store_rows, a.blocks = pass.blocks, a.capacities = pass.capacities;
    if (layer.turn >= 0) {
        a.cosines = pass.cosines[layer.turn], a.sines = pass.sines[layer.turn], a.rotated = pass.rotated[layer.turn];
    }
    return a;
}

// Checks of a model and a pass; see checks.h.
inline void check_norm(const char *name, const Vector &v, int64_t width) {
    require(v.size == (v.values == nullptr ? 0 : width), name, v.size, "the size of the normalized vector");
}

// of a mixer; see states.h
inline void check(const Mixer &mixer, int64_t hidden);
inline int64_t inputs_of(const Mixer &mixer);
inline int64_t outputs_of(const Mixer &mixer);

inline void check_heads(const Layer &layer, int64_t hidden, int64_t read) {
    const Attention &a = layer.attention;
    check_heads(a);
    int64_t q = a.queries * a.dim, k = a.keys * a.dim;
    check_shape("qkv", layer.qkv, (a.gated ? 2 : 1) * q + own_keys(a), read);
    check_shape("output", layer.output, hidden, q);
    check_norm("query_norm", layer.query_norm, a.wide ? q : a.dim);
    check_norm("key_norm", layer.key_norm, a.wide ? k : a.dim);
    check_norm("sinks", layer.sinks, a.queries);
}

inline void check(const Layer &layer, int64_t hidden, int64_t inner, int64_t read) {
    if (layer.mixer == nullptr) {
        check_heads(layer, hidden, read);
    } else {
        check(*layer.mixer, hidden);
        check_shape("qkv", layer.qkv, inputs_of(*layer.mixer), read);
        check_shape("output", layer.output, hidden, outputs_of(*layer.mixer));
        for (const Vector *one : {&layer.query_norm, &layer.key_norm, &layer.sinks}) check_norm("norm of heads", *one, 0);
    }
    if (layer.experts == nullptr || layer.expert_norms != nullptr) {
        int64_t own = all_outputs(layer.gate_up) / 2;
        require(own > 0 && own <= inner, "inner", own, "at most that of the model");
        check_shape("gate_up", layer.gate_up, 2 * own, hidden);
        check_shape("down", layer.down, hidden, own);
    }
    if (layer.experts != nullptr) check(*layer.experts, hidden);
    if (const ExpertNorms *norms = layer.expert_norms) {
        check_pointer("experts", layer.experts);
        for (const Vector *one : {&norms->before, &norms->router, &norms->after, &norms->dense, &norms->scales}) {
            check_pointer("expert_norms", one->values);
            check_norm("expert_norms", *one, one == &norms->scales ? layer.experts->count : hidden);
        }
    }
    for (const Vector *one : {&layer.before_attention, &layer.after_attention, &layer.before_mlp, &layer.after_mlp}) {
        check_norm("norm", *one, hidden);
    }
    if (layer.input != nullptr) {
        check_width("width", layer.input->width);
        require(layer.input->index >= 0 && layer.input->index < MOST_LAYERS, "index", layer.input->index, "in [0, 2^16)");
        check_shape("gate", layer.input->gate, layer.input->width, hidden);
        check_shape("projection", layer.input->projection, hidden, layer.input->width);
        check_pointer("norm", layer.input->norm.values);
        check_norm("norm", layer.input->norm, hidden);
    }
    require(layer.causal == 0 || layer.causal == 1, "causal", layer.causal, "0 or 1");
    for (const Convolution *one : {layer.attention_conv, layer.mlp_conv}) {
        if (one != nullptr) check(*one, hidden);
    }
}

// The first layer of attention; null if there is none.
inline const Attention *attention_of(const Model &model) {
    for (int64_t i = 0; i < model.layers; i++) {
        if (model.layer[i].mixer == nullptr) return &model.layer[i].attention;
    }
    return nullptr;
}

inline void check(const Model &model) {
    require(model.layers > 0 && model.layers <= MOST_LAYERS, "layers", model.layers, "in [1, 2^16]");
    check_width("hidden", model.hidden);
    check_width("inner", model.inner);
    check(model.gate);
    check_pointer("last_norm", model.last_norm.values);
    check_norm("last_norm", model.last_norm, model.hidden);
    bool given = model.input_norms[0].values != nullptr;
    for (const Vector &one : model.input_norms) {
        check_norm("input_norms", one, model.hidden);
        require((one.values != nullptr) == given, "input_norms", one.size, "given for both vectors or for neither");
    }
    for (int64_t i = 0; i < model.layers; i++) {
        check(model.layer[i], model.hidden, model.inner, i == 0 && given ? 2 * model.hidden : model.hidden);
    }
    require(attention_of(model) != nullptr, "layers", model.layers, "some with attention");
}

inline void check_states(const Model &model, const Pass &pass);

inline void check(const Model &model, const Pass &pass) {
    check_threads(pass.threads);
    check_cache(pass.cache_kind);
    require((pass.read != nullptr) == (model.input_norms[0].values != nullptr), "read", pass.read != nullptr, "given if and only if its norms are");
    require(pass.turns >= 0 && pass.turns <= MOST_LAYERS, "turns", pass.turns, "in [0, 2^16]");
    check_pointer("x", pass.x);
    check_pointer("normed", pass.normed);
    const Norms none{};
    bool checked = false;
    for (int64_t i = 0; i < model.layers; i++) {
        if (const LayerInput *input = model.layer[i].input) {
            check_pointer("inputs", pass.inputs);
            require((input->index + 1) * input->width <= pass.input_width, "input_width", pass.input_width, "that of all inputs of a token");
        }
        if (model.layer[i].mixer != nullptr) continue;
        int64_t turn = model.layer[i].turn;
        require(turn >= -1 && turn < pass.turns, "turn", turn, "in [-1, turns)");
        Attention a = at_layer(model.layer[i], none, pass);
        check_heads(a);
        check_store(a, pass.store_width, pass.cache_kind == INT8_CACHE);
        if (!checked || a.ends != nullptr) check_tokens(a);
        checked = true;
    }
    check_states(model, pass);
}

} // namespace foresay
