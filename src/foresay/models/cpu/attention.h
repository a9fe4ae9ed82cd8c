// Attention of a Llama-like layer: head norms, rotary positions, writing the cache, and attention over it.
//
// A token's sums have a fixed order, so its bits depend neither on the batch, nor on the other columns, nor on the number of threads. A
// score is a sum over the dimensions by lanes of a vector, then over the lanes. A token's weights are summed by position modulo the
// lanes, then over the lanes. Values are summed position by position. Tokens of one row can therefore share the keys and values that
// are read, a block of positions at a time: a position that a token does not attend to has weight zero, and adding zero changes no bit.
// T is the type of the cache in memory: float32, bfloat16, or int8 for levels of 8 bits, where the float32 scale of a head's key or value
// follows its levels. Queries are rounded to bfloat16 with a cache of bfloat16 if the processor multiplies such numbers.
// Shapes: N tokens, Q query heads, K key heads, D dimensions of a head.

#pragma once

#include "dots.h"
#include "layer.h"

#include <algorithm>
#include <limits>
#include <type_traits>
#include <vector>

namespace foresay {

// Keys and values of a layer: both in the joint product; keys alone, whose numbers are the values, too; or those of another layer.
enum KeysAndValues { OWN = 0, EQUAL = 1, OTHERS = 2 };

struct Attention {
    int64_t tokens, columns, queries, keys, dim, rotated, wide, window;
    int64_t offset, store_rows; // offset: numbers of a slot of the cache before this layer's
    int64_t gated;              // nonzero if each query head of the joint product is followed by a gate of its output
    int64_t source, value_norm; // source: see KeysAndValues; value_norm: nonzero if values are normalized, without weights
    int64_t scale_length;       // see `query_scale`; 0 for queries that their position does not scale
    void *const *blocks;       // [store_rows] each row's keys and values: for each layer, [2, slots, K, D]; null for a row without slots
    const int64_t *capacities; // [store_rows] slots of each block
    const int64_t *rows;      // [N] the cache row of each token
    const int64_t *slots;     // [N] its slot
    const int64_t *starts;    // [N] the slot of the first token of its row in this pass
    const int64_t *positions; // [N] its position
    const int64_t *ends;      // [N] the last position that it attends to; null for its own
    const uint8_t *ancestors; // [N, columns] nonzero if it attends to a column of its row; null for chains, which attend to all before them
    const float *cosines;     // [N, rotated]; null without rotary positions
    const float *sines;       // [N, rotated]
    const float *query_norm;  // [D], or [Q * D] if all heads are one vector (wide); null for none
    const float *key_norm;
    const float *sinks; // [Q] a further score of each head, which takes weight and has no value; null for none
    float eps, scaling, softcap, scale_rate; // softcap 0 for none
};

// The factor of a token's query: 1 + rate log(1 + floor(position / length)) (Llama 4, Ministral 3).
inline float query_scale(const Attention &a, int64_t token) {
    return a.scale_length == 0 ? 1.0f : 1.0f + a.scale_rate * std::log(static_cast<float>(1 + a.positions[token] / a.scale_length));
}

// Elements of a head's key or value.
template <class T> inline int64_t head_size(const Attention &a) { return a.dim + (std::is_same_v<T, int8_t> ? sizeof(float) : 0); }

// The keys of a layer in a row of the cache, [slots, K, head_size]; its values follow them.
template <class T> inline T *keys_of_row(const Attention &a, int64_t row) {
    return static_cast<T *>(a.blocks[row]) + a.offset * a.capacities[row];
}

template <class T> inline int64_t to_values(const Attention &a, int64_t row) { return a.capacities[row] * a.keys * head_size<T>(a); }

template <class T> inline void write_head(T *out, const float *x, int64_t dim) {
    for (int64_t d = 0; d < dim; d++) write(out[d], x[d]);
}

inline void write_head(int8_t *out, const float *x, int64_t dim) {
    Rounding by = rounding_of(x, dim);
    for (int64_t d = 0; d < dim; d++) out[d] = static_cast<int8_t>(by.level(x[d]));
    std::memcpy(out + dim, &by.scale, sizeof by.scale);
}

inline void norm_in_place(float *x, const float *weight, int64_t width, float eps) {
    float unit = 1.0f / std::sqrt(mean_square(x, width) + eps);
#pragma omp simd
    for (int64_t i = 0; i < width; i++) x[i] = x[i] * unit * weight[i];
}

inline void unit_in_place(float *x, int64_t width, float eps) {
    float unit = 1.0f / std::sqrt(mean_square(x, width) + eps);
#pragma omp simd
    for (int64_t i = 0; i < width; i++) x[i] *= unit;
}

// Numbers of keys and values in the joint product of a token.
inline int64_t own_keys(const Attention &a) { return a.source == OTHERS ? 0 : (a.source == EQUAL ? 1 : 2) * a.keys * a.dim; }

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
    int64_t q = a.queries * a.dim, k = a.keys * a.dim, own = own_keys(a);
    int64_t step = a.gated ? 2 * a.dim : a.dim, to_keys = a.queries * step;
    const float *source = joint + n * (to_keys + own);
    float *query = queries + n * q;
    for (int64_t h = 0; h < a.queries; h++) {
        for (int64_t d = 0; d < a.dim; d++) query[h * a.dim + d] = source[h * step + d];
    }
    norm_heads(query, a.query_norm, a.queries, a);
    rotate_heads(query, a.queries, a, n);
    if (own == 0) return;
    source += to_keys;
    std::vector<float> key(source, source + k), value(source + own - k, source + own);
    norm_heads(key.data(), a.key_norm, a.keys, a);
    rotate_heads(key.data(), a.keys, a, n);
    T *keys = keys_of_row<T>(a, a.rows[n]) + a.slots[n] * a.keys * head_size<T>(a), *values = keys + to_values<T>(a, a.rows[n]);
    for (int64_t h = 0; h < a.keys; h++) {
        if (a.value_norm) unit_in_place(value.data() + h * a.dim, a.dim, a.eps);
        write_head(keys + h * head_size<T>(a), key.data() + h * a.dim, a.dim);
        write_head(values + h * head_size<T>(a), value.data() + h * a.dim, a.dim);
    }
}

