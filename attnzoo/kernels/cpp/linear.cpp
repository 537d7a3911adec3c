// Causal linear attention on a CPU, chunk by chunk; the forward pass.
//
// A chunk is as many tokens as lanes are at hand, a query in each, or fewer where a packed sequence
// ends. What a query reads of the state before the chunk is one product. Without decay, what it
// reads of the chunk is too: its scores. With decay, the chunk's own tokens go through a state of
// their own, one after the other; the state before it fades once, by the decay of the whole chunk,
// so that rounding does not add up over the tokens.
// Both states stay in the first cache; inputs and outputs are read and written where they lie. One
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
    int64_t chunk;                                    // tokens, BLOCK at most
    int64_t decays;                                   // of a token: 0, 1 or D
    int64_t q_steps[3], k_steps[3], v_steps[3], decay_steps[3];  // of row, head and token
    int64_t out_steps[3];
    double scale, eps;                                // of queries; added to the sum of weights
    const Real *q, *k, *v, *log_decay, *kv, *z;       // kv and z: the state before
    Real *out, *last_kv, *last_z;                     // and after, [B, H, D, E] and [B, H, D]
    const int64_t* ids;                               // [B, T], of sequences; or none
};

template <class Real>
class Walk : Math<Real> {
    using typename Math<Real>::Reals;
    using typename Math<Real>::Ints;
    using Math<Real>::LANES, Math<Real>::load, Math<Real>::store, Math<Real>::all;
    using Math<Real>::exp2, Math<Real>::add, Math<Real>::products, Math<Real>::column;

  public:
    // Query heads first to last - 1 of a key head.
    Walk(const Task<Real>& task, int64_t row, int64_t head, int64_t first, int64_t last)
        : t(task), row_(row), head_(head), first_(first), last_(last), size_(t.key_size),
          kv_(size_ * t.value_size), z_(size_), own_kv_(t.decays ? kv_.size() : 0),
          own_z_(t.decays ? size_ : 0), step_(t.decays ? BLOCK * size_ : 0), since_(step_.size()),
          weights_((size_ + BLOCK) * BLOCK), faded_(size_), spare_(t.value_size),
          divisors_(t.normalize ? t.groups * BLOCK : 0), rows_(size_ + BLOCK) {
        const int64_t unit = row * t.heads + head;
        std::copy_n(t.kv + unit * kv_.size(), kv_.size(), kv_.data());
        std::copy_n(t.z + unit * size_, size_, z_.data());
        for (int64_t d = 0; d < size_; ++d) rows_[d] = &kv_[d * t.value_size];
    }

    void run() {
        const int64_t* ids = t.ids ? t.ids + row_ * t.tokens : nullptr;
        for (int64_t at = 0; at < t.tokens; at += count_) {
            count_ = (int)std::min(t.chunk, t.tokens - at);
            if (ids && at && ids[at] != ids[at - 1]) {
                std::fill(kv_.begin(), kv_.end(), Real(0));
                std::fill(z_.begin(), z_.end(), Real(0));
            }
            for (int c = 1; ids && c < count_; ++c)
                if (ids[at + c] != ids[at]) count_ = c;
            q_ = t.q + row_ * t.q_steps[0] + head_ * t.groups * t.q_steps[1] + at * t.q_steps[2];
            k_ = t.k + row_ * t.k_steps[0] + head_ * t.k_steps[1] + at * t.k_steps[2];
            v_ = t.v + row_ * t.v_steps[0] + head_ * t.v_steps[1] + at * t.v_steps[2];
            out_ = t.out + row_ * t.out_steps[0] + head_ * t.groups * t.out_steps[1] +
                   at * t.out_steps[2];
            for (int w = 0; w < count_; ++w) rows_[size_ + w] = v_ + w * t.v_steps[2];
            if (t.decays) fade(at);
            for (int64_t group = first_; group < last_; ++group) read(group);
            t.decays ? step_through() : write();
            if (t.normalize)
                for (int64_t group = first_; group < last_; ++group) divide(group);
        }
    }

    void keep() const {
        const int64_t unit = row_ * t.heads + head_;
        std::copy_n(kv_.data(), kv_.size(), t.last_kv + unit * kv_.size());
        std::copy_n(z_.data(), size_, t.last_z + unit * size_);
    }

