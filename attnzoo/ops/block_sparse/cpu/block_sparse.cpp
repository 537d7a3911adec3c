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

#include "checks.h"
#include "lanes.h"
#include "pairs.h"
#include "rows.h"
#include "threads.h"
#include "tiles.h"

constexpr int PANEL = 32;  // keys of a panel; blocks divide it or are multiples of it
#if defined(__aarch64__)
constexpr int WIDEST = 8;  // vectors of columns of a tile of products
#else
constexpr int WIDEST = 2;
#endif

template <class Real>
class Worker : PairLists, Math<Real> {
    using typename Math<Real>::Reals;
    using typename Math<Real>::Ints;
    using Math<Real>::LANES, Math<Real>::load, Math<Real>::store, Math<Real>::broadcast;
    using Math<Real>::exp2, Math<Real>::add_weighted_rows;

  public:
    Worker(const Task& task, const Tensors<Real>& tensors, int64_t unit)
        : PairLists(task, unit), x(tensors), lanes_((size_ + LANES - 1) / LANES * LANES),
          panels_((task.keys + PANEL - 1) / PANEL), p_(GROUP * lanes_), dp_(GROUP * lanes_),
          unused_(std::max(t.key_size, t.value_size) + PANEL), sums_(tile_ * LANES), max_(tile_),
          k_rows_(lanes_), v_rows_(lanes_) {
        for (int i = 0; i < LANES; ++i) lane_index_[i] = i;
    }

