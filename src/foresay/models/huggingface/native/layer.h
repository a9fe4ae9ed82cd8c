// What lies between the matrix products of a Llama-like layer: norms, rotary positions, the cache, attention, gates.
//
// Every token is computed by itself, in one fixed order of sums, whatever else the pass holds: the bits of a token depend
// neither on the batch, nor on the columns beside it, nor on how many threads there are. Numbers are float32; T is the type of
// the cache in memory, float32 or bfloat16. Shapes: N tokens, Q query heads, K key heads, D dimensions of a head.

#pragma once

#include "numbers.h"

#include <vector>

namespace foresay {

inline float mean_square(const float *x, int64_t width) {
    float sum = 0.0f;
#pragma omp simd reduction(+ : sum)
    for (int64_t i = 0; i < width; i++) sum += x[i] * x[i];
    return sum / static_cast<float>(width);
}

// One token: x += scale * added, normed by `after` first where that is given; then out = x normed by `before`, or x itself.
inline void add_norm(float *x, const float *added, const float *after, float scale, const float *before, float *out,
                     int64_t width, float eps) {
    if (added != nullptr) {
        float unit = after == nullptr ? 1.0f : 1.0f / std::sqrt(mean_square(added, width) + eps);
        if (after != nullptr) {
#pragma omp simd
            for (int64_t i = 0; i < width; i++) x[i] += scale * (added[i] * unit * after[i]);
        } else {
#pragma omp simd
            for (int64_t i = 0; i < width; i++) x[i] += scale * added[i];
        }
    }
    if (before == nullptr) {
        std::memcpy(out, x, width * sizeof(float));
        return;
    }
    float unit = 1.0f / std::sqrt(mean_square(x, width) + eps);
#pragma omp simd
    for (int64_t i = 0; i < width; i++) out[i] = x[i] * unit * before[i];
}

enum Activation { SILU = 0, GELU_TANH = 1, GELU = 2 };

// One token: out[i] = activation(gates[i]) * gates[width + i]
inline void gate(const float *gates, float *out, int64_t width, int64_t kind) {
    const float *ups = gates + width;
    if (kind == SILU) {
#pragma omp simd
        for (int64_t i = 0; i < width; i++) out[i] = gates[i] / (1.0f + exponential(-gates[i])) * ups[i];
    } else if (kind == GELU_TANH) {
#pragma omp simd
        for (int64_t i = 0; i < width; i++) {
            float u = 1.5957691216057308f * (gates[i] + 0.044715f * gates[i] * gates[i] * gates[i]);
            out[i] = gates[i] / (1.0f + exponential(-u)) * ups[i];
        }
    } else {
        for (int64_t i = 0; i < width; i++) {
            out[i] = 0.5f * gates[i] * (1.0f + std::erf(gates[i] * 0.70710678118654752f)) * ups[i];
        }
    }
}

struct Attention {
    int64_t tokens, columns, queries, keys, dim, rotated, wide, window;
    int64_t row_stride;       // elements from one row of the cache to the next
    const int64_t *rows;      // [N] the cache row of each token
    const int64_t *slots;     // [N] its slot
    const int64_t *starts;    // [N] the slot of the first token of its row in this pass
    const int64_t *positions; // [N] its position
    const uint8_t *ancestors; // [N, columns] whether it sees each column of its row; null: those before it, as in any chain
    const float *cosines;     // [N, rotated]; null: nothing is rotated
    const float *sines;       // [N, rotated]
    const float *query_norm;  // [D], or [Q * D] where all heads are one vector; null: none
    const float *key_norm;
    float eps, scaling, softcap; // softcap 0: none
};

inline void norm_in_place(float *x, const float *weight, int64_t width, float eps) {
    float unit = 1.0f / std::sqrt(mean_square(x, width) + eps);
#pragma omp simd
    for (int64_t i = 0; i < width; i++) x[i] = x[i] * unit * weight[i];
}

inline void norm_heads(float *x, const float *weight, int64_t heads, const Attention &a) {
    if (weight == nullptr) return;
    if (a.wide) return norm_in_place(x, weight, heads * a.dim, a.eps);
    for (int64_t h = 0; h < heads; h++) norm_in_place(x + h * a.dim, weight, a.dim, a.eps);
}

inline void rotate_heads(float *x, int64_t heads, const Attention &a, int64_t n) {
    if (a.cosines == nullptr) return;
    const float *cosines = a.cosines + n * a.rotated, *sines = a.sines + n * a.rotated;
    int64_t half = a.rotated / 2;
    for (int64_t h = 0; h < heads; h++) {
        float *low = x + h * a.dim, *high = low + half;
#pragma omp simd
        for (int64_t i = 0; i < half; i++) {
            float one = low[i], two = high[i];
            low[i] = one * cosines[i] - two * sines[i];
            high[i] = two * cosines[half + i] + one * sines[half + i];
        }
    }
}

// Queries [N, Q * D] of the joint product, normed and rotated; keys and values go to the cache.
template <class T>
void place(const Attention &a, const float *joint, float *queries, T *key_cache, T *value_cache, int64_t n) {
    int64_t q = a.queries * a.dim, k = a.keys * a.dim;
    const float *source = joint + n * (q + 2 * k);
    float *query = queries + n * q;
    std::vector<float> key(k);
    for (int64_t i = 0; i < q; i++) query[i] = source[i];
    for (int64_t i = 0; i < k; i++) key[i] = source[q + i];
    norm_heads(query, a.query_norm, a.queries, a);
    norm_heads(key.data(), a.key_norm, a.keys, a);
    rotate_heads(query, a.queries, a, n);
    rotate_heads(key.data(), a.keys, a, n);
    int64_t at = a.rows[n] * a.row_stride + a.slots[n] * k;
    for (int64_t i = 0; i < k; i++) write(key_cache[at + i], key[i]);
    for (int64_t i = 0; i < k; i++) write(value_cache[at + i], source[q + k + i]);
}

template <int FIXED> inline float dot(const float *a, const float *b, int64_t dim) {
    int64_t size = FIXED > 0 ? FIXED : dim;
    float sum = 0.0f;
#pragma omp simd reduction(+ : sum)
    for (int64_t i = 0; i < size; i++) sum += a[i] * b[i];
    return sum;
}

// The slots that a token sees, in order.
inline void slots_in_sight(const Attention &a, int64_t n, std::vector<int64_t> &seen) {
    seen.clear();
    int64_t start = a.starts[n], column = a.slots[n] - start;
    int64_t last = a.ancestors == nullptr ? a.slots[n] : start - 1;
    int64_t first = a.window > 0 ? a.positions[n] - a.window + 1 : 0;
    for (int64_t s = first > 0 ? first : 0; s <= last; s++) seen.push_back(s);
    if (a.ancestors == nullptr) return;
    for (int64_t c = 0; c <= column; c++) {
        if (a.ancestors[n * a.columns + c] && a.positions[n - column + c] >= first) seen.push_back(start + c);
    }
}

// What the heads of one group gather for one token.
template <class T, int FIXED>
void gather(const Attention &a, const float *queries, const T *key_cache, const T *value_cache, float *out, int64_t n,
            int64_t head, std::vector<int64_t> &seen, std::vector<float> &room) {
    int64_t dim = FIXED > 0 ? FIXED : a.dim, group = a.queries / a.keys, stride = a.keys * a.dim;
    int64_t count = static_cast<int64_t>(seen.size());
    room.resize(group * (count + dim) + dim);
    float *scores = room.data(), *sums = scores + group * count, *one = sums + group * dim;
    const float *query = queries + (n * a.queries + head * group) * a.dim;
    int64_t base = a.rows[n] * a.row_stride + head * a.dim;
    for (int64_t j = 0; j < count; j++) {
        const T *key = key_cache + base + seen[j] * stride;
#pragma omp simd
        for (int64_t i = 0; i < dim; i++) one[i] = read(key[i]);
        for (int64_t g = 0; g < group; g++) scores[g * count + j] = a.scaling * dot<FIXED>(query + g * a.dim, one, dim);
    }
    for (int64_t g = 0; g < group; g++) {
        float *score = scores + g * count;
        if (a.softcap > 0.0f) {
            for (int64_t j = 0; j < count; j++) score[j] = a.softcap * std::tanh(score[j] / a.softcap);
        }
        float top = score[0], total = 0.0f;
#pragma omp simd reduction(max : top)
        for (int64_t j = 0; j < count; j++) top = score[j] > top ? score[j] : top;
#pragma omp simd
        for (int64_t j = 0; j < count; j++) score[j] = exponential(score[j] - top);
        for (int64_t j = 0; j < count; j++) total += score[j];
        float inverse = 1.0f / total;
#pragma omp simd
        for (int64_t j = 0; j < count; j++) score[j] *= inverse;
    }
    std::memset(sums, 0, group * dim * sizeof(float));
    for (int64_t j = 0; j < count; j++) {
        const T *value = value_cache + base + seen[j] * stride;
#pragma omp simd
        for (int64_t i = 0; i < dim; i++) one[i] = read(value[i]);
        for (int64_t g = 0; g < group; g++) {
            float weight = scores[g * count + j];
            float *sum = sums + g * dim;
#pragma omp simd
            for (int64_t i = 0; i < dim; i++) sum[i] += weight * one[i];
        }
    }
    std::memcpy(out + (n * a.queries + head * group) * a.dim, sums, group * dim * sizeof(float));
}

} // namespace foresay
