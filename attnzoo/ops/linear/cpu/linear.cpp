// Causal linear attention on a CPU: forward and backward pass, chunk by chunk.
//
//     S_t = Diag(a_t) S_{t-1} + k_t v_t^T,     z_t = a_t z_{t-1} + k_t,
//     o_t = scale q_t S_t / (scale q_t z_t + eps) if normalised, else scale q_t S_t
//
// Without normalisation, the totals scale q_t z_t can be returned too.
//
// A chunk has at most CHUNK tokens and ends where its sequence ends. Its queries read the state
// before the chunk and, through scores, the chunk's own keys: A_ij = sum over d of q_id L_ijd k_jd,
// where L_ij is the product of the decays of tokens j + 1 to i. Every decay is the exponential of a
// sum of log decays or a product of numbers in [0, 1], never a quotient, so no decay overflows or
// cancels. Both passes compute the feature maps of queries and keys chunk by chunk.
//
// work     one key head of a sequence, or of short ones that begin in the same BUNDLE tokens; or some
//          of its spans, and in the forward pass some of its query heads or columns of values; the
//          data of a chunk fits in the L1 and L2 caches
// reads    tensors of any floating type in place, with stride 1 in the last dimension
// writes   out, the state after the last token, and for the backward pass one state per SPAN tokens;
//          nothing for tokens outside of sequences
// limits   chunk at most CHUNK
// oracle   linear_attention(impl="reference"), float64 included
//
// Letters: B batch, H key heads, G query heads per key head, T tokens, D features, E value size,
// F decays per token (0, 1 or D), P columns of values of one piece of work. In buffers, D, E and P
// are rounded up to multiples of 16.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <deque>
#include <vector>

#include "feature_maps.h"
#include "linear_chunk.h"
#include "threads.h"

template <class Real>
class LinearAttention : protected TokenChunk<Real> {
  protected:
    using Base = TokenChunk<Real>;
    using typename Tiles<Real>::Reals;
    using typename Tiles<Real>::Ints;
    using Tiles<Real>::LANES, Tiles<Real>::load, Tiles<Real>::store, Tiles<Real>::broadcast;
    using Tiles<Real>::multiply, Tiles<Real>::for_columns, Tiles<Real>::product;
    using Tiles<Real>::transpose, Tiles<Real>::lane_numbers, Tiles<Real>::exp;
    using Tiles<Real>::scale_row, Tiles<Real>::add_lanes, Tiles<Real>::add_lanes_of_rows;
    using Base::t, Base::s_, Base::head_, Base::group_, Base::groups_, Base::column_;
    using Base::columns_, Base::is_token_, Base::start_, Base::count_, Base::load_rows;
    static constexpr int WIDE = CHUNK / LANES;  // vectors per row of CHUNK tokens

    const int64_t size_, width_;      // D and P, rounded up
    const int64_t rows_, keys_;       // rows of queries, G CHUNK; elements of a chunk's keys
    FeatureMap<Real> k_map_;
    std::deque<FeatureMap<Real>> q_maps_;  // one per query head
    const int64_t given_;                  // elements of a chunk's keys before the map; 0 without
    Buffer<Real> buffer_;

    // The chunk; rows after its last token are zero.
    Real *given_k_, *given_q_, *y_k_, *y_q_;  // x and y of the feature maps, see feature_maps.h
    Real *k_, *v_, *q_;     // [CHUNK, D], [CHUNK, P], [G CHUNK, D]: keys, values, scaled queries
    Real *k_written_, *q_read_;       // keys decayed to the chunk's end, queries from its start
    Real *k_columns_;                 // [D, CHUNK]: transposed keys
    Real *scores_;                    // [G CHUNK, CHUNK]
    Real *inverse_;                   // [G CHUNK]: 1 / denominator
    Real *decay_, *before_, *after_;  // [CHUNK, F]: decays; products from the start; to the end
    Real *pairs_;                     // [CHUNK, CHUNK]: products of decays between tokens, F = 1
    Real *total_;                     // [D]: decay of the state over the chunk

    LinearAttention(const Task<Real>& task, int64_t head, int64_t group, int64_t groups,
                    int64_t column, int64_t columns)
        : Base(task, head, group, groups, column, columns, task.chunk),
          size_(pad(t.key_size)), width_(pad(columns)), rows_(groups * CHUNK),
          keys_(CHUNK * size_), k_map_(task.k_map, head, task.given_size),
          given_(k_map_.is_identity() ? 0 : CHUNK * pad(task.given_size)),
          buffer_((given_ ? (1 + groups) * (given_ + keys_) : 0) + keys_ * (3 + groups) + CHUNK * width_ + rows_ * (CHUNK + 1) + CHUNK * CHUNK +
                  size_ + (t.decays ? keys_ * (3 + groups) : 0)),
          given_k_(buffer_.take(given_)), given_q_(buffer_.take(groups * given_)),
          y_k_(buffer_.take(given_ ? keys_ : 0)), y_q_(buffer_.take(given_ ? groups * keys_ : 0)),
          k_(buffer_.take(keys_)), v_(buffer_.take(CHUNK * width_)),
          q_(buffer_.take(groups * keys_)), k_written_(t.decays ? buffer_.take(keys_) : k_),
          q_read_(t.decays ? buffer_.take(groups * keys_) : q_), k_columns_(buffer_.take(keys_)),
          scores_(buffer_.take(rows_ * CHUNK)), inverse_(buffer_.take(rows_)),
          decay_(buffer_.take(t.decays ? keys_ : 0)), before_(buffer_.take(t.decays ? keys_ : 0)),
          after_(buffer_.take(keys_)), pairs_(buffer_.take(CHUNK * CHUNK)),
          total_(buffer_.take(size_)) {
        for (int64_t g = 0; given_ && g < groups; ++g)
            q_maps_.emplace_back(task.q_map, head * task.groups + group + g, task.given_size);
    }

    // Begin a chunk, and load its keys, values and decays.
    void load_keys(int64_t start) {
        this->begin(start);
        if (given_) {
            load_rows(t.k, head_, 0, t.given_size, given_ / CHUNK, Real(1), given_k_);
            k_map_.features(given_k_, is_token_, y_k_, k_);
        } else {
            load_rows(t.k, head_, 0, t.key_size, size_, Real(1), k_);
        }
        load_rows(t.v, head_, column_, columns_, width_, Real(1), v_);
        load_decays();
    }

