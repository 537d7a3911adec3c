// Block-sparse attention on a CPU: each query attends to its own list of key blocks.
//
// Queries are processed in tiles. Pairs of a query and a block are sorted by block, so that a block
// stays in the cache for all queries of the tile that attend to it. The scores of a query with
// several keys are in the lanes of one SIMD vector, so keys are passed in transposed too, in panels
// of PANEL keys. Online softmax merges the blocks of a query. The reference that it subtracts from
// scores changes only if a score exceeds it by HEADROOM, so that few sums are rescaled. The result
// of a query does not depend on the other queries.
//
// One call computes one unit: one key head and the query heads that share it. Scores are base 2.
// Letters: U units, T queries of a head, G heads, N = G T, S keys, D key size, E value size, F heads
// of a unit with a selection of their own, M query blocks, K selected blocks; D and E are multiples
// of 16.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>

#if defined(__AVX512F__)
#include <immintrin.h>
#endif

#include "lanes.h"
#include "threads.h"
#include "tiles.h"

constexpr int PANEL = 32;              // keys of a panel; blocks divide it or are multiples of it
constexpr int GROUP = 32;              // pairs of a query and a block that are processed together
constexpr int64_t LEAST_TILE = 256, MOST_TILE = 4096;  // queries of a tile
constexpr double MASKED_SCORE = -1e30;  // below every score
constexpr double HEADROOM = 32;        // by which scores may exceed the reference
constexpr int32_t NO_BLOCK = 1 << 30;  // as in impl/selection.py

struct Task {
    int64_t threads, units, groups, queries, keys, key_size, value_size;
    int64_t key_heads;  // units per batch row
    int64_t causal, window, num_sinks, block_size, query_block;
    int64_t selections, query_blocks, selected_blocks;  // F, M, K
    double scale;             // multiplies query-key products
    const int64_t* lengths;   // [U / key_heads]: real keys, the first ones of a row
    const int64_t* counts;    // [U / key_heads]: real queries, the last ones of a row
    const int32_t* selected;  // [U, F, M, K]: sorted; NO_BLOCK after the last
};

template <class Real>
struct Tensors {
    const Real *q, *k, *v;                // [U N, D], [U S, D], [U S, E]
    const Real *k_panels, *v_panels;      // [U, S / PANEL, D or E, PANEL]; v_panels: backward only
    Real *out, *lse;                      // [U N, E], [U N]; the backward pass reads only lse
    const Real *d_out, *delta;            // [U N, E], [U N]
    Real *dq, *dk, *dv;
};

struct Pair {
    int32_t query, low, high;  // index of the query in the tile; keys low to high - 1 of the block
};

template <class Real>
class Worker : Math<Real> {
    using typename Math<Real>::Reals;
    using typename Math<Real>::Ints;
    using Math<Real>::LANES, Math<Real>::load, Math<Real>::store, Math<Real>::broadcast;
    using Math<Real>::exp2, Math<Real>::add_weighted_rows;

  public:
    Worker(const Task& task, const Tensors<Real>& tensors, int64_t unit)
        : t(task), x(tensors), unit_(unit), n_(task.lengths[unit / task.key_heads]),
          count_(task.counts[unit / task.key_heads]), size_((int)task.block_size),
          lanes_((size_ + LANES - 1) / LANES * LANES), panels_((task.keys + PANEL - 1) / PANEL),
          tile_(queries_per_tile(task)), p_(GROUP * lanes_), dp_(GROUP * lanes_),
          unused_(std::max(t.key_size, t.value_size) + PANEL), sums_(tile_ * LANES), max_(tile_),
          starts_(task.keys / task.block_size + 3), k_rows_(lanes_), v_rows_(lanes_) {
        for (int i = 0; i < LANES; ++i) lane_index_[i] = i;
    }

