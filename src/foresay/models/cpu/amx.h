// Intel's matrix instructions (AMX) on registers of up to 16 rows of 64 bytes.

#pragma once

#include <cstdint>

// clang before version 16 names them otherwise
#if (defined(__AMX_INT8__) && defined(__AMX_BF16__)) || (defined(__AMXINT8__) && defined(__AMXBF16__))
#if defined(__linux__) && defined(__AVX512VNNI__) && defined(__AVX512BF16__)
#define FORESAY_TILES 1

#include <sys/syscall.h>
#include <unistd.h>

namespace foresay {

// Number of rows and bytes of a row of each register; both zero if it is not used.
struct alignas(64) TileShapes {
    uint8_t palette = 1, start_row = 0, reserved[14] = {};
    uint16_t bytes[16] = {};
    uint8_t rows[16] = {};
};
static_assert(sizeof(TileShapes) == 64);

// True if the operating system permits this process to use the registers, which is requested here.
inline bool tiles_allowed() {
    constexpr long ASK = 0x1023, TILE_DATA = 18; // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
    static const bool allowed = syscall(SYS_arch_prctl, ASK, TILE_DATA) == 0;
    return allowed;
}

inline void tile_shapes(const TileShapes &shapes) { asm volatile("ldtilecfg %0" ::"m"(shapes)); }

inline void tile_release() { asm volatile("tilerelease"); }

template <int TILE> inline void tile_zero() { asm volatile("tilezero %%tmm%c0" ::"i"(TILE)); }

template <int TILE> inline void tile_load(const void *memory, int64_t stride) {
    asm volatile("tileloadd (%0,%1,1), %%tmm%c2" ::"r"(memory), "r"(stride), "i"(TILE) : "memory");
}

template <int TILE> inline void tile_store(void *memory, int64_t stride) {
    asm volatile("tilestored %%tmm%c2, (%0,%1,1)" ::"r"(memory), "r"(stride), "i"(TILE) : "memory");
}

// SUMS [rows, 16] += X [rows, 4 k] signed bytes times W [k, 16, 4] unsigned bytes, as 32-bit integers.
template <int SUMS, int X, int W> inline void tile_bytes() {
    asm volatile("tdpbsud %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(SUMS), "i"(X), "i"(W));
}

// The same with signed bytes in W.
template <int SUMS, int X, int W> inline void tile_signed_bytes() {
    asm volatile("tdpbssd %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(SUMS), "i"(X), "i"(W));
}

// SUMS [rows, 16] += X [rows, 2 k] times W [k, 16, 2], bfloat16 numbers to float32. The processor fixes the order of the sums, by k alone.
template <int SUMS, int X, int W> inline void tile_pairs() {
    asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(SUMS), "i"(X), "i"(W));
}

} // namespace foresay

#endif
#endif