    // Load the decays, and decay the keys.
    void load_decays() {
        if (t.decays == 1) decay_tokens();
        if (t.decays > 1) decay_channels();
    }

    // -- decays -----------------------------------------------------------------------------------

    // Compute the decays of a chunk with one decay per token, and decay the keys.
    void decay_tokens() {
        this->multiply_decays(before_, after_, pairs_);
        std::fill_n(total_, size_, before_[CHUNK - 1]);
        for (int i = 0; i < CHUNK; ++i)
            scale_row(k_ + i * size_, after_[i], size_, k_written_ + i * size_);
    }

    // Compute the decays of a chunk with one decay per key channel, and decay the keys.
    void decay_channels() {
        load_rows(t.log_decay, head_, 0, t.key_size, size_, Real(1), decay_);
        for (int64_t d = 0; d < size_; d += LANES) {
            Reals product = broadcast(1), sum{};
            for (int64_t at = d; at < keys_; at += size_) {
                const Reals log_decay = load(decay_ + at), decay = exp(log_decay);
                sum += log_decay;
                product *= decay;
                store(decay_ + at, decay);
                store(before_ + at, product);
            }
            store(total_ + d, exp(sum));  // more precise; errors of the state add up over chunks
            product = broadcast(1);
            for (int64_t at = keys_ - size_ + d; at >= 0; at -= size_) {
                store(after_ + at, product);
                store(k_written_ + at, load(k_ + at) * product);
                product *= load(decay_ + at);
            }
        }
    }

    // -- scores -----------------------------------------------------------------------------------

    // Load the queries of the chunk, and decay them.
    void load_queries() {
        for (int64_t g = 0; g < groups_; ++g) {
            const int64_t head = head_ * t.groups + group_ + g;
            if (!given_) {
                load_rows(t.q, head, 0, t.key_size, size_, Real(t.scale), q_ + g * keys_);
                continue;
            }
            Real* given = given_q_ + g * given_;
            load_rows(t.q, head, 0, t.given_size, given_ / CHUNK, Real(1), given);
            q_maps_[g].features(given, is_token_, y_q_ + g * keys_, q_ + g * keys_);
        }
        for (int64_t g = 0; t.decays > 1 && g < groups_; ++g)
            for (int64_t i = 0; i < keys_; i += LANES)
                store(q_read_ + g * keys_ + i, load(q_ + g * keys_ + i) * load(before_ + i));
        for (int64_t r = 0; t.decays == 1 && r < rows_; ++r)
            scale_row(q_ + r * size_, before_[r % CHUNK], size_, q_read_ + r * size_);
    }

    // Compute the scores of the chunk's queries.
    void compute_scores() {
        transpose(k_, size_, CHUNK, size_, k_columns_, CHUNK);
        if (t.decays > 1) {
            for (int i = 0; i < CHUNK; ++i) score_channels(i);
            return;
        }
        product(scores_, CHUNK, rows_, q_, size_, 1, k_columns_, CHUNK, CHUNK, size_);
        for (int64_t r = 0; r < rows_; ++r)
            for (int w = 0; w < CHUNK; w += LANES) {
                const int i = (int)(r % CHUNK);
                const Reals score = load(scores_ + r * CHUNK + w);
                store(scores_ + r * CHUNK + w, t.decays ? score * load(pairs_ + i * CHUNK + w)
                                               : lane_numbers(w) <= i ? score
                                                                      : Reals{});
            }
    }

    // Compute the scores of token i: multiply the transposed keys of earlier tokens by the decays
    // of token i, in place, and then by its queries. The calls for tokens 0 to i accumulate L_ij
    // k_j. Keys of later tokens are not decayed yet; their scores are discarded.
    void score_channels(int i) {
        const Real* decay = decay_ + i * size_;
        for (int w = 0; w < CHUNK; w += LANES) {
            const Ints lanes = lane_numbers(w);
            for (int64_t g = 0; g < groups_; ++g) {
                const Real* q = q_ + (g * CHUNK + i) * size_;
                Reals sums[4] = {};
                for (int64_t d = 0; d < size_; d += 4)
                    for (int u = 0; u < 4; ++u) {
                        Real* keys = k_columns_ + (d + u) * CHUNK + w;
                        Reals value = load(keys);
                        if (g == 0) {
                            value = lanes < i ? value * decay[d + u] : value;
                            store(keys, value);
                        }
                        sums[u] += q[d + u] * value;
                    }
                const Reals sum = (sums[0] + sums[1]) + (sums[2] + sums[3]);
                store(scores_ + (g * CHUNK + i) * CHUNK + w, lanes <= i ? sum : Reals{});
            }
        }
    }

    // Write the sums of weights to inverse_; z is the sum of keys before the chunk.
    void add_weights(const Real* z) {
        add_lanes_of_rows(rows_, inverse_, [&](int64_t r) {
            Reals sum{};
            for (int w = 0; w < CHUNK; w += LANES) sum += load(scores_ + r * CHUNK + w);
            for (int64_t d = 0; d < size_; d += LANES)
                sum += load(q_read_ + r * size_ + d) * load(z + d);
            return sum;
        });
    }

    // Compute the sum of keys after the chunk: z = decayed z + sum of decayed keys.
    void advance_keys(const Real* before, Real* after) const {
        for (int64_t d = 0; d < size_; d += LANES) {
            Reals sum = load(before + d);
            if (t.decays) sum *= load(total_ + d);
            for (int i = 0; i < count_; ++i) sum += load(k_written_ + i * size_ + d);
            store(after + d, sum);
        }
    }
};

// -- the forward pass -----------------------------------------------------------------------------

