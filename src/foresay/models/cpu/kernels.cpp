// Entry points: a forward pass over a Llama-like decoder's layers on a CPU, and single matrix products.

#include "attention.h"
#include "blocks.h"
#include "checks.h"
#include "experts.h"
#include "multiply.h"

#include <cstdio>
#include <new>
#include <pthread.h>

namespace foresay {

static Pool *threads_of_this_process = nullptr;

Pool &pool() {
    static const bool ready = [] {
        threads_of_this_process = new Pool;
        // a forked child process has none of its parent's threads
        pthread_atfork(nullptr, nullptr, [] { threads_of_this_process = new Pool; });
        return true;
    }();
    (void)ready;
    return *threads_of_this_process;
}

// A norm's weight in the model's own memory.
struct Vector {
    const void *values; // null without a norm
    int64_t size, is_bf16, from_one;
};

struct Layer {
    Product qkv, output, gate_up, down;
    Vector before_attention, after_attention, before_mlp, after_mlp, query_norm, key_norm;
    Attention attention; // fields that are the same in all passes
    int64_t turn;        // index of its cosines and sines; -1 for none
    const Experts *experts; // instead of gate_up and down; null for none
};

// Weights of a layer's norms as float32 factors.
struct Norms {
    const float *before_attention, *after_attention, *before_mlp, *after_mlp, *query_norm, *key_norm;
    std::vector<float> room;

