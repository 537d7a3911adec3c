// Causal linear attention on a CPU, chunk by chunk: the forward pass.
//
// A chunk has at most BLOCK tokens, one query per SIMD lane, and ends where a packed segment ends.
// The output is one product of queries and the state before the chunk, plus the part from the chunk
// itself. Without decay, that part comes from scores. With decay, the tokens of the chunk update a
// state of their own one by one; the state before the chunk decays once per chunk, so that rounding
// errors do not accumulate over tokens.
//
// work     one key head and some of its query heads; both states fit the L1 cache
// reads    q, k, v and log decay in place, with any strides but 1 in the last dimension
// writes   out, and the state after the last token
// limits   D and E multiples of 16; chunk at most BLOCK
// oracle   linear_attention(impl="reference"), float64 included
//
// Letters: B batch, H key heads, G query heads per key head, T tokens, D key size, E value size.

#include <algorithm>
#include <cstdint>
#include <vector>

#include "lanes.h"
#include "threads.h"

template <class Real>
struct Task {
    int64_t threads, batch, heads, groups, tokens, key_size, value_size, normalize;
    int64_t chunk;                                               // tokens, at most BLOCK
    int64_t decays;                                              // per token: 0, 1 or D
    int64_t q_steps[3], k_steps[3], v_steps[3], decay_steps[3];  // strides of batch, head, token
    int64_t out_steps[3];
    double scale, eps;                           // factor of queries; added to the sum of weights
    const Real *q, *k, *v, *log_decay, *kv, *z;  // kv and z: the state before the first token
    Real *out, *last_kv, *last_z;                // last_kv, last_z: the state after the last
    const int64_t* ids;                          // segments, [B, T], or null
};

template <class Real>
class LinearForward : Math<Real> {
    using typename Math<Real>::Reals;
    using typename Math<Real>::Ints;
    using Math<Real>::LANES, Math<Real>::load, Math<Real>::store, Math<Real>::broadcast;
    using Math<Real>::exp2, Math<Real>::add_weighted_rows, Math<Real>::dot_products;
    using Math<Real>::store_column;

  public:
    // Compute query heads first to last - 1 of key head `head`; groups count within the key head.
    LinearForward(const Task<Real>& task, int64_t row, int64_t head, int64_t first, int64_t last)
        : t(task), row_(row), head_(head), first_(first), last_(last), size_(t.key_size),
          kv_(size_ * t.value_size), z_(size_), chunk_kv_(t.decays ? kv_.size() : 0),
          chunk_z_(t.decays ? size_ : 0), token_decay_(t.decays ? BLOCK * size_ : 0),
          cumulative_decay_(token_decay_.size()), weights_((size_ + BLOCK) * BLOCK),
          q_decayed_(size_), discarded_(t.value_size),
          denominators_(t.normalize ? t.groups * BLOCK : 0), rows_(size_ + BLOCK) {
        const int64_t index = row * t.heads + head;
        std::copy_n(t.kv + index * kv_.size(), kv_.size(), kv_.data());
        std::copy_n(t.z + index * size_, size_, z_.data());
        for (int64_t d = 0; d < size_; ++d) rows_[d] = &kv_[d * t.value_size];
    }

    void run() {
        const int64_t* ids = t.ids ? t.ids + row_ * t.tokens : nullptr;
        for (int64_t start = 0; start < t.tokens; start += count_) {
            count_ = (int)std::min(t.chunk, t.tokens - start);
            if (ids && start && ids[start] != ids[start - 1]) {
                std::fill(kv_.begin(), kv_.end(), Real(0));
                std::fill(z_.begin(), z_.end(), Real(0));
            }
            for (int c = 1; ids && c < count_; ++c)
                if (ids[start + c] != ids[start]) count_ = c;
            q_ = t.q + row_ * t.q_steps[0] + head_ * t.groups * t.q_steps[1] + start * t.q_steps[2];
            k_ = t.k + row_ * t.k_steps[0] + head_ * t.k_steps[1] + start * t.k_steps[2];
            v_ = t.v + row_ * t.v_steps[0] + head_ * t.v_steps[1] + start * t.v_steps[2];
            out_ = t.out + row_ * t.out_steps[0] + head_ * t.groups * t.out_steps[1] +
                   start * t.out_steps[2];
            for (int w = 0; w < count_; ++w) rows_[size_ + w] = v_ + w * t.v_steps[2];
            if (t.decays) compute_decays(start);
            for (int64_t group = first_; group < last_; ++group) attend(group);
            t.decays ? scan_tokens() : update_state();
            if (t.normalize)
                for (int64_t group = first_; group < last_; ++group) normalize(group);
        }
    }

    void store_state() const {
        const int64_t index = row_ * t.heads + head_;
        std::copy_n(kv_.data(), kv_.size(), t.last_kv + index * kv_.size());
        std::copy_n(z_.data(), size_, t.last_z + index * size_);
    }