// Sums of values in registers: queries times vectors of dimensions, half as many where there are 16 registers.
constexpr int QUERIES_AT_ONCE = 4;
#if defined(__AVX512F__) || defined(__ARM_NEON)
constexpr int MOST_VECTORS = 4;
#else
constexpr int MOST_VECTORS = 2;
#endif
constexpr int64_t POSITIONS = 4 * LANES; // positions processed as a block
constexpr int64_t MOST_TOKENS = 16, MOST_SCORES = 1 << 16; // of a span, and of all its heads

// Consecutive tokens of one row that share the reading of the cache; a token of a tree forms its own span.
struct Span {
    int64_t first, count;
};

// The first and the last position that a token attends to.
inline int64_t first_in_sight(const Attention &a, int64_t n) {
    int64_t first = a.window > 0 ? a.positions[n] - a.window + 1 : 0;
    return first > 0 ? first : 0;
}

inline int64_t last_in_sight(const Attention &a, int64_t n) { return a.ends == nullptr ? a.positions[n] : a.ends[n]; }

inline void spans_of(const Attention &a, std::vector<Span> &out) {
    out.clear();
    int64_t group = a.queries / a.keys;
    for (int64_t n = 0; n < a.tokens;) {
        int64_t count = 1, most = a.ancestors != nullptr ? 1 : MOST_SCORES / (group * (last_in_sight(a, n) + MOST_TOKENS + POSITIONS));
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
    for (int64_t c = 0; c < a.columns; c++) {
        if (a.ancestors[n * a.columns + c]) path.push_back(a.starts[n] + c);
    }
}

// Keys and values of a head are read as numbers of this type: as they are, or widened to float32 first, where the processor has no dot
// products of bfloat16 numbers. Queries are rounded to the same type.
template <class T> struct Working { typedef float type; };
#if defined(FORESAY_BF16_DOTS)
template <> struct Working<bf16> { typedef bf16 type; };
#endif

template <class W> constexpr int64_t STEP = 4 * LANES / sizeof(W); // numbers of a vector

inline Floats add_products(Floats sum, const float *x, Floats y) { return sum + load<Floats>(x) * y; }

inline Floats add_products(Floats sum, const bf16 *x, Floats y) { return add_pairs(sum, load<Words>(x), reinterpret_cast<Words>(y)); }

// Rows of keys or values at consecutive positions, [., stride], each of `padded` numbers.
template <class W> struct Rows {
    const W *first;
    int64_t stride;
};

// The keys or the values of one head and row of the cache.
template <class T> struct Source {
    typedef typename Working<T>::type W;
    const T *first;
    int64_t stride, dim, padded, start;
    const int64_t *path; // slots of the positions from `start` on; null for chains, where slot = position
    W *room;             // [POSITIONS, padded], zero in padding

    // Positions [from, to), at most POSITIONS of them: in the cache itself if they lie there as they are read, else copied.
    Rows<W> rows(int64_t from, int64_t to) const {
        if constexpr (std::is_same_v<T, W>) {
            if ((path == nullptr || to <= start) && padded == dim) {
                for (int64_t p = to; p < to + POSITIONS; p++) fetch(first + p * stride);
                return {first + from * stride, stride};
            }
        }
        for (int64_t p = from; p < to; p++) {
            const T *row = first + (path == nullptr || p < start ? p : path[p - start]) * stride;
            W *out = room + (p - from) * padded;
            if constexpr (std::is_same_v<T, W>) {
                std::memcpy(out, row, dim * sizeof(T));
            } else if constexpr (std::is_same_v<T, int8_t>) {
                float scale;
                std::memcpy(&scale, row + dim, sizeof scale);
#pragma omp simd
                for (int64_t d = 0; d < dim; d++) out[d] = scale * static_cast<float>(row[d]);
            } else {
                int64_t d = 0;
                for (; d + LANES <= dim; d += LANES) store(out + d, vector_of(row + d));
                for (; d < dim; d++) out[d] = foresay::read(row[d]);
            }
        }
        return {room, padded};
    }

    // The rows of one head are too far apart for the hardware prefetcher.
    void fetch(const T *row) const {
        for (int64_t d = 0; d < dim; d += 64 / sizeof(T)) __builtin_prefetch(row + d);
    }
};

// scores[j] = query [padded] times row j, for j < LANES; of fewer rows the last one is repeated.
template <class W> inline void row_dots(const W *query, Rows<W> rows, int64_t count, int64_t padded, float *scores) {
    Floats sums[LANES] = {};
    const W *at[LANES];
#pragma GCC unroll 16
    for (int64_t j = 0; j < LANES; j++) at[j] = rows.first + (j < count ? j : count - 1) * rows.stride;
    for (int64_t d = 0; d < padded; d += STEP<W>) {
        Floats some = load<Floats>(query + d);
#pragma GCC unroll 16
        for (int j = 0; j < LANES; j++) sums[j] = add_products(sums[j], at[j] + d, some);
    }
    store(scores, together(sums));
}

// sums[r] [V vectors] += weights[r] [count] times rows [count, stride], from dimension d on.
template <int R, int V, class W>
inline void add_rows(const float *const *weights, Rows<W> rows, int64_t d, int64_t count, float *const *sums) {
    Floats sum[R][V];
    for (int r = 0; r < R; r++)
        for (int v = 0; v < V; v++) sum[r][v] = load<Floats>(sums[r] + d + v * LANES);
    for (int64_t p = 0; p < count; p++) {
        Floats row[V];
#pragma GCC unroll 4
        for (int v = 0; v < V; v++) row[v] = vector_of(rows.first + p * rows.stride + d + v * LANES);
#pragma GCC unroll 4
        for (int r = 0; r < R; r++) {
            float weight = weights[r][p];
#pragma GCC unroll 4
            for (int v = 0; v < V; v++) sum[r][v] += row[v] * weight;
        }
    }
    for (int r = 0; r < R; r++)
        for (int v = 0; v < V; v++) store(sums[r] + d + v * LANES, sum[r][v]);
}

template <int R, class W> inline void add_all_values(const float *const *weights, Rows<W> rows, int64_t padded, int64_t count, float *const *sums) {
    for (int64_t d = 0; d < padded;) {
        int64_t left = (padded - d) / LANES;
        if (left >= MOST_VECTORS) add_rows<R, MOST_VECTORS>(weights, rows, d, count, sums), d += MOST_VECTORS * LANES;
        else if (left >= 2) add_rows<R, 2>(weights, rows, d, count, sums), d += 2 * LANES;
        else add_rows<R, 1>(weights, rows, d, count, sums), d += LANES;
    }
}

// Replaces the scores of positions [first, last] by their softmax; all others in [0, width) get weight zero. sink: see Attention.
inline void weights_of(float *scores, int64_t first, int64_t last, int64_t width, float scaling, float softcap, const float *sink) {
    for (int64_t p = first; p <= last; p++) scores[p] *= scaling;
    if (softcap > 0.0f) {
        for (int64_t p = first; p <= last; p++) scores[p] = softcap * std::tanh(scores[p] / softcap);
    }
    int64_t from = first / LANES * LANES, to = (last / LANES + 1) * LANES;
    std::memset(scores, 0, from * sizeof(float));
    std::memset(scores + to, 0, (width - to) * sizeof(float));
    for (int64_t p = from; p < first; p++) scores[p] = std::numeric_limits<float>::lowest();
    for (int64_t p = last + 1; p < to; p++) scores[p] = std::numeric_limits<float>::lowest();
    Floats tops = load<Floats>(scores + from);
    for (int64_t p = from + LANES; p < to; p += LANES) {
        Floats some = load<Floats>(scores + p);
        tops = some > tops ? some : tops;
    }
    float top = tops[0];
    for (int i = 1; i < LANES; i++) top = tops[i] > top ? tops[i] : top;
    if (sink != nullptr && *sink > top) top = *sink;
#pragma omp simd
    for (int64_t p = from; p < to; p++) scores[p] = exponential(scores[p] - top);
    for (int64_t p = from; p < first; p++) scores[p] = 0.0f;
    for (int64_t p = last + 1; p < to; p++) scores[p] = 0.0f;
    Floats sums[LANES] = {};
    for (int64_t p = from; p < to; p += LANES) sums[0] += load<Floats>(scores + p);
    float inverse = 1.0f / (together(sums)[0] + (sink == nullptr ? 0.0f : exponential(*sink - top)));
#pragma omp simd
    for (int64_t p = from; p < to; p++) scores[p] *= inverse;
}

// Runs `body` over groups of queries: body(group size as a compile-time constant, index of the first).
template <class F> inline void some_queries(int64_t count, const F &body) {
    int64_t r = 0;
    for (; r + QUERIES_AT_ONCE <= count; r += QUERIES_AT_ONCE) body(std::integral_constant<int, QUERIES_AT_ONCE>(), r);
    if (r + 3 <= count) body(std::integral_constant<int, 3>(), r), r += 3;
    for (; r + 2 <= count; r += 2) body(std::integral_constant<int, 2>(), r);
    for (; r < count; r++) body(std::integral_constant<int, 1>(), r);
}

// Computes attention of the query heads that share one key head for the tokens of a span, out [N, Q * D].
template <class T>
void gather(const Attention &a, const float *queries, float *out, Span span, int64_t head) {
    typedef typename Working<T>::type W;
    static thread_local std::vector<float> kept;
    static thread_local std::vector<W> kept_rows;
    static thread_local std::vector<int64_t> kept_path;
    static thread_local std::vector<float *> pointers;
    int64_t n = span.first, group = a.queries / a.keys, count = span.count * group;
    int64_t last = last_in_sight(a, n + span.count - 1), from = first_in_sight(a, n) / POSITIONS * POSITIONS;
    int64_t padded = (a.dim + STEP<W> - 1) / STEP<W> * STEP<W>, width = (last - from) / POSITIONS * POSITIONS + POSITIONS;
    slots_of_path(a, n, kept_path);
    kept.assign(count * (width + padded), 0.0f), kept_rows.assign((POSITIONS + count) * padded, W{}), pointers.resize(2 * count);
    // addresses, so that no loop below looks up a variable of the thread
    float **scores = pointers.data(), **sums = scores + count;
    W *asked = kept_rows.data() + POSITIONS * padded;
    for (int64_t r = 0; r < count; r++) {
        const float *query = queries + ((n + r / group) * a.queries + head * group + r % group) * a.dim;
        for (int64_t d = 0; d < a.dim; d++) write(asked[r * padded + d], query[d]);
        scores[r] = kept.data() + r * width, sums[r] = kept.data() + count * width + r * padded;
    }
    const T *keys = keys_of_row<T>(a, a.rows[n]) + head * head_size<T>(a);
    Source<T> source{keys, a.keys * head_size<T>(a), a.dim, padded, a.starts[n], kept_path.empty() ? nullptr : kept_path.data(), kept_rows.data()};
    for (int64_t p = from; p <= last; p += POSITIONS) {
        int64_t end = std::min(p + POSITIONS, last + 1);
        Rows<W> rows = source.rows(p, end);
        for (int64_t r = 0; r < count; r++) {
            float *place = scores[r] + (p - from);
            for (int64_t j = 0; j < end - p; j += LANES) {
                row_dots(asked + r * padded, {rows.first + j * rows.stride, rows.stride}, end - p - j, padded, place + j);
            }
        }
    }
    for (int64_t r = 0; r < count; r++) {
        int64_t token = n + r / group;
        const float *sink = a.sinks == nullptr ? nullptr : a.sinks + head * group + r % group;
        float scaling = a.scaling * query_scale(a, token);
        weights_of(scores[r], first_in_sight(a, token) - from, last_in_sight(a, token) - from, width, scaling, a.softcap, sink);
    }
    source.first += to_values<T>(a, a.rows[n]);
    for (int64_t p = from; p <= last; p += POSITIONS) {
        int64_t end = std::min(p + POSITIONS, last + 1);
        Rows<W> rows = source.rows(p, end);
        some_queries(count, [&](auto some, int64_t r) {
            constexpr int R = decltype(some)::value;
            const float *weights[R];
            for (int i = 0; i < R; i++) weights[i] = scores[r + i] + (p - from);
            add_all_values<R>(weights, rows, padded, end - p, sums + r);
        });
    }
    for (int64_t r = 0; r < count; r++) {
        std::memcpy(out + ((n + r / group) * a.queries + head * group + r % group) * a.dim, sums[r], a.dim * sizeof(float));
    }
}

} // namespace foresay
