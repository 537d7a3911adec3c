// Hashing on a CPU: which pivot a token scores highest, round by round.
//
// As best_pivots in attnzoo/ops/reformer_asymmetric.py, where the last bits of a score name its
// pivot; but no score is written.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>

#include "lanes.h"
#include "threads.h"

constexpr int64_t PART = 16 * BLOCK;  // tokens that a thread takes at a time

struct Task {
    int64_t threads, units, tokens, size, pivots, rounds, bits;
    const int64_t* counts;  // [rounds]: pivots of each, those of one round after another's
    const float* x;         // [units, tokens, size]
    const float* p;         // [units, pivots, size]
    const float* offsets;   // [units, pivots], taken off the scores; or none
    int32_t* out;           // [rounds, units, tokens]
};

// For tokens begin to end - 1.
static void find(const Task& t, int64_t unit, int64_t begin, int64_t end) {
    using M = Math<float>;
    constexpr int V = BLOCK / M::LANES;
    std::vector<float> lanes(BLOCK * t.size);
    M::Reals sums[TALL][V];
    M::Ints best[V];
    for (int64_t i = begin; i < end; i += BLOCK) {
        const int count = (int)std::min<int64_t>(BLOCK, end - i);
        for (int c = 0; c < count; ++c)
            M::column(t.x + (unit * t.tokens + i + c) * t.size, t.size, 1, &lanes[c]);
        int64_t first = unit * t.pivots;
        for (int64_t round = 0; round < t.rounds; first += t.counts[round++]) {
            M::Reals most[V];
            for (auto& its : most) its = M::all(-INFINITY);
            for (int64_t p = 0; p < t.counts[round]; p += TALL) {
                const float* rows[TALL];
                int32_t numbers[TALL];
                for (int r = 0; r < TALL; ++r) {
                    numbers[r] = (int32_t)std::min(p + r, t.counts[round] - 1);
                    rows[r] = t.p + (first + numbers[r]) * t.size;
                }
                M::products(rows, lanes.data(), t.size, sums);
                for (int r = 0; r < TALL; ++r) {
                    const float offset = t.offsets ? t.offsets[first + numbers[r]] : 0;
                    for (int j = 0; j < V; ++j) {
                        const M::Ints score = (M::Ints)(sums[r][j] - offset);
                        const M::Reals named = (M::Reals)((score & -(1 << t.bits)) | numbers[r]);
                        most[j] = named > most[j] ? named : most[j];
                    }
                }
            }
            for (int j = 0; j < V; ++j) best[j] = (M::Ints)most[j] & ((1 << t.bits) - 1);
            int32_t* out = t.out + (round * t.units + unit) * t.tokens + i;
            std::memcpy(out, best, count * sizeof *out);
        }
    }
}

extern "C" void pivots(const Task* task) {
    const Task& t = *task;
    const int64_t parts = (t.tokens + PART - 1) / PART;
    in_threads(t.units * parts, t.threads, [&](int64_t i) {
        const int64_t begin = i % parts * PART;
        find(t, i / parts, begin, std::min(begin + PART, t.tokens));
    });
}
