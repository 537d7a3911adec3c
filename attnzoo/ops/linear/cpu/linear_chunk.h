// The arguments of the kernels of causal linear attention, and the chunk of tokens that they
// compute at a time. Letters are those of linear.cpp.

#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <utility>
#include <vector>

#include "checks.h"
#include "feature_maps.h"
#include "layout.h"
#include "rows.h"
#include "tiles.h"

constexpr int CHUNK = 16;   // tokens
constexpr int SPAN = 512;   // tokens between the states that the forward pass stores
constexpr int BUNDLE = 128;  // sequences that begin in the same BUNDLE tokens are one piece of work
constexpr double LOWEST_LOG_DECAY = -1e4;  // its exponential is 0; sums of -infinity would be NaN

static int64_t pad(int64_t size) { return (size + 15) / 16 * 16; }

// A sequence: tokens `first` to `end` - 1 of a row of the tensors, and the index of its states.
struct Sequence {
    int64_t number = 0, row = 0, first = 0, end = 0;

    int64_t length() const { return end - first; }
    int64_t spans() const { return (length() + SPAN - 1) / SPAN; }

    // Return the first token of a span, or the end of the sequence.
    int64_t span_start(int64_t span) const { return std::min(first + span * SPAN, end); }
};

template <class Real>
struct Task {
    int64_t threads, batch, heads, groups;  // batch is the number of sequences
    int64_t tokens, longest;                // of a row; the most of a sequence in the one row
    int64_t key_size, value_size;
    int64_t given_size;             // size of queries and keys before the feature map
    int64_t normalize;              // whether outputs are divided by the totals
    int64_t chunk;                  // tokens, at most CHUNK
    int64_t decays;                 // per token: 0, 1 or D
    double scale, eps;              // factor of queries; added to sums of weights
    Tensor q, k, v, log_decay, out;
    const int64_t *starts, *lengths;  // of the sequences of one row, [B]; null: each row is one
    const Real *kv, *z;             // [B, H, D, E], [B, H, D]: the state before the first token of
                                    // each sequence; null: zeros
    Real *last_kv, *last_z;         // the state after the last token, or null
    Real* kept;                     // [rows, H, (T - 1) / SPAN, D, E + 1]: states before spans, but
                                    // for the first of a sequence (kv, then z); or null
    Real* sums;                     // [rows, H G, T]: sums of weights, or 1 / denominators if
                                    // normalised; or null
    MapTask<Real> q_map, k_map;

    FIELDS(threads, batch, heads, groups, tokens, longest, key_size, value_size, given_size,
           normalize, chunk, decays, scale, eps, q, k, v, log_decay, out, starts, lengths, kv, z, last_kv,
           last_z, kept, sums, q_map, k_map)

    bool are_sequences_inside() const {
        return !starts || are_sequences(starts, lengths, batch, tokens, longest);
    }

    Sequence sequence(int64_t number) const {
        if (!starts) return {number, number, 0, tokens};
        return {number, 0, starts[number], starts[number] + lengths[number]};
    }

    // Return the number of tokens of all sequences.
    int64_t count_tokens() const {
        int64_t total = starts ? 0 : batch * tokens;
        for (int64_t i = 0; starts && i < batch; ++i) total += lengths[i];
        return total;
    }

    // Return the index of a query in a contiguous [rows, H G, T].
    int64_t query(int64_t row, int64_t head, int64_t token) const {
        return (row * heads * groups + head) * tokens + token;
    }

    int64_t kept_spans() const { return std::max<int64_t>(tokens - 1, 0) / SPAN; }

    // Return the stored state before a span that begins at `token` and is not a sequence's first.
    // No two of them begin in the same SPAN tokens, because each is SPAN tokens after another.
    Real* kept_state(int64_t row, int64_t head, int64_t token) const {
        const int64_t number = (row * heads + head) * kept_spans() + token / SPAN - 1;
        return kept + number * key_size * (value_size + 1);
    }

    // Return where the gradients of the weights of a head's map are stored, which `maps` heads have:
    // those of the first spans of all sequences that begin in the same BUNDLE tokens, or those of
    // another span.
    int64_t weight_gradient(const Sequence& s, int64_t maps, int64_t head, int64_t span) const {
        const int64_t firsts = starts ? (tokens + BUNDLE - 1) / BUNDLE : 1;
        const int64_t number =
            span ? firsts + s.span_start(span) / SPAN - 1 : starts ? s.first / BUNDLE : 0;
        return (s.row * maps + head) * (firsts + kept_spans()) + number;
    }
};