template <class Real>
class LinearForward : public ForwardLoops<LinearForward<Real>, LinearAttention<Real>, Real> {
    using Loops = ForwardLoops<LinearForward<Real>, LinearAttention<Real>, Real>;
    using Base = LinearAttention<Real>;
    using typename Base::Reals;
    using Base::LANES, Base::load, Base::store, Base::multiply, Base::for_columns;
    using Base::t, Base::s_, Base::head_, Base::group_, Base::groups_, Base::column_;
    using Base::columns_, Base::size_, Base::width_, Base::rows_, Base::keys_, Base::start_;
    using Base::count_, Base::k_written_, Base::q_read_, Base::v_, Base::scores_, Base::inverse_;
    using Base::total_;

    Buffer<Real> buffer_;
    Real *kv_, *z_, *out_;  // [D, P], [D]: the state before the chunk; [G CHUNK, P]

  public:
    LinearForward(const Task<Real>& task, int64_t head, int64_t group, int64_t groups,
                  int64_t column, int64_t columns)
        : Loops(task, head, group, groups, column, columns),
          buffer_(size_ * (width_ + 1) + rows_ * width_), kv_(buffer_.take(size_ * width_)),
          z_(buffer_.take(size_)), out_(buffer_.take(rows_ * width_)) {}

  private:
    friend ForwardLoops<LinearForward<Real>, LinearAttention<Real>, Real>;

    void load_state(const Real* kv, const Real* z) {
        std::fill_n(kv_, size_ * width_, Real(0));
        std::fill_n(z_, size_, Real(0));
        if (!kv) return;
        for (int64_t d = 0; d < t.key_size; ++d)
            std::copy_n(kv + d * t.value_size + column_, columns_, kv_ + d * width_);
        std::copy_n(z, t.key_size, z_);
    }

    void load_chunk(int64_t start) { this->load_keys(start); }

    // Compute the sums of weights, or their reciprocals.
    void compute_sums() {
        this->add_weights(z_);
        for (int64_t r = 0; t.normalize && r < rows_; r += LANES)
            store(inverse_ + r, Real(1) / (load(inverse_ + r) + Real(t.eps)));
        for (int64_t g = 0; t.sums && column_ == 0 && g < groups_; ++g)
            std::copy_n(inverse_ + g * CHUNK, count_,
                        t.sums + t.query(s_.row, head_ * t.groups + group_ + g, start_));
    }

    void store_state(Real* kv, Real* z) const {
        for (int64_t d = 0; d < t.key_size; ++d)
            std::copy_n(kv_ + d * width_, columns_, kv + d * t.value_size + column_);
        if (column_ == 0) std::copy_n(z_, t.key_size, z);
    }

    void compute_outputs() {
        this->load_queries();
        this->compute_scores();
        if (t.normalize || t.sums) compute_sums();
        for (int64_t g = 0; g < groups_; ++g) compute_outputs(g);
    }

    // Compute the outputs of a query head.
    void compute_outputs(int64_t g) const {
        const Real *q = q_read_ + g * keys_, *scores = scores_ + g * CHUNK * CHUNK;
        Real* out = out_ + g * CHUNK * width_;
        for_columns(width_, [&](auto vectors, int64_t column) {
            constexpr int V = decltype(vectors)::value, R = std::min(TILE / V, CHUNK);
            for (int first = 0; first < count_; first += R) {
                Reals sums[R][V] = {};
                multiply(sums, q + first * size_, size_, 1, kv_ + column, width_, size_);
                multiply(sums, scores + first * CHUNK, CHUNK, 1, v_ + column, width_, first + R);
                for (int r = 0; r < R; ++r)
                    for (int j = 0; j < V; ++j)
                        store(out + (first + r) * width_ + column + j * LANES,
                              t.normalize ? sums[r][j] * inverse_[g * CHUNK + first + r]
                                          : sums[r][j]);
            }
        });
        this->store_rows(out, columns_, width_, t.out, head_ * t.groups + group_ + g, column_);
    }

    // Compute the state after the chunk.
    void advance() {
        this->advance_keys(z_, z_);
        for_columns(width_, [&](auto vectors, int64_t column) {
            constexpr int V = decltype(vectors)::value, R = TILE / V;
            for (int64_t d = 0; d < size_; d += R) {
                Real* kv = kv_ + d * width_ + column;
                Reals sums[R][V];
                for (int r = 0; r < R; ++r)
                    for (int j = 0; j < V; ++j) {
                        sums[r][j] = load(kv + r * width_ + j * LANES);
                        if (t.decays) sums[r][j] *= total_[d + r];
                    }
                multiply(sums, k_written_ + d, 1, size_, v_ + column, width_, count_);
                for (int r = 0; r < R; ++r)
                    for (int j = 0; j < V; ++j)
                        store(kv + r * width_ + j * LANES, sums[r][j]);
            }
        });
    }
};

// -- the backward pass ----------------------------------------------------------------------------

// Computes the states of a span again, then processes its chunks in reverse. States are transposed,
// [E, D]. With do the gradient of a numerator, and y that of a denominator:
//     dA_ij = do_i v_j + y_i,     dq_i = do_i S^T + y_i z + sum over j <= i of dA_ij L_ij k_j,
//     dk_j = v_j dS^T + dz + sum over i >= j of dA_ij L_ij q_i,     y_i = -o_i do_i / denominator
// Outputs and denominators are those of the forward pass.
// The exponential of a log decay multiplies the state, later reads of it, earlier writes to it, and
// the scores of later queries with earlier keys. The gradient of the log decay is the sum of these
// values times their gradients; no term is subtracted.
template <class Real>
class LinearBackward : public BackwardLoops<LinearBackward<Real>, LinearAttention<Real>, Real> {
    using Loops = BackwardLoops<LinearBackward<Real>, LinearAttention<Real>, Real>;
    using Base = LinearAttention<Real>;
    using typename Base::Reals;
    using typename Base::Ints;
    using Base::LANES, Base::load, Base::store, Base::broadcast, Base::multiply, Base::product;
    using Base::for_columns, Base::transpose, Base::add_lanes, Base::add_lanes_of_rows;
    using Base::lane_numbers, Base::t, Base::s_, Base::head_, Base::size_, Base::width_;
    using Base::rows_, Base::keys_, Base::groups_, Base::start_, Base::count_, Base::k_, Base::v_;
    using Base::q_, Base::k_written_, Base::q_read_, Base::k_columns_, Base::scores_;
    using Base::inverse_, Base::decay_, Base::before_, Base::after_, Base::pairs_, Base::total_;
    using Base::WIDE, Base::next_, Base::given_, Base::given_k_, Base::given_q_, Base::y_k_;
    using Base::y_q_, Base::k_map_, Base::q_maps_, Base::is_token_;
    using Loops::out_, Loops::needed_, Loops::reads_, Loops::sums, Loops::needs_state;

