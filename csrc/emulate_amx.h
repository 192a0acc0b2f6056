// The AMX instructions in plain C++, so that the unit for AMX can be tested on processors without AMX (CMake's
// SAMESEED_EMULATE).

#pragma once

#include <cstdint>
#include <cstring>

#undef _tile_loadd
#undef _tile_stored
#undef _tile_dpbsud
#define _tile_loadconfig emulated_tiles().configure
#define _tile_release emulated_tiles().release
#define _tile_loadd emulated_tiles().load
#define _tile_stored emulated_tiles().save
#define _tile_dpbsud emulated_tiles().multiply

namespace sameseed {
namespace {

struct EmulatedTiles {
    uint8_t data[8][16][64];
    int64_t bytes[8], rows[8];

    void configure(const void* config) {  // from byte 16: row widths (2 bytes each); from byte 48: row counts (1 byte)
        const uint8_t* from = static_cast<const uint8_t*>(config);
        for (int t = 0; t < 8; t++) bytes[t] = from[16 + 2 * t] + 256 * from[17 + 2 * t], rows[t] = from[48 + t];
        std::memset(data, 0, sizeof data);
    }
    void release() { std::memset(rows, 0, sizeof rows); }
    void load(int t, const void* from, int64_t stride) {
        for (int64_t r = 0; r < rows[t]; r++)
            std::memcpy(data[t][r], static_cast<const uint8_t*>(from) + r * stride, static_cast<size_t>(bytes[t]));
    }
    void save(int t, void* to, int64_t stride) const {
        for (int64_t r = 0; r < rows[t]; r++)
            std::memcpy(static_cast<uint8_t*>(to) + r * stride, data[t][r], static_cast<size_t>(bytes[t]));
    }
    // For each row m, column n and row k of b: sums[m][n] += the dot product of four signed bytes of a[m] (bytes 4 k to
    // 4 k + 3) with four unsigned bytes of b[k] (bytes 4 n to 4 n + 3).
    void multiply(int sums, int a, int b) {
        for (int64_t m = 0; m < rows[sums]; m++)
            for (int64_t n = 0; n < bytes[sums] / 4; n++) {
                int32_t sum;
                std::memcpy(&sum, data[sums][m] + 4 * n, sizeof sum);
                for (int64_t k = 0; k < rows[b]; k++)
                    for (int64_t i = 0; i < 4; i++)
                        sum += static_cast<int8_t>(data[a][m][4 * k + i]) * static_cast<int32_t>(data[b][k][4 * n + i]);
                std::memcpy(data[sums][m] + 4 * n, &sum, sizeof sum);
            }
    }
};

inline EmulatedTiles& emulated_tiles() {
    thread_local EmulatedTiles tiles;
    return tiles;
}

}  // namespace
}  // namespace sameseed
