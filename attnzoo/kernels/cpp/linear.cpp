// Causal linear attention without decay on a CPU, chunk by chunk; the forward pass.
//
// A chunk is as many tokens as lanes are at hand, a query in each. Scores never leave the first
// cache, and neither does the state; inputs and outputs are read and written where they lie. One
// piece of work is one key head, with some of the query heads that share it.
// Letters: B batch, H key heads, G query heads that share one, T tokens, D key size, E value size,
// multiples of 16.

#include <algorithm>
#include <cstdint>
#include <vector>

#include "lanes.h"
#include "threads.h"

template <class Real>
struct Task {
    int64_t threads, batch, heads, groups, tokens, key_size, value_size, normalize;
    int64_t q_steps[3], k_steps[3], v_steps[3], out_steps[3];  // of row, head and token
    double scale, eps;  // of queries; added to the sum of weights
    const Real *q, *k, *v, *kv, *z;  // [B, H G, T, D], [B, H, T, D], [B, H, T, E]; the state before
    Real *out, *last_kv, *last_z;    // [B, H G, T, E]; and after, [B, H, D, E] and [B, H, D]
};

template <class Real>
class Walk : Math<Real> {
    using typename Math<Real>::Reals;
    using typename Math<Real>::Ints;
    using Math<Real>::LANES, Math<Real>::load, Math<Real>::store, Math<Real>::all;
    using Math<Real>::add, Math<Real>::products, Math<Real>::column;

  public:
    // Query heads first to last - 1 of a key head.
    Walk(const Task<Real>& task, int64_t row, int64_t head, int64_t first, int64_t last)
        : t(task), row_(row), head_(head), first_(first), last_(last),
          kv_(t.key_size * t.value_size), z_(t.key_size), weights_((t.key_size + BLOCK) * BLOCK),
          spare_(t.value_size), rows_(t.key_size + BLOCK) {
        const int64_t unit = row * t.heads + head;
        std::copy_n(t.kv + unit * kv_.size(), kv_.size(), kv_.data());
        std::copy_n(t.z + unit * z_.size(), z_.size(), z_.data());
        for (int64_t d = 0; d < t.key_size; ++d) rows_[d] = &kv_[d * t.value_size];
    }

    void run() {
        const Real* k = t.k + row_ * t.k_steps[0] + head_ * t.k_steps[1];
        const Real* v = t.v + row_ * t.v_steps[0] + head_ * t.v_steps[1];
        for (int64_t at = 0; at < t.tokens; at += BLOCK) {
            const int count = (int)std::min<int64_t>(BLOCK, t.tokens - at);
            const Real *keys = k + at * t.k_steps[2], *values = v + at * t.v_steps[2];
            for (int w = 0; w < count; ++w) rows_[t.key_size + w] = values + w * t.v_steps[2];
            for (int64_t group = first_; group < last_; ++group) read(group, at, count, keys);
            write(count, keys);
        }
    }

    void keep() const {
        const int64_t unit = row_ * t.heads + head_;
        std::copy_n(kv_.data(), kv_.size(), t.last_kv + unit * kv_.size());
        std::copy_n(z_.data(), z_.size(), t.last_z + unit * z_.size());
    }

  private:
    const Task<Real>& t;
    const int64_t row_, head_, first_, last_;
    std::vector<Real> kv_, z_;
    std::vector<Real> weights_;      // [D + BLOCK, BLOCK]: of rows of the state, and of values
    std::vector<Real> spare_;        // where lanes without a query write
    std::vector<const Real*> rows_;  // of the state, and of values