    struct State {
        Buffer<Real> buffer;
        Real *kv, *z;  // [E, D], [D]
        int64_t start = 0;

        State(int64_t size, int64_t width)
            : buffer(size * (width + 1)), kv(buffer.take(size * width)), z(buffer.take(size)) {}
    };

    std::deque<State> states_;  // before the chunks of a span
    State d_state_;
    Buffer<Real> buffer_;
    Real *d_out_, *d_scores_;                  // [G CHUNK, E], [G CHUNK, CHUNK]
    Real *d_read_, *d_written_;                // of decayed queries and keys: [G CHUNK, D]; [CHUNK, D]
    Real *v_columns_, *dv_columns_, *dv_;      // [E, CHUNK] twice; [CHUNK, E]
    Real *dq_, *dk_, *d_log_;                  // [G CHUNK, D]; [CHUNK, D] twice
    Real *d_total_, *d_sums_, *written_sums_;  // [D], [G CHUNK], [CHUNK]
    Real* outputs_;                            // [CHUNK, E]: of the forward pass
    Real* d_given_;                            // of queries or keys before the feature map

  public:
    LinearBackward(const Task<Real>& task, const Gradients<Real>& out, int64_t head)
        : Loops(out, task, head, 0, task.groups, 0, task.value_size), d_state_(size_, width_),
          buffer_(rows_ * (width_ + CHUNK + 2 * size_ + 1) + 4 * CHUNK * width_ + 3 * keys_ +
                  size_ + CHUNK + given_),
          d_out_(buffer_.take(rows_ * width_)), d_scores_(buffer_.take(rows_ * CHUNK)),
          d_read_(buffer_.take(rows_ * size_)), d_written_(buffer_.take(keys_)),
          v_columns_(buffer_.take(CHUNK * width_)), dv_columns_(buffer_.take(CHUNK * width_)),
          dv_(buffer_.take(CHUNK * width_)), dq_(buffer_.take(rows_ * size_)),
          dk_(buffer_.take(keys_)), d_log_(buffer_.take(keys_)), d_total_(buffer_.take(size_)),
          d_sums_(buffer_.take(rows_)), written_sums_(buffer_.take(CHUNK)),
          outputs_(buffer_.take(CHUNK * width_)), d_given_(buffer_.take(given_)) {}

  private:
    friend Loops;

    void add_state() { states_.emplace_back(size_, width_); }

    void load_state(const Real* kv, const Real* z, State& state) const {
        std::fill_n(state.kv, size_ * width_, Real(0));
        std::fill_n(state.z, size_, Real(0));
        for (int64_t d = 0; kv && d < t.key_size; ++d)
            for (int64_t e = 0; e < t.value_size; ++e)
                state.kv[e * size_ + d] = kv[d * t.value_size + e];
        if (z) std::copy_n(z, t.key_size, state.z);
    }

    int64_t state_pitch() const { return size_; }

    void load_written(int64_t start) { this->load_keys(start); }

    // Compute the state after the chunk.
    void advance(const State& before, State& after) const {
        this->advance_keys(before.z, after.z);
        add_products(before.kv, after.kv, v_, k_written_, count_);
    }

    // after[e][:] = before[e][:] decayed + sum over rows r of values[r][e] keys[r][:].
    void add_products(const Real* before, Real* after, const Real* values, const Real* keys,
                      int64_t rows) const {
        for_columns(size_, [&](auto vectors, int64_t column) {
            constexpr int V = decltype(vectors)::value, R = TILE / V;
            Reals total[V];
            for (int j = 0; j < V; ++j) total[j] = load(total_ + column + j * LANES);
            for (int64_t e = 0; e < width_; e += R) {
                const int64_t at = e * size_ + column;
                Reals sums[R][V];
                for (int r = 0; r < R; ++r)
                    for (int j = 0; j < V; ++j) {
                        sums[r][j] = load(before + at + r * size_ + j * LANES);
                        if (t.decays) sums[r][j] *= total[j];
                    }
                multiply(sums, values + e, 1, width_, keys + column, size_, rows);
                for (int r = 0; r < R; ++r)
                    for (int j = 0; j < V; ++j)
                        store(after + at + r * size_ + j * LANES, sums[r][j]);
            }
        });
    }

    // Compute the gradients of a chunk.
    void differentiate(const State& state) {
        next_ = -CHUNK;
        this->load_keys(state.start);
        this->load_queries();
        this->compute_scores();
        load_output_gradients();
        const bool scores = needed_.q || needed_.k || needed_.decay;
        if (scores) differentiate_scores(state);
        if (needed_.v) differentiate_values();
        if (needed_.k || needed_.decay) differentiate_writes();
        if (needed_.decay) differentiate_state_decay(state);
        if (scores) t.decays > 1 ? differentiate_channels() : differentiate_tokens();
        store_gradients();
        if (needs_state(start_)) differentiate_state();
    }

    // Compute only the gradient of the state before a chunk, which does not depend on the chunk's
    // keys, values and state.
    void skip(int64_t start) {
        next_ = -CHUNK;
        this->begin(start);
        this->load_decays();
        this->load_queries();
        load_output_gradients();
        differentiate_state();
    }