    void forward() {
        for_each_tile([this](int64_t row, int queries, int64_t) {
            std::fill(sums_.begin(), sums_.begin() + queries * LANES, Real(0));
            std::fill(max_.begin(), max_.begin() + queries, Real(MASKED_SCORE));
            std::fill(x.out + row * t.value_size, x.out + (row + queries) * t.value_size, Real(0));
            for_each_group(
                [&](int64_t block, const Pair* pairs, int count) {
                    attend(row, block, pairs, count);
                },
                [&](const Pair& pair) __attribute__((always_inline)) {
                    prefetch_row(x.q + (row + pair.query) * t.key_size, t.key_size);
                    prefetch_row(x.out + (row + pair.query) * t.value_size, t.value_size);
                });
            finish(row, queries);
        });
    }

    // Add to dq, dk and dv.
    void backward() {
        for_each_tile([this](int64_t row, int, int64_t) {
            for_each_group(
                [&](int64_t block, const Pair* pairs, int count) {
                    attend_backward(row, block, pairs, count);
                },
                [&](const Pair& pair) __attribute__((always_inline)) {
                    prefetch_row(x.q + (row + pair.query) * t.key_size, t.key_size);
                    prefetch_row(x.dq + (row + pair.query) * t.key_size, t.key_size);
                    prefetch_row(x.d_out + (row + pair.query) * t.value_size, t.value_size);
                });
        });
    }

  private:
    const Task& t;
    const Tensors<Real>& x;
    const int64_t unit_, n_, count_;  // real keys and queries of the row
    const int size_, lanes_;          // keys of a block; the same rounded up to vectors
    const int64_t panels_, tile_;
    std::vector<Real> p_, dp_;        // [GROUP, lanes_]
    std::vector<Real> unused_;        // in place of queries beyond the last
    std::vector<Real> sums_;          // [tile_, LANES]: running sum of each query, per lane
    std::vector<Real> max_;           // [tile_]: reference of each query
    std::vector<Pair> pairs_, sorted_;
    std::vector<int32_t> blocks_;     // of pairs_
    std::vector<int64_t> starts_;     // first pair of each block, in sorted_
    std::vector<const Real*> k_rows_, v_rows_;
    Ints lane_index_;

    // -- tiles and pairs -----------------------------------------------------------------------

    // Return the number of queries of a tile, so that a block has more than GROUP pairs on average.
    static int64_t queries_per_tile(const Task& t) {
        const int64_t blocks = t.keys / t.block_size + 1;
        const int64_t enough = 2 * GROUP * blocks / (t.selected_blocks + 1);
        int64_t queries = LEAST_TILE;
        while (queries < std::min({enough, t.queries, MOST_TILE})) queries *= 2;
        return queries;
    }

    template <class Work>
    void for_each_tile(Work work) {
        for (int64_t group = 0; group < t.groups; ++group)
            for (int64_t i = 0; i < t.queries; i += tile_) {
                const int queries = (int)std::min(tile_, t.queries - i);
                sort_pairs(group, i, queries);
                work(unit_ * t.groups * t.queries + group * t.queries + i, queries, group);
            }
    }

    void add_pairs(int query, int64_t from, int64_t to) {
        for (int64_t block = from / size_; from < to; ++block) {
            const int64_t stop = std::min(to, (block + 1) * size_);
            const int64_t base = block * size_;
            pairs_.push_back({query, (int32_t)(from - base), (int32_t)(stop - base)});
            blocks_.push_back((int32_t)block);
            from = stop;
        }
    }