// Gradients that are not needed are null.
template <class Real>
struct Gradients {
    Tensor d_out, dq, dk, dv, d_log_decay;
    const Real* d_totals;             // [rows, H G, T], or null
    const Real *d_last_kv, *d_last_z; // of the state after the last token, or null
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

// At most CHUNK consecutive tokens of a key head, which end where their sequence ends.
template <class Real>
class TokenChunk : protected Tiles<Real>, protected Rows<Real> {
  protected:
    using typename Tiles<Real>::Reals;
    using Tiles<Real>::LANES, Tiles<Real>::load, Tiles<Real>::store, Tiles<Real>::broadcast;
    using Tiles<Real>::exp, Tiles<Real>::lane_numbers;
    using Rows<Real>::load_row, Rows<Real>::store_row;

    const Task<Real>& t;
    Sequence s_;  // that is computed
    const int64_t head_;
    const int64_t group_, groups_;    // the first query head, and how many
    const int64_t column_, columns_;  // the first column of values, and how many
    const int64_t limit_;             // tokens, at most CHUNK

    // Rows of buffers after the chunk's last token are zero
    bool is_token_[CHUNK];
    int64_t start_ = 0;
    int next_ = CHUNK;     // distance to the chunk that is computed next, in tokens
    int count_ = 0;       // tokens

    TokenChunk(const Task<Real>& task, int64_t head, int64_t group, int64_t groups, int64_t column,
               int64_t columns, int64_t limit)
        : t(task), head_(head), group_(group), groups_(groups), column_(column),
          columns_(columns), limit_(limit) {}

    // Return the index of the states of the sequence and head.
    int64_t index() const { return s_.number * t.heads + head_; }

    int64_t matrix() const { return t.key_size * t.value_size; }

    // Return the parts of a state of the sequence and head in tensors of them, which may be null.
    template <class T>
    T* own_kv(T* kv) const { return kv ? kv + index() * matrix() : nullptr; }
    template <class T>
    T* own_z(T* z) const { return z ? z + index() * t.key_size : nullptr; }

    // Return the number of tokens of the chunk that begins at `start`.
    int count_tokens(int64_t start) const {
        const int64_t end = s_.span_start((start - s_.first) / SPAN + 1);
        return (int)std::min(limit_, end - start);
    }

    // Begin the chunk that begins at `start`.
    void begin(int64_t start) {
        start_ = start;
        count_ = count_tokens(start);
        for (int i = 0; i < CHUNK; ++i) is_token_[i] = i < count_;
    }

    // Load the chunk's rows of a tensor, and prefetch those of the chunk that is computed next.
    void load_rows(const Tensor& tensor, int64_t head, int64_t column, int64_t size,
                   int64_t padded, Real factor, Real* out) const {
        load_block(tensor, head, column, size, padded, factor, 0, CHUNK, out);
        prefetch_next(tensor, head, column, size, 0, CHUNK);
    }

    // Load the rows `first` to `end` - 1 of a chunk.
    void load_block(const Tensor& tensor, int64_t head, int64_t column, int64_t size,
                    int64_t padded, Real factor, int first, int end, Real* out) const {
        int i = first;
        for (; i < end && i < count_; ++i, out += padded)
            load_row(tensor.at(s_.row, head, start_ + i, column), tensor.type, size, padded, factor,
                     out);
        if (i < end) std::fill_n(out, (end - i) * padded, Real(0));
    }

    // Prefetch rows of the chunk that is computed next, if it has as many tokens. Always inlined,
    // see Tensor::prefetch().
    inline __attribute__((always_inline)) void prefetch_next(const Tensor& tensor, int64_t head,
                                                             int64_t column, int64_t size,
                                                             int first, int end) const {
        const int64_t next = start_ + next_;
        const int64_t last = std::min(s_.end, next + std::min(end, count_));
        for (int64_t i = std::max(s_.first, next + first); i < last; ++i)
            tensor.prefetch(s_.row, head, i, column, size);
    }

