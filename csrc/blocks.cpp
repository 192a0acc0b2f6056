// Reading matrices in ggml's blocks. Plain C++, because it runs once per weight and is limited by memory speed.

#include "blocks.h"

#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstring>
#include <new>
#include <stdexcept>
#include <string>
#include <system_error>
#include <vector>

#include "pack.h"
#include "tasks.h"

namespace sameseed {
namespace {

struct Kind {
    int64_t values, bytes;  // of a block
    int64_t part;           // values with a step of their own; 0: none
    int bits;               // of a code
    bool least;             // a block has a least value, besides its scale
};

constexpr int short_file = -1, not_finite = -2, no_memory = -3;  // else the number of a system's error

constexpr Kind kinds[] = {{32, 18, 0, 4, false},   {32, 20, 0, 4, true},    {32, 22, 0, 5, false},
                          {32, 24, 0, 5, true},    {32, 34, 0, 8, false},   {32, 18, 0, 4, false},
                          {256, 144, 32, 4, true}, {256, 176, 32, 5, true}, {256, 210, 16, 6, false}};

// What one block decodes to.
struct Decoded {
    uint8_t* codes;  // [values]
    int8_t steps[16], minima[16];
    uint16_t scale, least;
};

void halves(const uint8_t* bytes, int64_t count, uint8_t* low, uint8_t* high) {
    for (int64_t i = 0; i < count; i++) {
        low[i] = bytes[i] & 15;
        high[i] = bytes[i] >> 4;
    }
}

void decode_small(BlockKind kind, const uint8_t* in, Decoded& out) {
    std::memcpy(&out.scale, in, 2);
    if (kind == BlockKind::q8_0) {
        std::memcpy(out.codes, in + 2, 32);
        return;
    }
    const bool least = kind == BlockKind::q4_1 || kind == BlockKind::q5_1,
               fifth = kind == BlockKind::q5_0 || kind == BlockKind::q5_1;
    in += 2;
    if (least) {
        std::memcpy(&out.least, in, 2);
        out.least ^= 0x8000;  // the file has the smallest value, our formats hold its negative
        in += 2;
    }
    halves(in + (fifth ? 4 : 0), 16, out.codes, out.codes + 16);
    if (!fifth) return;
    uint32_t bits;
    std::memcpy(&bits, in, 4);
    for (int64_t i = 0; i < 32; i++) out.codes[i] |= (bits >> i & 1) << 4;
}

void decode_k45(bool fifth, const uint8_t* in, Decoded& out) {
    std::memcpy(&out.scale, in, 2);
    std::memcpy(&out.least, in + 2, 2);
    const uint8_t *packed = in + 4, *bits = in + 16, *codes = in + (fifth ? 48 : 16);
    for (int64_t i = 0; i < 4; i++) {
        const uint8_t first = packed[i], second = packed[4 + i], third = packed[8 + i];
        out.steps[i] = first & 63;
        out.minima[i] = second & 63;
        out.steps[4 + i] = static_cast<int8_t>((third & 15) | first >> 6 << 4);
        out.minima[4 + i] = static_cast<int8_t>(third >> 4 | second >> 6 << 4);
    }
    for (int64_t i = 0; i < 4; i++) halves(codes + 32 * i, 32, out.codes + 64 * i, out.codes + 64 * i + 32);
    if (!fifth) return;
    for (int64_t i = 0; i < 8; i++)
        for (int64_t j = 0; j < 32; j++) out.codes[32 * i + j] |= (bits[j] >> i & 1) << 4;
}

void decode_k6(const uint8_t* in, Decoded& out) {
    for (int64_t half = 0; half < 2; half++) {
        uint8_t* codes = out.codes + 128 * half;
        const uint8_t* bits = in + 128 + 32 * half;
        halves(in + 64 * half, 64, codes, codes + 64);
        for (int64_t i = 0; i < 4; i++)
            for (int64_t j = 0; j < 32; j++) codes[32 * i + j] |= (bits[j] >> 2 * i & 3) << 4;
    }
    std::memcpy(out.steps, in + 192, 16);
    std::memcpy(&out.scale, in + 208, 2);
}

// The error of the system, or 0; `short_file` where the file ends too early.
int read_all(int file, uint8_t* out, int64_t size, int64_t at) {
    while (size > 0) {
        const ssize_t count = pread(file, out, static_cast<size_t>(size), static_cast<off_t>(at));
        if (count < 0 && errno == EINTR) continue;
        if (count <= 0) return count < 0 ? errno : short_file;
        out += count, at += count, size -= count;
    }
    return 0;
}

}  // namespace

void read_block_rows(const BlockRows& a) {
    if (a.kind < 0 || a.kind > static_cast<int>(BlockKind::q6_k)) throw std::invalid_argument("no such kind of blocks");
    const auto kind = static_cast<BlockKind>(a.kind);
    const Kind& of = kinds[a.kind];
    const int64_t count = a.depth / of.values, row_bytes = count * of.bytes, parts = of.part ? a.depth / of.part : 0;
    if (a.outputs < 1 || count < 1 || a.depth % of.values) throw std::invalid_argument("blocks do not divide the rows");
    const int64_t blocks = round_up(a.outputs, block_outputs) / block_outputs,
                  packed = a.depth * block_outputs * (of.bits == 8 ? 2 : 1) / 2;
    std::atomic<int> damage{0};  // what was wrong, as above
    const auto work = [&](int64_t first, int64_t last) {
        std::vector<uint8_t> raw(static_cast<size_t>(row_bytes * block_outputs)),
            plain(static_cast<size_t>(a.depth * block_outputs));
        for (int64_t block = first; block < last && !damage; block++) {
            const int64_t start = block * block_outputs, rows = std::min(block_outputs, a.outputs - start);
            int wrong = a.order ? 0 : read_all(a.file, raw.data(), rows * row_bytes, a.begin + start * row_bytes);
            for (int64_t o = 0; a.order && o < rows && !wrong; o++)
                wrong = read_all(a.file, raw.data() + o * row_bytes, row_bytes, a.begin + a.order[start + o] * row_bytes);
            if (wrong) {
                damage = wrong;
                return;
            }
            const int64_t scales_at = block * count * block_outputs;
            if (rows < block_outputs) {
                std::memset(a.scales + scales_at, 0, static_cast<size_t>(count * block_outputs) * 2);
                if (a.least) std::memset(a.least + scales_at, 0, static_cast<size_t>(count * block_outputs) * 2);
                if (a.steps) std::memset(a.steps + block * parts * block_outputs, 0, static_cast<size_t>(parts * block_outputs));
                if (a.minima)
                    std::memset(a.minima + block * parts * block_outputs, 0, static_cast<size_t>(parts * block_outputs));
            }
            for (int64_t o = 0; o < rows; o++)
                for (int64_t i = 0; i < count; i++) {
                    Decoded found;
                    found.codes = plain.data() + o * a.depth + i * of.values;
                    found.least = 0;
                    const uint8_t* in = raw.data() + o * row_bytes + i * of.bytes;
                    if (of.values == 32)
                        decode_small(kind, in, found);
                    else if (kind == BlockKind::q6_k)
                        decode_k6(in, found);
                    else
                        decode_k45(kind == BlockKind::q5_k, in, found);
                    if ((found.scale & 0x7c00) == 0x7c00 || (found.least & 0x7c00) == 0x7c00) damage = not_finite;
                    a.scales[scales_at + i * block_outputs + o] = found.scale;
                    if (a.least) a.least[scales_at + i * block_outputs + o] = found.least;
                    for (int64_t j = 0, each = of.part ? of.values / of.part : 0; j < each; j++) {
                        const int64_t at = ((block * parts + i * each + j) / 2 * block_outputs + o) * 2 + j % 2;
                        a.steps[at] = found.steps[j];
                        if (a.minima) a.minima[at] = found.minima[j];
                    }
                }
            pack_block({plain.data(), a.codes + block * packed, nullptr, rows, a.depth, 1, a.depth, of.bits != 8}, 0);
            if (a.high) pack_high(plain.data(), a.high + block * a.depth / (32 / (of.bits - 4)) * 128, rows, a.depth, of.bits);
        }
    };
    by_rows(blocks, a.depth * block_outputs, [&](int64_t first, int64_t last) {
        try {  // an exception may not leave a thread of the pool
            work(first, last);
        } catch (const std::bad_alloc&) {
            damage = no_memory;
        }
    });
    if (damage == no_memory) throw std::bad_alloc();
    const std::string again = "; the file is damaged, download it again";
    if (damage == short_file) throw std::runtime_error("ends after the file does" + again);
    if (damage == not_finite) throw std::runtime_error("holds NaN or infinity" + again);
    if (damage) throw std::runtime_error("cannot be read: " + std::generic_category().message(damage));
}

}  // namespace sameseed
