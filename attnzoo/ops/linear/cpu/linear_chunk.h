// The arguments of the kernels of causal linear attention, and the chunk of tokens that they
// compute at a time. Letters are those of linear.cpp.

#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <vector>

#include "feature_maps.h"
#include "layout.h"
#include "rows.h"
#include "tiles.h"

constexpr int CHUNK = 16;   // tokens
constexpr int SPAN = 512;   // tokens between the states that the forward pass stores
constexpr double LOWEST_LOG_DECAY = -1e4;  // its exponential is 0; sums of -infinity would be NaN

static int64_t pad(int64_t size) { return (size + 15) / 16 * 16; }

template <class Real>
struct Task {
    int64_t threads, batch, heads, groups, tokens, key_size, value_size;
    int64_t given_size;             // size of queries and keys before the feature map
    int64_t normalize;              // whether outputs are divided by the totals
    int64_t chunk;                  // tokens, at most CHUNK
    int64_t decays;                 // per token: 0, 1 or D
    double scale, eps;              // factor of queries; added to sums of weights
    Tensor q, k, v, log_decay, out;
    const Real *kv, *z;             // [B, H, D, E], [B, H, D]: the state before the first token
    Real *last_kv, *last_z;         // the state after the last token
    Real* kept;                     // [B, H, T / SPAN, D, E + 1]: states (kv, then z), or null
    Real* sums;                     // [B, H G, T]: sums of weights, or 1 / denominators if
                                    // normalised; or null
    const int64_t* ids;             // segment ids, [B, T], or null
    const uint8_t* key_mask;        // [B, T]: false where key features are set to 0; or null
    MapTask<Real> q_map, k_map;

    FIELDS(threads, batch, heads, groups, tokens, key_size, value_size, given_size, normalize,
           chunk, decays, scale, eps, q, k, v, log_decay, out, kv, z, last_kv, last_z, kept, sums,
           ids, key_mask, q_map, k_map)

    int64_t spans() const { return (tokens + SPAN - 1) / SPAN; }

    // Return the index of a query in a contiguous [B, H G, T].
    int64_t query(int64_t row, int64_t head, int64_t token) const {
        return (row * heads * groups + head) * tokens + token;
    }

    // Return the stored state before a span.
    Real* kept_state(int64_t row, int64_t head, int64_t span) const {
        return kept + ((row * heads + head) * spans() + span) * key_size * (value_size + 1);
    }
};

// Gradients that are not needed are null.
template <class Real>
struct Gradients {
    Tensor d_out, dq, dk, dv, d_log_decay;
    const Real* d_totals;             // [B, H G, T], or null
    const Real *d_last_kv, *d_last_z; // of the state after the last token
    Real *d_kv, *d_z;                 // of the state before the first token; both or neither

    FIELDS(d_out, dq, dk, dv, d_log_decay, d_totals, d_last_kv, d_last_z, d_kv, d_z)
};

// Which gradients are computed.
struct Needed {
    bool q, k, v, decay;  // of queries and keys before or after the feature map, or of its weights
    bool state;           // of the state before a chunk, because gradients of earlier tokens need it

    template <class Real>
    Needed(const Task<Real>& t, const Gradients<Real>& out)
        : q(out.dq.data || t.q_map.d_weight || t.q_map.d_bias),
          k(out.dk.data || t.k_map.d_weight || t.k_map.d_bias), v(out.dv.data),
          decay(t.decays && out.d_log_decay.data), state(k || v || decay || out.d_kv) {}
};

// At most SIZE consecutive tokens of a key head, which end where a packed segment ends.
template <class Real, int SIZE>
class TokenChunk : protected Tiles<Real>, protected Rows<Real> {
  protected:
    using typename Tiles<Real>::Reals;
    using Tiles<Real>::LANES, Tiles<Real>::load, Tiles<Real>::store, Tiles<Real>::broadcast;
    using Tiles<Real>::exp, Tiles<Real>::lane_numbers;
    using Rows<Real>::load_row, Rows<Real>::store_row;

    const Task<Real>& t;
    const int64_t row_, head_;
    const int64_t group_, groups_;    // the first query head, and how many
    const int64_t column_, columns_;  // the first column of values, and how many
    const int64_t limit_;             // tokens, at most SIZE

    // Rows of buffers after the chunk's last token are zero
    bool is_token_[SIZE], is_key_[SIZE];
    int64_t start_ = 0;
    int next_ = SIZE;     // distance to the chunk that is computed next, in tokens
    int count_ = 0;       // tokens
    bool first_ = false;  // whether the chunk begins a packed segment