    // Sort the pairs of queries first to first + queries - 1 of a head by block.
    void sort_pairs(int64_t group, int64_t first, int queries) {
        pairs_.clear(), blocks_.clear();
        const int64_t start = n_ - t.queries;  // position of query 0; negative with padding
        const int64_t query_block = t.query_block;
        const auto floor_div = [](int64_t a, int64_t b) { return a >= 0 ? a / b : -((b - 1 - a) / b); };
        const int64_t first_block = floor_div(start, query_block);
        const int64_t selection = t.selections == 1 ? 0 : group;
        const int32_t* selected = t.selected + (unit_ * t.selections + selection) *
                                                   t.query_blocks * t.selected_blocks;
        for (int i = 0; i < queries; ++i) {
            const int64_t position = start + first + i;
            if (position < n_ - count_) continue;
            const int64_t block = floor_div(position, query_block), leader = block * query_block;
            int64_t low = std::max<int64_t>(leader - t.window + t.causal, 0) / size_ * size_;
            int64_t high = position + 1;
            if (!t.causal) {
                high = leader + query_block + t.window;
                high = std::min((high + size_ - 1) / size_ * size_, n_);
            }
            const int32_t* own = selected + (block - first_block) * t.selected_blocks;
            const int64_t sinks = std::min(t.num_sinks, n_);
            add_pairs(i, 0, std::min(sinks, low));
            add_pairs(i, low, high);
            if (!t.causal && sinks > high) add_pairs(i, high, sinks);
            for (int64_t j = 0; j < t.selected_blocks && own[j] != NO_BLOCK; ++j) {
                const int64_t from = own[j] * (int64_t)size_;
                add_pairs(i, std::max(from, t.num_sinks), std::min(from + size_, n_));
            }
        }
        std::fill(starts_.begin(), starts_.end(), 0);
        for (int32_t block : blocks_) ++starts_[block + 2];
        for (size_t j = 2; j < starts_.size(); ++j) starts_[j] += starts_[j - 1];
        sorted_.resize(pairs_.size());
        for (size_t j = 0; j < pairs_.size(); ++j) sorted_[starts_[blocks_[j] + 1]++] = pairs_[j];
    }

