// Matrix products with frozen weights: out[m, n] = sum over k of x[m, k] * w[n, k], in float32.
//
// Every sum runs over k in a fixed order, in one accumulator, so the bits of a row depend neither on other rows nor on the number of
// threads. Weights are stored in panels of 32 outputs, so that a vector of them is multiplied by one number of x. For few rows a panel
// is decoded in registers, for many rows once into float32; both give the same bits.

#pragma once

#include <cstdint>
#include <cstring>
#if defined(__AVX2__)
#include <immintrin.h>
#endif

namespace foresay {

constexpr int64_t PANEL = 32, GROUP = 32;
// FEW, MANY: most rows whose sums are kept in registers, if the panel is decoded in registers (FEW) or was decoded before (MANY).
// From SPLIT rows on a tile is half a panel wide, because the sums of a whole width would leave none of 16 registers for the weights.
#if defined(__AVX512F__)
constexpr int LANES = 16, FEW = 8, MANY = 12, SPLIT = 1 << 20;
constexpr int64_t DEPTH_AT_ONCE = 256;
#elif defined(__AVX2__)
constexpr int LANES = 8, FEW = 6, MANY = 6, SPLIT = 4;
constexpr int64_t DEPTH_AT_ONCE = 128;
#else
constexpr int LANES = 4, FEW = 2, MANY = 2, SPLIT = 1 << 20;
constexpr int64_t DEPTH_AT_ONCE = 256;
#endif
constexpr int VECTORS = PANEL / LANES, HALVES = 16 / LANES;
constexpr int64_t ROWS_AT_ONCE = 48;

typedef float Floats __attribute__((vector_size(4 * LANES), may_alias));
typedef int32_t Ints __attribute__((vector_size(4 * LANES), may_alias));
typedef uint32_t Words __attribute__((vector_size(4 * LANES), may_alias));
typedef uint16_t Shorts __attribute__((vector_size(2 * LANES), may_alias));
typedef int8_t Bytes __attribute__((vector_size(LANES), may_alias));

enum Format { FLOAT32 = 0, BFLOAT16 = 1, INT8 = 2, INT4 = 3, FLOAT32_ROWS = 4, BFLOAT16_ROWS = 5 };

// Most rows for which a panel is decoded in registers, once per tile. With short vectors this is cheaper than storing the decoded
// panel, unless decoding takes many instructions.
constexpr int64_t in_registers(int format) { return LANES == 8 ? (format == INT4 ? 8 : ROWS_AT_ONCE) : 2 * FEW; }

// Weights [outputs, depth]. Panels are stored consecutively; depth is padded to a multiple of 4, outputs to a multiple of 32.
//   float32, bfloat16, int8: [panel, depth, 32]; int8 has `scales` [outputs], float32.
//   int4: [panel, depth / 4, 16] words of 8 levels; level j of word l is output l + 16 * (j % 2) at depth j / 2.
//         `scales` [panel, depth / 32, 2, 32] float16: the scale of each group, and its offset (the weight at level 0).
//   float32_rows, bfloat16_rows: [outputs] addresses of the weights of each output, rows of `depth` numbers; the bias likewise,
//         [outputs] addresses of numbers. See dots.h.
struct Product {
    int64_t format, outputs, depth;
    const void *weights;
    const void *scales;
    const void *bias; // [outputs] float32; null for none
};

// Converts float16 to float32 as processors do: a NaN becomes a quiet NaN.
inline float wide_half(uint16_t half) {
    uint32_t sign = static_cast<uint32_t>(half) >> 15 << 31, power = half >> 10 & 31, digits = half & 1023;
    // subnormal numbers are multiples of 2^-24
    if (power == 0) return (sign ? -1.0f : 1.0f) * static_cast<float>(digits) * 5.9604644775390625e-8f;
    uint32_t bits = sign | (power == 31 ? 255 : power + 112) << 23 | digits << 13;
    if (power == 31 && digits != 0) bits |= 1u << 22;
    float out;
    std::memcpy(&out, &bits, sizeof out);
    return out;
}

template <class V, class T> inline V load(const T *place) {
    V out;
    std::memcpy(&out, place, sizeof out);
    return out;
}

inline void halves(const uint16_t *place, Floats *out) {
#if defined(__AVX512F__)
    for (int v = 0; v < VECTORS; v++) out[v] = reinterpret_cast<Floats>(_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i *>(place + v * LANES))));
#elif defined(__AVX2__) && defined(__F16C__)
    for (int v = 0; v < VECTORS; v++) out[v] = reinterpret_cast<Floats>(_mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i *>(place + v * LANES))));
#else
    for (int v = 0; v < VECTORS; v++)
        for (int i = 0; i < LANES; i++) out[v][i] = wide_half(place[v * LANES + i]);
#endif
}

