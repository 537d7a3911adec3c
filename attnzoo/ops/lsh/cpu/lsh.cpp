// LSH attention on a CPU: softmax over sparse sets of keys, for the asymmetric form of Reformer.
//
// Queries and keys are sorted by bucket, and each query attends to an interval of the sorted keys.
// A block is up to BLOCK consecutive queries, one per SIMD lane, and the keys of their intervals.
// Keys are read in place: each element of a key is multiplied with all queries. A key to which a
// query attended in an earlier round is recognised by its rank in that round, and masked. Online
// softmax merges the rounds with running maxima and sums, so the result of a query does not depend
// on the other queries of its block.
//
// One call computes one unit: one key head and the query heads that share it. Scores are base 2.
// Letters: U units, T queries of a head, G heads, N = G T, S keys, D key size, E value size; D and
// E are multiples of 16.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <utility>
#include <vector>

#include "lanes.h"
#include "layout.h"
#include "threads.h"

// The same as EMPTY_LSE in attnzoo/ops/lsh/block_softmax.py
constexpr double EMPTY_LSE = -1e8;
constexpr double MASKED_SCORE = -1e30;  // below every score

struct HashRound {
    const int64_t* keys;     // [U S]: key rows in sorted order
    const float* key_ranks;  // [U S]: rank of each key row
    const float* centers;    // [U N]: per query row, centre of its interval in ranks
    const int64_t* queries;  // [U N]: query rows, sorted as keys are
    const int64_t* begin;    // [U N]: first key of the interval, an index into keys
    const int64_t* end;      // [U N]

    FIELDS(keys, key_ranks, centers, queries, begin, end)
};

struct Task {
    int64_t threads, units, groups, queries, keys, key_size, value_size;
    int64_t position;       // of the first query
    int64_t before, after;  // keys of the window before and after the query's position
    int64_t first_tokens;   // leading keys that every query attends to
    int64_t chunk_size;     // maximum number of keys that a query attends to in a round
    int64_t rounds;
    int64_t windows;        // 1: the window comes after the rounds in hash_rounds, and its keys are
                            // masked in the rounds; else 0
    int64_t block_keys;     // maximum number of keys of a block
    double scale;           // multiplies query-key products
    const HashRound* hash_rounds;  // [rounds + windows]; a window has only key_ranks and centers

    FIELDS(threads, units, groups, queries, keys, key_size, value_size, position, before, after,
           first_tokens, chunk_size, rounds, windows, block_keys, scale, hash_rounds)
};

template <class Real>
struct Tensors {
    const Real *q, *k, *v;  // [U N, D], [U S, D], [U S, E]
    Real *out, *lse;        // [U N, E], [U N]; the backward pass reads only lse
    const Real *d_out, *delta;
    Real *dq, *dk, *dv;

    FIELDS(q, k, v, out, lse, d_out, delta, dq, dk, dv)
};

// Queries, one per lane, and their keys.
struct Block {
    int count, width, first;  // queries; keys; leading keys that every query attends to
    int64_t rows[BLOCK];
    int low[BLOCK], high[BLOCK];  // a query attends to keys low to high - 1, and the leading ones
    std::vector<int64_t> keys;

    void clear() { count = width = first = 0; }

    void add_query(int64_t row, int64_t begin, int64_t end) {
        rows[count] = row;
        low[count] = (int)begin;
        high[count++] = (int)end;
    }

    // Return the range of keys to which at least one of SUM_ROWS queries from `lane` on attends.
    std::pair<int, int> key_range(int lane) const {
        int from = first ? 0 : width, to = first;
        for (int c = lane; c < std::min(lane + SUM_ROWS, count); ++c) {
            from = std::min(from, low[c]);
            to = std::max(to, high[c]);
        }
        return {from, to};
    }

    // Return the range of queries that attend to at least one of SUM_ROWS keys from `key` on.
    std::pair<int, int> query_range(int key) const {
        if (key < first) return {0, count};
        int from = count, to = 0;
        for (int c = 0; c < count; ++c)
            if (low[c] < key + SUM_ROWS && high[c] > key) from = std::min(from, c), to = c + 1;
        return {std::min(from, to), to};
    }
};

template <class Real>
class Worker : Math<Real> {
    using typename Math<Real>::Reals;
    using typename Math<Real>::Ints;
    using Math<Real>::LANES, Math<Real>::load, Math<Real>::store, Math<Real>::broadcast;
    using Math<Real>::exp2, Math<Real>::add_weighted_rows, Math<Real>::dot_products;