    // Call work(block, pairs, count) for up to GROUP pairs of a block at a time, after prefetch(pair)
    // for each of the pairs.
    template <class Work, class Prefetch>
    void for_each_group(Work work, Prefetch prefetch) {
        int64_t prefetched = 0;
        for (int64_t block = 0; block + 2 < (int64_t)starts_.size(); ++block) {
            if (starts_[block] == starts_[block + 1]) continue;
            point_to_keys(block);
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
    static inline __attribute__((always_inline)) void prefetch_row(const Real* row, int64_t size) {
        for (int64_t i = 0; i < size; i += 64 / sizeof(Real)) __builtin_prefetch(row + i, 0, 2);
    }

    void point_to_keys(int64_t block) {
        for (int i = 0; i < lanes_; ++i) {
            const int64_t key = unit_ * t.keys + std::min(block * size_ + i, t.keys - 1);
            k_rows_[i] = x.k + key * t.key_size;
            v_rows_[i] = x.v + key * t.value_size;
        }
    }

    // -- products ------------------------------------------------------------------------------

    // out[r][i] = factor rows[r] . (key i of the block), for `count` rows. The panels have `depth`
    // rows. Rows of out are written up to a multiple of SUM_ROWS.
    void multiply(const Real* const* rows, int count, const Real* panels, int64_t block,
                  int64_t depth, Real factor, std::vector<Real>& out) const {
        const int64_t begin = block * size_;
        for (int from = 0; from < lanes_;) {
            const int64_t key = begin + from;
            const Real* columns = panels + (unit_ * panels_ + key / PANEL) * depth * PANEL +
                                  key % PANEL;
            const int width = std::min<int>(lanes_ - from, PANEL);
            for (int done = 0; done < width;)
                if (width - done >= 2 * LANES)
                    multiply<2>(rows, count, columns + done, depth, factor, &out[from + done]),
                        done += 2 * LANES;
                else
                    multiply<1>(rows, count, columns + done, depth, factor, &out[from + done]),
                        done += LANES;
            from += width;
        }
    }

    template <int V>
    void multiply(const Real* const* rows, int count, const Real* columns, int64_t depth,
                  Real factor, Real* out) const {
        int r = 0;
        for (; r + SUM_ROWS < count; r += DOT_ROWS)
            multiply<DOT_ROWS, V>(rows + r, columns, depth, factor, out + r * lanes_);
        if (r < count) multiply<SUM_ROWS, V>(rows + r, columns, depth, factor, out + r * lanes_);
    }

    template <int R, int V>
    void multiply(const Real* const* rows, const Real* columns, int64_t depth, Real factor,
                  Real* out) const {
        Reals sums[R][V];
        Math<Real>::dot_products(rows, columns, depth, sums);
        for (int r = 0; r < R; ++r)
            for (int i = 0; i < V; ++i) store(out + r * lanes_ + i * LANES, sums[r][i] * factor);
    }

    // Point to the rows of GROUP queries, and past the last query to unused_.
    template <class Pointer>
    void point_to_queries(const Pair* pairs, int count, Pointer from, int64_t size,
                          Pointer* rows) {
        for (int r = 0; r < GROUP; ++r)
            rows[r] = r < count ? from + pairs[r].query * size : unused_.data();
    }

    Ints attended(const Pair& pair, int lane) const {
        const Ints key = lane_index_ + lane;
        return (key >= pair.low) & (key < pair.high);
    }

    // Set rows `count` to the next multiple of SUM_ROWS to 0.
    void clear_rows_from(int count, std::vector<Real>& rows) const {
        const int end = (count + SUM_ROWS - 1) / SUM_ROWS * SUM_ROWS;
        std::fill(rows.begin() + count * lanes_, rows.begin() + end * lanes_, Real(0));
    }

    // -- forward and backward ------------------------------------------------------------------

    void attend(int64_t row, int64_t block, const Pair* pairs, int count) {
        const Real* q_rows[GROUP];
        point_to_queries(pairs, count, x.q + row * t.key_size, t.key_size, q_rows);
        multiply(q_rows, count, x.k_panels, block, t.key_size, Real(t.scale * LOG2_E), p_);
        Real rescale[GROUP];
        std::fill(rescale, rescale + GROUP, Real(1));
        bool rescaled = false;
        for (int r = 0; r < count; ++r) {
            Real* p = &p_[r * lanes_];
            const bool full = pairs[r].low == 0 && pairs[r].high == lanes_;
            const Real limit = max_[pairs[r].query] + Real(HEADROOM);
            Ints above{};
            for (int lane = 0; lane < lanes_; lane += LANES) {
                Reals score = load(p + lane);
                if (!full) {
                    score = attended(pairs[r], lane) ? score : broadcast(MASKED_SCORE);
                    store(p + lane, score);
                }
                above |= score > limit;
            }
            if (any(above)) {
                raise_reference(pairs[r].query, p, rescale[r]);
                rescaled = true;
            }
            const Real reference = max_[pairs[r].query];
            Reals sum = load(&sums_[pairs[r].query * LANES]);
            for (int lane = 0; lane < lanes_; lane += LANES) {
                const Reals score = load(p + lane);
                Reals weight = exp2(score - reference);
                if (!full) weight = score == Real(MASKED_SCORE) ? Reals{} : weight;
                store(p + lane, weight);
                sum += weight;
            }
            store(&sums_[pairs[r].query * LANES], sum);
        }
        clear_rows_from(count, p_);
        Real* out[GROUP];
        point_to_queries(pairs, count, x.out + row * t.value_size, t.value_size, out);
        for (int r = 0; r < count; r += SUM_ROWS)
            add_weighted_rows(out + r, rescaled ? rescale + r : nullptr, &p_[r * lanes_], lanes_, 1,
                              v_rows_.data(), {0, size_}, t.value_size);
    }

    static bool any(Ints x) {
#if defined(__AVX512F__)
        return _mm512_test_epi64_mask((__m512i)x, (__m512i)x) != 0;
#else
        int64_t parts[sizeof(Ints) / 8], sum = 0;
        std::memcpy(parts, &x, sizeof x);
        for (int64_t part : parts) sum |= part;
        return sum != 0;
#endif
    }

    // Raise the reference of a query to its largest score, and rescale its sum.
    void raise_reference(int query, const Real* scores, Real& rescale) {
        const Real largest = *std::max_element(scores, scores + lanes_);
        rescale = exp2(broadcast(max_[query] - largest))[0];
        store(&sums_[query * LANES], load(&sums_[query * LANES]) * rescale);
        max_[query] = largest;
    }

    // Divide by the sums, and write the log-sum-exp.
    void finish(int64_t row, int queries) {
        for (int i = 0; i < queries; ++i) {
            Real sum = 0;
            for (int lane = 0; lane < LANES; ++lane) sum += sums_[i * LANES + lane];
            const Real inverse = sum == 0 ? 0 : 1 / sum;  // NaN stays NaN
            x.lse[row + i] = sum == 0 ? INFINITY : max_[i] + std::log2(sum);
            Real* out = x.out + (row + i) * t.value_size;
            for (int64_t e = 0; e < t.value_size; ++e) out[e] *= inverse;
        }
    }

    void attend_backward(int64_t row, int64_t block, const Pair* pairs, int count) {
        const Real *q_rows[GROUP], *d_out_rows[GROUP];
        point_to_queries(pairs, count, x.q + row * t.key_size, t.key_size, q_rows);
        point_to_queries(pairs, count, x.d_out + row * t.value_size, t.value_size, d_out_rows);
        multiply(q_rows, count, x.k_panels, block, t.key_size, Real(t.scale * LOG2_E), p_);
        multiply(d_out_rows, count, x.v_panels, block, t.value_size, 1, dp_);
        for (int r = 0; r < count; ++r) {
            const int64_t i = row + pairs[r].query;
            const bool full = pairs[r].low == 0 && pairs[r].high == lanes_;
            const Real log = x.lse[i], delta = x.delta[i];
            for (int lane = r * lanes_, key = 0; key < lanes_; key += LANES, lane += LANES) {
                Reals weight = exp2(load(&p_[lane]) - log);
                if (!full) weight = attended(pairs[r], key) ? weight : Reals{};
                Reals d_score = weight * (load(&dp_[lane]) - delta) * Real(t.scale);
                if (!full) d_score = attended(pairs[r], key) ? d_score : Reals{};
                store(&p_[lane], weight);
                store(&dp_[lane], d_score);
            }
        }
        clear_rows_from(count, p_);
        clear_rows_from(count, dp_);
        Real* dq[GROUP];
        point_to_queries(pairs, count, x.dq + row * t.key_size, t.key_size, dq);
        for (int r = 0; r < count; r += SUM_ROWS)
            add_weighted_rows(dq + r, nullptr, &dp_[r * lanes_], lanes_, 1, k_rows_.data(),
                              {0, size_}, t.key_size);
        for (int w = 0; w < size_; w += SUM_ROWS) {
            Real *dk[SUM_ROWS], *dv[SUM_ROWS];
            for (int r = 0; r < SUM_ROWS; ++r) {
                const int64_t key = block * size_ + w + r;
                const bool valid = w + r < size_ && key < t.keys;
                dk[r] = valid ? x.dk + (unit_ * t.keys + key) * t.key_size : unused_.data();
                dv[r] = valid ? x.dv + (unit_ * t.keys + key) * t.value_size : unused_.data();
            }
            add_weighted_rows(dk, nullptr, &dp_[w], 1, lanes_, q_rows, {0, count}, t.key_size);
            add_weighted_rows(dv, nullptr, &p_[w], 1, lanes_, d_out_rows, {0, count},
                              t.value_size);
        }
        std::fill(unused_.begin(), unused_.end(), Real(0));
    }
};

template <class Real, class Pass>
static void run(const Task& task, const Tensors<Real>& tensors, Pass pass) {
    in_threads(task.units, task.threads, [&](int64_t unit) {
        Worker<Real> worker(task, tensors, unit);
        (worker.*pass)();
    });
}

#define EXPORT(Real)                                                                           \
    extern "C" void sparse_forward_##Real(const Task* task, const Tensors<Real>* tensors) {    \
        run(*task, *tensors, &Worker<Real>::forward);                                          \
    }                                                                                          \
    extern "C" void sparse_backward_##Real(const Task* task, const Tensors<Real>* tensors) {   \
        run(*task, *tensors, &Worker<Real>::backward);                                         \
    }