inline Ints widened(const int8_t *place) {
#if defined(__AVX512F__)
    return reinterpret_cast<Ints>(_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i *>(place))));
#elif defined(__AVX2__)
    return reinterpret_cast<Ints>(_mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i *>(place))));
#else
    return __builtin_convertvector(load<Bytes>(place), Ints);
#endif
}

// Converts LANES bfloat16 numbers to float32.
inline Floats widened(const uint16_t *place) {
#if defined(__AVX512F__)
    __m512i wide = _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i *>(place)));
    return reinterpret_cast<Floats>(_mm512_slli_epi32(wide, 16));
#elif defined(__AVX2__)
    __m256i wide = _mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i *>(place)));
    return reinterpret_cast<Floats>(_mm256_slli_epi32(wide, 16));
#else
    return reinterpret_cast<Floats>(__builtin_convertvector(load<Shorts>(place), Words) << 16);
#endif
}

// Decodes a panel's weights at four consecutive depths; `at` returns COUNT vectors from the FIRST on.
template <int FORMAT> struct Decoder;

template <> struct Decoder<FLOAT32> {
    const float *weights;
    Decoder(const Product &p, int64_t panel, int64_t padded) : weights(static_cast<const float *>(p.weights) + panel * padded * PANEL) {}
    explicit Decoder(const float *decoded) : weights(decoded) {}
    inline void group(int64_t) {}
    template <int FIRST, int COUNT> inline void at(int64_t k, int, Floats *out) const {
        for (int v = 0; v < COUNT; v++) out[v] = load<Floats>(weights + k * PANEL + (FIRST + v) * LANES);
    }
};

template <> struct Decoder<BFLOAT16> {
    const uint16_t *weights;
    Decoder(const Product &p, int64_t panel, int64_t padded) : weights(static_cast<const uint16_t *>(p.weights) + panel * padded * PANEL) {}
    inline void group(int64_t) {}
    template <int FIRST, int COUNT> inline void at(int64_t k, int, Floats *out) const {
        for (int v = 0; v < COUNT; v++) out[v] = widened(weights + k * PANEL + (FIRST + v) * LANES);
    }
};

template <> struct Decoder<INT8> {
    const int8_t *weights;
    Decoder(const Product &p, int64_t panel, int64_t padded) : weights(static_cast<const int8_t *>(p.weights) + panel * padded * PANEL) {}
    inline void group(int64_t) {}
    template <int FIRST, int COUNT> inline void at(int64_t k, int, Floats *out) const {
        for (int v = 0; v < COUNT; v++) {
            out[v] = __builtin_convertvector(widened(weights + k * PANEL + (FIRST + v) * LANES), Floats);
        }
    }
};

template <> struct Decoder<INT4> {
    const uint32_t *weights;
    const uint16_t *scales;
    Floats scale[VECTORS], base[VECTORS];
    Words words[HALVES];
    Decoder(const Product &p, int64_t panel, int64_t padded)
        : weights(static_cast<const uint32_t *>(p.weights) + panel * padded * 4),
          scales(static_cast<const uint16_t *>(p.scales) + panel * (padded / GROUP) * 2 * PANEL) {}
    inline void group(int64_t k) {
        if (k % GROUP == 0) {
            halves(scales + k / GROUP * 2 * PANEL, scale);
            halves(scales + k / GROUP * 2 * PANEL + PANEL, base);
        }
        for (int h = 0; h < HALVES; h++) words[h] = load<Words>(weights + k * 4 + h * LANES);
    }
    template <int FIRST, int COUNT> inline void at(int64_t, int step, Floats *out) const {
        for (int v = FIRST; v < FIRST + COUNT; v++) {
            int half = v % HALVES, level = 2 * step + v / HALVES;
            Ints bits = reinterpret_cast<Ints>((words[half] >> (4 * level)) & 15u);
            out[v - FIRST] = scale[v] * __builtin_convertvector(bits, Floats) + base[v];
        }
    }
};

template <class D, int V, int FIRST, int COUNT, int ROWS>
inline void weights_at(const D &decoder, int64_t k, int step, const float *one, Floats (&sum)[ROWS][COUNT]) {
    if constexpr (V < COUNT) {
        Floats weight[1];
        decoder.template at<FIRST + V, 1>(k, step, weight);
#pragma GCC unroll 16
        for (int r = 0; r < ROWS; r++) sum[r][V] += weight[0] * one[r];
        weights_at<D, V + 1, FIRST, COUNT, ROWS>(decoder, k, step, one, sum);
    }
}

