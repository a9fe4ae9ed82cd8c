// Drafts token after token with a draft head: the likeliest token of a pass and the pass's output are the inputs of the next one.

#pragma once

#include "model.h"
#include "multiply.h"

namespace foresay {

struct Chain {
    const Product *embeddings, *scores; // of all tokens; of the output layer
    const int64_t *token_ids;           // [outputs of `scores`], the token of each; null if they are the same
    const float *cosines, *sines;       // [positions, rotated]
    int64_t rotated, positions;
    int64_t is_bf16;      // nonzero if embeddings and outputs are rounded to bfloat16, as the target's hidden states are
    int64_t token, most;  // the token before the first one; largest number of tokens
    const int64_t *ends;  // [num_ends], tokens after which no token is drafted
    int64_t num_ends;
    double probability, threshold; // a token is drafted while probability * weights[...] of all tokens so far exceeds the threshold
    const double *weights;         // [10], by tenths of a token's confidence
    int64_t *tokens;      // out, [most]
    float *confidences;   // out, [most], the probability of each token
};

inline void check(const Chain &c, const Model &model, const Pass &pass) {
    check_pointer("embeddings", c.embeddings), check_pointer("scores", c.scores);
    check(*c.embeddings), check(*c.scores);
    check_shape("embeddings", *c.embeddings, all_outputs(*c.embeddings), model.hidden);
    check_shape("scores", *c.scores, all_outputs(*c.scores), model.hidden);
    require(c.embeddings->next == nullptr && c.scores->next == nullptr, "next", 1, "null: one format for all outputs");
    for (const void *one : {static_cast<const void *>(c.weights), static_cast<const void *>(c.tokens), static_cast<const void *>(c.confidences)}) {
        check_pointer("memory of tokens", one);
    }
    check_pointer("cosines", c.cosines), check_pointer("sines", c.sines);
    check_rows("most", c.most), check_rows("ends", c.num_ends);
    require(c.num_ends == 0 || c.ends != nullptr, "ends", c.num_ends, "0 without an address");
    require(pass.tokens == 1 && pass.ancestors == nullptr, "tokens", pass.tokens, "1, in a chain");
    require(pass.turns == 1, "turns", pass.turns, "1");
    check_pointer("slots", pass.slots), check_pointer("positions", pass.positions);
    require(*pass.positions >= 0 && *pass.positions <= c.positions - c.most, "position", *pass.positions, "within the table of cosines");
}

// Index of the greatest score, the first of equal ones; NaN counts as the greatest.
inline int64_t likeliest(const float *scores, int64_t count) {
    float top = scores[0];
    int32_t unordered = 0;
#pragma omp simd reduction(max : top) reduction(| : unordered)
    for (int64_t i = 0; i < count; i++) {
        top = scores[i] > top ? scores[i] : top;
        unordered |= scores[i] != scores[i];
    }
    int64_t i = 0;
    while (i < count - 1 && (unordered ? scores[i] == scores[i] : scores[i] != top)) i++;
    return i;
}

// Softmax probability of the score at an index.
inline float confidence_of(const float *scores, int64_t count, int64_t index) {
    float top = scores[index], sum = 0.0f;
#pragma omp simd reduction(+ : sum)
    for (int64_t i = 0; i < count; i++) sum += exponential(scores[i] - top);
    return 1.0f / sum;
}

inline void round_to_bf16(float *x, int64_t count) {
    for (int64_t i = 0; i < count; i++) {
        bf16 rounded;
        write(rounded, x[i]);
        x[i] = read(rounded);
    }
}

inline int tenth(float confidence) {
    return confidence > 0.0f ? std::min(static_cast<int>(10.0 * static_cast<double>(confidence)), 9) : 0;
}

// Returns the number of drafted tokens. pass: of the first one; pass.x [H] has the output before it, and is overwritten.
// run: body(pass) runs the model.
template <class F> int64_t draft(const Model &model, const Pass &first, const Chain &c, const F &run) {
    Pass pass = first;
    int64_t hidden = model.hidden, count = 0, slot = *first.slots, position = *first.positions, token = c.token;
    int64_t outputs = c.scores->outputs;
    std::vector<float> read(2 * hidden), scores(outputs);
    const float *cosines, *sines;
    double probability = c.probability;
    pass.slots = pass.starts = &slot, pass.positions = &position, pass.read = read.data();
    pass.cosines = &cosines, pass.sines = &sines, pass.rotated = &c.rotated;
    while (count < c.most) {
        require(token >= 0 && token < c.embeddings->outputs, "token", token, "a row of the embeddings");
        row_of(*c.embeddings, token, read.data());
        std::memcpy(read.data() + hidden, pass.x, hidden * sizeof(float));
        if (c.is_bf16) round_to_bf16(read.data(), 2 * hidden);
        std::memcpy(pass.x, read.data() + hidden, hidden * sizeof(float));
        cosines = c.cosines + position * c.rotated, sines = c.sines + position * c.rotated;
        check(model, pass);
        run(pass);
        multiply(*c.scores, pass.normed, hidden, 1, scores.data(), static_cast<int>(pass.threads));
        int64_t best = likeliest(scores.data(), outputs);
        float confidence = confidence_of(scores.data(), outputs, best);
        token = c.token_ids == nullptr ? best : c.token_ids[best];
        c.tokens[count] = token, c.confidences[count] = confidence;
        count++, slot++, position++;
        if (std::find(c.ends, c.ends + c.num_ends, token) != c.ends + c.num_ends) break;
        probability *= c.weights[tenth(confidence)];
        if (!(probability > c.threshold)) break;
    }
    return count;
}

} // namespace foresay