    TokenChunk(const Task<Real>& task, int64_t row, int64_t head, int64_t group, int64_t groups,
               int64_t column, int64_t columns, int64_t limit)
        : t(task), row_(row), head_(head), group_(group), groups_(groups), column_(column),
          columns_(columns), limit_(limit) {}

    int64_t index() const { return row_ * t.heads + head_; }

    // Return the number of tokens of the chunk that begins at `start`.
    int count_tokens(int64_t start) const {
        const int64_t end = std::min(t.tokens, (start / SPAN + 1) * SPAN);
        int count = (int)std::min(limit_, end - start);
        const int64_t* ids = t.ids ? t.ids + row_ * t.tokens + start : nullptr;
        for (int c = 1; ids && c < count; ++c)
            if (ids[c] != ids[0]) count = c;
        return count;
    }

    // Begin the chunk that begins at `start`.
    void begin(int64_t start) {
        start_ = start;
        count_ = count_tokens(start);
        const int64_t* ids = t.ids ? t.ids + row_ * t.tokens + start : nullptr;
        first_ = ids && start && ids[0] != ids[-1];
        for (int i = 0; i < SIZE; ++i) {
            is_token_[i] = i < count_;
            is_key_[i] = i < count_ && (!t.key_mask || t.key_mask[row_ * t.tokens + start + i]);
        }
    }

    // Load the chunk's rows of a tensor, and prefetch those of the chunk that is computed next.
    void load_rows(const Tensor& tensor, int64_t head, int64_t column, int64_t size,
                   int64_t padded, Real factor, Real* out) const {
        load_block(tensor, head, column, size, padded, factor, 0, SIZE, out);
        prefetch_next(tensor, head, column, size, 0, SIZE);
    }

    // Load the rows `first` to `end` - 1 of a chunk.
    void load_block(const Tensor& tensor, int64_t head, int64_t column, int64_t size,
                    int64_t padded, Real factor, int first, int end, Real* out) const {
        int i = first;
        for (; i < end && i < count_; ++i, out += padded)
            load_row(tensor.at(row_, head, start_ + i, column), tensor.type, size, padded, factor,
                     out);
        if (i < end) std::fill_n(out, (end - i) * padded, Real(0));
    }

    // Prefetch rows of the chunk that is computed next, if it has as many tokens. Always inlined,
    // see Tensor::prefetch().
    inline __attribute__((always_inline)) void prefetch_next(const Tensor& tensor, int64_t head,
                                                             int64_t column, int64_t size,
                                                             int first, int end) const {
        const int64_t next = start_ + next_;
        const int64_t last = std::min(t.tokens, next + std::min(end, count_));
        for (int64_t i = std::max<int64_t>(0, next + first); i < last; ++i)
            tensor.prefetch(row_, head, i, column, size);
    }

    // Prefetch rows that the chunk writes later. Always inlined like prefetch_next().
    inline __attribute__((always_inline)) void prefetch_outputs(
        const Tensor& tensor, int64_t head, int64_t column, int64_t size) const {
        for (int i = 0; tensor.data && i < count_; ++i) {
            const char* row = tensor.at(row_, head, start_ + i, column);
            for (int64_t b = 0; b < size * tensor.bytes(); b += 64)
                __builtin_prefetch(row + b, 1, 2);
        }
    }

    void store_rows(const Real* rows, int64_t size, int64_t padded, const Tensor& tensor,
                    int64_t head, int64_t column) const {
        for (int i = 0; i < count_; ++i)
            store_row(rows + i * padded, size, tensor.at(row_, head, start_ + i, column),
                      tensor.type);
    }

