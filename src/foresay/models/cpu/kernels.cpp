// Entry points: a forward pass over a Llama-like decoder's layers on a CPU, and single matrix products.

#include "attention.h"
#include "blocks.h"
#include "chain.h"
#include "model.h"
#include "multiply.h"
#include "recurrent.h"

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

void attend(const Attention &a, const float *joint, float *queries, float *out, int64_t kind, int threads) {
    if (kind == BFLOAT16_CACHE) return attend<bf16>(a, joint, queries, out, threads);
    if (kind == INT8_CACHE) return attend<int8_t>(a, joint, queries, out, threads);
    return attend<float>(a, joint, queries, out, threads);
}

// Input of the first layer instead of x normalized, [N, 2 H]: two vectors, each normalized by its own weights.
const float *normed_inputs(const Model &model, const Pass &pass, std::vector<float> &room) {
    int64_t hidden = model.hidden;
    room.resize((pass.tokens * 2 + 2) * hidden);
    float *out = room.data(), *weights[2] = {out + pass.tokens * 2 * hidden, out + (pass.tokens * 2 + 1) * hidden};
    for (int part = 0; part < 2; part++) Norms::widened(model.input_norms[part], weights[part]);
    each_token(pass.tokens, static_cast<int>(pass.threads), [&](int64_t n) {
        for (int64_t part = 0; part < 2; part++) {
            float *read = const_cast<float *>(pass.read) + (2 * n + part) * hidden; // read only: nothing is added to it
            add_norm(read, nullptr, nullptr, 1.0f, weights[part], out + (2 * n + part) * hidden, hidden, model.eps);
        }
        if (model.second_is_residual) std::memcpy(pass.x + n * hidden, out + (2 * n + 1) * hidden, hidden * sizeof(float));
    });
    return out;
}

// x [N, H] += norm(projection(activation(gate x) * input)). added [N, H]: room for the projection.
void add_input(const Model &model, const LayerInput &one, const Pass &pass, float *added) {
    static thread_local std::vector<float> kept_gates, kept_weight;
    int64_t tokens = pass.tokens, hidden = model.hidden, width = one.width;
    int threads = static_cast<int>(pass.threads);
    kept_gates.resize(tokens * 4 * width), kept_weight.resize(one.norm.size);
    float *gates = kept_gates.data(), *joint = gates + tokens * width, *gated = joint + tokens * 2 * width;
    const float *weight = Norms::widened(one.norm, kept_weight.data());
    multiply(one.gate, pass.x, hidden, tokens, gates, threads);
    each_token(tokens, threads, [&](int64_t n) {
        std::memcpy(joint + n * 2 * width, gates + n * width, width * sizeof(float));
        std::memcpy(joint + n * 2 * width + width, pass.inputs + n * pass.input_width + one.index * width, width * sizeof(float));
        apply(model.gate, joint + n * 2 * width, gated + n * width, width);
    });
    multiply(one.projection, gated, width, tokens, added, threads);
    each_token(tokens, threads, [&](int64_t n) {
        float *x = pass.x + n * hidden;
        add_norm(x, added + n * hidden, weight, 1.0f, nullptr, added + n * hidden, hidden, model.eps);
    });
}