    // Load the gradients of numerators and of sums of weights.
    void load_output_gradients() {
        for (int64_t g = 0; g < groups_; ++g) {
            Real* d_out = d_out_ + g * CHUNK * width_;
            const int64_t head = head_ * groups_ + g, query = t.query(s_.row, head, start_);
            this->load_rows(out_.d_out, head, 0, t.value_size, width_, Real(1), d_out);
            if (out_.d_totals) load_sums(out_.d_totals + query, d_sums_ + g * CHUNK);
            if (!t.normalize) continue;
            load_sums(t.sums + query, inverse_ + g * CHUNK);
            this->load_rows(t.out, head, 0, t.value_size, width_, Real(1), outputs_);
            for (int i = 0; i < CHUNK; ++i)
                this->scale_row(d_out + i * width_, inverse_[g * CHUNK + i], width_,
                                d_out + i * width_);
            add_lanes_of_rows(CHUNK, d_sums_ + g * CHUNK, [&](int64_t i) {
                Reals sum{};
                for (int64_t e = i * width_; e < (i + 1) * width_; e += LANES)
                    sum -= load(outputs_ + e) * load(d_out + e);
                return sum;
            });
        }
    }

    // Copy one number per token of the chunk, followed by zeros.
    void load_sums(const Real* from, Real* to) const {
        std::copy_n(from, count_, to);
        std::fill_n(to + count_, CHUNK - count_, Real(0));
    }

    // Compute the gradients of the scores and of the decayed queries.
    void differentiate_scores(const State& state) {
        transpose(v_, width_, CHUNK, width_, v_columns_, CHUNK);
        product(d_scores_, CHUNK, rows_, d_out_, width_, 1, v_columns_, CHUNK, CHUNK, width_);
        if (reads_)
            product(d_read_, size_, rows_, d_out_, width_, 1, state.kv, size_, size_, width_);
        for (int64_t r = 0; sums() && r < rows_; ++r) {
            const Reals d_sum = broadcast(d_sums_[r]);
            for (int64_t w = r * CHUNK; w < (r + 1) * CHUNK; w += LANES)
                store(d_scores_ + w, load(d_scores_ + w) + d_sum);
            for (int64_t d = 0; reads_ && d < size_; d += LANES) {
                Real* read = d_read_ + r * size_ + d;
                store(read, load(read) + d_sum * load(state.z + d));
            }
        }
        for (int64_t r = 0; r < rows_; ++r)
            for (int w = 0; w < CHUNK; w += LANES) {
                Real* d_score = d_scores_ + r * CHUNK + w;
                store(d_score, lane_numbers(w) <= (int)(r % CHUNK) ? load(d_score) : Reals{});
            }
    }

    void differentiate_values() {
        const Real* k_columns = k_columns_;
        if (t.decays > 1) transpose(k_written_, size_, CHUNK, size_, k_columns_, CHUNK);
        product(dv_columns_, CHUNK, width_, d_state_.kv, size_, 1, k_columns, CHUNK, CHUNK, size_);
        transpose(dv_columns_, CHUNK, width_, CHUNK, dv_, width_);
        if (t.decays == 1)
            for (int i = 0; i < CHUNK; ++i)
                this->scale_row(dv_ + i * width_, after_[i], width_, dv_ + i * width_);
        add_later(dv_, scores_, d_out_, width_);
    }

    void differentiate_writes() {
        product(d_written_, size_, CHUNK, v_, width_, 1, d_state_.kv, size_, size_, width_);
        for (int64_t i = 0; i < keys_; i += size_)
            for (int64_t d = 0; d < size_; d += LANES)
                store(d_written_ + i + d, load(d_written_ + i + d) + load(d_state_.z + d));
    }

    // out[j][:] += sum over query heads and tokens i >= j of weights[i][j] rows[i][:].
    void add_later(Real* out, const Real* weights, const Real* rows, int64_t width) const {
        for_columns(width, [&](auto vectors, int64_t column) {
            constexpr int V = decltype(vectors)::value, R = std::min(TILE / V, CHUNK);
            for (int first = 0; first < count_; first += R) {
                Reals sums[R][V] = {};
                for (int64_t g = 0; g < groups_; ++g)
                    multiply(sums, weights + (g * CHUNK + first) * CHUNK + first, 1, CHUNK,
                             rows + (g * CHUNK + first) * width + column, width, count_ - first);
                for (int r = 0; r < R; ++r)
                    for (int j = 0; j < V; ++j) {
                        Real* x = out + (first + r) * width + column + j * LANES;
                        store(x, load(x) + sums[r][j]);
                    }
            }
        });
    }

    // Compute the gradient of the logarithm of the state decay: the decay times its gradient.
    void differentiate_state_decay(const State& state) {
        for (int64_t d = 0; d < size_; d += LANES) {
            Reals sums[2] = {load(state.z + d) * load(d_state_.z + d), Reals{}};
            for (int64_t e = 0; e < width_; e += 2)
                for (int u = 0; u < 2; ++u) {
                    const int64_t at = (e + u) * size_ + d;
                    sums[u] += load(state.kv + at) * load(d_state_.kv + at);
                }
            store(d_total_ + d, (sums[0] + sums[1]) * load(total_ + d));
        }
    }

    // Compute the gradient of the state before the chunk from that of the state after it.
    void differentiate_state() {
        add_products(d_state_.kv, d_state_.kv, d_out_, q_read_, rows_);
        for (int64_t d = 0; d < size_; d += LANES) {
            Reals sum = load(d_state_.z + d);
            if (t.decays) sum *= load(total_ + d);
            for (int64_t r = 0; sums() && r < rows_; ++r)
                sum += load(q_read_ + r * size_ + d) * d_sums_[r];
            store(d_state_.z + d, sum);
        }
    }

    // Compute the gradients of keys, queries and log decays, with one decay per token or none.
    void differentiate_tokens() {
        if (needed_.decay) differentiate_decays();
        for (int64_t r = 0; t.decays && r < rows_; ++r)
            for (int w = 0; w < CHUNK; w += LANES) {
                Real* d_score = d_scores_ + r * CHUNK + w;
                store(d_score, load(d_score) * load(pairs_ + r % CHUNK * CHUNK + w));
            }
        if (needed_.k) {
            for (int i = 0; i < CHUNK; ++i)
                this->scale_row(d_written_ + i * size_, t.decays ? after_[i] : Real(1), size_,
                                dk_ + i * size_);
            add_later(dk_, d_scores_, q_, size_);
        }
        if (!needed_.q) return;
        for_columns(size_, [&](auto vectors, int64_t column) {
            constexpr int V = decltype(vectors)::value, R = std::min(TILE / V, CHUNK);
            for (int64_t row = 0; row < rows_; row += R) {
                const int first = (int)(row % CHUNK);
                Reals sums[R][V] = {};
                multiply(sums, d_scores_ + row * CHUNK, CHUNK, 1, k_ + column, size_, first + R);
                for (int r = 0; r < R; ++r)
                    for (int j = 0; j < V; ++j) {
                        const int64_t at = (row + r) * size_ + column + j * LANES;
                        const Reals read = load(d_read_ + at);
                        store(dq_ + at,
                              sums[r][j] + (t.decays ? read * before_[first + r] : read));
                    }
            }
        });
    }

