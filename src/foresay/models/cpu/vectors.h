// Vectors of the widest instruction set that the compiler may use, and the few operations on them that need intrinsics.

#pragma once

#include <cstdint>
#include <cstring>
#include <type_traits>
#if defined(__AVX2__)
#include <immintrin.h>
#elif defined(__ARM_NEON)
#include <arm_neon.h>
#endif

namespace foresay {

#if defined(__AVX512F__)
constexpr int LANES = 16;
#elif defined(__AVX2__)
constexpr int LANES = 8;
#else
constexpr int LANES = 4;
#endif

typedef float Floats __attribute__((vector_size(4 * LANES), may_alias));
typedef int32_t Ints __attribute__((vector_size(4 * LANES), may_alias));
typedef uint32_t Words __attribute__((vector_size(4 * LANES), may_alias));
typedef uint16_t Shorts __attribute__((vector_size(2 * LANES), may_alias));
typedef uint8_t Bytes __attribute__((vector_size(LANES), may_alias));

template <int N> using Constant = std::integral_constant<int, N>;

template <class V, class T> inline V load(const T *place) {
    V out;
    std::memcpy(&out, place, sizeof out);
    return out;
}

template <class V, class T> inline void store(T *place, V value) { std::memcpy(place, &value, sizeof value); }

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

// Converts LANES float16 numbers to float32.
inline Floats halves(const uint16_t *place) {
#if defined(__AVX512F__)
    return reinterpret_cast<Floats>(_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i *>(place))));
#elif defined(__AVX2__) && defined(__F16C__)
    return reinterpret_cast<Floats>(_mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i *>(place))));
#else
    Floats out;
    for (int i = 0; i < LANES; i++) out[i] = wide_half(place[i]);
    return out;
#endif
}

// Converts LANES bytes to 32-bit integers.
inline Ints widened(const uint8_t *place) {
#if defined(__AVX512F__)
    return reinterpret_cast<Ints>(_mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i *>(place))));
#elif defined(__AVX2__)
    return reinterpret_cast<Ints>(_mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i *>(place))));
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

// Converts the bfloat16 numbers in the low and the high halves of 32-bit lanes to float32.
inline Floats low_halves(Words pairs) { return reinterpret_cast<Floats>(pairs << 16); }

inline Floats high_halves(Words pairs) { return reinterpret_cast<Floats>(pairs & 0xffff0000u); }

inline Words repeated(const void *four_bytes) {
    uint32_t word;
    std::memcpy(&word, four_bytes, sizeof word);
    return Words{} + word;
}

// BYTE_DOTS: the processor multiplies unsigned by signed bytes and adds four products to a 32-bit lane in one instruction.
#if (defined(__AVX512F__) && defined(__AVX512VNNI__)) || (!defined(__AVX512F__) && defined(__AVXVNNI__))
#define FORESAY_BYTE_DOTS 1
#endif
// BF16_DOTS: it multiplies bfloat16 numbers and adds two products to a float32 lane in one instruction.
#if (defined(__AVX512F__) && defined(__AVX512BF16__)) || defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC)
#define FORESAY_BF16_DOTS 1
#endif

#if defined(FORESAY_BF16_DOTS)
constexpr bool BF16_DOTS = true;
// Adds the products of two pairs of bfloat16 numbers to each lane. The processor fixes how it rounds.
inline Floats add_pairs(Floats sum, Words x, Words y) {
#if defined(__AVX512F__)
    return reinterpret_cast<Floats>(_mm512_dpbf16_ps(reinterpret_cast<__m512>(sum), reinterpret_cast<__m512bh>(x), reinterpret_cast<__m512bh>(y)));
#else
    return reinterpret_cast<Floats>(vbfdotq_f32(reinterpret_cast<float32x4_t>(sum), reinterpret_cast<bfloat16x8_t>(x), reinterpret_cast<bfloat16x8_t>(y)));
#endif
}
#else
constexpr bool BF16_DOTS = false;
inline Floats add_pairs(Floats sum, Words x, Words y) {
    sum += low_halves(x) * low_halves(y);
    sum += high_halves(x) * high_halves(y);
    return sum;
}
#endif

} // namespace foresay
