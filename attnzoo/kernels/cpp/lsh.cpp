// Softmax over scattered sets of keys on a CPU: the asymmetric form of Reformer's attention.
//
// Queries are sorted by bucket as keys are, and each sees an interval of that order. Up to BLOCK of
// them that follow each other are attended to at once, a query in each lane of vector registers:
// keys are read where they lie, every number of one beside all queries. A key that an earlier
// round has met is told by its place there, and left out. Rounds are merged as they come, with
// running maxima and sums, so a query's numbers do not depend on which others share its block.
//
// One call works on one key head and the query heads that share it, a unit. Scores are in logs of 2.
// Letters: U units, T queries of a head, G heads, N = G T, S keys, D key size, E value size; D and E
// are multiples of 16.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <utility>
#include <vector>

#include "lanes.h"
#include "threads.h"

constexpr double NOTHING = -1e8;  // as in attnzoo/ops/reformer_blocks.py
constexpr double LOWEST = -1e30;  // below every score

struct Round {
    const int64_t* keys;     // [U S]: the row of the key in each place
    const float* places;     // [U S]: the place of each key's row
    const float* middles;    // [U N]: of each query's row, of what it sees
    const int64_t* queries;  // [U N]: rows, sorted as keys are
    const int64_t* begin;    // [U N]: what each of those sees, in places of keys
    const int64_t* end;
};

struct Task {
    int64_t threads, units, groups, queries, keys, key_size, value_size;
    int64_t position;       // of the first query
    int64_t before, after;  // how many keys a query sees on either side of its own
    int64_t first;          // keys at the beginning that all see
    int64_t chunk, rounds;  // a round shows as many keys to a query, at most
    int64_t others;         // orders behind the rounds, whose keys no round shows again
    int64_t reach;          // keys beside a block, at most
    double scale;           // multiplies the products
    const Round* orders;    // [rounds + others]; of the others, places and middles only
};

template <class Real>
struct Rows {
    const Real *q, *k, *v;  // [U N, D], [U S, D], [U S, E]
    Real *out, *lse;        // [U N, E], [U N]; the backward pass reads lse only
    const Real *d_out, *delta;
    Real *dq, *dk, *dv;
};

// Queries in lanes, and the keys beside them.
struct Block {
    int count, width, always;  // always: leading keys that all see
    int64_t rows[BLOCK];
    int low[BLOCK], high[BLOCK];  // a lane sees keys low to high - 1, and the leading ones
    std::vector<int64_t> keys;

    void clear() { count = width = always = 0; }

    void lane(int64_t row, int64_t from, int64_t to) {
        rows[count] = row;
        low[count] = (int)from;
        high[count++] = (int)to;
    }

    // Keys that some of FLAT lanes see.
    std::pair<int, int> seen_by(int lane) const {
        int from = always ? 0 : width, to = always;
        for (int c = lane; c < std::min(lane + FLAT, count); ++c) {
            from = std::min(from, low[c]);
            to = std::max(to, high[c]);
        }
        return {from, to};
    }

    // Lanes that see some of FLAT keys.
    std::pair<int, int> seeing(int key) const {
        if (key < always) return {0, count};
        int from = count, to = 0;
        for (int c = 0; c < count; ++c)
            if (low[c] < key + FLAT && high[c] > key) from = std::min(from, c), to = c + 1;
        return {std::min(from, to), to};
    }
};

template <class Real>
class Worker : Math<Real> {
    using typename Math<Real>::Reals;
    using typename Math<Real>::Ints;
    using Math<Real>::LANES, Math<Real>::load, Math<Real>::store, Math<Real>::all;
    using Math<Real>::exp2, Math<Real>::add, Math<Real>::products;

