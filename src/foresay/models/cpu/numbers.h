// Number formats in memory, and functions that compilers can vectorize.

#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

namespace foresay {

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

inline void write(bf16 &place, float value) {  // rounds to nearest, ties to even; NaN stays NaN
    uint32_t wide;
    std::memcpy(&wide, &value, sizeof wide);
    uint32_t rounded = (wide + 0x7fffu + ((wide >> 16) & 1u)) >> 16;
    place.bits = static_cast<uint16_t>((wide & 0x7fffffffu) > 0x7f800000u ? 0x7fc0u : rounded);
}

// e^x as 2^n (1 + f + ...), without a function call, so that loops over it are vectorized. Relative error below 3e-7. NaN stays NaN.
inline float exponential(float given) {
    float x = given > -87.0f ? given : -87.0f; // also for NaN, which has no integer part
    x = x < 88.0f ? x : 88.0f;
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
    return given == given ? p * scale : given;
}

} // namespace foresay
