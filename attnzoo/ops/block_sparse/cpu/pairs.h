// The pairs of a query and a key block of block-sparse attention, sorted by block.
//
// Letters: as in block_sparse.cpp.

#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <vector>

#if defined(__AVX512F__)
#include <immintrin.h>
#endif

#include "lanes.h"
#include "layout.h"

constexpr int GROUP = 32;              // pairs of a query and a block that are processed together
constexpr int64_t LEAST_TILE = 256, MOST_TILE = 4096;  // queries of a tile
constexpr double MASKED_SCORE = -1e30;  // below every score
constexpr double HEADROOM = 32;        // by which scores may exceed the reference
constexpr int32_t NO_BLOCK = 1 << 30;  // as in ops/block_sparse/selection.py

struct Task {
    int64_t threads, units, groups, queries, keys, key_size, value_size;
    int64_t key_heads;  // units per batch row
    int64_t causal, window, num_sinks, block_size, query_block;
    int64_t selections, query_blocks, selected_blocks;  // F, M, K
    double scale;             // multiplies query-key products
    const int64_t* lengths;   // [U / key_heads]: real keys, the first ones of a row
    const int64_t* counts;    // [U / key_heads]: real queries, the last ones of a row
    const int32_t* selected;  // [U, F, M, K]: sorted; NO_BLOCK after the last. Blocks outside of
                              // the real keys have no pairs.

    FIELDS(threads, units, groups, queries, keys, key_size, value_size, key_heads, causal, window,
           num_sinks, block_size, query_block, selections, query_blocks, selected_blocks, scale,
           lengths, counts, selected)

    // Return whether the real keys and queries are among those of the tensors.
    bool are_lengths_inside() const {
        for (int64_t row = 0; row < units / key_heads; ++row)
            if (counts[row] < 0 || counts[row] > std::min(queries, lengths[row]) ||
                lengths[row] > keys)
                return false;
        return true;
    }
};

template <class Real>
struct Tensors {
    const Real *q, *k, *v;                // [U N, D], [U S, D], [U S, E]
    const Real *k_panels, *v_panels;      // [U, S / PANEL, D or E, PANEL]; v_panels: backward only
    Real *out, *lse;                      // [U N, E], [U N]; the backward pass reads only lse
    const Real *d_out, *delta;            // [U N, E], [U N]
    Real *dq, *dk, *dv;

    FIELDS(q, k, v, k_panels, v_panels, out, lse, d_out, delta, dq, dk, dv)
};

struct Pair {
    int32_t query, low, high;  // index of the query in the tile; keys low to high - 1 of the block
};

// Return whether a lane of a mask is set.
template <class Real>
inline bool any_lane(typename Vectors<Real>::Ints mask) {
#if defined(__AVX512F__)
    return _mm512_test_epi64_mask((__m512i)mask, (__m512i)mask) != 0;
#else
    int64_t parts[sizeof mask / 8], sum = 0;
    std::memcpy(parts, &mask, sizeof mask);
    for (int64_t part : parts) sum |= part;
    return sum != 0;
#endif
}

// The pairs of the queries of one unit, for a tile of queries at a time.
class PairLists {
  protected:
    PairLists(const Task& task, int64_t unit)
        : t(task), unit_(unit), n_(task.lengths[unit / task.key_heads]),
          count_(task.counts[unit / task.key_heads]), size_((int)task.block_size),
          tile_(queries_per_tile(task)), starts_(task.keys / task.block_size + 3) {}

    const Task& t;
    const int64_t unit_, n_, count_;  // real keys and queries of the row
    const int size_;                  // keys of a block
    const int64_t tile_;              // queries of a tile

    // Call work(row, queries, first): the first row of a tile, its number of queries, and the index
    // of the first one in its head.
    template <class Work>
    void for_each_tile(Work work) {
        for (int64_t group = 0; group < t.groups; ++group)
            for (int64_t i = 0; i < t.queries; i += tile_) {
                const int queries = (int)std::min(tile_, t.queries - i);
                sort_pairs(group, i, queries);
                work(unit_ * t.groups * t.queries + group * t.queries + i, queries, i);
            }
    }

    // Call begin(block) for each block with pairs, and work(block, pairs, count) for up to GROUP of
    // its pairs at a time, after prefetch(pair) for each of them.
    template <class Begin, class Work, class Prefetch>
    void for_each_group(Begin begin, Work work, Prefetch prefetch) {
        int64_t prefetched = 0;
        for (int64_t block = 0; block + 2 < (int64_t)starts_.size(); ++block) {
            if (starts_[block] == starts_[block + 1]) continue;
            begin(block);
            for (int64_t j = starts_[block]; j < starts_[block + 1]; j += GROUP) {
                const int count = (int)std::min<int64_t>(GROUP, starts_[block + 1] - j);
                const int64_t end = std::min<int64_t>(j + count + GROUP, sorted_.size());
                for (; prefetched < end; ++prefetched) prefetch(sorted_[prefetched]);
                work(block, &sorted_[j], count);
            }
        }
    }