  public:
    Worker(const Task& task, const Rows<Real>& rows, int64_t unit)
        : t(task), x(rows), count_(t.groups * t.queries), begin_(unit * count_),
          keys_(unit * t.keys), width_(t.reach + t.first + 2 * (TALL + FLAT)),
          q_(BLOCK * t.key_size), d_(BLOCK * t.value_size), p_(BLOCK * width_),
          dp_(BLOCK * width_), spare_(std::max(t.key_size, t.value_size)), middles_(t.rounds + 1),
          at_k_(width_), at_v_(width_) {
        block_.keys.resize(width_);
    }

    void forward() {
        top_.assign(count_, LOWEST);
        sum_.assign(count_, 0);
        Real* out = x.out + begin_ * t.value_size;
        std::fill(out, out + count_ * t.value_size, Real(0));
        walk([this](int round) { attend(round); });
        for (int64_t i = 0; i < count_; ++i, out += t.value_size) {
            const Real share = sum_[i] == 0 ? 0 : 1 / sum_[i];  // what is not a number remains so
            x.lse[begin_ + i] = sum_[i] == 0 ? NOTHING : top_[i] + std::log2(sum_[i]);
            for (int64_t e = 0; e < t.value_size; ++e) out[e] *= share;
        }
    }

    // Adds to the gradients.
    void backward() {
        walk([this](int round) { differentiate(round); });
    }

  private:
    const Task& t;
    const Rows<Real>& x;
    const int64_t count_, begin_, keys_, width_;  // queries, the first row of them and of keys
    std::vector<Real> q_, d_, p_, dp_, spare_, top_, sum_;
    std::vector<Reals> middles_;
    std::vector<const Real*> at_k_, at_v_;
    Block block_;

    // -- blocks --------------------------------------------------------------------------------

    // Call work(round) for every block; round -1 is the window and the first keys.
    template <class Work>
    void walk(Work work) {
        for (int64_t group = 0; group < t.groups; ++group)
            for (int64_t i = 0; i < t.queries; i += BLOCK) near(group, i, work);
        for (int round = 0; round < t.rounds; ++round) far(round, work);
    }

    template <class Work>
    void near(int64_t group, int64_t i, Work work) {
        const int64_t count = std::min<int64_t>(BLOCK, t.queries - i), position = t.position + i;
        int64_t last = std::min(position + count - 1 + t.after, t.keys - 1);
        last = std::max(last, t.first - 1);  // the first keys lie in one tile
        int64_t begin = std::max<int64_t>(position - t.before, 0);
        if (begin <= t.first) begin = 0;
        for (int64_t from = begin; from <= last; from += t.reach) {
            const int64_t to = std::min(from + t.reach, last + 1);
            block_.clear();
            block_.always = from == begin ? (int)t.first : 0;
            if (from > 0)
                for (int j = 0; j < block_.always; ++j) block_.keys[block_.width++] = keys_ + j;
            const int64_t shift = block_.width - from;
            for (int64_t j = from; j < to; ++j) block_.keys[block_.width++] = keys_ + j;
            for (int64_t at = position; at < position + count; ++at)
                block_.lane(begin_ + group * t.queries + at - t.position,
                            std::clamp(at - t.before, from, to) + shift,
                            std::clamp(at + t.after + 1, from, to) + shift);
            work(-1);
        }
    }

    template <class Work>
    void far(int round, Work work) {
        const Round& order = t.orders[round];
        const int64_t stop = begin_ + count_;
        for (int64_t i = begin_; i < stop;) {
            const int64_t base = order.begin[i];
            int64_t last = base;
            block_.clear();
            for (; i < stop && block_.count < BLOCK && order.end[i] - base <= t.reach; ++i) {
                if (order.begin[i] == order.end[i]) continue;
                block_.lane(order.queries[i], order.begin[i] - base, order.end[i] - base);
                last = order.end[i];
            }
            for (int64_t at = base; at < last; ++at) block_.keys[block_.width++] = order.keys[at];
            if (block_.count) work(round);
        }
    }