// out [N, H], a dense feed-forward's output, becomes the sum of that and the output of experts, each normalized; see ExpertNorms.
void add_experts(const Model &model, const Layer &layer, const Pass &pass, float *out) {
    static thread_local std::vector<float> room;
    const ExpertNorms &own = *layer.expert_norms;
    int64_t tokens = pass.tokens, hidden = model.hidden;
    int threads = static_cast<int>(pass.threads);
    room.resize(3 * tokens * hidden + 4 * hidden + layer.experts->count);
    float *read = room.data(), *routed = read + tokens * hidden, *sums = routed + tokens * hidden, *weights = sums + tokens * hidden;
    const float *before = Norms::widened(own.before, weights), *after = Norms::widened(own.after, weights + 2 * hidden);
    const float *dense = Norms::widened(own.dense, weights + 3 * hidden), *scales = Norms::widened(own.scales, weights + 4 * hidden);
    float *router = weights + hidden;
    Norms::widened(own.router, router);
    for (int64_t i = 0; i < hidden; i++) router[i] *= own.factor;
    each_token(tokens, threads, [&](int64_t n) {
        float *x = pass.x + n * hidden;
        add_norm(x, nullptr, nullptr, 1.0f, before, read + n * hidden, hidden, model.eps);
        add_norm(x, nullptr, nullptr, 1.0f, router, routed + n * hidden, hidden, model.eps);
    });
    multiply_experts(*layer.experts, read, hidden, tokens, sums, threads, {routed, scales});
    each_token(tokens, threads, [&](int64_t n) {
        float *sum = read + n * hidden;
        std::memset(sum, 0, hidden * sizeof(float));
        add_norm(sum, out + n * hidden, dense, 1.0f, nullptr, routed + n * hidden, hidden, model.eps);
        add_norm(sum, sums + n * hidden, after, 1.0f, nullptr, out + n * hidden, hidden, model.eps);
    });
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
    const float *first = pass.read == nullptr ? normed : normed_inputs(model, pass, apart);
    static thread_local std::vector<float> of_taps, convolved;
    // a half's input, and its output in `more`, convolved if the layer has convolutions around it
    auto before = [&](const Convolution *c, const float *x) -> const float * {
        if (c == nullptr) return x;
        of_taps.resize(tokens * 2 * c->taps * c->groups), convolved.resize(2 * tokens * hidden);
        multiply(c->projection, x, hidden, tokens, of_taps.data(), threads);
        each_token(tokens, threads, [&, deltas = of_taps.data(), out = convolved.data()](int64_t n) {
            convolve(*c, 0, x, deltas, pass.rows, n, hidden, out);
        });
        return convolved.data();
    };
    auto after = [&](const Convolution *c) -> const float * {
        if (c == nullptr) return more;
        float *out = convolved.data() + tokens * hidden;
        each_token(tokens, threads, [&, deltas = of_taps.data()](int64_t n) { convolve(*c, 1, more, deltas, pass.rows, n, hidden, out); });
        return out;
    };
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
        const float *read_first = before(layer.attention_conv, i == 0 ? first : normed);
        multiply(layer.qkv, read_first, layer.qkv.depth, tokens, joint, threads);
        if (layer.mixer != nullptr) {
            mix(*layer.mixer, *pass.mixed, read_first, joint, tokens, seen, threads);
        } else {
            Attention at = at_layer(layer, norms, pass);
            attend(at, joint, queries, seen, pass.cache_kind, threads);
            if (at.gated) gate_heads(at, joint, seen, threads);
        }
        multiply(layer.output, seen, layer.output.depth, tokens, more, threads);
        norm(after(layer.attention_conv), norms.after_attention, norms.before_mlp);
        const float *read = before(layer.mlp_conv, normed);
        if (layer.experts != nullptr && layer.expert_norms == nullptr) {
            multiply_experts(*layer.experts, read, hidden, tokens, more, threads);
        } else {
            multiply(layer.gate_up, read, hidden, tokens, joint, threads);
            int64_t inner = layer.down.depth;
            each_token(tokens, threads, [&](int64_t n) { apply(model.gate, joint + n * 2 * inner, gated + n * inner, inner); });
            multiply(layer.down, gated, inner, tokens, more, threads);
            if (layer.expert_norms != nullptr) add_experts(model, layer, pass, more);
        }
        bool is_last = layer.input == nullptr && layer.scale == 1.0f; // of the changes of x
        norm(after(layer.mlp_conv), norms.after_mlp, is_last ? next : nullptr);
        if (is_last) continue;
        if (layer.input != nullptr) add_input(model, *layer.input, pass, more);
        each_token(tokens, threads, [&](int64_t n) {
            for (int64_t h = 0; h < hidden; h++) pass.x[n * hidden + h] *= layer.scale;
        });
        norm(nullptr, nullptr, next);
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

// Drafts tokens one after the other, `count` of them; see chain.h.
extern "C" int64_t foresay_chain(const Model *model, const Pass *pass, const Chain *chain, int64_t *count) {
    return guarded([&] {
        check(*model);
        check(*chain, *model, *pass);
        *count = draft(*model, *pass, *chain, [&](const Pass &one) { run(*model, one); });
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

// Packs the blocks of `outputs` rows into levels and scales of panels; see quantized.h
extern "C" int64_t foresay_pack(int64_t kind, const uint8_t *const *rows, int64_t outputs, int64_t depth, uint8_t *levels, uint8_t *scales,
                                int64_t threads) {
    return guarded([&] {
        check_pack(kind, rows, outputs, depth);
        const BlockLayout &layout = LAYOUTS[kind];
        each((outputs + PANEL - 1) / PANEL, check_threads(threads), [&](int64_t panel) {
            int64_t first = panel * PANEL, count = outputs - first < PANEL ? outputs - first : PANEL;
            int64_t level_size = level_bytes(layout.bits, depth), scale_size = scale_bytes(layout.scaling, depth);
            std::memset(levels + panel * level_size, 0, level_size);
            std::memset(scales + panel * scale_size, 0, scale_size);
            pack_panel(kind, rows + first, count, depth, levels + panel * level_size, scales + panel * scale_size);
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

// Sizes of the structs that Python passes, in the order of structs.py.
extern "C" int64_t foresay_struct_size(int64_t index) {
    constexpr int64_t sizes[] = {sizeof(Product), sizeof(Gate), sizeof(Experts), sizeof(ExpertNorms), sizeof(Convolution), sizeof(Attention), sizeof(Vector),
                                 sizeof(LayerInput), sizeof(Layer), sizeof(Model), sizeof(Pass), sizeof(Chain),
                                 sizeof(Mixer), sizeof(StateRow), sizeof(StateRows)};
    return index >= 0 && index < 15 ? sizes[index] : 0;
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
#if defined(__ARM_FEATURE_MATMUL_INT8)
        ", I8MM"
#endif
#if defined(FORESAY_BF16_DOTS)
        ", BF16"
#endif
        ;
}

// 1 if products use matrix instructions.
extern "C" int64_t foresay_tiles() { return tiles_allowed(); }

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

extern "C" int64_t foresay_gate(const Gate *gate, const float *joint, float *out, int64_t tokens, int64_t width) {
    return guarded([&] {
        check_rows("tokens", tokens);
        check_width("width", width);
        check(*gate);
        for (int64_t n = 0; n < tokens; n++) apply(*gate, joint + 2 * n * width, out + n * width, width);
    });
}

// Attention over a cache of one layer.
extern "C" int64_t foresay_attend(const Attention *a, const float *joint, float *queries, float *out, int64_t kind, int64_t threads) {
    return guarded([&] {
        check_heads(*a);
        check_store(*a, 2 * a->keys * (a->dim + (kind == INT8_CACHE ? 4 : 0)), kind == INT8_CACHE);
        check_tokens(*a);
        check_cache(kind);
        attend(*a, joint, queries, out, kind, check_threads(threads));
    });
}

// A layer's mixture of the tokens of each row, by states. x [tokens, hidden], joint [tokens, inputs], out [tokens, outputs]; see recurrent.h.
extern "C" int64_t foresay_mix(const Mixer *mixer, const StateRows *states, const float *x, const float *joint, float *out, int64_t tokens,
                               int64_t threads) {
    return guarded([&] {
        check_rows("tokens", tokens);
        check(*mixer, has_state(*mixer) ? mixer->side.depth : mixer->value_dim);
        check(*states, tokens);
        check(*mixer, *states);
        mix(*mixer, *states, x, joint, tokens, out, check_threads(threads));
    });
}
