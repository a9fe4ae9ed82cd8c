// What lies between the matrix products of a Llama-like layer on a CPU: norms, rotary positions, the cache, attention, gates.
//
// Every token is computed by itself, in one fixed order of sums, whatever else the pass holds: the bits of a token depend
// neither on the batch, nor on the columns beside it, nor on how many threads there are. Numbers are float32 inside; T is the
// type in memory, float32 or bfloat16. Shapes: N tokens, Q query heads, K key heads, D dimensions of a head.

#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>

namespace {

struct bf16 {
    uint16_t bits;
};

inline float read(float value) { return value; }

inline float read(bf16 value) {
    uint32_t wide = static_cast<uint32_t>(value.bits) << 16;
    float out;
    std::memcpy(&out, &wide, sizeof out);
    return out;
}

inline void write(float &place, float value) { place = value; }

inline void write(bf16 &place, float value) {  // to the nearest, halves to even; what is not a number stays none
    uint32_t wide;
    std::memcpy(&wide, &value, sizeof wide);
    uint32_t rounded = (wide + 0x7fffu + ((wide >> 16) & 1u)) >> 16;
    place.bits = static_cast<uint16_t>((wide & 0x7fffffffu) > 0x7f800000u ? 0x7fc0u : rounded);
}

// e^x by 2^n (1 + f + ...): no call, so that loops over it are vectors. Relative error below 3e-7.
inline float exponential(float x) {
    x = x < -87.0f ? -87.0f : (x > 88.0f ? 88.0f : x);
    float n = std::nearbyintf(x * 1.44269504088896341f);
    float f = x - n * 0.693359375f + n * 2.12194440e-4f;
    float p = 1.9875691500e-4f;
    p = p * f + 1.3981999507e-3f;
    p = p * f + 8.3334519073e-3f;
    p = p * f + 4.1665795894e-2f;
    p = p * f + 1.6666665459e-1f;
    p = p * f + 5.0000001201e-1f;
    p = p * f * f + f + 1.0f;
    int32_t power = (static_cast<int32_t>(n) + 127) << 23;
    float scale;
    std::memcpy(&scale, &power, sizeof scale);
    return p * scale;
}

template <class T> float mean_square(const T *x, int64_t width) {
    float sum = 0.0f;
#pragma omp simd reduction(+ : sum)
    for (int64_t i = 0; i < width; i++) sum += read(x[i]) * read(x[i]);
    return sum / static_cast<float>(width);
}

// x += scale * added, normed by `after` first where that is given; then out = x normed by `before`, where that is given.
template <class T>
void add_norm(T *x, const T *added, const float *after, float scale, const float *before, T *out, int64_t tokens,
              int64_t width, float eps, int threads) {
#pragma omp parallel for num_threads(threads) if (threads > 1)
    for (int64_t n = 0; n < tokens; n++) {
        T *row = x + n * width;
        if (added != nullptr) {
            const T *more = added + n * width;
            if (after != nullptr) {
                float unit = 1.0f / std::sqrt(mean_square(more, width) + eps);
#pragma omp simd
                for (int64_t i = 0; i < width; i++) write(row[i], read(row[i]) + scale * (read(more[i]) * unit * after[i]));
            } else {
#pragma omp simd
                for (int64_t i = 0; i < width; i++) write(row[i], read(row[i]) + scale * read(more[i]));
            }
        }
        if (before != nullptr) {
            float unit = 1.0f / std::sqrt(mean_square(row, width) + eps);
            T *normed = out + n * width;
#pragma omp simd
            for (int64_t i = 0; i < width; i++) write(normed[i], read(row[i]) * unit * before[i]);
        }
    }
}

enum Activation { SILU = 0, GELU_TANH = 1, GELU = 2 };

// out[n, i] = activation(joint[n, i]) * joint[n, width + i]
template <class T> void gate(const T *joint, T *out, int64_t tokens, int64_t width, int kind, int threads) {
#pragma omp parallel for num_threads(threads) if (threads > 1)
    for (int64_t n = 0; n < tokens; n++) {
        const T *gates = joint + 2 * n * width, *ups = gates + width;
        T *row = out + n * width;
        if (kind == SILU) {
#pragma omp simd
            for (int64_t i = 0; i < width; i++) {
                float x = read(gates[i]);
                write(row[i], x / (1.0f + exponential(-x)) * read(ups[i]));
            }
        } else if (kind == GELU_TANH) {
#pragma omp simd
            for (int64_t i = 0; i < width; i++) {
                float x = read(gates[i]);
                float u = 1.5957691216057308f * (x + 0.044715f * x * x * x);
                write(row[i], x / (1.0f + exponential(-u)) * read(ups[i]));
            }
        } else {
            for (int64_t i = 0; i < width; i++) {
                float x = read(gates[i]);
                write(row[i], 0.5f * x * (1.0f + std::erf(x * 0.70710678118654752f)) * read(ups[i]));
            }
        }
    }
}

struct Attention {
    int64_t tokens, columns, queries, keys, dim, rotated, wide, window;
    int64_t row_stride;       // elements from one row of the cache to the next
    const int64_t *rows;      // [N] the cache row of each token
    const int64_t *slots;     // [N] its slot
    const int64_t *positions; // [N] its position
    const uint8_t *ancestors; // [N, columns] whether it sees each column of its row; null: those before it, as in any chain
    const float *cosines;     // [N, rotated]; null: nothing is rotated
    const float *sines;       // [N, rotated]
    const float *query_norm;  // [D], or [Q * D] where all heads are one vector; null: none
    const float *key_norm;
    float eps, scaling, softcap; // softcap 0: none
};

void norm_in_place(float *x, const float *weight, int64_t width, float eps) {
    float unit = 1.0f / std::sqrt(mean_square(x, width) + eps);
#pragma omp simd
    for (int64_t i = 0; i < width; i++) x[i] = x[i] * unit * weight[i];
}

void norm_heads(float *x, const float *weight, int64_t heads, const Attention &a) {
    if (weight == nullptr) return;
    if (a.wide) return norm_in_place(x, weight, heads * a.dim, a.eps);
    for (int64_t h = 0; h < heads; h++) norm_in_place(x + h * a.dim, weight, a.dim, a.eps);
}

void rotate_heads(float *x, int64_t heads, const Attention &a, int64_t n) {
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
template <class T> void place(const Attention &a, const T *joint, float *queries, T *key_cache, T *value_cache, int64_t n) {
    int64_t q = a.queries * a.dim, k = a.keys * a.dim;
    const T *source = joint + n * (q + 2 * k);
    float *query = queries + n * q;
    std::vector<float> key(k);
    for (int64_t i = 0; i < q; i++) query[i] = read(source[i]);
    for (int64_t i = 0; i < k; i++) key[i] = read(source[q + i]);
    norm_heads(query, a.query_norm, a.queries, a);
    norm_heads(key.data(), a.key_norm, a.keys, a);
    rotate_heads(query, a.queries, a, n);
    rotate_heads(key.data(), a.keys, a, n);
    int64_t at = a.rows[n] * a.row_stride + a.slots[n] * k;
    for (int64_t i = 0; i < k; i++) write(key_cache[at + i], key[i]);
    std::memcpy(value_cache + at, source + q + k, k * sizeof(T));
}

template <int FIXED> inline float dot(const float *a, const float *b, int64_t dim) {
    int64_t size = FIXED > 0 ? FIXED : dim;
    float sum = 0.0f;
#pragma omp simd reduction(+ : sum)
    for (int64_t i = 0; i < size; i++) sum += a[i] * b[i];
    return sum;
}

// The slots that a token sees, in order.
void slots_in_sight(const Attention &a, int64_t n, std::vector<int64_t> &seen) {
    seen.clear();
    int64_t column = n % a.columns, start = a.slots[n] - column;
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
void gather(const Attention &a, const float *queries, const T *key_cache, const T *value_cache, T *out, int64_t n,
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
    T *place = out + (n * a.queries + head * group) * a.dim;
    for (int64_t i = 0; i < group * dim; i++) write(place[i], sums[i]);
}

template <class T, int FIXED>
void gather_all(const Attention &a, const float *queries, const T *keys, const T *values, T *out, int threads) {
#pragma omp parallel num_threads(threads) if (threads > 1)
    {
        std::vector<int64_t> seen;
        std::vector<float> room;
        int64_t last = -1;
#pragma omp for schedule(dynamic, 1)
        for (int64_t task = 0; task < a.tokens * a.keys; task++) {
            int64_t n = task / a.keys;
            if (n != last) slots_in_sight(a, n, seen);
            last = n;
            gather<T, FIXED>(a, queries, keys, values, out, n, task % a.keys, seen, room);
        }
    }
}

template <class T>
void attend(const Attention &a, const T *joint, float *queries, T *keys, T *values, T *out, int threads) {
    int placing = a.tokens >= 8 ? threads : 1;
#pragma omp parallel for num_threads(placing) if (placing > 1)
    for (int64_t n = 0; n < a.tokens; n++) place(a, joint, queries, keys, values, n);
    if (a.dim == 64) return gather_all<T, 64>(a, queries, keys, values, out, threads);
    if (a.dim == 128) return gather_all<T, 128>(a, queries, keys, values, out, threads);
    return gather_all<T, 0>(a, queries, keys, values, out, threads);
}

} // namespace

#define FORESAY(NAME, T)                                                                                                \
    extern "C" void foresay_add_norm_##NAME(T *x, const T *added, const float *after, float scale, const float *before, \
                                            T *out, int64_t tokens, int64_t width, float eps, int threads) {            \
        add_norm(x, added, after, scale, before, out, tokens, width, eps, threads);                                     \
    }                                                                                                                   \
    extern "C" void foresay_gate_##NAME(const T *joint, T *out, int64_t tokens, int64_t width, int kind, int threads) { \
        gate(joint, out, tokens, width, kind, threads);                                                                 \
    }                                                                                                                   \
    extern "C" void foresay_attend_##NAME(const Attention *a, const T *joint, float *queries, T *keys, T *values,       \
                                          T *out, int threads) {                                                        \
        attend(*a, joint, queries, keys, values, out, threads);                                                         \
    }

FORESAY(float32, float)
FORESAY(bfloat16, bf16)