    // Compute the gradient of each log decay i: add up the terms of all values that decay with
    // token i. These are reads of the state by tokens i and later, writes to the state by earlier
    // tokens, scores of the former with the latter, and the state itself.
    void differentiate_decays() {
        add_lanes_of_rows(CHUNK, dk_, [&](int64_t i) {
            Reals sum{};
            for (int64_t g = 0; g < groups_; ++g)
                for (int64_t d = 0; d < size_; d += LANES) {
                    const int64_t at = (g * CHUNK + i) * size_ + d;
                    sum += load(q_read_ + at) * load(d_read_ + at);
                }
            return sum;
        });
        add_lanes_of_rows(CHUNK, written_sums_, [&](int64_t i) {
            Reals sum{};
            for (int64_t at = i * size_; at < (i + 1) * size_; at += LANES)
                sum += load(k_written_ + at) * load(d_written_ + at);
            return sum;
        });
        Reals sums[WIDE] = {}, pairs[CHUNK];
        for (int i = CHUNK - 1; i >= 0; --i) {
            pairs[i] = Reals{};
            for (int w = 0; w < WIDE; ++w) {
                for (int64_t g = 0; g < groups_; ++g) {
                    const int64_t at = (g * CHUNK + i) * CHUNK + w * LANES;
                    sums[w] += load(scores_ + at) * load(d_scores_ + at);
                }
                pairs[i] += lane_numbers(w * LANES) < i ? sums[w] : Reals{};
            }
        }
        add_lanes_of_rows(CHUNK, d_log_, [&](int64_t i) { return pairs[i]; });
        Real state = 0, read = 0, written = 0;
        for (int64_t d = 0; d < size_; ++d) state += d_total_[d];
        for (int i = CHUNK - 1; i >= 0; --i) d_log_[i] += read += dk_[i];
        for (int i = 0; i < CHUNK; written += written_sums_[i++]) d_log_[i] += state + written;
    }

    // Compute the gradients of keys, queries and log decays, with one decay per key channel.
    void differentiate_channels() {
        for (int64_t d = 0; d < size_; d += LANES) {
            Reals read{};
            for (int i = CHUNK - 1; i >= 0; --i) {
                const int64_t at = i * size_ + d;
                const Reals before = load(before_ + at);
                store(dk_ + at, load(d_written_ + at) * load(after_ + at));
                for (int64_t g = 0; g < groups_; ++g) {
                    const Reals d_read = load(d_read_ + g * keys_ + at);
                    store(dq_ + g * keys_ + at, d_read * before);
                    read += load(q_read_ + g * keys_ + at) * d_read;
                }
                store(d_log_ + at, read);
            }
            Reals written = load(d_total_ + d);
            for (int64_t at = d; at < keys_; at += size_) {
                store(d_log_ + at, load(d_log_ + at) + written);
                written += load(k_written_ + at) * load(d_written_ + at);
            }
            for (int j = 0; j < count_; ++j) differentiate_pairs(j, d);
        }
    }

    // Add the terms of the scores of key j with the queries of tokens j and later, in the vector of
    // channels that begins at d.
    void differentiate_pairs(int j, int64_t d) {
        const Real *q = q_ + d, *decay = decay_ + d;
        const Reals key = load(k_ + j * size_ + d);
        Reals d_key = load(dk_ + j * size_ + d), product = broadcast(1), terms[CHUNK];
        for (int i = j; i < count_; ++i) {
            if (i > j) product *= load(decay + i * size_);
            const Reals decayed = product * key;
            Reals sum{};
            for (int64_t g = 0; g < groups_; ++g) {
                const Real weight = d_scores_[(g * CHUNK + i) * CHUNK + j];
                Real* dq = dq_ + g * keys_ + i * size_ + d;
                store(dq, load(dq) + weight * decayed);
                sum += weight * load(q + g * keys_ + i * size_);
            }
            d_key += product * sum;
            terms[i] = decayed * sum;
        }
        store(dk_ + j * size_ + d, d_key);
        Reals sum{};
        for (int i = count_ - 1; i > j; --i) {
            sum += terms[i];
            store(d_log_ + i * size_ + d, load(d_log_ + i * size_ + d) + sum);
        }
    }

    // Store gradients of queries or keys before the feature map.
    void store_given(const Real* rows, const Tensor& tensor, int64_t head) const {
        this->store_rows(rows, t.given_size, given_ ? given_ / CHUNK : size_, tensor, head, 0);
    }

    void store_gradients() {
        if (needed_.q) store_query_gradients();
        if (needed_.k) store_key_gradients();
        if (needed_.v) this->store_rows(dv_, t.value_size, width_, out_.dv, head_, 0);
        if (needed_.decay)
            this->store_rows(d_log_, t.decays, t.decays > 1 ? size_ : 1, out_.d_log_decay, head_,
                             0);
    }

    void store_query_gradients() {
        if (t.scale != 1)
            for (int64_t i = 0; i < rows_ * size_; i += LANES)
                store(dq_ + i, load(dq_ + i) * Real(t.scale));
        for (int64_t g = 0; g < groups_; ++g) {
            const Real* dq = dq_ + g * keys_;
            if (given_)
                q_maps_[g].gradients(given_q_ + g * given_, is_token_, y_q_ + g * keys_,
                                     q_ + g * keys_, dq, out_.dq.data ? d_given_ : nullptr);
            if (out_.dq.data) store_given(given_ ? d_given_ : dq, out_.dq, head_ * groups_ + g);
        }
    }

