// Sums of level * level over a group of depths, as exact 32-bit integers: the arithmetic of each instruction set.

#pragma once

#include "quantized.h"

namespace foresay {

// Adds the products of four levels each to the lanes of a sum of 32-bit integers.
#if defined(FORESAY_BYTE_DOTS)
#define FORESAY_DOTS(BITS) 8 // one kind of arithmetic for all levels
inline Ints add_four(Ints sum, Words levels, Words x) {
#if defined(__AVX512F__)
    return reinterpret_cast<Ints>(_mm512_dpbusd_epi32(reinterpret_cast<__m512i>(sum), reinterpret_cast<__m512i>(levels), reinterpret_cast<__m512i>(x)));
#else
    return reinterpret_cast<Ints>(_mm256_dpbusd_avx_epi32(reinterpret_cast<__m256i>(sum), reinterpret_cast<__m256i>(levels), reinterpret_cast<__m256i>(x)));
#endif
}
#elif defined(__ARM_FEATURE_DOTPROD)
#define FORESAY_DOTS(BITS) 8
inline Ints add_four(Ints sum, Words levels, Words x) {
    return reinterpret_cast<Ints>(vdotq_s32(reinterpret_cast<int32x4_t>(sum), reinterpret_cast<int8x16_t>(levels), reinterpret_cast<int8x16_t>(x)));
}
#else
#define FORESAY_DOTS(BITS) BITS
#endif

// Without one: sums of two products in 16 bits, which are then added in pairs. `in_order` keeps the compiler from interleaving steps,
// whose numbers would not fit into the registers.
#if !defined(FORESAY_BYTE_DOTS) && defined(__AVX512BW__)
#define FORESAY_SHORT_SUMS 1
typedef __m512i Integers;
inline Integers two_products(Integers levels, Integers x) { return _mm512_maddubs_epi16(levels, x); }
inline Integers two_products_signed(Integers levels, Integers x) {
    return _mm512_maddubs_epi16(_mm512_abs_epi8(levels), _mm512_mask_sub_epi8(x, _mm512_movepi8_mask(levels), _mm512_setzero_si512(), x));
}
inline Integers add_shorts(Integers x, Integers y) { return _mm512_add_epi16(x, y); }
inline Integers short_ones() { return _mm512_set1_epi16(1); }
inline Ints add_in_pairs(Integers x, Integers by) { return reinterpret_cast<Ints>(_mm512_madd_epi16(x, by)); }
inline void in_order(Integers &x) { asm volatile("" : "+v"(x)); }
#elif !defined(FORESAY_BYTE_DOTS) && defined(__AVX2__) && !defined(__AVX512F__)
#define FORESAY_SHORT_SUMS 1
typedef __m256i Integers;
inline Integers two_products(Integers levels, Integers x) { return _mm256_maddubs_epi16(levels, x); }
inline Integers two_products_signed(Integers levels, Integers x) {
    return _mm256_maddubs_epi16(_mm256_abs_epi8(levels), _mm256_sign_epi8(x, levels));
}
inline Integers add_shorts(Integers x, Integers y) { return _mm256_add_epi16(x, y); }
inline Integers short_ones() { return _mm256_set1_epi16(1); }
inline Ints add_in_pairs(Integers x, Integers by) { return reinterpret_cast<Ints>(_mm256_madd_epi16(x, by)); }
inline void in_order(Integers &x) { asm volatile("" : "+x"(x)); }
#endif

// Adds the products of the signed 16-bit numbers in both halves of a lane to a sum of 32-bit integers.
inline Ints add_short_pairs(Ints sum, Words x, Words y) {
#if defined(__AVX512F__) && defined(__AVX512VNNI__)
    return reinterpret_cast<Ints>(_mm512_dpwssd_epi32(reinterpret_cast<__m512i>(sum), reinterpret_cast<__m512i>(x), reinterpret_cast<__m512i>(y)));
#elif defined(__AVX512BW__)
    return sum + reinterpret_cast<Ints>(_mm512_madd_epi16(reinterpret_cast<__m512i>(x), reinterpret_cast<__m512i>(y)));
#elif defined(__AVX2__) && !defined(__AVX512F__)
    return sum + reinterpret_cast<Ints>(_mm256_madd_epi16(reinterpret_cast<__m256i>(x), reinterpret_cast<__m256i>(y)));
#else
    Ints a = reinterpret_cast<Ints>(x), b = reinterpret_cast<Ints>(y);
    return sum + (a << 16 >> 16) * (b << 16 >> 16) + (a >> 16) * (b >> 16);
#endif
}

#if defined(__ARM_FEATURE_MATMUL_INT8)
// dots_of_group below for two tokens and more: an instruction multiplies two tokens by two outputs at 8 depths.
template <int DEPTH, int ROWS, int FIRST, int COUNT, class L>
inline void sums_of_pairs(const L &levels, int64_t first, const int8_t *x, int64_t stride, Ints (&out)[ROWS][COUNT]) {
    int32x4_t sums[(ROWS + 1) / 2][COUNT][2] = {};
#pragma GCC unroll 4
    for (int k = 0; k < DEPTH; k += 8) {
        Words low[COUNT], high[COUNT];
        constexpr int PARTS = L::PARTS;
        levels.template at<FIRST, COUNT>(first + k / 4 / PARTS * PARTS, k / 4 % PARTS, low);
        levels.template at<FIRST, COUNT>(first + k / 4 / PARTS * PARTS, k / 4 % PARTS + 1, high);
#pragma GCC unroll 2
        for (int r = 0; r < ROWS; r += 2) {
            const int8_t *one = x + r * stride + k, *other = r + 1 < ROWS ? one + stride : one;
            int8x16_t both = vcombine_s8(vld1_s8(one), vld1_s8(other));
#pragma GCC unroll 4
            for (int v = 0; v < COUNT; v++) {
                uint32x4_t a = reinterpret_cast<uint32x4_t>(low[v]), b = reinterpret_cast<uint32x4_t>(high[v]);
                sums[r / 2][v][0] = vmmlaq_s32(sums[r / 2][v][0], both, vreinterpretq_s8_u32(vzip1q_u32(a, b)));
                sums[r / 2][v][1] = vmmlaq_s32(sums[r / 2][v][1], both, vreinterpretq_s8_u32(vzip2q_u32(a, b)));
            }
        }
    }
    for (int r = 0; r < ROWS; r++)
        for (int v = 0; v < COUNT; v++) {
            int64x2_t a = vreinterpretq_s64_s32(sums[r / 2][v][0]), b = vreinterpretq_s64_s32(sums[r / 2][v][1]);
            out[r][v] = reinterpret_cast<Ints>(r % 2 == 0 ? vzip1q_s64(a, b) : vzip2q_s64(a, b));
        }
}
#endif

// The same in sums of two products, 16 bits each, which are added in pairs, each times a number of a pair in `by`, to `out`.
#if defined(FORESAY_SHORT_SUMS)
template <int BITS, int DEPTH, int ROWS, int FIRST, int COUNT, class L>
inline void add_shorts_of_group(const L &levels, int64_t first, const int8_t *x, int64_t stride, const Integers (&by)[COUNT], Ints (&out)[ROWS][COUNT]) {
    // levels of 4 bits cannot overflow 16 bits within 32 depths, those of 4-bit floats within 16, nor those of 6 bits within 8
    constexpr int SAFE = BITS == LEVELS_4 ? DEPTH : BITS == FLOATS_4 ? 16 : BITS == LEVELS_6 ? 8 : 4;
#pragma GCC unroll 4
    for (int from = 0; from < DEPTH; from += SAFE) {
        Integers narrow[ROWS][COUNT];
#pragma GCC unroll 8
        for (int k = from; k < from + SAFE; k += 4) {
            Words words[COUNT];
            levels.template at<FIRST, COUNT>(first + k / 4 / L::PARTS * L::PARTS, k / 4 % L::PARTS, words);
            Integers four[COUNT];
            for (int v = 0; v < COUNT; v++) four[v] = reinterpret_cast<Integers>(words[v]);
#pragma GCC unroll 12
            for (int r = 0; r < ROWS; r++) {
                Integers one = reinterpret_cast<Integers>(repeated(x + r * stride + k));
                in_order(one);
#pragma GCC unroll 4
                for (int v = 0; v < COUNT; v++) {
                    Integers two = BITS == LEVELS_8 ? two_products_signed(four[v], one) : two_products(four[v], one);
                    narrow[r][v] = k == from ? two : add_shorts(narrow[r][v], two);
                    in_order(narrow[r][v]);
                }
            }
        }
#pragma GCC unroll 12
        for (int r = 0; r < ROWS; r++)
#pragma GCC unroll 4
            for (int v = 0; v < COUNT; v++) out[r][v] += add_in_pairs(narrow[r][v], by[v]);
    }
}
#endif

// Sum over a group of level * level, for ROWS tokens and COUNT vectors of outputs from vector FIRST on. first: the group's first four
// depths in `levels`. BITS: of the levels.
template <int BITS, int DEPTH, int ROWS, int FIRST, int COUNT, class L>
inline void dots_of_group(const L &levels, int64_t first, const int8_t *x, int64_t stride, Ints (&out)[ROWS][COUNT]) {
#if defined(__ARM_FEATURE_MATMUL_INT8)
    if constexpr (ROWS > 1) return sums_of_pairs<DEPTH, ROWS, FIRST, COUNT>(levels, first, x, stride, out);
#endif
#if defined(FORESAY_BYTE_DOTS) || defined(__ARM_FEATURE_DOTPROD)
    for (int r = 0; r < ROWS; r++)
        for (int v = 0; v < COUNT; v++) out[r][v] = Ints{};
    for (int k = 0; k < DEPTH / 4; k += L::PARTS) {
#pragma GCC unroll 4
        for (int part = 0; part < L::PARTS; part++) {
            Words four[COUNT];
            levels.template at<FIRST, COUNT>(first + k, part, four);
#pragma GCC unroll 12
            for (int r = 0; r < ROWS; r++) {
                Words one = repeated(x + r * stride + 4 * (k + part));
#pragma GCC unroll 8
                for (int v = 0; v < COUNT; v++) out[r][v] = add_four(out[r][v], four[v], one);
            }
        }
    }
#elif defined(FORESAY_SHORT_SUMS)
    Integers ones[COUNT];
    for (int v = 0; v < COUNT; v++) ones[v] = short_ones();
    for (int r = 0; r < ROWS; r++)
        for (int v = 0; v < COUNT; v++) out[r][v] = Ints{};
    add_shorts_of_group<BITS, DEPTH, ROWS, FIRST, COUNT>(levels, first, x, stride, ones, out);
#else
    for (int r = 0; r < ROWS; r++)
        for (int v = 0; v < COUNT; v++) out[r][v] = Ints{};
    for (int k = 0; k < DEPTH; k += 4) {
        Words four[COUNT];
        levels.template at<FIRST, COUNT>(first + k / 4 / L::PARTS * L::PARTS, k / 4 % L::PARTS, four);
        for (int v = 0; v < COUNT; v++) {
            for (int d = 0; d < 4; d++) {
                Words top = four[v] << (24 - 8 * d);
                Ints level = BITS == LEVELS_8 ? reinterpret_cast<Ints>(top) >> 24 : reinterpret_cast<Ints>(top >> 24);
                for (int r = 0; r < ROWS; r++) out[r][v] += level * static_cast<int32_t>(x[r * stride + k + d]);
            }
        }
    }
#endif
}

// Adds to `out` the same sums, times a multiple for each output.
template <int BITS, int DEPTH, int ROWS, int FIRST, int COUNT, class L>
inline void add_group_dots(const L &levels, int64_t first, const int8_t *x, int64_t stride, const Ints (&multiples)[COUNT], Ints (&out)[ROWS][COUNT]) {
#if defined(FORESAY_SHORT_SUMS)
    Integers pairs[COUNT];
    for (int v = 0; v < COUNT; v++) pairs[v] = reinterpret_cast<Integers>((multiples[v] & 0xffff) | multiples[v] << 16);
    add_shorts_of_group<BITS, DEPTH, ROWS, FIRST, COUNT>(levels, first, x, stride, pairs, out);
#else
    Ints dots[ROWS][COUNT];
    dots_of_group<BITS, DEPTH, ROWS, FIRST, COUNT>(levels, first, x, stride, dots);
#pragma GCC unroll 12
    for (int r = 0; r < ROWS; r++)
#pragma GCC unroll 8
        for (int v = 0; v < COUNT; v++) out[r][v] += dots[r][v] * multiples[v];
#endif
}

} // namespace foresay