  private:
    const Task<Real>& t;
    const int64_t row_, head_, first_, last_, size_;
    std::vector<Real> kv_, z_, own_kv_, own_z_;  // the state before the chunk, and the chunk's own
    std::vector<Real> step_, since_;             // [BLOCK, D]: decay of a token, and up to it
    std::vector<Real> weights_;                  // [D + BLOCK, BLOCK]: of rows_
    std::vector<Real> faded_;  // [D]: logs so far, then a query as it meets the state before
    std::vector<Real> spare_;                    // where lanes without a query write
    std::vector<Real> divisors_;                 // [G, BLOCK]
    std::vector<const Real*> rows_;              // of the state, and values
    int count_ = 0;                              // tokens of the chunk
    const Real *q_ = nullptr, *k_ = nullptr, *v_ = nullptr;  // its first, of the first query head
    Real* out_ = nullptr;

    // What is left of the state at every token, and of that before the chunk.
    void fade(int64_t at) {
        const Real* logs = t.log_decay + row_ * t.decay_steps[0] + head_ * t.decay_steps[1] +
                           at * t.decay_steps[2];
        std::fill(faded_.begin(), faded_.end(), Real(0));
        for (int c = 0; c < count_; ++c, logs += t.decay_steps[2])
            for (int64_t d = 0; d < size_; d += LANES) {
                const Reals now = t.decays == 1 ? all(*logs) : load(logs + d);
                const Reals so_far = load(&faded_[d]) + now;
                store(&faded_[d], so_far);
                store(&step_[c * size_ + d], exp2(now * Real(LOG2_E)));
                store(&since_[c * size_ + d], exp2(so_far * Real(LOG2_E)));
            }
    }

    // What a query head reads of the state before the chunk and, without decay, of the chunk.
    void read(int64_t group) {
        const Real* q = q_ + group * t.q_steps[1];
        Real *out = out_ + group * t.out_steps[1], *scores = &weights_[size_ * BLOCK];
        for (int c = 0; c < count_; ++c) {
            const Real* row = q + c * t.q_steps[2];
            if (t.decays) {
                const Real* since = &since_[c * size_];
                for (int64_t d = 0; d < size_; ++d) faded_[d] = row[d] * since[d];
                row = faded_.data();
            }
            column(row, size_, t.scale, &weights_[c]);
        }
        for (int w = 0; !t.decays && w < count_; w += TALL) {
            const Real* beside[TALL];
            for (int r = 0; r < TALL; ++r)
                beside[r] = k_ + std::min(w + r, count_ - 1) * t.k_steps[2];
            if (w < BLOCK / 2)
                score<BLOCK / LANES>(beside, w, 0, scores);
            else  // the first half of the lanes lies before them
                score<BLOCK / LANES / 2>(beside, w, BLOCK / 2, scores);
        }
        for (int c = 0; c < count_; c += FLAT) {
            Real* into[FLAT];
            for (int r = 0; r < FLAT; ++r) {
                into[r] = c + r < count_ ? out + (c + r) * t.out_steps[2] : spare_.data();
                std::fill_n(into[r], t.value_size, Real(0));
            }
            const int seen = (int)size_ + (t.decays ? 0 : std::min(c + FLAT, count_));
            add(into, nullptr, &weights_[c], 1, BLOCK, rows_.data(), {0, seen}, t.value_size);
        }
        if (t.normalize) sum_up(group, scores);
    }

    // The sums of the weights that were read.
    void sum_up(int64_t group, const Real* scores) {
        for (int lane = 0; lane < count_; lane += LANES) {
            Reals before{}, inside{};
            for (int64_t d = 0; d < size_; ++d)
                before += load(&weights_[d * BLOCK + lane]) * z_[d];
            for (int w = 0; !t.decays && w < std::min(count_, lane + LANES); ++w)
                inside += load(scores + w * BLOCK + lane);
            store(&divisors_[group * BLOCK + lane], before + inside + Real(t.eps));
        }
    }

    void divide(int64_t group) {
        for (int c = 0; c < count_; ++c) {
            Real* its = out_ + group * t.out_steps[1] + c * t.out_steps[2];
            const Real share = 1 / divisors_[group * BLOCK + c];
            for (int64_t e = 0; e < t.value_size; ++e) its[e] *= share;
        }
    }

    // Scores of TALL keys from w on, for lanes from lane on; none of a later key.
    template <int V>
    void score(const Real* const* beside, int w, int lane, Real* scores) {
        Reals sums[TALL][V];
        products(beside, &weights_[lane], size_, sums);
        Ints number;
        for (int i = 0; i < LANES; ++i) number[i] = lane + i;
        for (int r = 0; r < TALL; ++r)
            for (int i = 0; i < V; ++i)
                store(scores + (w + r) * BLOCK + lane + i * LANES,
                      number + i * LANES >= w + r ? sums[r][i] : Reals{});
    }