    // Prefetch rows that the chunk writes later. Always inlined like prefetch_next().
    inline __attribute__((always_inline)) void prefetch_outputs(
        const Tensor& tensor, int64_t head, int64_t column, int64_t size) const {
        for (int i = 0; tensor.data && i < count_; ++i) {
            const char* row = tensor.at(s_.row, head, start_ + i, column);
            for (int64_t b = 0; b < size * tensor.bytes(); b += 64)
                __builtin_prefetch(row + b, 1, 2);
        }
    }

    void store_rows(const Real* rows, int64_t size, int64_t padded, const Tensor& tensor,
                    int64_t head, int64_t column) const {
        for (int i = 0; i < count_; ++i)
            store_row(rows + i * padded, size, tensor.at(s_.row, head, start_ + i, column),
                      tensor.type);
    }

    // Multiply the decays of tokens, with one decay per token: from the chunk's start to each token
    // (`before`), from each token to the end (`after`), and from token j to token i (`pairs`,
    // [CHUNK, CHUNK]; 0 for j > i). Log decays are summed in float64, and not as differences of
    // longer sums, which would cancel for Real = double.
    void multiply_decays(Real* before, Real* after, Real* pairs) const {
        Real given[CHUNK], logs[CHUNK * CHUNK];
        double sum = 0, between[CHUNK];
        load_rows(t.log_decay, head_, 0, 1, 1, Real(1), given);
        for (int i = 0; i < CHUNK; ++i) {
            const double log = given[i] < LOWEST_LOG_DECAY ? LOWEST_LOG_DECAY : (double)given[i];
            before[i] = Real(sum += log);
            for (int j = 0; j < CHUNK; ++j) {
                between[j] = j < i ? between[j] + log : 0;
                logs[i * CHUNK + j] = Real(between[j]);
            }
        }
        sum = 0;
        for (int i = CHUNK - 1; i >= 0; --i) {
            after[i] = Real(sum);
            sum += given[i] < LOWEST_LOG_DECAY ? LOWEST_LOG_DECAY : (double)given[i];
        }
        for (int w = 0; w < CHUNK; w += LANES) {
            store(before + w, exp(load(before + w)));
            store(after + w, exp(load(after + w)));
        }
        for (int i = 0; i < CHUNK; ++i)
            for (int w = 0; w < CHUNK; w += LANES) {
                const Reals product = exp(load(logs + i * CHUNK + w));
                store(pairs + i * CHUNK + w, lane_numbers(w) <= i ? product : Reals{});
            }
    }
};

// The loops of a forward pass over chunks of tokens. `Pass` derives from it, and `Chunk`, its other
// base, derives from TokenChunk. A pass has load_state(), which takes null for zeros, load_chunk(),
// compute_outputs(), advance() and store_state().
template <class Pass, class Chunk, class Real>
class ForwardLoops : public Chunk {
    Pass& pass() { return static_cast<Pass&>(*this); }

    // Load a state, kv then z, or that before the first token of the sequence if it is null.
    void begin_sequence(const Sequence& sequence, const Real* state) {
        this->s_ = sequence;
        if (state) pass().load_state(state, state + this->matrix());
        else pass().load_state(this->own_kv(this->t.kv), this->own_z(this->t.z));
    }

  protected:
    using Chunk::Chunk;

  public:
    // Compute the outputs of tokens `first` to `end` - 1 of a sequence from the state before them;
    // null means the state before the first token of the sequence.
    void run(const Sequence& sequence, int64_t first, int64_t end, const Real* state) {
        const auto& t = this->t;
        begin_sequence(sequence, state);
        const bool is_last = end == sequence.end && t.last_kv && this->group_ == 0;
        for (int64_t start = first; start < end; start += this->count_) {
            const bool is_span = start > sequence.first && (start - sequence.first) % SPAN == 0;
            if (t.kept && is_span && this->group_ == 0) {
                Real* kept = t.kept_state(sequence.row, this->head_, start);
                pass().store_state(kept, kept + this->matrix());
            }
            pass().load_chunk(start);
            pass().compute_outputs();
            if (is_last || start + this->count_ < end) pass().advance();
        }
        if (is_last) pass().store_state(this->own_kv(t.last_kv), this->own_z(t.last_z));
    }

