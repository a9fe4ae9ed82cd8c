// Mixture of experts: instead of one feed-forward, each token passes through a few of many, which its router selects.
//
// A token's bits depend neither on other tokens nor on the number of threads: the rows of an expert are products of their own, and a
// token's experts are added in the order of their indices. Only the weights of selected experts are read.

#pragma once

#include "checks.h"
#include "layer.h"
#include "multiply.h"

namespace foresay {

struct Experts {
    int64_t count, active, inner, renormalized; // renormalized: nonzero if the weights of a token's experts add up to `scale`
    int64_t sigmoid;                            // nonzero for weights that are sigmoids of scores instead of their softmax
    int64_t groups, active_groups;              // experts are selected within some groups of consecutive ones; 1 for all
    int64_t shared_inner;
    Gate gate;
    Product router;                             // [count, hidden]
    const Product *gate_up, *down;              // [count] each, [2 * inner, hidden] and [hidden, inner]
    const Product *shared_gate_up, *shared_down; // of an expert that every token passes through; null for none
    const Product *shared_gate;                 // [1, hidden], whose sigmoid multiplies that expert's output; null for none
    const float *correction;                    // [count] is added to sigmoids for the selection alone; null for softmax
    float scale;                                // of the weights
};

inline void check_shape(const char *name, const Product &p, int64_t outputs, int64_t depth) {
    check(p);
    int64_t found = 0;
    for (const Product *part = &p; part != nullptr; part = part->next) found += part->outputs;
    require(found == outputs, name, found, "the width of the next input");
    require(p.depth == depth, name, p.depth, "the width of its input");
}

inline void check(const Gate &gate) {
    require(gate.kind >= SILU && gate.kind <= CLAMPED, "gate", gate.kind, "in [0, 3]");
    require(gate.kind != CLAMPED || gate.limit >= 0.0f, "limit", static_cast<int64_t>(gate.limit), "at least 0");
}

inline void check(const Experts &e, int64_t hidden) {
    check(e.gate);
    require(e.count > 0 && e.count <= MOST_EXPERTS, "experts", e.count, "in [1, 2^16]");
    require(e.active > 0 && e.active <= e.count, "active", e.active, "at most the number of experts");
    check_width("inner", e.inner);
    check_shape("router", e.router, e.count, hidden);
    require((e.correction != nullptr) == (e.sigmoid != 0), "correction", e.sigmoid, "given if and only if weights are sigmoids");
    require(e.groups > 0 && e.groups <= e.count && e.count % e.groups == 0, "groups", e.groups, "a divisor of the number of experts");
    require(e.groups == 1 || e.groups * 2 <= e.count, "groups", e.groups, "of at least 2 experts");
    require(e.active_groups > 0 && e.active_groups <= e.groups, "active_groups", e.active_groups, "at most the number of groups");
    require(e.active <= e.count / e.groups * e.active_groups, "active", e.active, "at most the experts of the active groups");
    require((e.shared_gate_up == nullptr) == (e.shared_down == nullptr), "shared", e.shared_inner, "both products or none");
    if (e.shared_gate_up != nullptr) {
        check_width("shared_inner", e.shared_inner);
        check_shape("shared_gate_up", *e.shared_gate_up, 2 * e.shared_inner, hidden);
        check_shape("shared_down", *e.shared_down, hidden, e.shared_inner);
    }
    require(e.shared_gate == nullptr || e.shared_down != nullptr, "shared_gate", e.shared_inner, "null without a shared expert");
    if (e.shared_gate != nullptr) check_shape("shared_gate", *e.shared_gate, 1, hidden);
    check_pointer("gate_up", e.gate_up);
    check_pointer("down", e.down);
    for (int64_t i = 0; i < e.count; i++) {
        check_shape("gate_up", e.gate_up[i], 2 * e.inner, hidden);
        check_shape("down", e.down[i], hidden, e.inner);
        for (const Product *all : {e.gate_up, e.down}) {
            require(all[i].activations == all[0].activations, "activations", all[i].activations, "the same in all experts");
        }
    }
}

// Writes the indices of the `most` greatest of `count` numbers, in descending order; of equal numbers the first is greater.
inline void greatest(const float *numbers, int64_t count, int64_t most, int64_t *chosen) {
    for (int64_t j = 0; j < most; j++) {
        int64_t best = -1;
        for (int64_t i = 0; i < count; i++) {
            bool is_free = std::find(chosen, chosen + j, i) == chosen + j;
            if (is_free && (best < 0 || numbers[i] > numbers[best])) best = i;
        }
        chosen[j] = best;
    }
}

// Replaces scores by their sigmoids, and returns what experts are selected by: with the correction, and minus infinity outside of the
// active groups, those whose two greatest experts have the greatest sums.
inline const float *sigmoids(const Experts &e, float *scores, std::vector<float> &room, std::vector<int64_t> &chosen) {
    int64_t size = e.count / e.groups, two[2];
    room.resize(e.count + e.groups), chosen.resize(e.active_groups);
    float *choice = room.data(), *sums = choice + e.count;
    for (int64_t i = 0; i < e.count; i++) {
        scores[i] = 1.0f / (1.0f + exponential(-scores[i]));
        choice[i] = scores[i] + e.correction[i];
    }
    if (e.active_groups == e.groups) return choice;
    for (int64_t g = 0; g < e.groups; g++) {
        greatest(choice + g * size, size, 2, two);
        sums[g] = choice[g * size + two[0]] + choice[g * size + two[1]];
    }
    greatest(sums, e.groups, e.active_groups, chosen.data());
    for (int64_t g = 0; g < e.groups; g++) {
        if (std::find(chosen.begin(), chosen.end(), g) != chosen.end()) continue;
        std::fill(choice + g * size, choice + (g + 1) * size, -std::numeric_limits<float>::infinity());
    }
    return choice;
}

// What the router reads instead of the experts' inputs, [tokens, hidden], and a factor of each expert's weights; null for neither.
struct Routing {
    const float *x = nullptr, *scales = nullptr;
};

// Selects the experts of a token, `active` of them in ascending order, and their weights: the softmax of all scores, of the highest ones,
// or sigmoids, times `scales` if given. Scores are overwritten.
inline void route(const Experts &e, float *scores, const float *scales, int64_t *chosen, float *weights) {
    static thread_local std::vector<float> room;
    static thread_local std::vector<int64_t> groups;
    greatest(e.sigmoid ? sigmoids(e, scores, room, groups) : scores, e.count, e.active, chosen);
    float top = scores[chosen[0]], sum = 0.0f;
    std::sort(chosen, chosen + e.active);
    auto weight_of = [&](int64_t i) { return e.sigmoid ? scores[i] : exponential(scores[i] - top); };
    if (e.renormalized) {
        for (int64_t j = 0; j < e.active; j++) sum += weight_of(chosen[j]);
        if (e.sigmoid) sum += 1e-20f;
    } else {
        for (int64_t i = 0; i < e.count && !e.sigmoid; i++) sum += weight_of(i);
        if (e.sigmoid) sum = 1.0f;
    }
    for (int64_t j = 0; j < e.active; j++) weights[j] = weight_of(chosen[j]) / sum * e.scale;
    for (int64_t j = 0; j < e.active && scales != nullptr; j++) weights[j] *= scales[chosen[j]];
}

// The rows of a few tokens, each repeated for each of its experts, sorted by expert.
struct Routed {
    std::vector<float> scores, weights, rows, joint, gated, out;
    std::vector<int64_t> chosen, first, row_of; // row_of [tokens, active]: the row of a token and expert
    std::vector<Job> jobs;
    Inputs inputs;
};

constexpr int64_t ROUTED_ROWS = 4096; // rows at a time, which bounds the memory for them

// Fills the jobs of the experts that some token selected.
inline void sort_by_expert(const Experts &e, const Product *products, int64_t assigned, Routed &at) {
    at.first.assign(e.count + 1, 0);
    at.row_of.resize(assigned);
    for (int64_t i = 0; i < assigned; i++) at.first[at.chosen[i] + 1]++;
    for (int64_t i = 0; i < e.count; i++) at.first[i + 1] += at.first[i];
    at.jobs.clear();
    for (int64_t i = 0; i < e.count; i++) {
        int64_t count = at.first[i + 1] - at.first[i];
        if (count > 0) at.jobs.push_back({products + i, at.first[i], count});
    }
    for (int64_t i = 0; i < assigned; i++) at.row_of[i] = at.first[at.chosen[i]]++;
}

inline void multiply_jobs(Routed &at, const float *x, int64_t depth, int64_t rows, float *out, int64_t width, int threads) {
    at.inputs.describe(*at.jobs[0].product, x, depth, rows);
    if (at.inputs.rounds()) each_token(rows, threads, [&](int64_t n) { at.inputs.round(n); });
    multiply_rounded(at.jobs.data(), static_cast<int64_t>(at.jobs.size()), at.inputs, out, width, threads);
}

// out [tokens, hidden] += the output of the expert that all tokens pass through.
inline void add_shared(const Experts &e, const float *x, int64_t hidden, int64_t tokens, float *out, Routed &at, int threads) {
    int64_t inner = e.shared_inner;
    at.joint.resize(tokens * 2 * inner), at.gated.resize(tokens * inner), at.out.resize(tokens * hidden);
    multiply(*e.shared_gate_up, x, hidden, tokens, at.joint.data(), threads);
    each_token(tokens, threads, [&](int64_t n) { apply(e.gate, at.joint.data() + n * 2 * inner, at.gated.data() + n * inner, inner); });
    multiply(*e.shared_down, at.gated.data(), inner, tokens, at.out.data(), threads);
    at.weights.assign(tokens, 1.0f);
    if (e.shared_gate != nullptr) {
        multiply(*e.shared_gate, x, hidden, tokens, at.weights.data(), threads);
        for (float &weight : at.weights) weight = 1.0f / (1.0f + exponential(-weight));
    }
    each_token(tokens, threads, [&](int64_t n) {
        const float *part = at.out.data() + n * hidden;
        float *sum = out + n * hidden, weight = at.weights[n];
#pragma omp simd
        for (int64_t i = 0; i < hidden; i++) sum[i] += weight * part[i];
    });
}

// out [tokens, hidden] = the weighted sum of the experts' outputs for x [tokens, hidden]; at most ROUTED_ROWS rows.
inline void multiply_some(const Experts &e, const Routing &by, const float *x, int64_t hidden, int64_t tokens, float *out, Routed &at,
                          int threads) {
    int64_t assigned = tokens * e.active;
    at.scores.resize(tokens * e.count);
    at.chosen.resize(assigned), at.weights.resize(assigned);
    multiply(e.router, by.x == nullptr ? x : by.x, hidden, tokens, at.scores.data(), threads);
    each_token(tokens, threads, [&](int64_t n) {
        route(e, at.scores.data() + n * e.count, by.scales, at.chosen.data() + n * e.active, at.weights.data() + n * e.active);
    });
    sort_by_expert(e, e.gate_up, assigned, at);
    at.rows.resize(assigned * hidden), at.out.resize(assigned * hidden);
    at.joint.resize(assigned * 2 * e.inner), at.gated.resize(assigned * e.inner);
    each_token(assigned, threads, [&](int64_t i) {
        std::memcpy(at.rows.data() + at.row_of[i] * hidden, x + i / e.active * hidden, hidden * sizeof(float));
    });
    multiply_jobs(at, at.rows.data(), hidden, assigned, at.joint.data(), 2 * e.inner, threads);
    each_token(assigned, threads, [&](int64_t i) {
        apply(e.gate, at.joint.data() + i * 2 * e.inner, at.gated.data() + i * e.inner, e.inner);
    });
    for (Job &job : at.jobs) job.product = e.down + (job.product - e.gate_up);
    multiply_jobs(at, at.gated.data(), e.inner, assigned, at.out.data(), hidden, threads);
    each_token(tokens, threads, [&](int64_t n) {
        float *sum = out + n * hidden;
        std::memset(sum, 0, hidden * sizeof(float));
        for (int64_t j = n * e.active; j < (n + 1) * e.active; j++) {
            const float *part = at.out.data() + at.row_of[j] * hidden;
            float weight = at.weights[j];
#pragma omp simd
            for (int64_t i = 0; i < hidden; i++) sum[i] += weight * part[i];
        }
    });
    if (e.shared_gate_up != nullptr) add_shared(e, x, hidden, tokens, out, at, threads);
}

// The same for any number of tokens.
inline void multiply_experts(const Experts &e, const float *x, int64_t hidden, int64_t tokens, float *out, int threads,
                             const Routing &by = {}) {
    static thread_local Routed kept;
    Routed &at = kept; // the caller's, not a worker's
    int64_t most = std::max<int64_t>(1, ROUTED_ROWS / e.active);
    for (int64_t first = 0; first < tokens; first += most) {
        int64_t some = std::min(most, tokens - first);
        Routing own{by.x == nullptr ? nullptr : by.x + first * hidden, by.scales};
        multiply_some(e, own, x + first * hidden, hidden, some, out + first * hidden, at, threads);
    }
}

} // namespace foresay