    // Take the chunk's keys and values into the state.
    void write() {
        for (int64_t d = 0; d < size_; d += FLAT) {
            Real* into[FLAT];
            for (int r = 0; r < FLAT; ++r) into[r] = &kv_[(d + r) * t.value_size];
            add(into, nullptr, k_ + d, 1, t.k_steps[2], &rows_[size_], {0, count_}, t.value_size);
        }
        for (int64_t d = 0; d < size_; d += LANES) {
            Reals sum{};
            for (int w = 0; w < count_; ++w) sum += load(k_ + w * t.k_steps[2] + d);
            store(&z_[d], load(&z_[d]) + sum);
        }
    }

    // Take them into a state of their own, token by token, and read it; then into the other.
    void step_through() {
        std::fill(own_kv_.begin(), own_kv_.end(), Real(0));
        std::fill(own_z_.begin(), own_z_.end(), Real(0));
        for (int c = 0; c < count_; ++c) {
            int64_t column = 0;
            for (; column + 4 * LANES <= t.value_size; column += 4 * LANES) step<4>(c, column);
            for (; column < t.value_size; column += LANES) step<1>(c, column);
            step_keys(c);
        }
        const Real* left = &since_[(count_ - 1) * size_];
        for (int64_t d = 0; d < size_; ++d) {
            Real *kv = &kv_[d * t.value_size], *own = &own_kv_[d * t.value_size];
            for (int64_t e = 0; e < t.value_size; ++e) kv[e] = kv[e] * left[d] + own[e];
        }
        for (int64_t d = 0; d < size_; ++d) z_[d] = z_[d] * left[d] + own_z_[d];
    }

    // One token and V vectors of values, for all query heads.
    template <int V>
    void step(int c, int64_t column) {
        int64_t group = first_;
        group += last_ - group >= 4   ? step<V, 4, true>(c, column, group)
                 : last_ - group >= 2 ? step<V, 2, true>(c, column, group)
                                      : step<V, 1, true>(c, column, group);
        for (; group + 4 <= last_; group += 4) step<V, 4, false>(c, column, group);
        for (; group < last_; ++group) step<V, 1, false>(c, column, group);
    }

    // For G of them; the first ones take the token into the state.
    template <int V, int G, bool FIRST>
    int step(int c, int64_t column, int64_t group) {
        const Real *k = k_ + c * t.k_steps[2], *v = v_ + c * t.v_steps[2] + column;
        const Real *q[G], *kept = &step_[c * size_];
        const int64_t size = size_, width = t.value_size;
        Real* own = &own_kv_[column];
        Reals sums[G][V] = {}, values[V];
        for (int g = 0; g < G; ++g) q[g] = q_ + (group + g) * t.q_steps[1] + c * t.q_steps[2];
        for (int j = 0; j < V; ++j) values[j] = load(v + j * LANES);
        for (int64_t d = 0; d < size; ++d, own += width) {
            for (int j = 0; j < V; ++j) {
                Reals state = load(own + j * LANES);
                if (FIRST) {
                    state = state * kept[d] + k[d] * values[j];
                    store(own + j * LANES, state);
                }
                for (int g = 0; g < G; ++g) sums[g][j] += q[g][d] * state;
            }
        }
        for (int g = 0; g < G; ++g) {
            Real* out = out_ + (group + g) * t.out_steps[1] + c * t.out_steps[2] + column;
            for (int j = 0; j < V; ++j)
                store(out + j * LANES, load(out + j * LANES) + sums[g][j] * Real(t.scale));
        }
        return G;
    }

    // The same for the keys alone, which the sums of weights are read of.
    void step_keys(int c) {
        const Real *k = k_ + c * t.k_steps[2], *kept = &step_[c * size_];
        for (int64_t d = 0; d < size_; d += LANES)
            store(&own_z_[d], load(&own_z_[d]) * load(kept + d) + load(k + d));
        for (int64_t group = first_; t.normalize && group < last_; ++group) {
            const Real* q = q_ + group * t.q_steps[1] + c * t.q_steps[2];
            Reals sum{};
            for (int64_t d = 0; d < size_; d += LANES) sum += load(q + d) * load(&own_z_[d]);
            for (int i = 0; i < LANES; ++i) divisors_[group * BLOCK + c] += sum[i] * Real(t.scale);
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