  private:
    const Task<Real>& t;
    const int64_t row_, head_, first_, last_, size_;
    std::vector<Real> kv_, z_;                            // state before the chunk
    std::vector<Real> chunk_kv_, chunk_z_;                // state of the chunk's tokens, with decay
    std::vector<Real> token_decay_, cumulative_decay_;    // [BLOCK, D]: from the chunk's start on
    std::vector<Real> weights_;                           // [D + BLOCK, BLOCK]: of rows_
    std::vector<Real> q_decayed_;                         // [D]; also cumulative log decays
    std::vector<Real> discarded_;                         // output of lanes without a query
    std::vector<Real> denominators_;                      // [G, BLOCK]
    std::vector<const Real*> rows_;                       // rows of the state, then values
    int count_ = 0;                                       // tokens of the chunk
    const Real *q_ = nullptr, *k_ = nullptr, *v_ = nullptr;  // first token; q_ of query head 0
    Real* out_ = nullptr;

    // Compute the decay of each token, and the cumulative decay from the chunk's start.
    void compute_decays(int64_t start) {
        const Real* log_decays = t.log_decay + row_ * t.decay_steps[0] + head_ * t.decay_steps[1] +
                           start * t.decay_steps[2];
        std::fill(q_decayed_.begin(), q_decayed_.end(), Real(0));
        for (int c = 0; c < count_; ++c, log_decays += t.decay_steps[2])
            for (int64_t d = 0; d < size_; d += LANES) {
                const Reals log_decay =
                    t.decays == 1 ? broadcast(*log_decays) : load(log_decays + d);
                const Reals cumulative = load(&q_decayed_[d]) + log_decay;
                store(&q_decayed_[d], cumulative);
                store(&token_decay_[c * size_ + d], exp2(log_decay * Real(LOG2_E)));
                store(&cumulative_decay_[c * size_ + d], exp2(cumulative * Real(LOG2_E)));
            }
    }

    // Output of a query head from the state before the chunk and, without decay, from the chunk.
    void attend(int64_t group) {
        const Real* q = q_ + group * t.q_steps[1];
        Real *out = out_ + group * t.out_steps[1], *scores = &weights_[size_ * BLOCK];
        for (int c = 0; c < count_; ++c) {
            const Real* row = q + c * t.q_steps[2];
            if (t.decays) {
                const Real* decay = &cumulative_decay_[c * size_];
                for (int64_t d = 0; d < size_; ++d) q_decayed_[d] = row[d] * decay[d];
                row = q_decayed_.data();
            }
            store_column(row, size_, t.scale, &weights_[c]);
        }
        for (int w = 0; !t.decays && w < count_; w += DOT_ROWS) {
            const Real* keys[DOT_ROWS];
            for (int r = 0; r < DOT_ROWS; ++r)
                keys[r] = k_ + std::min(w + r, count_ - 1) * t.k_steps[2];
            if (w < BLOCK / 2)
                score<BLOCK / LANES>(keys, w, 0, scores);
            else  // queries in the first half precede all keys
                score<BLOCK / LANES / 2>(keys, w, BLOCK / 2, scores);
        }
        for (int c = 0; c < count_; c += SUM_ROWS) {
            Real* out_rows[SUM_ROWS];
            for (int r = 0; r < SUM_ROWS; ++r) {
                out_rows[r] = c + r < count_ ? out + (c + r) * t.out_steps[2] : discarded_.data();
                std::fill_n(out_rows[r], t.value_size, Real(0));
            }
            const int seen = (int)size_ + (t.decays ? 0 : std::min(c + SUM_ROWS, count_));
            add_weighted_rows(out_rows, nullptr, &weights_[c], 1, BLOCK, rows_.data(), {0, seen},
                              t.value_size);
        }
        if (t.normalize) compute_denominators(group, scores);
    }

    // Compute the denominators of a query head: the sums of its weights.
    void compute_denominators(int64_t group, const Real* scores) {
        for (int lane = 0; lane < count_; lane += LANES) {
            Reals from_state{}, from_chunk{};
            for (int64_t d = 0; d < size_; ++d)
                from_state += load(&weights_[d * BLOCK + lane]) * z_[d];
            for (int w = 0; !t.decays && w < std::min(count_, lane + LANES); ++w)
                from_chunk += load(scores + w * BLOCK + lane);
            store(&denominators_[group * BLOCK + lane], from_state + from_chunk + Real(t.eps));
        }
    }

    void normalize(int64_t group) {
        for (int c = 0; c < count_; ++c) {
            Real* row = out_ + group * t.out_steps[1] + c * t.out_steps[2];
            const Real inverse = 1 / denominators_[group * BLOCK + c];
            for (int64_t e = 0; e < t.value_size; ++e) row[e] *= inverse;
        }
    }

    // Scores of keys w to w + DOT_ROWS - 1, for V vectors of queries; 0 for later keys.
    template <int V>
    void score(const Real* const* keys, int w, int lane, Real* scores) {
        Reals sums[DOT_ROWS][V];
        dot_products(keys, &weights_[lane], size_, sums);
        Ints query;
        for (int i = 0; i < LANES; ++i) query[i] = lane + i;
        for (int r = 0; r < DOT_ROWS; ++r)
            for (int i = 0; i < V; ++i)
                store(scores + (w + r) * BLOCK + lane + i * LANES,
                      query + i * LANES >= w + r ? sums[r][i] : Reals{});
    }