// Adds the products of ROWS rows with COUNT vectors of one panel to sums [rows, 32], over depths [from, to), a multiple of 4 of them.
template <class D, int ROWS, int FIRST, int COUNT>
inline void tile(D &decoder, const float *x, int64_t stride, int64_t from, int64_t to, float *sums, bool fresh) {
    Floats sum[ROWS][COUNT];
    for (int r = 0; r < ROWS; r++)
        for (int v = 0; v < COUNT; v++) sum[r][v] = fresh ? Floats{} : load<Floats>(sums + r * PANEL + (FIRST + v) * LANES);
    for (int64_t k = from; k < to; k += 4) {
        decoder.group(k);
#pragma GCC unroll 4
        for (int step = 0; step < 4; step++) {
            if constexpr (COUNT > ROWS) { // fewer rows than vectors: keep the numbers of x in registers and decode each vector once
                float one[ROWS];
                for (int r = 0; r < ROWS; r++) one[r] = x[r * stride + k + step];
                weights_at<D, 0, FIRST, COUNT, ROWS>(decoder, k + step, step, one, sum);
            } else {
                Floats weight[COUNT];
                decoder.template at<FIRST, COUNT>(k + step, step, weight);
#pragma GCC unroll 16
                for (int r = 0; r < ROWS; r++) {
                    float one = x[r * stride + k + step];
                    for (int v = 0; v < COUNT; v++) sum[r][v] += weight[v] * one;
                }
            }
        }
    }
    for (int r = 0; r < ROWS; r++)
        for (int v = 0; v < COUNT; v++) std::memcpy(sums + r * PANEL + (FIRST + v) * LANES, &sum[r][v], sizeof(Floats));
}

// The same as `tile` for any number of rows and a whole panel, in tiles of at most MOST rows.
template <class D, int MOST> inline void tiles(D &decoder, const float *x, int64_t stride, int64_t rows, int64_t from, int64_t to, float *sums, bool fresh) {
#define TILE(N)                                                                                     \
    if constexpr (N <= MOST) {                                                                      \
        while (rows >= N) {                                                                         \
            if constexpr (N < SPLIT) {                                                              \
                tile<D, N, 0, VECTORS>(decoder, x, stride, from, to, sums, fresh);                  \
            } else {                                                                                \
                tile<D, N, 0, VECTORS / 2>(decoder, x, stride, from, to, sums, fresh);              \
                tile<D, N, VECTORS / 2, VECTORS / 2>(decoder, x, stride, from, to, sums, fresh);    \
            }                                                                                       \
            x += N * stride, sums += N * PANEL, rows -= N;                                          \
        }                                                                                           \
    }
    TILE(12) TILE(8) TILE(6) TILE(5) TILE(4) TILE(3) TILE(2) TILE(1)
#undef TILE
}

// Computes out[m, n] for the outputs of one panel and at most ROWS_AT_ONCE rows of x [rows, stride], padded with zeros.
template <int FORMAT> void panel_product(const Product &p, const float *x, int64_t stride, int64_t rows, int64_t panel, float *out) {
    int64_t padded = (p.depth + 3) / 4 * 4;
    alignas(64) float sums[ROWS_AT_ONCE * PANEL];
    Decoder<FORMAT> decoder(p, panel, padded);
    if constexpr (FORMAT == FLOAT32) {
        tiles<Decoder<FLOAT32>, MANY>(decoder, x, stride, rows, 0, padded, sums, true);
    } else if (rows <= in_registers(FORMAT)) {
        tiles<Decoder<FORMAT>, FEW>(decoder, x, stride, rows, 0, padded, sums, true);
    } else {
        alignas(64) float room[DEPTH_AT_ONCE * PANEL];
        for (int64_t from = 0; from < padded; from += DEPTH_AT_ONCE) {
            int64_t to = from + DEPTH_AT_ONCE < padded ? from + DEPTH_AT_ONCE : padded;
            Decoder<FLOAT32> decoded(room - from * PANEL);
            for (int64_t k = from; k < to; k += 4) {
                decoder.group(k);
#pragma GCC unroll 4
                for (int step = 0; step < 4; step++) {
                    Floats weight[VECTORS];
                    decoder.template at<0, VECTORS>(k + step, step, weight);
                    for (int v = 0; v < VECTORS; v++) std::memcpy(room + (k + step - from) * PANEL + v * LANES, &weight[v], sizeof(Floats));
                }
            }
            tiles<Decoder<FLOAT32>, MANY>(decoded, x, stride, rows, from, to, sums, from == 0);
        }
    }
    int64_t first = panel * PANEL, count = p.outputs - first < PANEL ? p.outputs - first : PANEL;
    const float *scales = FORMAT == INT8 ? static_cast<const float *>(p.scales) + first : nullptr;
    const float *bias = static_cast<const float *>(p.bias);
    for (int64_t r = 0; r < rows; r++) {
        float *place = out + r * p.outputs + first, *sum = sums + r * PANEL;
        for (int64_t i = 0; i < count; i++) {
            float value = sum[i];
            if constexpr (FORMAT == INT8) value *= scales[i];
            place[i] = bias == nullptr ? value : value + bias[first + i];
        }
    }
}

} // namespace foresay