    // The outputs of a chunk for a query head.
    void read(int64_t group, int64_t at, int count, const Real* keys) {
        const int64_t head = head_ * t.groups + group;
        const Real* q = t.q + row_ * t.q_steps[0] + head * t.q_steps[1] + at * t.q_steps[2];
        Real* out = t.out + row_ * t.out_steps[0] + head * t.out_steps[1] + at * t.out_steps[2];
        Real* scores = &weights_[t.key_size * BLOCK];
        for (int c = 0; c < count; ++c)
            column(q + c * t.q_steps[2], t.key_size, t.scale, &weights_[c]);
        const Real* beside[TALL];
        for (int w = 0; w < count; w += TALL) {
            for (int r = 0; r < TALL; ++r)
                beside[r] = keys + std::min(w + r, count - 1) * t.k_steps[2];
            if (w < BLOCK / 2)
                score<BLOCK / LANES>(beside, w, 0, scores);
            else  // the first half of the lanes lies before them
                score<BLOCK / LANES / 2>(beside, w, BLOCK / 2, scores);
        }
        Real divisors[BLOCK];
        for (int lane = 0; lane < count; lane += LANES) {
            Reals sum{};
            if (t.normalize) {
                for (int64_t d = 0; d < t.key_size; ++d)
                    sum += load(&weights_[d * BLOCK + lane]) * z_[d];
                Reals inside{};
                for (int w = 0; w < std::min(count, lane + LANES); ++w)
                    inside += load(scores + w * BLOCK + lane);
                sum = sum + inside + Real(t.eps);
            } else {
                sum = all(1);
            }
            store(divisors + lane, sum);
        }
        for (int c = 0; c < count; c += FLAT) {
            Real* into[FLAT];
            for (int r = 0; r < FLAT; ++r) {
                into[r] = c + r < count ? out + (c + r) * t.out_steps[2] : spare_.data();
                std::fill_n(into[r], t.value_size, Real(0));
            }
            const int seen = (int)t.key_size + std::min(c + FLAT, count);
            add(into, nullptr, &weights_[c], 1, BLOCK, rows_.data(), {0, seen}, t.value_size);
        }
        if (t.normalize)
            for (int c = 0; c < count; ++c) {
                Real* its = out + c * t.out_steps[2];
                for (int64_t e = 0; e < t.value_size; ++e) its[e] /= divisors[c];
            }
    }

    // Scores of TALL keys from w on, for lanes from lane on; none of a later key.
    template <int V>
    void score(const Real* const* beside, int w, int lane, Real* scores) {
        Reals sums[TALL][V];
        products(beside, &weights_[lane], t.key_size, sums);
        Ints number;
        for (int i = 0; i < LANES; ++i) number[i] = lane + i;
        for (int r = 0; r < TALL; ++r)
            for (int i = 0; i < V; ++i)
                store(scores + (w + r) * BLOCK + lane + i * LANES,
                      number + i * LANES >= w + r ? sums[r][i] : Reals{});
    }

    // Take a chunk's keys and values into the state.
    void write(int count, const Real* keys) {
        for (int64_t d = 0; d < t.key_size; d += FLAT) {
            Real* into[FLAT];
            for (int r = 0; r < FLAT; ++r) into[r] = &kv_[(d + r) * t.value_size];
            add(into, nullptr, keys + d, 1, t.k_steps[2], &rows_[t.key_size], {0, count},
                t.value_size);
        }
        for (int64_t d = 0; d < t.key_size; d += LANES) {
            Reals sum{};
            for (int w = 0; w < count; ++w) sum += load(keys + w * t.k_steps[2] + d);
            store(&z_[d], load(&z_[d]) + sum);
        }
    }
};

template <class Real>
static void run(const Task<Real>& t) {
    // several pieces of a key head make its state each, so there are no more than threads need
    const int64_t heads = t.batch * t.heads;
    const int64_t pieces = std::min(t.groups, (t.threads + heads - 1) / heads);
    in_threads(heads * pieces, t.threads, [&](int64_t i) {
        const int64_t head = i / pieces, piece = i % pieces;
        Walk<Real> walk(t, head / t.heads, head % t.heads, piece * t.groups / pieces,
                        (piece + 1) * t.groups / pieces);
        walk.run();
        if (piece == 0) walk.keep();
    });
}

extern "C" void linear_float(const Task<float>* task) { run(*task); }
extern "C" void linear_double(const Task<double>* task) { run(*task); }