    void read_from(const Layer &layer) {
        const Vector *const kept[] = {&layer.before_attention, &layer.after_attention, &layer.before_mlp, &layer.after_mlp,
                                      &layer.query_norm, &layer.key_norm};
        const float **const found[] = {&before_attention, &after_attention, &before_mlp, &after_mlp, &query_norm, &key_norm};
        int64_t size = 0, at = 0;
        for (const Vector *one : kept) size += one->size;
        room.resize(size);
        for (int i = 0; i < 6; i++) {
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
    int64_t layers, hidden, inner, activation;
    float eps, residual_scale;
    Vector last_norm;
    const Layer *layer;
    Vector beside[2]; // norms of the two vectors that the first layer reads; null if it reads x normalized
    int64_t from_beside; // nonzero if x starts as the second of these vectors, normalized
};

struct Pass {
    int64_t tokens, columns, threads, cache_kind, turns, store_rows, store_layers; // cache_kind: see CacheKind
    const int64_t *rows, *slots, *starts, *positions;
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
};

template <class T>
void attend(const Attention &a, const float *joint, float *queries, float *out, int threads) {
    each_token(a.tokens, threads, [&](int64_t n) { place<T>(a, joint, queries, n); });
    static thread_local std::vector<Span> found;
    spans_of(a, found);
    const std::vector<Span> &spans = found; // the caller's vector, not a worker's
    each(static_cast<int64_t>(spans.size()) * a.keys, threads, [&, list = spans.data()](int64_t task) {
        gather<T>(a, queries, out, list[task / a.keys], task % a.keys);
    });
}

enum CacheKind { FLOAT32_CACHE = 0, BFLOAT16_CACHE = 1, INT8_CACHE = 2 };

void attend(const Attention &a, const float *joint, float *queries, float *out, int64_t kind, int threads) {
    if (kind == BFLOAT16_CACHE) return attend<bf16>(a, joint, queries, out, threads);
    if (kind == INT8_CACHE) return attend<int8_t>(a, joint, queries, out, threads);
    return attend<float>(a, joint, queries, out, threads);
}

inline void check_cache(int64_t kind) { require(kind >= FLOAT32_CACHE && kind <= INT8_CACHE, "cache", kind, "in [0, 2]"); }

Attention at_layer(const Layer &layer, const Norms &norms, const Pass &pass, int64_t index) {
    Attention a = layer.attention;
    a.query_norm = norms.query_norm, a.key_norm = norms.key_norm;
    a.tokens = pass.tokens, a.columns = pass.columns;
    a.rows = pass.rows, a.slots = pass.slots, a.starts = pass.starts, a.positions = pass.positions, a.ancestors = pass.ancestors;
    a.layer = index, a.store_rows = pass.store_rows, a.blocks = pass.blocks, a.capacities = pass.capacities;
    if (layer.turn >= 0) {
        a.cosines = pass.cosines[layer.turn], a.sines = pass.sines[layer.turn], a.rotated = pass.rotated[layer.turn];
    }
    return a;
}

// Checks of a model and a pass; see checks.h.
inline void check_norm(const char *name, const Vector &v, int64_t width) {
    require(v.size == (v.values == nullptr ? 0 : width), name, v.size, "the size of the normalized vector");
}

inline void check(const Layer &layer, int64_t hidden, int64_t inner, int64_t read) {
    const Attention &a = layer.attention;
    check_heads(a);
    int64_t q = a.queries * a.dim, k = a.keys * a.dim;
    check_shape("qkv", layer.qkv, q + 2 * k, read);
    check_shape("output", layer.output, hidden, q);
    if (layer.experts == nullptr) {
        check_shape("gate_up", layer.gate_up, 2 * inner, hidden);
        check_shape("down", layer.down, hidden, inner);
    } else {
        check(*layer.experts, hidden);
    }
    for (const Vector *one : {&layer.before_attention, &layer.after_attention, &layer.before_mlp, &layer.after_mlp}) {
        check_norm("norm", *one, hidden);
    }
    check_norm("query_norm", layer.query_norm, a.wide ? q : a.dim);
    check_norm("key_norm", layer.key_norm, a.wide ? k : a.dim);
}

inline void check(const Model &model) {
    require(model.layers > 0 && model.layers <= MOST_LAYERS, "layers", model.layers, "in [1, 2^16]");
    check_width("hidden", model.hidden);
    check_width("inner", model.inner);
    require(model.activation >= SILU && model.activation <= GELU, "activation", model.activation, "in [0, 2]");
    check_pointer("last_norm", model.last_norm.values);
    check_norm("last_norm", model.last_norm, model.hidden);
    bool two = model.beside[0].values != nullptr;
    for (const Vector &one : model.beside) {
        check_norm("beside", one, model.hidden);
        require((one.values != nullptr) == two, "beside", one.size, "given for both vectors or for neither");
    }
    for (int64_t i = 0; i < model.layers; i++) {
        check(model.layer[i], model.hidden, model.inner, i == 0 && two ? 2 * model.hidden : model.hidden);
        const Attention &a = model.layer[i].attention, &first = model.layer[0].attention;
        require(a.keys == first.keys && a.dim == first.dim, "keys", a.keys, "the same in all layers, as dim");
    }
}

inline void check(const Model &model, const Pass &pass) {
    check_threads(pass.threads);
    check_cache(pass.cache_kind);
    require((pass.read != nullptr) == (model.beside[0].values != nullptr), "read", pass.read != nullptr, "given if and only if its norms are");
    require(pass.turns >= 0 && pass.turns <= MOST_LAYERS, "turns", pass.turns, "in [0, 2^16]");
    check_pointer("x", pass.x);
    check_pointer("normed", pass.normed);
    const Norms none{};
    for (int64_t i = 0; i < model.layers; i++) {
        int64_t turn = model.layer[i].turn;
        require(turn >= -1 && turn < pass.turns, "turn", turn, "in [-1, turns)");
        Attention a = at_layer(model.layer[i], none, pass, i);
        check_heads(a);
        check_store(a, pass.store_layers);
        if (i == 0) check_tokens(a);
    }
}

// Input of the first layer instead of x normalized, [N, 2 H]: two vectors, each normalized by its own weights.
const float *beside(const Model &model, const Pass &pass, std::vector<float> &room) {
    int64_t hidden = model.hidden;
    room.resize((pass.tokens * 2 + 2) * hidden);
    float *out = room.data(), *weights[2] = {out + pass.tokens * 2 * hidden, out + (pass.tokens * 2 + 1) * hidden};
    for (int part = 0; part < 2; part++) Norms::widened(model.beside[part], weights[part]);
    each_token(pass.tokens, static_cast<int>(pass.threads), [&](int64_t n) {
        for (int64_t part = 0; part < 2; part++) {
            float *read = const_cast<float *>(pass.read) + (2 * n + part) * hidden; // read only: nothing is added to it
            add_norm(read, nullptr, nullptr, 1.0f, weights[part], out + (2 * n + part) * hidden, hidden, model.eps);
        }
        if (model.from_beside) std::memcpy(pass.x + n * hidden, out + (2 * n + 1) * hidden, hidden * sizeof(float));
    });
    return out;
}

void run(const Model &model, const Pass &pass) {
    int64_t tokens = pass.tokens, hidden = model.hidden, wide = 2 * model.inner, heads = 0;
    int threads = static_cast<int>(pass.threads);
    for (int64_t i = 0; i < model.layers; i++) {
        if (all_outputs(model.layer[i].qkv) > wide) wide = all_outputs(model.layer[i].qkv);
        if (model.layer[i].output.depth > heads) heads = model.layer[i].output.depth;
    }
    static thread_local std::vector<float> room;
    room.resize(tokens * (wide + 2 * heads + model.inner + hidden));
    float *joint = room.data(), *queries = joint + tokens * wide, *seen = queries + tokens * heads;
    float *gated = seen + tokens * heads, *more = gated + tokens * model.inner, *normed = pass.normed;
    auto norm = [&](const float *added, const float *after, const float *before) {
        each_token(tokens, threads, [&](int64_t n) {
            add_norm(pass.x + n * hidden, added == nullptr ? nullptr : added + n * hidden, after, model.residual_scale, before,
                     normed + n * hidden, hidden, model.eps);
        });
    };
    static thread_local Norms of_layers[2];
    static thread_local std::vector<float> last;
    last.resize(hidden);
    static thread_local std::vector<float> apart;
    const float *first = pass.read == nullptr ? normed : beside(model, pass, apart);
    of_layers[0].read_from(model.layer[0]);
    norm(nullptr, nullptr, of_layers[0].before_attention);
    for (int64_t i = 0; i < model.layers; i++) {
        const Layer &layer = model.layer[i];
        const Norms &norms = of_layers[i % 2];
        const float *next = nullptr;
        if (i + 1 < model.layers) {
            of_layers[(i + 1) % 2].read_from(model.layer[i + 1]);
            next = of_layers[(i + 1) % 2].before_attention;
        } else {
            next = Norms::widened(model.last_norm, last.data());
        }
        if (pass.states[i] != nullptr) std::memcpy(pass.states[i], pass.x, tokens * hidden * sizeof(float));
        multiply(layer.qkv, i == 0 ? first : normed, layer.qkv.depth, tokens, joint, threads);
        attend(at_layer(layer, norms, pass, i), joint, queries, seen, pass.cache_kind, threads);
        multiply(layer.output, seen, layer.output.depth, tokens, more, threads);
        norm(more, norms.after_attention, norms.before_mlp);
        if (layer.experts != nullptr) {
            multiply_experts(*layer.experts, normed, hidden, tokens, model.activation, more, threads);
        } else {
            multiply(layer.gate_up, normed, hidden, tokens, joint, threads);
            each_token(tokens, threads, [&](int64_t n) {
                gate(joint + n * 2 * model.inner, gated + n * model.inner, model.inner, model.activation);
            });
            multiply(layer.down, gated, model.inner, tokens, more, threads);
        }
        norm(more, norms.after_mlp, next);
    }
}

} // namespace foresay

using namespace foresay;

// The return value of an entry point; foresay_message returns the details.
enum Status : int64_t { DONE = 0, OUT_OF_MEMORY = 1, BAD_SIZE = 2, FAILED = 3 };

static thread_local char message[256];

static int64_t failed(Status status, const char *what) {
    std::snprintf(message, sizeof message, "%s", what);
    return status;
}

// Returns the status of the exception being handled.
static int64_t caught() noexcept {
    try {
        throw;
    } catch (const std::bad_alloc &error) {
        return failed(OUT_OF_MEMORY, error.what());
    } catch (const std::length_error &error) {
        return failed(OUT_OF_MEMORY, error.what());
    } catch (const std::invalid_argument &error) {
        return failed(BAD_SIZE, error.what());
    } catch (const std::exception &error) {
        return failed(FAILED, error.what());
    } catch (...) {
        return failed(FAILED, "an unknown exception");
    }
}

// Runs the body of an entry point and converts any exception, from any thread, to a status.
template <class F> int64_t guarded(const F &body) noexcept {
    try {
        body();
        return DONE;
    } catch (...) {
        return caught();
    }
}

// The message of the last failed entry point on this thread.
extern "C" const char *foresay_message() { return message; }

// Checks that the sizes of a model are consistent.
extern "C" int64_t foresay_check(const Model *model) {
    return guarded([&] { check(*model); });
}

extern "C" int64_t foresay_pass(const Model *model, const Pass *pass) {
    return guarded([&] {
        check(*model);
        check(*model, *pass);
        run(*model, *pass);
    });
}

// The same with x and out in bfloat16.
static void multiply_bf16(const Product &p, const bf16 *x, bf16 *out, int64_t rows, int threads) {
    std::vector<float> wide(rows * p.depth), product(rows * all_outputs(p));
    for (size_t i = 0; i < wide.size(); i++) wide[i] = read(x[i]);
    multiply(p, wide.data(), p.depth, rows, product.data(), threads);
    for (size_t i = 0; i < product.size(); i++) write(out[i], product[i]);
}

// x [rows, depth] and out [rows, all outputs], float32 or both bfloat16
extern "C" int64_t foresay_multiply(const Product *p, const void *x, void *out, int64_t rows, int64_t is_bf16, int64_t threads) {
    return guarded([&] {
        check(*p);
        check_rows("rows", rows);
        int workers = check_threads(threads);
        if (is_bf16) return multiply_bf16(*p, static_cast<const bf16 *>(x), static_cast<bf16 *>(out), rows, workers);
        multiply(*p, static_cast<const float *>(x), p->depth, rows, static_cast<float *>(out), workers);
    });
}

// Packs the blocks of `outputs` rows into levels and scales of panels, which must be zero; see quantized.h
extern "C" int64_t foresay_pack(int64_t kind, const uint8_t *const *rows, int64_t outputs, int64_t depth, uint8_t *levels, uint8_t *scales,
                                int64_t threads) {
    return guarded([&] {
        check_pack(kind, rows, outputs, depth);
        const BlockLayout &layout = LAYOUTS[kind];
        each((outputs + PANEL - 1) / PANEL, check_threads(threads), [&](int64_t panel) {
            int64_t first = panel * PANEL, count = outputs - first < PANEL ? outputs - first : PANEL;
            pack_panel(kind, rows + first, count, depth, levels + panel * level_bytes(layout.bits, depth),
                       scales + panel * scale_bytes(layout.scaling, depth));
        });
    });
}

// out [count, depth] = rows of quantized weights, by their indices
extern "C" int64_t foresay_rows(const Product *p, const int64_t *ids, int64_t count, float *out) {
    return guarded([&] {
        check_part(*p);
        require(p->format == QUANTIZED, "format", p->format, "2, for quantized weights");
        check_rows("count", count);
        for (int64_t n = 0; n < count; n++) require(ids[n] >= 0 && ids[n] < p->outputs, "row", ids[n], "an output of the product");
        for (int64_t n = 0; n < count; n++) read_row(*p, ids[n], out + n * p->depth);
    });
}

// Sizes of the structs that Python passes, in the order of structs.py: Product, Experts, Attention, Vector, Layer, Model, Pass.
extern "C" int64_t foresay_struct_size(int64_t index) {
    constexpr size_t sizes[] = {sizeof(Product), sizeof(Experts), sizeof(Attention), sizeof(Vector), sizeof(Layer), sizeof(Model), sizeof(Pass)};
    return index >= 0 && index < 7 ? static_cast<int64_t>(sizes[index]) : 0;
}

// The instructions that the kernels were compiled for.
extern "C" const char *foresay_instructions() {
    return
#if defined(__AVX512F__)
        "AVX-512"
#elif defined(__AVX2__)
        "AVX2"
#elif defined(__ARM_NEON)
        "NEON"
#else
        "no vectors of more than 16 bytes"
#endif
#if defined(FORESAY_BYTE_DOTS)
        ", VNNI"
#elif defined(__ARM_FEATURE_DOTPROD)
        ", dot products"
#endif
#if defined(FORESAY_BF16_DOTS)
        ", BF16"
#endif
        ;
}

// 1 if products with bfloat16 weights and activations use instructions for them.
extern "C" int64_t foresay_bf16_dots() { return BF16_DOTS; }

// Entry points for tests of single parts.
extern "C" int64_t foresay_add_norm(float *x, const float *added, const float *after, float scale, const float *before, float *out,
                                    int64_t tokens, int64_t width, float eps) {
    return guarded([&] {
        check_rows("tokens", tokens);
        check_width("width", width);
        for (int64_t n = 0; n < tokens; n++) {
            add_norm(x + n * width, added == nullptr ? nullptr : added + n * width, after, scale, before, out + n * width, width, eps);
        }
    });
}

extern "C" int64_t foresay_gate(const float *joint, float *out, int64_t tokens, int64_t width, int64_t kind) {
    return guarded([&] {
        check_rows("tokens", tokens);
        check_width("width", width);
        require(kind >= SILU && kind <= GELU, "kind", kind, "in [0, 2]");
        for (int64_t n = 0; n < tokens; n++) gate(joint + 2 * n * width, out + n * width, width, kind);
    });
}

// Attention over a cache of one layer.
extern "C" int64_t foresay_attend(const Attention *a, const float *joint, float *queries, float *out, int64_t kind, int64_t threads) {
    return guarded([&] {
        check_heads(*a);
        check_store(*a, 1);
        check_tokens(*a);
        check_cache(kind);
        attend(*a, joint, queries, out, kind, check_threads(threads));
    });
}