    // Turn rows into columns, one for each lane.
    void columns(const Real* from, int64_t size, Real factor, Real* to) const {
        for (int c = 0; c < block_.count; ++c)
            Math<Real>::column(from + block_.rows[c] * size, size, factor, to + c);
        for (int c = block_.count; c < BLOCK; ++c)
            for (int64_t d = 0; d < size; ++d) to[d * BLOCK + c] = 0;
    }

    // Point at the rows of the keys; the last one fills up.
    void look() {
        for (int w = 0; w < block_.width + TALL; ++w) {
            const int64_t key = block_.keys[std::min(w, block_.width - 1)];
            at_k_[w] = x.k + key * t.key_size;
            at_v_[w] = x.v + key * t.value_size;
        }
    }

    // out[w][:] = sum over d of rows[w][d] lanes[d][:].
    template <int V>
    void multiply(const Real* const* rows, const Real* lanes, int64_t depth, Real* out) const {
        Reals sums[TALL][V];
        for (int w = 0; w < block_.width; w += TALL) {
            products(rows + w, lanes, depth, sums);
            for (int r = 0; r < TALL; ++r)
                for (int i = 0; i < V; ++i) store(out + (w + r) * BLOCK + i * LANES, sums[r][i]);
        }
    }

    void multiply(const std::vector<const Real*>& rows, const std::vector<Real>& lanes,
                  int64_t depth, std::vector<Real>& out) const {
        if (block_.count <= BLOCK / 2)
            multiply<BLOCK / LANES / 2>(rows.data(), lanes.data(), depth, out.data());
        else
            multiply<BLOCK / LANES>(rows.data(), lanes.data(), depth, out.data());
    }

    // Call each(where, lane, seen) for the scores of LANES queries and a key; seen: by which.
    template <class Each>
    void pairs(int round, Each each) {
        const int met = round < 0 ? 0 : round + (int)t.others;
        const Real limit = Real(t.chunk) * t.chunk / 4;
        const auto order = [&](int r) -> const Round& {
            return t.orders[r < round ? r : t.rounds + r - round];
        };
        for (int lane = 0; lane < block_.count; lane += LANES) {
            const int count = std::min(LANES, block_.count - lane);
            Ints low{}, high{}, real{};
            for (int c = 0; c < count; ++c)
                low[c] = block_.low[lane + c], high[c] = block_.high[lane + c], real[c] = -1;
            for (int r = 0; r < met; ++r)
                for (int c = 0; c < count; ++c)
                    middles_[r][c] = order(r).middles[block_.rows[lane + c]];
            for (int w = 0; w < block_.width; ++w) {
                Ints seen = w < block_.always ? real : (low <= w) & (high > w);
                for (int r = 0; r < met; ++r) {
                    const Reals away = Real(order(r).places[block_.keys[w]]) - middles_[r];
                    seen &= away * away > limit;
                }
                each(w * BLOCK + lane, lane, seen);
            }
        }
    }

    // -- both passes ---------------------------------------------------------------------------

    void attend(int round) {
        columns(x.q, t.key_size, t.scale * LOG2_E, q_.data());
        look();
        multiply(at_k_, q_, t.key_size, p_);
        Real shrunk[BLOCK], tops[BLOCK], sums[BLOCK];
        for (int c = 0; c < BLOCK; ++c)
            tops[c] = shrunk[c] = c < block_.count ? top_[block_.rows[c] - begin_] : Real(LOWEST);
        pairs(round, [&](int at, int lane, Ints seen) {
            const Reals score = seen ? load(&p_[at]) : all(LOWEST), top = load(tops + lane);
            store(&p_[at], score);
            store(tops + lane, score > top ? score : top);
        });
        for (int lane = 0; lane < block_.count; lane += LANES) {
            const Reals top = load(tops + lane);
            Reals sum{};
            for (int at = lane; at < block_.width * BLOCK; at += BLOCK) {
                const Reals score = load(&p_[at]);
                const Reals weight = score == Real(LOWEST) ? Reals{} : exp2(score - top);
                store(&p_[at], weight);
                sum += weight;
            }
            store(sums + lane, sum);
            store(shrunk + lane, exp2(load(shrunk + lane) - top));
        }
        for (int c = 0; c < block_.count; c += FLAT) {
            Real* into[FLAT];
            rows_of(c, x.out, t.value_size, into);
            add(into, shrunk + c, &p_[c], 1, BLOCK, at_v_.data(), block_.seen_by(c), t.value_size);
        }
        for (int c = 0; c < block_.count; ++c) {
            const int64_t i = block_.rows[c] - begin_;
            top_[i] = tops[c];
            sum_[i] = sum_[i] * shrunk[c] + sums[c];
        }
    }