    void store_key_gradients() {
        Real* d_given = out_.dk.data ? d_given_ : nullptr;
        if (given_) k_map_.gradients(given_k_, is_token_, y_k_, k_, dk_, d_given);
        if (out_.dk.data) store_given(given_ ? d_given : dk_, out_.dk, head_);
    }
};

// -- entry points ---------------------------------------------------------------------------------

// Return the task restricted to some key channels, for a feature map that acts on each channel alone.
// The state is not part of it: its heads are not contiguous.
template <class Real>
static Task<Real> select_channels(const Task<Real>& t, int64_t first, int64_t count) {
    Task<Real> part = t;
    part.k = t.k.from(first);
    part.key_size = part.given_size = count;
    part.k_map.size = pad(count);
    if (t.decays > 1) {
        part.log_decay = t.log_decay.from(first);
        part.decays = count;
    }
    return part;
}

// Sequences `first` to `last`, which a piece of work computes for a key head.
struct Bundle {
    int64_t first, last;
};

// Return the bundles of a call. Sequences of one row that begin in the same BUNDLE tokens are in one,
// because the buffers of a piece of work take as long as some tokens; except those of which `alone`
// is true. Sequences without tokens are left out if there are no states that they pass on.
template <class Real, class Alone>
static std::vector<Bundle> find_bundles(const Task<Real>& t, bool has_states, Alone alone) {
    constexpr int64_t ANY = -1, CLOSED = -2;
    std::vector<Bundle> bundles;
    int64_t open = CLOSED;  // which BUNDLE tokens the last bundle is of
    for (int64_t i = 0; i < t.batch; ++i) {
        const Sequence s = t.sequence(i);
        if (s.length() == 0 && !has_states) continue;
        const int64_t own = s.length() == 0            ? ANY
                            : !t.starts || alone(s) ? CLOSED
                                                    : s.first / BUNDLE;
        const bool fits = open != CLOSED && (own == ANY || own == open || (open == ANY && own >= 0));
        if (fits) bundles.back().last = i;
        else bundles.push_back({i, i});
        if (!fits || open == ANY) open = own;
    }
    return bundles;
}

// Return into how many pieces a key head of a sequence is divided if all threads have equal work.
template <class Real>
static int64_t count_pieces(const Task<Real>& t, const Sequence& s, int64_t total) {
    if (total == 0) return 1;
    return (s.length() * t.threads + total * t.heads - 1) / (total * t.heads);
}

// A sequence whose tokens are divided into parts.
struct DividedSequence {
    Sequence sequence;
    std::vector<int64_t> cuts;  // first tokens of the parts, and the end
    int64_t states;             // index of the states before parts 1 and later, [H, parts - 1]
};

// Compute the states before the parts of sequences, in parallel over key channels, or over columns
// of the values if channels depend on each other.
template <class Forward, class Real>
static void compute_states(const Task<Real>& t, const std::vector<DividedSequence>& divided,
                           int64_t most_pieces, Real* states) {
    const int64_t matrix = t.key_size * t.value_size, step = matrix + t.key_size;
    const bool by_channels = t.k_map.acts_on_channels();
    const int64_t size = by_channels ? t.key_size : t.value_size;
    const int64_t panels = std::min(pad(size) / 16, most_pieces);
    const int64_t panel = pad((size + panels - 1) / panels);
    in_threads((int64_t)divided.size() * t.heads * panels, t.threads, [&](int64_t i) {
        const FlushDenormals flush;
        const DividedSequence& d = divided[i / panels / t.heads];
        const int64_t head = i / panels % t.heads, first = i % panels * panel;
        if (first >= size) return;
        const int64_t count = std::min(panel, size - first);
        const int64_t channel = by_channels ? first : 0, column = by_channels ? 0 : first;
        const int64_t index = d.sequence.number * t.heads + head;
        const Task<Real> part = by_channels ? select_channels(t, first, count) : t;
        Real* kv = states + (d.states + head * ((int64_t)d.cuts.size() - 2)) * step;
        Forward(part, head, 0, 1, column, by_channels ? t.value_size : count)
            .compute_states(d.sequence, d.cuts,
                            t.kv ? t.kv + index * matrix + channel * t.value_size : nullptr,
                            t.z ? t.z + index * t.key_size + channel : nullptr,
                            kv + channel * t.value_size, kv + matrix + channel, step);
    });
}

// A piece of work of each key head: a bundle, or tokens `begin` to `end` - 1 of one sequence.
struct ForwardPiece {
    Bundle bundle;
    int64_t begin, end;              // of a bundle of several sequences, those of the last one
    int64_t states, step;            // index of the state before `begin` of head 0, and from head to
                                     // head; -1 for the state before the sequence
    int64_t group, groups, column, columns;
};

// Divide a key head of a sequence into `wanted` pieces: its tokens, after the states before the parts
// are computed. Few tokens are not divided; the pieces of work are then query heads and columns of
// the values. `states` is the number of states that earlier sequences need.
template <class Real>
static void divide(const Task<Real>& t, const Sequence& s, int64_t wanted, int64_t& states,
                   std::vector<DividedSequence>& divided, std::vector<ForwardPiece>& pieces) {
    const int64_t parts = s.spans() < 2 * wanted ? 1 : wanted;
    const int64_t groups = std::min(t.groups, (wanted + parts - 1) / parts);
    const int64_t blocks = pad(t.value_size) / 16;  // of columns
    const int64_t panels = std::min(blocks, (wanted + parts * groups - 1) / (parts * groups));
    const int64_t panel = pad((t.value_size + panels - 1) / panels);
    std::vector<int64_t> cuts;
    for (int64_t p = 0; p <= parts; ++p) cuts.push_back(s.span_start(p * s.spans() / parts));
    for (int64_t p = 0; p < parts; ++p)
        for (int64_t g = 0; g < groups; ++g)
            for (int64_t column = 0; column < t.value_size; column += panel) {
                const int64_t group = g * t.groups / groups;
                pieces.push_back({{s.number, s.number}, cuts[p], cuts[p + 1],
                                  p ? states + p - 1 : -1, parts - 1, group,
                                  (g + 1) * t.groups / groups - group, column,
                                  std::min(panel, t.value_size - column)});
            }
    if (parts == 1) return;
    divided.push_back({s, cuts, states});
    states += t.heads * (parts - 1);
}

