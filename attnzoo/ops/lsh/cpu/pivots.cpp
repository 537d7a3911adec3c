// Hashing on a CPU: the highest-scoring pivot of each token in each hash round.
//
// Computes the same as best_pivots in attnzoo/ops/lsh/voronoi_hashing.py, without
// writing scores to memory. The last bits of a score are replaced by the index of its pivot.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>

#include "lanes.h"
#include "layout.h"
#include "threads.h"

constexpr int64_t TOKENS = 16 * BLOCK;  // tokens per piece of work

struct Task {
    int64_t threads, units, tokens, size, pivots, rounds, bits;
    const int64_t* pivots_per_round;  // [rounds]
    const float* x;                   // [units, tokens, size]
    const float* p;                   // [units, pivots, size], round after round
    const float* offsets;             // [units, pivots], subtracted from the scores; or null
    int32_t* out;                     // [rounds, units, tokens]

    FIELDS(threads, units, tokens, size, pivots, rounds, bits, pivots_per_round, x, p, offsets, out)
};

// Hash tokens `begin` to `end` - 1 of one unit.
static void hash_tokens(const Task& t, int64_t unit, int64_t begin, int64_t end) {
    using M = Math<float>;
    constexpr int V = BLOCK / M::LANES;
    std::vector<float> columns(BLOCK * t.size);
    M::Reals sums[DOT_ROWS][V];
    M::Ints best[V];
    for (int64_t i = begin; i < end; i += BLOCK) {
        const int count = (int)std::min<int64_t>(BLOCK, end - i);
        for (int c = 0; c < count; ++c)
            M::store_column(t.x + (unit * t.tokens + i + c) * t.size, t.size, 1, &columns[c]);
        int64_t first = unit * t.pivots;
        for (int64_t round = 0; round < t.rounds; first += t.pivots_per_round[round++]) {
            const int64_t pivots = t.pivots_per_round[round];
            M::Reals maxima[V];
            for (auto& maximum : maxima) maximum = M::broadcast(-INFINITY);
            for (int64_t p = 0; p < pivots; p += DOT_ROWS) {
                const float* rows[DOT_ROWS];
                int32_t index[DOT_ROWS];
                for (int r = 0; r < DOT_ROWS; ++r) {
                    index[r] = (int32_t)std::min(p + r, pivots - 1);
                    rows[r] = t.p + (first + index[r]) * t.size;
                }
                M::dot_products(rows, columns.data(), t.size, sums);
                for (int r = 0; r < DOT_ROWS; ++r) {
                    const float offset = t.offsets ? t.offsets[first + index[r]] : 0;
                    for (int j = 0; j < V; ++j) {
                        const M::Ints score = (M::Ints)(sums[r][j] - offset);
                        const M::Reals tagged = (M::Reals)((score & -(1 << t.bits)) | index[r]);
                        maxima[j] = tagged > maxima[j] ? tagged : maxima[j];
                    }
                }
            }
            for (int j = 0; j < V; ++j) best[j] = (M::Ints)maxima[j] & ((1 << t.bits) - 1);
            int32_t* out = t.out + (round * t.units + unit) * t.tokens + i;
            std::memcpy(out, best, count * sizeof *out);
        }
    }
}

extern "C" void best_pivots(const Task* task) {
    const Task& t = *task;
    const int64_t parts = (t.tokens + TOKENS - 1) / TOKENS;
    in_threads(t.units * parts, t.threads, [&](int64_t i) {
        const int64_t begin = i % parts * TOKENS;
        hash_tokens(t, i / parts, begin, std::min(begin + TOKENS, t.tokens));
    });
}

CALLED_FROM_PYTHON(best_pivots)