    void forward() {
        for_each_tile([this](int64_t row, int queries, int64_t) {
            std::fill(sums_.begin(), sums_.begin() + queries * LANES, Real(0));
            std::fill(max_.begin(), max_.begin() + queries, Real(MASKED_SCORE));
            std::fill(x.out + row * t.value_size, x.out + (row + queries) * t.value_size, Real(0));
            for_each_group(
                [&](int64_t block) { point_to_keys(block); },
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
                [&](int64_t block) { point_to_keys(block); },
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
    const Tensors<Real>& x;
    const int lanes_;                 // keys of a block, rounded up to vectors
    const int64_t panels_;
    std::vector<Real> p_, dp_;        // [GROUP, lanes_]
    std::vector<Real> unused_;        // in place of queries beyond the last
    std::vector<Real> sums_;          // [tile_, LANES]: running sum of each query, per lane
    std::vector<Real> max_;           // [tile_]: reference of each query
    std::vector<const Real*> k_rows_, v_rows_;
    Ints lane_index_;

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
            multiply_columns<WIDEST>(rows, count, columns, width, depth, factor, &out[from]);
            from += width;
        }
    }

    // The products with `width` columns, in tiles of V vectors of them, then of half as many.
    template <int V>
    void multiply_columns(const Real* const* rows, int count, const Real* columns, int width,
                          int64_t depth, Real factor, Real* out) const {
        int done = 0;
        for (; width - done >= V * LANES; done += V * LANES)
            multiply<V>(rows, count, columns + done, depth, factor, out + done);
        if constexpr (V > 1)
            if (done < width)
                multiply_columns<V / 2>(rows, count, columns + done, width - done, depth, factor,
                                        out + done);
    }

    template <int V>
    void multiply(const Real* const* rows, int count, const Real* columns, int64_t depth,
                  Real factor, Real* out) const {
        constexpr int REST = std::min(DOT_ROWS, SUM_ROWS);
        int r = 0;
        for (; r + SUM_ROWS < count; r += DOT_ROWS)
            multiply<DOT_ROWS, V>(rows + r, columns, depth, factor, out + r * lanes_);
        for (; r < count; r += REST)
            multiply<REST, V>(rows + r, columns, depth, factor, out + r * lanes_);
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
            if (any_lane<Real>(above)) {
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
static int64_t run(const Task& task, const Tensors<Real>& tensors, Pass pass) {
    if (!task.are_lengths_inside()) return REFUSED;
    in_threads(task.units, task.threads, [&](int64_t unit) {
        Worker<Real> worker(task, tensors, unit);
        (worker.*pass)();
    });
    return ACCEPTED;
}

#define EXPORT(Real)                                                                           \
    extern "C" int64_t sparse_forward_##Real(const Task* task, const Tensors<Real>* tensors) { \
        return run(*task, *tensors, &Worker<Real>::forward);                                   \
    }                                                                                          \
    extern "C" int64_t sparse_backward_##Real(const Task* task, const Tensors<Real>* tensors) {\
        return run(*task, *tensors, &Worker<Real>::backward);                                  \
    }

EXPORT(float)
EXPORT(double)

// -- selection ---------------------------------------------------------------------------------

// How a block is scored, as in ops/block_sparse/selection.py.
enum Score { MEAN, MOMENTS, BOUNDS, INDEXER };

struct BestTask {
    int64_t threads, units, shared;  // selections; how many of them share a summary
    int64_t heads;                   // I, of an indexer; otherwise 1
    int64_t queries, size;           // M, D
    int64_t blocks, pitch, kept;     // N, the row step of summaries, K
    int64_t units_per_range;         // selections that have the same candidates
    int64_t first;                   // candidates are blocks from first on
    int64_t score;
    int64_t q_type;            // a value of Type
    double scale;              // multiplies query-key products
    const char* q;             // [units, I, M, D]
    const float* weights;      // [units, I, M], of the heads of an indexer
    const float* summary;      // [units / shared, Z, pitch]: a column per block
    const int64_t* end;        // [.., M]: candidates are blocks below end
    const int64_t* begin;      // [.., M]: and blocks from begin
    const int64_t* stop;       // [.., M]: to stop - 1
    int32_t* out;              // [units, M, kept]: sorted; NO_BLOCK after the last

    FIELDS(threads, units, shared, heads, queries, size, blocks, pitch, kept, units_per_range,
           first, score, q_type, scale, q, weights, summary, end, begin, stop, out)
};

// Processes QUERIES queries at a time, so that their scores stay in the cache.
class Selector : Tiles<float> {
    static constexpr int GROUPS = 32;  // groups of sort keys in drop_low
    static constexpr int MOST_RANKS = 64;  // of select_few, whose time grows with their square

  public:
    static constexpr int QUERIES = 32;

    static int64_t depth(const BestTask& task) {
        return task.score == MEAN || task.score == INDEXER ? task.size : 2 * task.size;
    }

    explicit Selector(const BestTask& task)
        : t(task), is_indexer_(task.score == INDEXER), depth_(depth(task)),
          padded_((depth_ + 31) / 32 * 32),
          buffer_(QUERIES * (padded_ + (1 + is_indexer_) * task.pitch) + 64),
          features_(buffer_.take(QUERIES * padded_)),
          scores_(buffer_.take(QUERIES * task.pitch)),
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
                add_features(first + i, features_ + (i - from) * padded_);
            multiply(unit / t.shared, (to - from + 15) / 16 * 16, width);
            for (int64_t i = from; is_indexer_ && i < to; ++i)
                add_products((i - from) * t.pitch, width, t.weights[first + i], head == 0);
        }
        for (int64_t i = from; i < to; ++i)
            select(scores_ + (i - from) * t.pitch, range + i,
                   t.out + (unit * t.queries + i) * t.kept);
    }

  private:
    // Write the vector whose product with a summary is the score of a block.
    void add_features(int64_t row, float* features) const {
        const float factor = float(0.5 * t.scale);
        const char* q = t.q + row * t.size * Tensor{nullptr, t.q_type, {}}.bytes();
        Rows<float>::load_row(q, t.q_type, t.size, t.size, 1, features);
        for (int64_t d = 0; d < t.size; ++d) {
            const float x = features[d];
            if (t.score == BOUNDS) features[d] = std::max(x, 0.f);
            if (t.score == MOMENTS) features[t.size + d] = x * x * factor;
            if (t.score == BOUNDS) features[t.size + d] = std::min(x, 0.f);
        }
    }

    // Multiply features with the first `width` summaries of a key head.
    void multiply(int64_t unit, int64_t rows, int64_t width) {
        product(products_, t.pitch, rows, features_, padded_, 1,
                t.summary + unit * depth_ * t.pitch, t.pitch, width, depth_);
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
        const int64_t stop = std::min(t.stop[range], t.blocks);
        const int64_t end = std::min(t.end[range], stop);
        const Candidates candidates[] = {{t.first, end},
                                         {std::max({t.first, t.begin[range], end}), stop}};
        if (select_few(scores, candidates, out)) return;
        int n = 0, found = 0;
        for (const auto& [from, to] : candidates) n = add(scores, from, to, n);
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
            guess(limit, std::max(limit, *std::max_element(kept_keys_.begin(),
                                                           kept_keys_.begin() + n)));
        }
        for (; found < t.kept; ++found) out[found] = NO_BLOCK;
    }

    struct Candidates {
        int64_t from, to;  // blocks from `from` to `to` - 1
    };

    const BestTask& t;
    const bool is_indexer_;
    const int64_t depth_, padded_;  // Z, and Z rounded up to a multiple of 32
    Buffer<float> buffer_;
    int32_t guess_ = INT32_MAX;        // bound that about t.kept sort keys reach
    float *features_;                  // [QUERIES, Z]
    float *scores_;                    // [QUERIES, pitch]
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

    // Select among the candidates that reach a bound, the guess or that of least_bound; false if
    // they are too few or many.
    bool select_few(const float* scores, const Candidates (&candidates)[2], int32_t* out) {
#if defined(__AVX512F__)
        int n = copy_reached(scores, candidates, guess_);
        if ((n < t.kept || n > MOST_RANKS) && t.kept <= GROUPS)
            n = copy_reached(scores, candidates, least_bound(scores, candidates));
        if (n < t.kept || n > MOST_RANKS) return false;
        const __m512i kept = _mm512_set1_epi32((int)t.kept);
        int32_t least = INT32_MAX, most = INT32_MIN;
        for (int i = 0; i < n; i += 16) {
            const __mmask16 best = _mm512_mask_cmplt_epi32_mask(
                first_lanes(n - i), ranks(kept_keys_.data(), n, i), kept);
            const __m512i keys = _mm512_loadu_si512(&kept_keys_[i]);
            const __m512i ids = _mm512_loadu_si512(&kept_ids_[i]);
            const int count = __builtin_popcount(best);
            _mm512_mask_storeu_epi32(out, first_lanes(count),
                                     _mm512_maskz_compress_epi32(best, ids));
            out += count;
            least = std::min(least, _mm512_mask_reduce_min_epi32(best, keys));
            most = std::max(most, _mm512_mask_reduce_max_epi32(best, keys));
        }
        guess(least, most);
        return true;
#else
        (void)scores, (void)candidates, (void)out;
        return false;
#endif
    }

#if defined(__AVX512F__)
    static __mmask16 first_lanes(int64_t count) {
        return count < 16 ? (1u << count) - 1 : 0xffffu;
    }

