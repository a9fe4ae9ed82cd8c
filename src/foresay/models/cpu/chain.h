// Drafts token after token with a draft head: after a first pass over known tokens, the likeliest token of a pass and the pass's
// output for its last token are the inputs of the next one.

#pragma once

#include "model.h"
#include "multiply.h"

namespace foresay {

struct Chain {
    const Product *embeddings, *scores; // of all tokens; of the output layer
    const int64_t *token_ids;           // [outputs of `scores`], the token of each; null if they are the same
    const float *cosines, *sines;       // [positions, rotated]
    int64_t rotated, positions;
    int64_t feeds_norm;   // nonzero if a pass reads the last one's output after the last norm, not before it
    int64_t is_bf16;      // nonzero if embeddings and outputs are rounded to bfloat16, as the target's hidden states are
    const int64_t *known; // tokens of the first pass, which `Pass::tokens` counts
    int64_t most;         // largest number of drafted tokens
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
    for (const void *one : {static_cast<const void *>(c.known), static_cast<const void *>(c.weights), static_cast<const void *>(c.tokens),
                            static_cast<const void *>(c.confidences)}) {
        check_pointer("memory of tokens", one);
    }
    check_pointer("cosines", c.cosines), check_pointer("sines", c.sines);
    check_rows("most", c.most), check_rows("ends", c.num_ends), check_rows("tokens", pass.tokens);
    require(c.num_ends == 0 || c.ends != nullptr, "ends", c.num_ends, "0 without an address");
    require(pass.tokens > 0 && pass.ancestors == nullptr, "tokens", pass.tokens, "at least 1, in a chain");
    require(pass.turns == 1, "turns", pass.turns, "1");
    check_pointer("slots", pass.slots), check_pointer("positions", pass.positions);
    int64_t last = c.positions - c.most - pass.tokens + 1;
    require(*pass.positions >= 0 && *pass.positions <= last, "position", *pass.positions, "within the table of cosines");
    for (int64_t i = 1; i < pass.tokens; i++) {
        require(pass.positions[i] == *pass.positions + i, "position", pass.positions[i], "that after the one before it");
    }
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

inline bool ends(const Chain &c, int64_t token) { return std::find(c.ends, c.ends + c.num_ends, token) != c.ends + c.num_ends; }

// Reads the first layer's input: the embeddings of a pass's tokens, and the outputs in pass.x before each of them.
inline void read_inputs(const Chain &c, const int64_t *tokens, const Pass &pass, int64_t hidden, float *read) {
    for (int64_t i = 0; i < pass.tokens; i++, read += 2 * hidden) {
        require(tokens[i] >= 0 && tokens[i] < c.embeddings->outputs, "token", tokens[i], "a row of the embeddings");
        float *output = pass.x + i * hidden;
        row_of(*c.embeddings, tokens[i], read);
        std::memcpy(read + hidden, output, hidden * sizeof(float));
        if (c.is_bf16) round_to_bf16(read, 2 * hidden);
        std::memcpy(output, read + hidden, hidden * sizeof(float));
    }
}

// Returns the number of drafted tokens. pass: the first one, over the known tokens; pass.x [N, H] has the outputs before each of
// them, and is overwritten. run: body(pass) runs the model.
template <class F> int64_t draft(const Model &model, const Pass &first, const Chain &c, const F &run) {
    Pass pass = first;
    int64_t hidden = model.hidden, outputs = c.scores->outputs, count = 0, token;
    int64_t position = *first.positions, slot = first.slots[first.tokens - 1];
    std::vector<float> read(2 * hidden * first.tokens), scores(outputs);
    const int64_t *inputs = c.known;
    const float *cosines, *sines;
    double probability = c.probability;
    pass.read = read.data(), pass.cosines = &cosines, pass.sines = &sines, pass.rotated = &c.rotated;
    while (count < c.most) {
        cosines = c.cosines + position * c.rotated, sines = c.sines + position * c.rotated;
        check(model, pass);
        read_inputs(c, inputs, pass, hidden, read.data());
        run(pass);
        int64_t last = pass.tokens - 1;
        multiply(*c.scores, pass.normed + last * hidden, hidden, 1, scores.data(), static_cast<int>(pass.threads));
        int64_t best = likeliest(scores.data(), outputs);
        float confidence = confidence_of(scores.data(), outputs, best);
        token = c.token_ids == nullptr ? best : c.token_ids[best];
        c.tokens[count] = token, c.confidences[count] = confidence;
        count++;
        if (ends(c, token)) break;
        probability *= c.weights[tenth(confidence)];
        if (!(probability > c.threshold)) break;
        // the next pass is over this token alone
        const float *read_next = (c.feeds_norm ? pass.normed : pass.x) + last * hidden;
        if (read_next != pass.x) std::memcpy(pass.x, read_next, hidden * sizeof(float));
        slot++, position += pass.tokens, inputs = &token;
        pass.tokens = pass.columns = 1, pass.slots = pass.starts = &slot, pass.positions = &position;
    }
    return count;
}

} // namespace foresay