EXPORT(float)
EXPORT(double)

// -- selection ---------------------------------------------------------------------------------

// How a block is scored, as in impl/selection.py.
enum Score { MEAN, MOMENTS, BOUNDS, INDEXER };

struct BestTask {
    int64_t threads, units, shared;  // selections; how many of them share a summary
    int64_t heads;                   // I, of an indexer; otherwise 1
    int64_t queries, size;           // M, D
    int64_t blocks, pitch, kept;     // N, the row step of summaries, K
    int64_t units_per_range;         // selections that have the same candidates
    int64_t first;                   // candidates are blocks from first on
    int64_t score;
    double scale;              // multiplies query-key products
    const float* q;            // [units, I, M, D]
    const float* weights;      // [units, I, M], of the heads of an indexer
    const float* summary;      // [units / shared, Z, pitch]: a column per block
    const int64_t* end;        // [.., M]: candidates are blocks below end
    const int64_t* begin;      // [.., M]: and blocks from begin
    const int64_t* stop;       // [.., M]: to stop - 1
    int32_t* out;              // [units, M, kept]: sorted; NO_BLOCK after the last
};

// Processes QUERIES queries at a time, so that their scores stay in the cache.
class Selector : Tiles<float> {
    static constexpr int GROUPS = 32;  // groups of sort keys in drop_low