    // Multiply the decays of tokens, with one decay per token: from the chunk's start to each token
    // (`before`), from each token to the end (`after`), and from token j to token i (`pairs`,
    // [SIZE, SIZE]; 0 for j > i, and unchanged in later blocks of tokens). Log decays are summed in
    // float64, and not as differences of longer sums, which would cancel for Real = double.
    void multiply_decays(Real* before, Real* after, Real* pairs) const {
        Real given[SIZE], logs[SIZE * DECAY_BLOCK];
        double sums[SIZE], sum = 0, between[DECAY_BLOCK];
        load_rows(t.log_decay, head_, 0, 1, 1, Real(1), given);
        for (int i = 0; i < SIZE; ++i) {
            const int row = i % DECAY_BLOCK;
            const double log = given[i] < LOWEST_LOG_DECAY ? LOWEST_LOG_DECAY : (double)given[i];
            sums[i] = sum += log;
            before[i] = Real(sum);
            for (int j = 0; j < DECAY_BLOCK; ++j) {
                between[j] = j < row ? between[j] + log : 0;
                logs[i * DECAY_BLOCK + j] = Real(between[j]);
            }
        }
        sum = 0;
        for (int i = SIZE - 1; i >= 0; --i) {
            after[i] = Real(sum);
            sum += given[i] < LOWEST_LOG_DECAY ? LOWEST_LOG_DECAY : (double)given[i];
        }
        for (int w = 0; w < SIZE; w += LANES) {
            store(before + w, exp(load(before + w)));
            store(after + w, exp(load(after + w)));
        }
        for (int i = 0; i < SIZE; ++i)
            for (int w = 0; w < DECAY_BLOCK; w += LANES) {
                const Reals product = exp(load(logs + i * DECAY_BLOCK + w));
                store(pairs + i * SIZE + i / DECAY_BLOCK * DECAY_BLOCK + w,
                      lane_numbers(w) <= i % DECAY_BLOCK ? product : Reals{});
            }
        if constexpr (SIZE > DECAY_BLOCK) multiply_blocks(sums, pairs);
    }

  private:
    static constexpr int DECAY_BLOCK = 16;  // tokens; `pairs` of one block are exponentials

    // Compute `pairs` of tokens of different blocks: the product of decays from token j to the end
    // of its block, between the blocks, and from the start of its block to token i.
    static void multiply_blocks(const double* sums, Real* pairs) {
        Real starts[SIZE], ends[SIZE];
        for (int i = 0; i < SIZE; ++i) {
            const int first = i / DECAY_BLOCK * DECAY_BLOCK;
            starts[i] = Real(sums[i] - (first ? sums[first - 1] : 0));
            ends[i] = Real(sums[first + DECAY_BLOCK - 1] - sums[i]);
        }
        for (int w = 0; w < SIZE; w += LANES) {
            store(starts + w, exp(load(starts + w)));
            store(ends + w, exp(load(ends + w)));
        }
        for (int first = DECAY_BLOCK; first < SIZE; first += DECAY_BLOCK)
            for (int block = 0; block < first; block += DECAY_BLOCK) {
                const double log = sums[first - 1] - sums[block + DECAY_BLOCK - 1];
                const Real between = std::exp(Real(log));
                for (int i = first; i < first + DECAY_BLOCK; ++i)
                    for (int w = block; w < block + DECAY_BLOCK; w += LANES)
                        store(pairs + i * SIZE + w, load(ends + w) * (starts[i] * between));
            }
    }
};

// The loops of a forward pass over chunks of tokens. `Pass` derives from it, and `Chunk`, its other
// base, derives from TokenChunk. A pass has load_state(), load_chunk(), compute_outputs(),
// advance() and store_state().
template <class Pass, class Chunk, class Real>
class ForwardLoops : public Chunk {
    Pass& pass() { return static_cast<Pass&>(*this); }

    int64_t matrix() const { return this->t.key_size * this->t.value_size; }

    // Store kv, then z.
    void keep_state(Real* state) { pass().store_state(state, state + matrix()); }

  protected:
    using Chunk::Chunk;

  public:
    // Compute the outputs of tokens `first` to `end` - 1 from the state before them; null means
    // the state before the first token of the call.
    void run(int64_t first, int64_t end, const Real* state) {
        const auto& t = this->t;
        const int64_t head = this->index();
        if (state) pass().load_state(state, state + matrix());
        else pass().load_state(t.kv + head * matrix(), t.z + head * t.key_size);
        for (int64_t start = first; start < end; start += this->count_) {
            if (t.kept && start % SPAN == 0 && this->group_ == 0)
                keep_state(t.kept_state(this->row_, this->head_, start / SPAN));
            pass().load_chunk(start);
            pass().compute_outputs();
            pass().advance();
        }
        if (this->group_ == 0 && end == t.tokens)
            pass().store_state(t.last_kv + head * matrix(), t.last_z + head * t.key_size);
    }

    // Compute the states before the tokens `cuts`, except the first and the last of these tokens,
    // from the state kv and z. The states begin at `states_kv` and `states_z`, `step` elements apart.
    void compute_states(const std::vector<int64_t>& cuts, const Real* kv, const Real* z,
                        Real* states_kv, Real* states_z, int64_t step) {
        pass().load_state(kv, z);
        for (size_t i = 1; i + 1 < cuts.size(); ++i, states_kv += step, states_z += step) {
            for (int64_t start = cuts[i - 1]; start < cuts[i]; start += this->count_) {
                pass().load_chunk(start);
                pass().advance();
            }
            pass().store_state(states_kv, states_z);
        }
    }
};
