// The loop of limits.h with tdpbsud (AMX).

#include <immintrin.h>

#include "limits.h"
#ifdef SAMESEED_EMULATE
#include "emulate_amx.h"
#endif

namespace sameseed {
namespace {

constexpr int chains = 4;  // tiles of sums, each of 16 rows of 64 bytes

float run(int64_t rounds) {
    alignas(64) uint8_t config[64] = {1};
    for (int t = 0; t < 8; t++) config[16 + 2 * t] = 64, config[48 + t] = 16;
    alignas(64) int32_t numbers[16][16] = {};
    _tile_loadconfig(config);
    _tile_loadd(0, numbers, 64);
    _tile_loadd(1, numbers, 64);
    _tile_loadd(2, numbers, 64);
    _tile_loadd(3, numbers, 64);
    _tile_loadd(4, numbers, 64);
    _tile_loadd(5, numbers, 64);
    for (int64_t r = 0; r < rounds; r++) {
        _tile_dpbsud(0, 4, 5);
        _tile_dpbsud(1, 4, 5);
        _tile_dpbsud(2, 4, 5);
        _tile_dpbsud(3, 4, 5);
    }
    _tile_stored(0, numbers, 64);
    _tile_release();
    return static_cast<float>(numbers[0][0]);
}

}  // namespace

#ifdef SAMESEED_EMULATE
LimitLoops limits_avxvnni();
LimitLoops limits_amx() {
    LimitLoops loops = limits_avxvnni();
#else
LimitLoops limits_avx512vnni();
LimitLoops limits_amx() {
    LimitLoops loops = limits_avx512vnni();
#endif
    loops.int8 = {"tdpbsud, 16 x 64 x 16", chains * 2.0 * 16 * 64 * 16, run};
    return loops;
}

}  // namespace sameseed