  public:
    Worker(const Task& task, const Tensors<Real>& tensors, int64_t unit)
        : t(task), x(tensors), count_(t.groups * t.queries), begin_(unit * count_),
          keys_(unit * t.keys), width_(t.block_keys + t.first_tokens + 2 * (DOT_ROWS + SUM_ROWS)),
          q_(BLOCK * t.key_size), d_out_(BLOCK * t.value_size), p_(BLOCK * width_),
          dp_(BLOCK * width_), unused_(std::max(t.key_size, t.value_size)), centers_(t.rounds + 1),
          k_rows_(width_), v_rows_(width_) {
        block_.keys.resize(width_);
    }

    void forward() {
        max_.assign(count_, MASKED_SCORE);
        sum_.assign(count_, 0);
        Real* out = x.out + begin_ * t.value_size;
        std::fill(out, out + count_ * t.value_size, Real(0));
        for_each_block([this](int round) { attend(round); });
        for (int64_t i = 0; i < count_; ++i, out += t.value_size) {
            const Real inverse = sum_[i] == 0 ? 0 : 1 / sum_[i];  // NaN stays NaN
            x.lse[begin_ + i] = sum_[i] == 0 ? EMPTY_LSE : max_[i] + std::log2(sum_[i]);
            for (int64_t e = 0; e < t.value_size; ++e) out[e] *= inverse;
        }
    }

    // Add to dq, dk and dv.
    void backward() {
        for_each_block([this](int round) { attend_backward(round); });
    }

  private:
    const Task& t;
    const Tensors<Real>& x;
    const int64_t count_, begin_, keys_;  // queries; first query row; first key row
    const int64_t width_;                 // maximum keys of a block, with leading ones and padding
    std::vector<Real> q_, d_out_, p_, dp_;    // of the block, [rows, BLOCK]: a column per query
    std::vector<Real> unused_;                // output of lanes and keys beyond the last
    std::vector<Real> max_, sum_;             // [N]: running maximum and sum of each query
    std::vector<Reals> centers_;              // [rounds + 1]: of LANES queries
    std::vector<const Real*> k_rows_, v_rows_;  // of the block's keys
    Block block_;

    // -- blocks --------------------------------------------------------------------------------

    // Call work(round) for each block; round -1 is the window and the first tokens.
    template <class Work>
    void for_each_block(Work work) {
        for (int64_t group = 0; group < t.groups; ++group)
            for (int64_t i = 0; i < t.queries; i += BLOCK) window_blocks(group, i, work);
        for (int round = 0; round < t.rounds; ++round) round_blocks(round, work);
    }

    // Call work for the blocks of the window of queries i to i + BLOCK - 1 of a head.
    template <class Work>
    void window_blocks(int64_t group, int64_t i, Work work) {
        const int64_t count = std::min<int64_t>(BLOCK, t.queries - i), position = t.position + i;
        int64_t last = std::min(position + count - 1 + t.after, t.keys - 1);
        last = std::max(last, t.first_tokens - 1);  // the first tokens are in one block
        int64_t begin = std::max<int64_t>(position - t.before, 0);
        if (begin <= t.first_tokens) begin = 0;
        for (int64_t from = begin; from <= last; from += t.block_keys) {
            const int64_t to = std::min(from + t.block_keys, last + 1);
            block_.clear();
            block_.first = from == begin ? (int)t.first_tokens : 0;
            if (from > 0)
                for (int j = 0; j < block_.first; ++j) block_.keys[block_.width++] = keys_ + j;
            const int64_t shift = block_.width - from;
            for (int64_t j = from; j < to; ++j) block_.keys[block_.width++] = keys_ + j;
            for (int64_t at = position; at < position + count; ++at)
                block_.add_query(begin_ + group * t.queries + at - t.position,
                                 std::clamp(at - t.before, from, to) + shift,
                                 std::clamp(at + t.after + 1, from, to) + shift);
            work(-1);
        }
    }

    // Call work for the blocks of a hash round.
    template <class Work>
    void round_blocks(int round, Work work) {
        const HashRound& sorted = t.hash_rounds[round];
        const int64_t stop = begin_ + count_;
        for (int64_t i = begin_; i < stop;) {
            const int64_t base = sorted.begin[i];
            int64_t last = base;
            block_.clear();
            for (; i < stop && block_.count < BLOCK && sorted.end[i] - base <= t.block_keys; ++i) {
                if (sorted.begin[i] == sorted.end[i]) continue;
                block_.add_query(sorted.queries[i], sorted.begin[i] - base, sorted.end[i] - base);
                last = sorted.end[i];
            }
            for (int64_t at = base; at < last; ++at) block_.keys[block_.width++] = sorted.keys[at];
            if (block_.count) work(round);
        }
    }