    // Prefetch a row into the L2 cache. Always inlined, because GCC 12 treats a function that only
    // prefetches as one without side effects, and removes its calls.
    template <class Real>
    static inline __attribute__((always_inline)) void prefetch_row(const Real* row, int64_t size) {
        for (int64_t i = 0; i < size; i += 64 / sizeof(Real)) __builtin_prefetch(row + i, 0, 2);
    }

  private:
    struct Range {
        int64_t low = 0, high = 0;  // keys low to high - 1
    };

    std::vector<Pair> sorted_;
    std::vector<int64_t> starts_;  // first pair of each block, in sorted_

    // Return the number of queries of a tile, so that a block has more than GROUP pairs on average.
    static int64_t queries_per_tile(const Task& t) {
        const int64_t blocks = t.keys / t.block_size + 1;
        const int64_t enough = 2 * GROUP * blocks / (t.selected_blocks + 1);
        int64_t queries = LEAST_TILE;
        while (queries < std::min({enough, t.queries, MOST_TILE})) queries *= 2;
        return queries;
    }

    // Return the keys of the window of the query at a position; none if it is padding.
    Range window_of(int64_t position) const {
        if (position < n_ - count_) return {};
        const int64_t leader = floor_div(position, t.query_block) * t.query_block;
        const int64_t low = std::max<int64_t>(leader - t.window + t.causal, 0) / size_ * size_;
        if (t.causal) return {low, position + 1};
        const int64_t high = leader + t.query_block + t.window;
        return {low, std::min((high + size_ - 1) / size_ * size_, n_)};
    }

    static int64_t floor_div(int64_t a, int64_t b) { return a >= 0 ? a / b : -((b - 1 - a) / b); }

    // Sort the pairs of queries first to first + queries - 1 of a head by block.
    void sort_pairs(int64_t group, int64_t first, int queries) {
        std::fill(starts_.begin(), starts_.end(), 0);
        for_each_pair(group, first, queries, [this](int64_t block, const Pair&) {
            ++starts_[block + 2];
        });
        for (size_t j = 2; j < starts_.size(); ++j) starts_[j] += starts_[j - 1];
        sorted_.resize(starts_.back());
        for_each_pair(group, first, queries, [this](int64_t block, const Pair& pair) {
            sorted_[starts_[block + 1]++] = pair;
        });
    }

    // Call visit(block, pair) for the pairs of queries.
    template <class Visit>
    void for_each_pair(int64_t group, int64_t first, int queries, Visit visit) const {
        const int64_t start = n_ - t.queries;  // position of query 0; negative with padding
        const int64_t first_block = floor_div(start, t.query_block);
        const int64_t selection = t.selections == 1 ? 0 : group;
        const int32_t* selected = t.selected + (unit_ * t.selections + selection) *
                                                   t.query_blocks * t.selected_blocks;
        for (int i = 0; i < queries; ++i) {
            const int64_t position = start + first + i;
            if (position < n_ - count_) continue;
            visit_near_pairs(i, window_of(position), visit);
            const int64_t block = floor_div(position, t.query_block) - first_block;
            const int32_t* own = selected + block * t.selected_blocks;
            for (int64_t j = 0; j < t.selected_blocks && own[j] != NO_BLOCK; ++j) {
                const int64_t key = own[j] * (int64_t)size_;
                const int64_t from = std::max<int64_t>(t.num_sinks - key, 0);
                const int64_t to = std::min<int64_t>(n_ - key, size_);
                if (from < to) visit(own[j], Pair{i, (int32_t)from, (int32_t)to});
            }
        }
    }

    // Call visit(block, pair) for the window of a query and the first tokens outside it.
    template <class Visit>
    void visit_near_pairs(int query, Range window, Visit visit) const {
        const int64_t sinks = std::min(t.num_sinks, n_);
        visit_keys(query, 0, std::min(sinks, window.low), visit);
        visit_keys(query, window.low, window.high, visit);
        if (!t.causal && sinks > window.high) visit_keys(query, window.high, sinks, visit);
    }

    template <class Visit>
    void visit_keys(int query, int64_t from, int64_t to, Visit visit) const {
        for (int64_t block = from / size_; from < to; ++block) {
            const int64_t stop = std::min(to, (block + 1) * size_), base = block * size_;
            visit(block, Pair{query, (int32_t)(from - base), (int32_t)(stop - base)});
            from = stop;
        }
    }
};
