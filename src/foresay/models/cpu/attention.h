// Attention of a Llama-like layer: head norms, rotary positions, writing the cache, and attention over it.
//
// A token's sums run over positions in a fixed order, so its bits depend neither on the batch, nor on the other columns, nor on the
// number of threads. Scores are sums over the dimensions, in order. A token's weights are summed by position modulo the lanes of a
// vector, then over the lanes. Values are summed position by position. Tokens of one row can therefore share keys and values that are
// read, converted and transposed once, a block of positions at a time: a position that a token does not attend to has weight zero, and
// adding zero changes no bit. Numbers are float32; T is the type of the cache in memory, float32 or bfloat16.
// Shapes: N tokens, Q query heads, K key heads, D dimensions of a head.

#pragma once

#include "dots.h"
#include "layer.h"

#include <algorithm>
#include <limits>
#include <vector>

namespace foresay {

struct Attention {
    int64_t tokens, columns, queries, keys, dim, rotated, wide, window;
    int64_t layer, store_rows; // of the cache
    void *const *blocks;       // [store_rows] each row's keys and values, [2 * layers, slots, K, D]; null for a row without slots
    const int64_t *capacities; // [store_rows] slots of each block
    const int64_t *rows;      // [N] the cache row of each token
    const int64_t *slots;     // [N] its slot
    const int64_t *starts;    // [N] the slot of the first token of its row in this pass
    const int64_t *positions; // [N] its position
    const uint8_t *ancestors; // [N, columns] nonzero if it attends to a column of its row; null for chains, which attend to all before them
    const float *cosines;     // [N, rotated]; null without rotary positions
    const float *sines;       // [N, rotated]
    const float *query_norm;  // [D], or [Q * D] if all heads are one vector (wide); null for none
    const float *key_norm;
    float eps, scaling, softcap; // softcap 0 for none
};

// The keys of a layer in a row of the cache, [slots, K, D]; its values follow them.
template <class T> inline T *keys_of_row(const Attention &a, int64_t row) {
    return static_cast<T *>(a.blocks[row]) + 2 * a.layer * a.capacities[row] * a.keys * a.dim;
}

inline int64_t to_values(const Attention &a, int64_t row) { return a.capacities[row] * a.keys * a.dim; }

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

// Writes the queries [N, Q * D] of the joint product, normalized and rotated; stores the keys and values in the cache.
template <class T>
void place(const Attention &a, const float *joint, float *queries, int64_t n) {
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
    T *keys = keys_of_row<T>(a, a.rows[n]) + a.slots[n] * k, *values = keys + to_values(a, a.rows[n]);
    for (int64_t i = 0; i < k; i++) write(keys[i], key[i]);
    for (int64_t i = 0; i < k; i++) write(values[i], source[q + k + i]);
}

constexpr int VECTORS_AT_ONCE = 4, QUERIES_AT_ONCE = LANES == 16 ? 4 : 2;
constexpr int64_t POSITIONS = VECTORS_AT_ONCE * LANES; // positions processed as a block
constexpr int64_t MOST_TOKENS = 16, MOST_SCORES = 1 << 16; // of a span, and of all its heads

// Consecutive tokens of one row that share the reading of the cache; a token of a tree forms its own span.
struct Span {
    int64_t first, count;
};

// The first position that a token attends to; the last is its own.
inline int64_t first_in_sight(const Attention &a, int64_t n) {
    int64_t first = a.window > 0 ? a.positions[n] - a.window + 1 : 0;
    return first > 0 ? first : 0;
}

inline void spans_of(const Attention &a, std::vector<Span> &out) {
    out.clear();
    int64_t group = a.queries / a.keys;
    for (int64_t n = 0; n < a.tokens;) {
        int64_t count = 1, most = a.ancestors != nullptr ? 1 : MOST_SCORES / (group * (a.positions[n] + MOST_TOKENS + POSITIONS));
        if (most > MOST_TOKENS) most = MOST_TOKENS;
        while (count < most && n + count < a.tokens && a.rows[n + count] == a.rows[n]) count++;
        out.push_back({n, count});
        n += count;
    }
}

// Slots of the positions that a token attends to, from the first of its row in this pass on. Empty for chains, where slot = position.
inline void slots_of_path(const Attention &a, int64_t n, std::vector<int64_t> &path) {
    path.clear();
    if (a.ancestors == nullptr) return;
    int64_t column = a.slots[n] - a.starts[n];
    for (int64_t c = 0; c <= column; c++) {
        if (a.ancestors[n * a.columns + c]) path.push_back(a.starts[n] + c);
    }
}

// Lane indices that exchange blocks of SIZE lanes between two vectors, one step of a transposition.
template <int SIZE> struct Exchange {
    int32_t low[LANES], high[LANES];
    constexpr Exchange() : low{}, high{} {
        for (int l = 0; l < LANES; l++) {
            low[l] = l & SIZE ? LANES + l - SIZE : l;
            high[l] = l & SIZE ? LANES + l : l + SIZE;
        }
    }
};

// Transposes LANES vectors of LANES lanes.
template <int SIZE = 1> inline void turned(Floats *v) {
    static constexpr Exchange<SIZE> at;
    Ints low = load<Ints>(at.low), high = load<Ints>(at.high);
#pragma GCC unroll 16
    for (int i = 0; i < LANES; i++) {
        if (i & SIZE) continue;
        Floats one = v[i], two = v[i + SIZE];
        v[i] = chosen(one, two, low), v[i + SIZE] = chosen(one, two, high);
    }
    if constexpr (2 * SIZE < LANES) turned<2 * SIZE>(v);
}

// A block of the cache read once for all heads and tokens of a span: keys [D, POSITIONS] and values [POSITIONS, padded D], float32.
template <class T> struct Read {
    const T *keys, *values; // of the row and head
    int64_t stride, dim, padded, start;
    const int64_t *path; // slots of the positions from `start` on; null for chains
    float *out;          // [POSITIONS, padded], zero where dimensions are padded
    const T *zeros;      // [padded]

    int64_t slot(int64_t position) const { return path == nullptr || position < start ? position : path[position - start]; }

    // Prefetches the next block: the rows of one head are too far apart for the hardware prefetcher.
    void ahead(const T *place, int64_t from, int64_t to) const {
        for (int64_t p = from; p < to; p++) {
            const char *row = reinterpret_cast<const char *>(place + slot(p) * stride);
            for (int64_t byte = 0; byte < dim * static_cast<int64_t>(sizeof(T)); byte += 64) __builtin_prefetch(row + byte);
        }
    }

    // Keys of positions [from, to), at most POSITIONS of them, padded with zeros.
    const float *keys_of(int64_t from, int64_t to) const {
        int64_t whole = dim / LANES * LANES;
        for (int64_t v = 0; v < VECTORS_AT_ONCE; v++) {
            const T *places[LANES];
            for (int64_t j = 0; j < LANES; j++) {
                int64_t position = from + v * LANES + j;
                places[j] = position < to ? keys + slot(position) * stride : zeros;
            }
            for (int64_t d = 0; d < whole; d += LANES) {
                Floats block[LANES];
                for (int j = 0; j < LANES; j++) block[j] = vector_of(places[j] + d);
                turned(block);
                for (int64_t i = 0; i < LANES; i++) std::memcpy(out + (d + i) * POSITIONS + v * LANES, &block[i], sizeof(Floats));
            }
            for (int64_t d = whole; d < dim; d++)
                for (int64_t j = 0; j < LANES; j++) out[d * POSITIONS + v * LANES + j] = foresay::read(places[j][d]);
        }
        return out;
    }

    const float *values_of(int64_t from, int64_t to) const {
        for (int64_t p = from; p < to; p++) {
            const T *place = values + slot(p) * stride;
            float *row = out + (p - from) * padded;
            int64_t d = 0;
            for (; d + LANES <= dim; d += LANES) {
                Floats some = vector_of(place + d);
                std::memcpy(row + d, &some, sizeof some);
            }
            for (; d < dim; d++) row[d] = foresay::read(place[d]);
        }
        return out;
    }
};

// sums[r] [V vectors] += weights[r] [count] times rows [count, stride]. Used for queries times keys and for weights times values.
template <int R, int V> inline void add_rows(const float *const *weights, const float *rows, int64_t stride, int64_t count, float *const *sums) {
    Floats sum[R][V];
    for (int r = 0; r < R; r++)
        for (int v = 0; v < V; v++) sum[r][v] = load<Floats>(sums[r] + v * LANES);
    for (int64_t p = 0; p < count; p++) {
        Floats row[V];
#pragma GCC unroll 4
        for (int v = 0; v < V; v++) row[v] = load<Floats>(rows + p * stride + v * LANES);
#pragma GCC unroll 4
        for (int r = 0; r < R; r++) {
            float weight = weights[r][p];
#pragma GCC unroll 4
            for (int v = 0; v < V; v++) sum[r][v] += row[v] * weight;
        }
    }
    for (int r = 0; r < R; r++)
        for (int v = 0; v < V; v++) std::memcpy(sums[r] + v * LANES, &sum[r][v], sizeof(Floats));
}

template <int R> inline void add_all_values(const float *const *weights, const float *values, int64_t padded, int64_t count, float *const *sums) {
    float *place[R];
    for (int64_t d = 0; d < padded;) {
        for (int r = 0; r < R; r++) place[r] = sums[r] + d;
        int64_t left = (padded - d) / LANES;
        if (left >= 4) add_rows<R, 4>(weights, values + d, padded, count, place), d += 4 * LANES;
        else if (left >= 2) add_rows<R, 2>(weights, values + d, padded, count, place), d += 2 * LANES;
        else add_rows<R, 1>(weights, values + d, padded, count, place), d += LANES;
    }
}

// Replaces the scores of positions [first, last] by their softmax; all others in [0, width) get weight zero.
inline void weights_of(float *scores, int64_t first, int64_t last, int64_t width, float scaling, float softcap) {
    for (int64_t p = first; p <= last; p++) scores[p] *= scaling;
    if (softcap > 0.0f) {
        for (int64_t p = first; p <= last; p++) scores[p] = softcap * std::tanh(scores[p] / softcap);
    }
    int64_t from = first / LANES * LANES, to = (last / LANES + 1) * LANES;
    std::memset(scores, 0, from * sizeof(float));
    std::memset(scores + to, 0, (width - to) * sizeof(float));
    for (int64_t p = from; p < first; p++) scores[p] = std::numeric_limits<float>::lowest();
    for (int64_t p = last + 1; p < to; p++) scores[p] = std::numeric_limits<float>::lowest();
    float top = std::numeric_limits<float>::lowest();
#pragma omp simd reduction(max : top)
    for (int64_t p = from; p < to; p++) top = scores[p] > top ? scores[p] : top;
#pragma omp simd
    for (int64_t p = from; p < to; p++) scores[p] = exponential(scores[p] - top);
    for (int64_t p = from; p < first; p++) scores[p] = 0.0f;
    for (int64_t p = last + 1; p < to; p++) scores[p] = 0.0f;
    Floats sums[LANES] = {};
    for (int64_t p = from; p < to; p += LANES) sums[0] += load<Floats>(scores + p);
    float inverse = 1.0f / together(sums)[0];
#pragma omp simd
    for (int64_t p = from; p < to; p++) scores[p] *= inverse;
}

// Runs `body` over groups of queries: body(group size as a compile-time constant, index of the first).
template <class F> inline void some_queries(int64_t count, const F &body) {
    int64_t r = 0;
    for (; r + QUERIES_AT_ONCE <= count; r += QUERIES_AT_ONCE) body(std::integral_constant<int, QUERIES_AT_ONCE>(), r);
    if (r + 3 <= count && QUERIES_AT_ONCE > 3) body(std::integral_constant<int, 3>(), r), r += 3;
    for (; r + 2 <= count; r += 2) body(std::integral_constant<int, 2>(), r);
    for (; r < count; r++) body(std::integral_constant<int, 1>(), r);
}

// Computes attention of the query heads that share one key head for the tokens of a span, out [N, Q * D].
template <class T>
void gather(const Attention &a, const float *queries, float *out, Span span, int64_t head) {
    static thread_local std::vector<float> kept, block;
    static thread_local std::vector<T> zeros;
    static thread_local std::vector<int64_t> kept_path;
    static thread_local std::vector<float *> rows;
    int64_t n = span.first, group = a.queries / a.keys, count = span.count * group;
    int64_t last = a.positions[n + span.count - 1], from = first_in_sight(a, n) / POSITIONS * POSITIONS;
    int64_t padded = (a.dim + LANES - 1) / LANES * LANES, width = (last - from) / POSITIONS * POSITIONS + POSITIONS;
    slots_of_path(a, n, kept_path);
    block.assign(POSITIONS * padded, 0.0f), zeros.assign(padded, T{});
    kept.assign(count * (width + padded), 0.0f), rows.resize(3 * count);
    // addresses, so that no loop below looks up a variable of the thread
    float *room = kept.data(), **scores = rows.data(), **sums = scores + count;
    const float **asked = const_cast<const float **>(sums + count);
    const T *keys_at = keys_of_row<T>(a, a.rows[n]) + head * a.dim;
    const Read<T> source{keys_at, keys_at + to_values(a, a.rows[n]), a.keys * a.dim, a.dim, padded, a.starts[n],
                         kept_path.empty() ? nullptr : kept_path.data(), block.data(), zeros.data()};
    for (int64_t r = 0; r < count; r++) {
        asked[r] = queries + ((n + r / group) * a.queries + head * group + r % group) * a.dim;
        scores[r] = room + r * width, sums[r] = room + count * width + r * padded;
    }
    for (int64_t p = from; p <= last; p += POSITIONS) {
        source.ahead(source.keys, std::min(p + POSITIONS, last + 1), std::min(p + 2 * POSITIONS, last + 1));
        const float *keys = source.keys_of(p, std::min(p + POSITIONS, last + 1));
        some_queries(count, [&](auto some, int64_t r) {
            constexpr int R = decltype(some)::value;
            float *place[R];
            for (int i = 0; i < R; i++) place[i] = scores[r + i] + (p - from);
            add_rows<R, VECTORS_AT_ONCE>(asked + r, keys, POSITIONS, a.dim, place);
        });
    }
    for (int64_t r = 0; r < count; r++) {
        int64_t token = n + r / group;
        weights_of(scores[r], first_in_sight(a, token) - from, a.positions[token] - from, width, a.scaling, a.softcap);
    }
    std::memset(source.out, 0, POSITIONS * padded * sizeof(float)); // clear keys in the padding of values
    for (int64_t p = from; p <= last; p += POSITIONS) {
        int64_t end = std::min(p + POSITIONS, last + 1);
        source.ahead(source.values, end, std::min(end + POSITIONS, last + 1));
        const float *values = source.values_of(p, end);
        some_queries(count, [&](auto some, int64_t r) {
            constexpr int R = decltype(some)::value;
            const float *weights[R];
            for (int i = 0; i < R; i++) weights[i] = scores[r + i] + (p - from);
            add_all_values<R>(weights, values, padded, end - p, sums + r);
        });
    }
    for (int64_t r = 0; r < count; r++) {
        std::memcpy(out + ((n + r / group) * a.queries + head * group + r % group) * a.dim, sums[r], a.dim * sizeof(float));
    }
}

} // namespace foresay
