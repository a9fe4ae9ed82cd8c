// Norms and gated activations of a Llama-like layer, between its matrix products and attention. One token at a time, in float32.

#pragma once

#include "numbers.h"

namespace foresay {

inline float mean_square(const float *x, int64_t width) {
    float sum = 0.0f;
#pragma omp simd reduction(+ : sum)
    for (int64_t i = 0; i < width; i++) sum += x[i] * x[i];
    return sum / static_cast<float>(width);
}

// One token: x += scale * added, where `added` is first normalized by `after` if given; then out = x normalized by `before`, or x
// itself without `before`.
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

enum Activation { SILU = 0, GELU_TANH = 1, GELU = 2, CLAMPED = 3 };

// How a gated feed-forward combines its gates and its other inputs. alpha and limit: of CLAMPED.
struct Gate {
    int64_t kind;
    float alpha, limit;
};

// One token: out[i] = activation(gates[i]) * gates[width + i]. CLAMPED: min(gate, limit) * sigmoid(alpha * the same) * (1 + up), with
// up clamped to [-limit, limit].
inline void apply(const Gate &gate, const float *gates, float *out, int64_t width) {
    const float *ups = gates + width;
    int64_t kind = gate.kind;
    if (kind == CLAMPED) {
        float alpha = gate.alpha, limit = gate.limit;
#pragma omp simd
        for (int64_t i = 0; i < width; i++) {
            float one = gates[i] > limit ? limit : gates[i], up = ups[i] > limit ? limit : ups[i];
            up = up < -limit ? -limit : up;
            out[i] = one / (1.0f + exponential(-alpha * one)) * (up + 1.0f);
        }
    } else if (kind == SILU) {
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

} // namespace foresay