    // Add the chunk's keys and values to the state; without decay.
    void update_state() {
        for (int64_t d = 0; d < size_; d += SUM_ROWS) {
            Real* kv_rows[SUM_ROWS];
            for (int r = 0; r < SUM_ROWS; ++r) kv_rows[r] = &kv_[(d + r) * t.value_size];
            add_weighted_rows(kv_rows, nullptr, k_ + d, 1, t.k_steps[2], &rows_[size_], {0, count_},
                              t.value_size);
        }
        for (int64_t d = 0; d < size_; d += LANES) {
            Reals sum{};
            for (int w = 0; w < count_; ++w) sum += load(k_ + w * t.k_steps[2] + d);
            store(&z_[d], load(&z_[d]) + sum);
        }
    }

    // With decay: add the chunk to its own state token by token, which queries read; then merge it.
    void scan_tokens() {
        std::fill(chunk_kv_.begin(), chunk_kv_.end(), Real(0));
        std::fill(chunk_z_.begin(), chunk_z_.end(), Real(0));
        for (int c = 0; c < count_; ++c) {
            int64_t column = 0;
            for (; column + 4 * LANES <= t.value_size; column += 4 * LANES) step<4>(c, column);
            for (; column < t.value_size; column += LANES) step<1>(c, column);
            scan_keys(c);
        }
        const Real* decay = &cumulative_decay_[(count_ - 1) * size_];
        for (int64_t d = 0; d < size_; ++d) {
            Real *kv = &kv_[d * t.value_size], *chunk = &chunk_kv_[d * t.value_size];
            for (int64_t e = 0; e < t.value_size; ++e) kv[e] = kv[e] * decay[d] + chunk[e];
        }
        for (int64_t d = 0; d < size_; ++d) z_[d] = z_[d] * decay[d] + chunk_z_[d];
    }

    // One token and V vectors of values, for all query heads; the first call updates the state.
    template <int V>
    void step(int c, int64_t column) {
        int64_t group = first_;
        group += last_ - group >= 4   ? step<V, 4, true>(c, column, group)
                 : last_ - group >= 2 ? step<V, 2, true>(c, column, group)
                                      : step<V, 1, true>(c, column, group);
        for (; group + 4 <= last_; group += 4) step<V, 4, false>(c, column, group);
        for (; group < last_; ++group) step<V, 1, false>(c, column, group);
    }

    // For G query heads; FIRST updates the state with the token.
    template <int V, int G, bool FIRST>
    int step(int c, int64_t column, int64_t group) {
        const Real *k = k_ + c * t.k_steps[2], *v = v_ + c * t.v_steps[2] + column;
        const Real *q[G], *decay = &token_decay_[c * size_];
        const int64_t size = size_, width = t.value_size;
        Real* kv = &chunk_kv_[column];
        Reals sums[G][V] = {}, values[V];
        for (int g = 0; g < G; ++g) q[g] = q_ + (group + g) * t.q_steps[1] + c * t.q_steps[2];
        for (int j = 0; j < V; ++j) values[j] = load(v + j * LANES);
        for (int64_t d = 0; d < size; ++d, kv += width) {
            for (int j = 0; j < V; ++j) {
                Reals state = load(kv + j * LANES);
                if (FIRST) {
                    state = state * decay[d] + k[d] * values[j];
                    store(kv + j * LANES, state);
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

    // The same for the sums of keys, and the denominators.
    void scan_keys(int c) {
        const Real *k = k_ + c * t.k_steps[2], *decay = &token_decay_[c * size_];
        for (int64_t d = 0; d < size_; d += LANES)
            store(&chunk_z_[d], load(&chunk_z_[d]) * load(decay + d) + load(k + d));
        for (int64_t group = first_; t.normalize && group < last_; ++group) {
            const Real* q = q_ + group * t.q_steps[1] + c * t.q_steps[2];
            Reals sum{};
            for (int64_t d = 0; d < size_; d += LANES) sum += load(q + d) * load(&chunk_z_[d]);
            for (int i = 0; i < LANES; ++i)
                denominators_[group * BLOCK + c] += sum[i] * Real(t.scale);
        }
    }
};

template <class Real>
static void run(const Task<Real>& t) {
    // Each piece of a key head computes its state again, so use no more pieces than threads need
    const int64_t heads = t.batch * t.heads;
    if (heads == 0) return;
    const int64_t pieces = std::min(t.groups, (t.threads + heads - 1) / heads);
    in_threads(heads * pieces, t.threads, [&](int64_t i) {
        const int64_t head = i / pieces, piece = i % pieces;
        LinearForward<Real> forward(t, head / t.heads, head % t.heads, piece * t.groups / pieces,
                        (piece + 1) * t.groups / pieces);
        forward.run();
        if (piece == 0) forward.store_state();
    });
}

extern "C" void linear_float(const Task<float>* task) { run(*task); }
extern "C" void linear_double(const Task<double>* task) { run(*task); }