    // Call each(j, keys, valid) for the sort keys of 16 candidates from j on at a time.
    template <class Each>
    static void for_each_key(const float* scores, const Candidates (&candidates)[2], Each each) {
        for (const auto& [from, to] : candidates)
            for (int64_t j = from; j < to; j += 16) {
                const __mmask16 valid = first_lanes(to - j);
                const __m512 zero = _mm512_setzero_ps();  // added to negative zeros
                const __m512i bits = _mm512_castps_si512(
                    _mm512_add_ps(_mm512_maskz_loadu_ps(valid, scores + j), zero));
                const __m512i magnitude = _mm512_and_si512(_mm512_srai_epi32(bits, 31),
                                                           _mm512_set1_epi32(0x7fffffff));
                each(j, _mm512_xor_si512(bits, magnitude), valid);
            }
    }

    // Copy the sort keys of candidates that reach a bound, and return their number.
    int copy_reached(const float* scores, const Candidates (&candidates)[2], int32_t bound) {
        int n = 0;
        const __m512i lanes = (__m512i)lane_numbers(0), least = _mm512_set1_epi32(bound);
        int32_t *reached_keys = kept_keys_.data(), *reached_ids = kept_ids_.data();
        for_each_key(scores, candidates, [&](int64_t j, __m512i keys, __mmask16 valid) {
            const __mmask16 reach = _mm512_mask_cmpge_epi32_mask(valid, keys, least);
            const __m512i ids = _mm512_add_epi32(lanes, _mm512_set1_epi32((int)j));
            _mm512_storeu_si512(reached_keys + n, _mm512_maskz_compress_epi32(reach, keys));
            _mm512_storeu_si512(reached_ids + n, _mm512_maskz_compress_epi32(reach, ids));
            n += __builtin_popcount(reach);
        });
        return n;
    }

    // Return a bound that at least t.kept candidates reach: the t.kept-th largest of the maxima of
    // GROUPS groups.
    int32_t least_bound(const float* scores, const Candidates (&candidates)[2]) const {
        __m512i even = _mm512_set1_epi32(INT32_MIN), odd = even;
        for_each_key(scores, candidates, [&](int64_t, __m512i keys, __mmask16 valid) {
            const __m512i larger = _mm512_mask_max_epi32(even, valid, even, keys);
            even = odd, odd = larger;
        });
        int32_t maxima[GROUPS];
        _mm512_storeu_si512(maxima, even), _mm512_storeu_si512(maxima + 16, odd);
        const __m512i last = _mm512_set1_epi32((int)t.kept - 1);
        const __mmask16 low = _mm512_cmpeq_epi32_mask(ranks(maxima, GROUPS, 0), last);
        const __mmask16 high = _mm512_cmpeq_epi32_mask(ranks(maxima, GROUPS, 16), last);
        return maxima[low ? __builtin_ctz(low) : 16 + __builtin_ctz(high)];
    }

    // Return the ranks of 16 of n sort keys from `first` on: the number of larger ones, and of
    // earlier ones that are equal.
    static __m512i ranks(const int32_t* keys, int n, int first) {
        const __m512i own = _mm512_loadu_si512(keys + first), one = _mm512_set1_epi32(1);
        __m512i rank = _mm512_setzero_si512();
        int j = 0;
        for (; j < first; ++j) {
            const __mmask16 before = _mm512_cmpge_epi32_mask(_mm512_set1_epi32(keys[j]), own);
            rank = _mm512_mask_add_epi32(rank, before, rank, one);
        }
        for (; j < n; ++j) {
            const __m512i other = _mm512_set1_epi32(keys[j]);
            const __mmask16 later = j < first + 16 ? 0xfffeu << (j - first) : 0;
            const __mmask16 before = _mm512_cmpgt_epi32_mask(other, own) |
                                     _mm512_mask_cmpeq_epi32_mask(later, other, own);
            rank = _mm512_mask_add_epi32(rank, before, rank, one);
        }
        return rank;
    }
#endif

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
    void guess(int32_t smallest, int32_t largest) {
        const float least = score_of(smallest), below = least - 0.25f * (score_of(largest) - least);
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

CALLED_FROM_PYTHON(sparse_forward_float, sparse_forward_double, sparse_backward_float,
                   sparse_backward_double, select_best)