// Sequences with more tokens than a thread's share are divided. Results do not depend on the number
// of threads.
template <class Forward, class Real>
static void forward(const Task<Real>& t) {
    if (t.heads == 0) return;
    const int64_t total = t.count_tokens();
    int64_t most_pieces = 1, states = 0;
    std::vector<DividedSequence> divided;
    std::vector<ForwardPiece> pieces;
    const auto is_divided = [&](const Sequence& s) { return count_pieces(t, s, total) > 1; };
    for (const Bundle& bundle : find_bundles(t, t.last_kv, is_divided)) {
        const Sequence s = t.sequence(bundle.last);
        const int64_t wanted = count_pieces(t, s, total);
        most_pieces = std::max(most_pieces, wanted);
        if (wanted > 1) divide(t, s, wanted, states, divided, pieces);
        else pieces.push_back({bundle, s.first, s.end, -1, 0, 0, t.groups, 0, t.value_size});
    }
    const int64_t state_size = t.key_size * (t.value_size + 1);
    std::vector<Real> before(states * state_size);  // before parts of divided sequences
    if (states) compute_states<Forward>(t, divided, most_pieces, before.data());
    in_threads((int64_t)pieces.size() * t.heads, t.threads, [&](int64_t i) {
        const FlushDenormals flush;
        const ForwardPiece& p = pieces[i / t.heads];
        const int64_t head = i % t.heads;
        Forward pass(t, head, p.group, p.groups, p.column, p.columns);
        for (int64_t number = p.bundle.first; number < p.bundle.last; ++number) {
            const Sequence s = t.sequence(number);
            if (s.length() || t.last_kv) pass.run(s, s.first, s.end, nullptr);
        }
        const Real* state =
            p.states < 0 ? nullptr : before.data() + (p.states + head * p.step) * state_size;
        pass.run(t.sequence(p.bundle.last), p.begin, p.end, state);
    });
}

// A piece of work of each key head: a bundle, but only spans `begin` to `end` - 1 of the last
// sequence.
struct BackwardPiece {
    Bundle bundle;
    int64_t begin, end;
};

// Divide the spans of a sequence into parts, and return their first spans, and the end. Earlier parts
// have more later tokens, so they are shorter; `cost` is that of a later token, relative to one of the
// part. The first part has a span, because it stores gradients of weights for its bundle.
static std::vector<int64_t> divide_spans(int64_t spans, int64_t parts, double cost) {
    std::vector<int64_t> ends(parts + 1, 0);
    std::vector<double> sizes(parts, 1);
    double total = 0, sum = 0;
    for (int64_t p = parts - 1; p >= 0; --p) {
        sizes[p] = std::max(0.0, 1 - cost * total);
        total += sizes[p];
    }
    for (int64_t p = 0; p < parts; ++p) {
        sum += sizes[p];
        ends[p + 1] = std::max(std::llround(spans * sum / total), std::min<long long>(spans, 1));
    }
    return ends;
}

// The tokens of sequences with more than a thread's share are divided into parts, one per piece of
// work. Each piece first propagates the gradient of the state back through all later tokens, with the
// same operations as the pieces that contain them, so results do not depend on the number of threads.
template <class Backward, class Real>
static void backward(const Task<Real>& t, const Gradients<Real>& out) {
    if (t.heads == 0) return;
    const double cost = !Needed(t, out).state ? 0 : t.decays > 1 ? 0.3 : t.decays ? 0.2 : 0.15;
    const int64_t total = t.count_tokens();
    std::vector<BackwardPiece> pieces;
    // A sequence of several spans is the last one of its bundle
    for (const Bundle& bundle : find_bundles(t, out.d_kv, [](const Sequence&) { return false; })) {
        const Sequence s = t.sequence(bundle.last);
        const int64_t parts =
            std::max<int64_t>(1, std::min(count_pieces(t, s, total), s.spans()));
        const std::vector<int64_t> ends = divide_spans(s.spans(), parts, cost);
        pieces.push_back({bundle, 0, ends[1]});
        for (int64_t p = 1; p < parts; ++p)
            if (ends[p] < ends[p + 1])
                pieces.push_back({{s.number, s.number}, ends[p], ends[p + 1]});
    }
    in_threads((int64_t)pieces.size() * t.heads, t.threads, [&](int64_t i) {
        const FlushDenormals flush;
        const BackwardPiece& p = pieces[i / t.heads];
        Backward pass(t, out, i % t.heads);
        Sequence with_tokens;
        for (int64_t number = p.bundle.last; number >= p.bundle.first; --number) {
            const Sequence s = t.sequence(number);
            const bool is_last = number == p.bundle.last;
            if (s.length()) with_tokens = s;
            if (s.length() || out.d_kv)
                pass.run(s, is_last ? p.begin : 0, is_last ? p.end : s.spans());
        }
        if (p.begin == 0 && with_tokens.length()) pass.store_weight_gradients(with_tokens, 0);
    });
}

// All are refused if the sequences are not within the row.

extern "C" int64_t linear_forward_float(const Task<float>* task) {
    if (!task->are_sequences_inside()) return REFUSED;
    forward<LinearForward<float>>(*task);
    return ACCEPTED;
}
extern "C" int64_t linear_forward_double(const Task<double>* task) {
    if (!task->are_sequences_inside()) return REFUSED;
    forward<LinearForward<double>>(*task);
    return ACCEPTED;
}
extern "C" int64_t linear_backward_float(const Task<float>* task, const Gradients<float>* out) {
    if (!task->are_sequences_inside()) return REFUSED;
    backward<LinearBackward<float>>(*task, *out);
    return ACCEPTED;
}
extern "C" int64_t linear_backward_double(const Task<double>* task, const Gradients<double>* out) {
    if (!task->are_sequences_inside()) return REFUSED;
    backward<LinearBackward<double>>(*task, *out);
    return ACCEPTED;
}

CALLED_FROM_PYTHON(feature_map_names, linear_forward_float, linear_forward_double,
                   linear_backward_float, linear_backward_double)