    void differentiate(int round) {
        columns(x.q, t.key_size, t.scale * LOG2_E, q_.data());
        columns(x.d_out, t.value_size, 1, d_.data());
        look();
        multiply(at_k_, q_, t.key_size, p_);
        multiply(at_v_, d_, t.value_size, dp_);
        Real logs[BLOCK] = {}, deltas[BLOCK] = {};
        const Real *at_q[BLOCK], *at_d[BLOCK];
        for (int c = 0; c < block_.count; ++c) {
            const int64_t row = block_.rows[c];
            logs[c] = x.lse[row], deltas[c] = x.delta[row];
            at_q[c] = x.q + row * t.key_size, at_d[c] = x.d_out + row * t.value_size;
        }
        pairs(round, [&](int at, int lane, Ints seen) {
            const Reals weight = seen ? exp2(load(&p_[at]) - load(logs + lane)) : Reals{};
            store(&p_[at], weight);
            store(&dp_[at], weight * (load(&dp_[at]) - load(deltas + lane)) * Real(t.scale));
        });
        for (int c = 0; c < block_.count; c += FLAT) {
            Real* into[FLAT];
            rows_of(c, x.dq, t.key_size, into);
            add(into, nullptr, &dp_[c], 1, BLOCK, at_k_.data(), block_.seen_by(c), t.key_size);
        }
        for (int w = 0; w < block_.width; w += FLAT) {
            Real *into_k[FLAT], *into_v[FLAT];
            for (int r = 0; r < FLAT; ++r) {
                const bool real = w + r < block_.width;
                into_k[r] = real ? x.dk + block_.keys[w + r] * t.key_size : spare_.data();
                into_v[r] = real ? x.dv + block_.keys[w + r] * t.value_size : spare_.data();
            }
            const auto some = block_.seeing(w);
            add(into_k, nullptr, &dp_[w * BLOCK], BLOCK, 1, at_q, some, t.key_size);
            add(into_v, nullptr, &p_[w * BLOCK], BLOCK, 1, at_d, some, t.value_size);
        }
    }

    // Point at the rows of FLAT lanes, or at no row of those beyond the last.
    void rows_of(int lane, Real* of, int64_t size, Real** into) {
        for (int r = 0; r < FLAT; ++r)
            into[r] = lane + r < block_.count ? of + block_.rows[lane + r] * size : spare_.data();
    }
};

template <class Real, class Pass>
static void run(const Task& task, const Rows<Real>& rows, Pass pass) {
    in_threads(task.units, task.threads, [&](int64_t unit) {
        Worker<Real> worker(task, rows, unit);
        (worker.*pass)();
    });
}

#define EXPORT(Real)                                                                    \
    extern "C" void lsh_forward_##Real(const Task* task, const Rows<Real>* rows) {      \
        run(*task, *rows, &Worker<Real>::forward);                                      \
    }                                                                                   \
    extern "C" void lsh_backward_##Real(const Task* task, const Rows<Real>* rows) {     \
        run(*task, *rows, &Worker<Real>::backward);                                     \
    }

EXPORT(float)
EXPORT(double)