    // Compute the states before the tokens `cuts` of a sequence, except the first and the last of
    // these tokens, from the state kv and z, or zeros if they are null. The states begin at
    // `states_kv` and `states_z`, `step` elements apart.
    void compute_states(const Sequence& sequence, const std::vector<int64_t>& cuts, const Real* kv,
                        const Real* z, Real* states_kv, Real* states_z, int64_t step) {
        this->s_ = sequence;
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

// The loops of a backward pass over spans of tokens. `Pass` derives from it, and `Chunk`, its other
// base, derives from TokenChunk. A pass has states_ for the chunks of a span, add_state(), and
// d_state_; states are [E, D], with rows of state_pitch() numbers. It has load_state(), which takes
// null for zeros, load_written(), which loads the keys and values of a chunk for advance(),
// differentiate() and skip().
template <class Pass, class Chunk, class Real>
class BackwardLoops : public Chunk {
    Pass& pass() { return static_cast<Pass&>(*this); }

  protected:
    const Gradients<Real>& out_;
    const Needed needed_;
    const bool reads_;  // whether gradients of the decayed queries are needed

    template <class... Arguments>
    BackwardLoops(const Gradients<Real>& out, const Task<Real>& task, Arguments&&... arguments)
        : Chunk(task, std::forward<Arguments>(arguments)...), out_(out), needed_(task, out),
          reads_(needed_.q || needed_.decay) {}

    // Whether the sums of weights have gradients.
    bool sums() const { return this->t.normalize || out_.d_totals; }

    // Whether the gradient of the state before the chunk that begins at `start` is needed.
    bool needs_state(int64_t start) const {
        return needed_.state && (start > this->s_.first || out_.d_kv);
    }

  public:
    // Compute the gradients of the tokens of spans `first` to `end` - 1 of a sequence, after
    // propagating the gradient of the state back through all later spans. Those of the weights of
    // span 0 are not stored yet.
    void run(const Sequence& sequence, int64_t first, int64_t end) {
        this->s_ = sequence;
        const Real *d_kv = this->own_kv(out_.d_last_kv), *d_z = this->own_z(out_.d_last_z);
        pass().load_state(d_kv, d_z, pass().d_state_);
        for (int64_t span = (needed_.state ? sequence.spans() : end) - 1; span >= first; --span) {
            const bool own = span < end;
            for (size_t count = find_chunks(span, own && reads_); count--;)
                own ? pass().differentiate(pass().states_[count])
                    : pass().skip(pass().states_[count].start);
            if (own && span) store_weight_gradients(sequence, span);
        }
        if (first == 0 && out_.d_kv) store_state_gradient();
    }

    // Store the gradients of weights since the last call, which are those of a span.
    void store_weight_gradients(const Sequence& s, int64_t span) {
        const auto& t = this->t;
        if (!this->given_) return;
        this->k_map_.store_weight_gradients(t.weight_gradient(s, t.heads, this->head_, span));
        for (int64_t g = 0; g < t.groups; ++g)
            this->q_maps_[g].store_weight_gradients(t.weight_gradient(
                s, t.heads * t.groups, this->head_ * t.groups + g, span));
    }

  private:
    void store_state_gradient() {
        const auto& t = this->t;
        const auto& state = pass().d_state_;
        Real* d_kv = this->own_kv(out_.d_kv);
        std::copy_n(state.z, t.key_size, this->own_z(out_.d_z));
        for (int64_t d = 0; d < t.key_size; ++d)
            for (int64_t e = 0; e < t.value_size; ++e)
                d_kv[d * t.value_size + e] = state.kv[e * pass().state_pitch() + d];
    }

    // Find the chunks of a span, and compute the states before them if they are needed.
    size_t find_chunks(int64_t span, bool with_states) {
        const auto& t = this->t;
        auto& states = pass().states_;
        const int64_t first = this->s_.span_start(span), end = this->s_.span_start(span + 1);
        size_t count = 0;
        this->next_ = CHUNK;
        for (int64_t start = first; start < end; ++count) {
            if (count == states.size()) pass().add_state();
            states[count].start = start;
            if (with_states && count) {
                pass().advance(states[count - 1], states[count]);
            } else if (with_states && span) {
                const Real* kept = t.kept_state(this->s_.row, this->head_, start);
                pass().load_state(kept, kept + this->matrix(), states[0]);
            } else if (with_states) {
                pass().load_state(this->own_kv(t.kv), this->own_z(t.z), states[0]);
            }
            const int64_t next = start + this->count_tokens(start);
            if (with_states && next < end) pass().load_written(start);
            start = next;
        }
        return count;
    }
};
