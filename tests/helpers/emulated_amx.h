// amx.h without the instructions: what each does by Intel's manual. A use that a processor would refuse ends the process.

#pragma once

#include <cstdint>
#include <cstdlib>
#include <cstring>

#define FORESAY_TILES 1

namespace foresay {

struct alignas(64) TileShapes {
    uint8_t palette = 1, start_row = 0, reserved[14] = {};
    uint16_t bytes[16] = {};
    uint8_t rows[16] = {};
};

struct Emulated {
    bool is_configured = false;
    TileShapes shapes;
    uint8_t tiles[8][16][64];
};

inline thread_local Emulated emulated;

inline void require_tile(bool holds) {
    if (!holds) std::abort();
}

inline bool tiles_allowed() { return true; }

inline void tile_shapes(const TileShapes &shapes) {
    require_tile(shapes.palette == 1 && shapes.start_row == 0);
    for (uint8_t one : shapes.reserved) require_tile(one == 0);
    for (int i = 0; i < 16; i++) {
        bool used = shapes.rows[i] > 0;
        require_tile(shapes.rows[i] <= 16 && shapes.bytes[i] <= 64 && used == (shapes.bytes[i] > 0) && (i < 8 || !used));
    }
    emulated.is_configured = true, emulated.shapes = shapes;
    std::memset(emulated.tiles, 0, sizeof emulated.tiles);
}

inline void tile_release() { emulated.is_configured = false; }

template <int TILE> inline void require_used() { require_tile(emulated.is_configured && emulated.shapes.rows[TILE] > 0); }

template <int TILE> inline void tile_zero() {
    require_used<TILE>();
    std::memset(emulated.tiles[TILE], 0, sizeof emulated.tiles[TILE]);
}

template <int TILE> inline void tile_load(const void *place, int64_t stride) {
    tile_zero<TILE>();
    for (int r = 0; r < emulated.shapes.rows[TILE]; r++) {
        std::memcpy(emulated.tiles[TILE][r], static_cast<const uint8_t *>(place) + r * stride, emulated.shapes.bytes[TILE]);
    }
}

template <int TILE> inline void tile_store(void *place, int64_t stride) {
    require_used<TILE>();
    for (int r = 0; r < emulated.shapes.rows[TILE]; r++) {
        std::memcpy(static_cast<uint8_t *>(place) + r * stride, emulated.tiles[TILE][r], emulated.shapes.bytes[TILE]);
    }
}

template <int SUMS, int X, int W> inline void require_shapes() {
    require_used<SUMS>(), require_used<X>(), require_used<W>();
    const TileShapes &shapes = emulated.shapes;
    require_tile(shapes.rows[SUMS] == shapes.rows[X] && shapes.bytes[SUMS] == shapes.bytes[W] && shapes.rows[W] * 4 == shapes.bytes[X]);
    require_tile(SUMS != X && SUMS != W && X != W);
}

// Byte: of W.
template <class Byte, int SUMS, int X, int W> inline void multiply_bytes() {
    require_shapes<SUMS, X, W>();
    for (int m = 0; m < emulated.shapes.rows[SUMS]; m++)
        for (int k = 0; k < emulated.shapes.rows[W]; k++)
            for (int n = 0; n < emulated.shapes.bytes[SUMS] / 4; n++) {
                int32_t sum;
                std::memcpy(&sum, emulated.tiles[SUMS][m] + 4 * n, 4);
                for (int i = 0; i < 4; i++) {
                    sum += static_cast<int8_t>(emulated.tiles[X][m][4 * k + i]) * static_cast<Byte>(emulated.tiles[W][k][4 * n + i]);
                }
                std::memcpy(emulated.tiles[SUMS][m] + 4 * n, &sum, 4);
            }
}

template <int SUMS, int X, int W> inline void tile_bytes() { multiply_bytes<uint8_t, SUMS, X, W>(); }

template <int SUMS, int X, int W> inline void tile_signed_bytes() { multiply_bytes<int8_t, SUMS, X, W>(); }

// Denormal numbers count as zero.
inline float flushed(uint32_t bits) {
    if ((bits & 0x7f800000u) == 0) bits &= 0x80000000u;
    float out;
    std::memcpy(&out, &bits, 4);
    return out;
}

inline float flushed(float value) {
    uint32_t bits;
    std::memcpy(&bits, &value, 4);
    return flushed(bits);
}

inline float bf16_at(const uint8_t *place) {
    uint16_t half;
    std::memcpy(&half, place, 2);
    return flushed(static_cast<uint32_t>(half) << 16);
}

template <int SUMS, int X, int W> inline void tile_pairs() {
    require_shapes<SUMS, X, W>();
    for (int m = 0; m < emulated.shapes.rows[SUMS]; m++)
        for (int n = 0; n < emulated.shapes.bytes[SUMS] / 4; n++) {
            float sums[2] = {0.0f, 0.0f}, total; // of even and of odd depths
            for (int k = 0; k < emulated.shapes.rows[W]; k++)
                for (int i = 0; i < 2; i++) {
                    float product = bf16_at(emulated.tiles[X][m] + 4 * k + 2 * i) * bf16_at(emulated.tiles[W][k] + 4 * n + 2 * i);
                    sums[i] = flushed(sums[i] + product);
                }
            std::memcpy(&total, emulated.tiles[SUMS][m] + 4 * n, 4);
            total = flushed(flushed(total) + flushed(sums[0] + sums[1]));
            std::memcpy(emulated.tiles[SUMS][m] + 4 * n, &total, 4);
        }
}

} // namespace foresay