  public:
    static constexpr int QUERIES = 32;

    explicit Selector(const BestTask& task)
        : t(task), is_indexer_(task.score == INDEXER),
          depth_(task.score == MEAN || is_indexer_ ? task.size : 2 * task.size),
          buffer_(QUERIES * (depth_ + (1 + is_indexer_) * task.pitch) + 64),
          features_(buffer_.take(QUERIES * depth_)), scores_(buffer_.take(QUERIES * task.pitch)),
          products_(is_indexer_ ? buffer_.take(QUERIES * task.pitch) : scores_),
          keys_(task.blocks + 2 * GROUPS),
          ids_(keys_), kept_keys_(keys_), kept_ids_(keys_) {}

    // Select for the queries from `from` to `to` - 1 of a unit.
    void run(int64_t unit, int64_t from, int64_t to) {
        const int64_t range = unit / t.units_per_range * t.queries;
        int64_t width = 1;
        for (int64_t i = from; i < to; ++i) {
            const int64_t stop = std::min(t.stop[range + i], t.blocks);
            width = std::max(width, t.begin[range + i] < stop ? stop
                                                              : std::min(t.end[range + i], stop));
        }
        width = (width + 15) / 16 * 16;
        for (int64_t head = 0; head < t.heads; ++head) {
            const int64_t first = (unit * t.heads + head) * t.queries;
            for (int64_t i = from; i < to; ++i)
                add_features(t.q + (first + i) * t.size, features_ + (i - from) * depth_);
            product(products_, t.pitch, (to - from + 15) / 16 * 16, features_, depth_, 1,
                    t.summary + unit / t.shared * depth_ * t.pitch, t.pitch, width, depth_);
            for (int64_t i = from; is_indexer_ && i < to; ++i)
                add_products((i - from) * t.pitch, width, t.weights[first + i], head == 0);
        }
        for (int64_t i = from; i < to; ++i)
            select(scores_ + (i - from) * t.pitch, range + i,
                   t.out + (unit * t.queries + i) * t.kept);
    }