    // Transpose the block's rows, multiplied by a factor, into columns, one per lane.
    void load_columns(const Real* from, int64_t size, Real factor, Real* to) const {
        for (int c = 0; c < block_.count; ++c)
            Math<Real>::store_column(from + block_.rows[c] * size, size, factor, to + c);
        for (int c = block_.count; c < BLOCK; ++c)
            for (int64_t d = 0; d < size; ++d) to[d * BLOCK + c] = 0;
    }

    // Point to the rows of the block's keys, padded with the last one.
    void point_to_keys() {
        for (int w = 0; w < block_.width + DOT_ROWS; ++w) {
            const int64_t key = block_.keys[std::min(w, block_.width - 1)];
            k_rows_[w] = x.k + key * t.key_size;
            v_rows_[w] = x.v + key * t.value_size;
        }
    }

    // out[w][:] = sum over d of rows[w][d] columns[d][:].
    template <int V>
    void multiply(const Real* const* rows, const Real* columns, int64_t depth, Real* out) const {
        Reals sums[DOT_ROWS][V];
        for (int w = 0; w < block_.width; w += DOT_ROWS) {
            dot_products(rows + w, columns, depth, sums);
            for (int r = 0; r < DOT_ROWS; ++r)
                for (int i = 0; i < V; ++i) store(out + (w + r) * BLOCK + i * LANES, sums[r][i]);
        }
    }

    void multiply(const std::vector<const Real*>& rows, const std::vector<Real>& columns,
                  int64_t depth, std::vector<Real>& out) const {
        if (block_.count <= BLOCK / 2)
            multiply<BLOCK / LANES / 2>(rows.data(), columns.data(), depth, out.data());
        else
            multiply<BLOCK / LANES>(rows.data(), columns.data(), depth, out.data());
    }

    // Call each(index, lane, attends) for the scores of a key with LANES queries.
    template <class Each>
    void for_each_score(int round, Each each) {
        const int earlier = round < 0 ? 0 : round + (int)t.windows;
        const Real limit = Real(t.chunk_size) * t.chunk_size / 4;
        const auto earlier_round = [&](int r) -> const HashRound& {
            return t.hash_rounds[r < round ? r : t.rounds + r - round];
        };
        for (int lane = 0; lane < block_.count; lane += LANES) {
            const int count = std::min(LANES, block_.count - lane);
            Ints low{}, high{}, valid{};
            for (int c = 0; c < count; ++c)
                low[c] = block_.low[lane + c], high[c] = block_.high[lane + c], valid[c] = -1;
            for (int r = 0; r < earlier; ++r)
                for (int c = 0; c < count; ++c)
                    centers_[r][c] = earlier_round(r).centers[block_.rows[lane + c]];
            for (int w = 0; w < block_.width; ++w) {
                Ints attends = w < block_.first ? valid : (low <= w) & (high > w);
                for (int r = 0; r < earlier; ++r) {
                    const Real rank = earlier_round(r).key_ranks[block_.keys[w]];
                    const Reals distance = rank - centers_[r];
                    attends &= distance * distance > limit;
                }
                each(w * BLOCK + lane, lane, attends);
            }
        }
    }

    // -- forward and backward ------------------------------------------------------------------

    void attend(int round) {
        load_columns(x.q, t.key_size, t.scale * LOG2_E, q_.data());
        point_to_keys();
        multiply(k_rows_, q_, t.key_size, p_);
        Real rescale[BLOCK], maxima[BLOCK], sums[BLOCK];
        for (int c = 0; c < BLOCK; ++c) {
            maxima[c] = c < block_.count ? max_[block_.rows[c] - begin_] : Real(MASKED_SCORE);
            rescale[c] = maxima[c];
        }
        for_each_score(round, [&](int i, int lane, Ints attends) {
            const Reals score = attends ? load(&p_[i]) : broadcast(MASKED_SCORE);
            const Reals maximum = load(maxima + lane);
            store(&p_[i], score);
            store(maxima + lane, score > maximum ? score : maximum);
        });
        for (int lane = 0; lane < block_.count; lane += LANES) {
            const Reals maximum = load(maxima + lane);
            Reals sum{};
            for (int i = lane; i < block_.width * BLOCK; i += BLOCK) {
                const Reals score = load(&p_[i]);
                const Reals weight = score == Real(MASKED_SCORE) ? Reals{} : exp2(score - maximum);
                store(&p_[i], weight);
                sum += weight;
            }
            store(sums + lane, sum);
            store(rescale + lane, exp2(load(rescale + lane) - maximum));
        }
        for (int c = 0; c < block_.count; c += SUM_ROWS) {
            Real* out[SUM_ROWS];
            output_rows(c, x.out, t.value_size, out);
            const auto keys = block_.key_range(c);
            add_weighted_rows(out, rescale + c, &p_[c], 1, BLOCK, v_rows_.data(), keys,
                              t.value_size);
        }
        for (int c = 0; c < block_.count; ++c) {
            const int64_t i = block_.rows[c] - begin_;
            max_[i] = maxima[c];
            sum_[i] = sum_[i] * rescale[c] + sums[c];
        }
    }