  private:
    // Write the vector whose product with a summary is the score of a block.
    void add_features(const float* q, float* features) const {
        const float factor = float(0.5 * t.scale);
        for (int64_t d = 0; d < t.size; ++d) {
            features[d] = t.score == BOUNDS ? std::max(q[d], 0.f) : q[d];
            if (t.score == MOMENTS) features[t.size + d] = q[d] * q[d] * factor;
            if (t.score == BOUNDS) features[t.size + d] = std::min(q[d], 0.f);
        }
    }

    // Add the contribution of a head of the indexer to the scores of a query.
    void add_products(int64_t row, int64_t width, float weight, bool is_first) {
        for (int64_t j = row; j < row + width; j += LANES) {
            const Reals product = load(products_ + j);
            const Reals sum = is_first ? Reals{} : load(scores_ + j);
            store(scores_ + j, sum + (product > 0 ? product : Reals{}) * weight);
        }
    }

    void select(const float* scores, int64_t range, int32_t* out) {
        int n = 0;
        const int64_t stop = std::min(t.stop[range], t.blocks);
        n = add(scores, t.first, std::min(t.end[range], stop), n);
        n = add(scores, std::max(t.first, t.begin[range]), stop, n);
        int found = 0;
        if (n <= t.kept) {
            for (; found < n; ++found) out[found] = ids_[found];
        } else {
            n = drop_low(n);
            const int32_t limit = threshold(kept_keys_.data(), n);
            int64_t ties = t.kept - count_from(kept_keys_.data(), n, (int64_t)limit + 1);
            for (int j = 0; found < t.kept; ++j) {
                const bool tie = kept_keys_[j] == limit;
                out[found] = kept_ids_[j];
                found += kept_keys_[j] > limit || (tie && ties > 0);
                ties -= tie;
            }
            guess(n, limit);
        }
        for (; found < t.kept; ++found) out[found] = NO_BLOCK;
    }

    const BestTask& t;
    const bool is_indexer_;
    const int64_t depth_;  // Z
    Buffer<float> buffer_;
    int32_t guess_ = INT32_MAX;        // bound that about t.kept sort keys reach
    float *features_, *scores_;        // [QUERIES, Z], [QUERIES, pitch]
    float* products_;                  // of a head of the indexer, [QUERIES, pitch]
    // Sort keys, which are integers in the order of the scores, and their blocks
    std::vector<int32_t> keys_, ids_, kept_keys_, kept_ids_;

    static int32_t key_of(float score) {
        int32_t bits;
        score += 0.f;  // no negative zero
        std::memcpy(&bits, &score, sizeof bits);
        return bits ^ ((bits >> 31) & 0x7fffffff);
    }

    static float score_of(int32_t key) {
        float score;
        key ^= (key >> 31) & 0x7fffffff;
        std::memcpy(&score, &key, sizeof score);
        return score;
    }

    int add(const float* scores, int64_t from, int64_t to, int n) {
        for (int64_t j = from; j < to; ++j, ++n) {
            keys_[n] = key_of(scores[j]);
            ids_[n] = (int32_t)j;
        }
        std::fill_n(keys_.begin() + n, GROUPS, INT32_MIN);
        return n;
    }

    // Copy those of n sort keys that reach a bound, at least t.kept, and return their number. The
    // bound is a guess from the previous query. If too few reach it, the bound is the t.kept-th
    // largest of the maxima of GROUPS groups, or all are copied if t.kept exceeds GROUPS.
    int drop_low(int n) {
        int left = copy_from(guess_, n);
        if (left >= t.kept) return left;
        if (t.kept > GROUPS) return copy_from(INT32_MIN, n);
        int32_t largest[GROUPS];
        std::copy_n(keys_.begin(), GROUPS, largest);
        for (int i = GROUPS; i < n; i += GROUPS)
            for (int j = 0; j < GROUPS; ++j) largest[j] = std::max(largest[j], keys_[i + j]);
        return copy_from(threshold(largest, GROUPS), n);
    }

    // Set the bound for the next query a little below the smallest selected sort key.
    void guess(int n, int32_t limit) {
        int32_t most = limit;
        for (int i = 0; i < n; ++i) most = std::max(most, kept_keys_[i]);
        const float least = score_of(limit), below = least - 0.25f * (score_of(most) - least);
        guess_ = std::isfinite(below) ? key_of(below) : INT32_MAX;
    }

    // Copy those of n sort keys that are at least `bound`, and return their number.
    int copy_from(int32_t bound, int n) {
        int left = 0;
#if defined(__AVX512F__)
        for (int i = 0; i < n; i += 16) {
            const __m512i keys = _mm512_loadu_si512(&keys_[i]), ids = _mm512_loadu_si512(&ids_[i]);
            const __mmask16 reach = _mm512_cmpge_epi32_mask(keys, _mm512_set1_epi32(bound)) &
                                    (n - i < 16 ? (1u << (n - i)) - 1 : 0xffffu);
            _mm512_storeu_si512(&kept_keys_[left], _mm512_maskz_compress_epi32(reach, keys));
            _mm512_storeu_si512(&kept_ids_[left], _mm512_maskz_compress_epi32(reach, ids));
            left += __builtin_popcount(reach);
        }
#else
        for (int i = 0; i < n; ++i) {
            kept_keys_[left] = keys_[i], kept_ids_[left] = ids_[i];
            left += keys_[i] >= bound;
        }
#endif
        std::fill_n(kept_keys_.begin() + left, 16, INT32_MIN);
        return left;
    }

    // Return how many of n sort keys are at least `limit`. They are padded with INT32_MIN to a
    // multiple of 16.
    static int64_t count_from(const int32_t* keys, int n, int64_t limit) {
        if (limit > INT32_MAX) return 0;
        int32_t count = 0;
        const int32_t least = (int32_t)limit;
#if defined(__AVX512F__)
        if (least == INT32_MIN) return n;
        for (int i = 0; i < n; i += 16)
            count += __builtin_popcount(_mm512_cmpge_epi32_mask(_mm512_loadu_si512(keys + i),
                                                                _mm512_set1_epi32(least)));
#else
        for (int i = 0; i < n; ++i) count += keys[i] >= least;
#endif
        return count;
    }

    // Return an integer that exactly t.kept of n sort keys reach, or with ties the largest integer
    // that at least t.kept reach.
    int32_t threshold(const int32_t* keys, int n) const {
        int32_t least = INT32_MAX, most = INT32_MIN;
        for (int i = 0; i < n; ++i) least = std::min(least, keys[i]);
        for (int i = 0; i < n; ++i) most = std::max(most, keys[i]);
        int64_t low = least, high = (int64_t)most + 1;  // enough reach low, too few reach high
        float low_score = score_of(least), high_score = score_of(most);
        for (int step = 0; high - low > 1; ++step) {
            int64_t middle = low + (high - low) / 2;
            const float between = 0.5f * (low_score + high_score);
            if (step < 16 && std::isfinite(between)) {  // scores are spread more evenly than keys
                const int32_t key = key_of(between);
                if (key > low && key < high) middle = key;
            }
            const int64_t count = count_from(keys, n, middle);
            if (count >= t.kept) low = middle, low_score = score_of((int32_t)middle);
            else high = middle, high_score = score_of((int32_t)middle);
            if (count == t.kept) break;
        }
        return (int32_t)low;
    }
};

extern "C" void select_best(const BestTask* task) {
    const int64_t part_size = 16 * Selector::QUERIES, m = task->queries;
    const int64_t parts = (m + part_size - 1) / part_size;
    in_threads(task->units * parts, task->threads, [&](int64_t part) {
        const FlushDenormals flush;
        Selector selector(*task);
        const int64_t first = part % parts * part_size, last = std::min(first + part_size, m);
        for (int64_t i = first; i < last; i += Selector::QUERIES)
            selector.run(part / parts, i, std::min(i + Selector::QUERIES, last));
    });
}