    void attend_backward(int round) {
        load_columns(x.q, t.key_size, t.scale * LOG2_E, q_.data());
        load_columns(x.d_out, t.value_size, 1, d_out_.data());
        point_to_keys();
        multiply(k_rows_, q_, t.key_size, p_);
        multiply(v_rows_, d_out_, t.value_size, dp_);
        Real logs[BLOCK] = {}, deltas[BLOCK] = {};
        const Real *q_rows[BLOCK], *d_out_rows[BLOCK];
        for (int c = 0; c < block_.count; ++c) {
            const int64_t row = block_.rows[c];
            logs[c] = x.lse[row], deltas[c] = x.delta[row];
            q_rows[c] = x.q + row * t.key_size, d_out_rows[c] = x.d_out + row * t.value_size;
        }
        for_each_score(round, [&](int i, int lane, Ints attends) {
            const Reals weight = attends ? exp2(load(&p_[i]) - load(logs + lane)) : Reals{};
            store(&p_[i], weight);
            store(&dp_[i], weight * (load(&dp_[i]) - load(deltas + lane)) * Real(t.scale));
        });
        for (int c = 0; c < block_.count; c += SUM_ROWS) {
            Real* dq[SUM_ROWS];
            output_rows(c, x.dq, t.key_size, dq);
            const auto keys = block_.key_range(c);
            add_weighted_rows(dq, nullptr, &dp_[c], 1, BLOCK, k_rows_.data(), keys, t.key_size);
        }
        for (int w = 0; w < block_.width; w += SUM_ROWS) {
            Real *dk[SUM_ROWS], *dv[SUM_ROWS];
            for (int r = 0; r < SUM_ROWS; ++r) {
                const bool valid = w + r < block_.width;
                dk[r] = valid ? x.dk + block_.keys[w + r] * t.key_size : unused_.data();
                dv[r] = valid ? x.dv + block_.keys[w + r] * t.value_size : unused_.data();
            }
            const auto queries = block_.query_range(w);
            const Real *p = &p_[w * BLOCK], *dp = &dp_[w * BLOCK];
            add_weighted_rows(dk, nullptr, dp, BLOCK, 1, q_rows, queries, t.key_size);
            add_weighted_rows(dv, nullptr, p, BLOCK, 1, d_out_rows, queries, t.value_size);
        }
    }

    // Point to the rows of SUM_ROWS queries; past the last query, to unused_.
    void output_rows(int lane, Real* x, int64_t size, Real** rows) {
        for (int r = 0; r < SUM_ROWS; ++r)
            rows[r] = lane + r < block_.count ? x + block_.rows[lane + r] * size : unused_.data();
    }
};

template <class Real, class Pass>
static void run(const Task& task, const Tensors<Real>& tensors, Pass pass) {
    in_threads(task.units, task.threads, [&](int64_t unit) {
        Worker<Real> worker(task, tensors, unit);
        (worker.*pass)();
    });
}

#define EXPORT(Real)                                                                      \
    extern "C" void lsh_forward_##Real(const Task* task, const Tensors<Real>* tensors) {  \
        run(*task, *tensors, &Worker<Real>::forward);                                     \
    }                                                                                     \
    extern "C" void lsh_backward_##Real(const Task* task, const Tensors<Real>* tensors) { \
        run(*task, *tensors, &Worker<Real>::backward);                                    \
    }

EXPORT(float)
EXPORT(double)

CALLED_FROM_PYTHON(lsh_forward_float, lsh_forward_double, lsh_backward_float, lsh_backward_double)
