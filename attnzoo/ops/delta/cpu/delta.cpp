// The delta rule on a CPU: forward and backward pass, chunk by chunk, and decoding of one token.
//
//     S_t = (I - b_t k_t k_t^T) Diag(a_t) S_{t-1} + b_t k_t v_t^T,     o_t = scale q_t S_t
//
// A chunk has at most CHUNK tokens of one sequence. Token i writes k_i x_i^T to the state. With the state S before the chunk, forward substitution gives
//     x_i = b_i (v_i - (k_i decayed) S - sum over j < i of KK_ij x_j),
// with KK_ij = sum over d of k_id L_ijd k_jd, where L_ij is the product of the decays of tokens
// j + 1 to i. Every decay is such a product of numbers in [0, 1], never an inverse or a difference,
// so no decay overflows or cancels.
//
// work     some columns of the values of one key head; its queries, keys and state stay in caches
// reads    q, k, v, beta and log decay in place, with stride 1 in the last dimension
// writes   out, the state after the last token of each sequence, and for the backward pass one state
//          per SPAN tokens; nothing between sequences
// limits   D and E multiples of 16; chunk at most CHUNK
// oracle   delta_attention(impl="reference"), float64 included
//
// Letters: B rows of tokens, S sequences: the rows, or parts of the one row, H key
// heads, G query heads per key head, T tokens of a row, D key size, E value size, F decays per token
// (0, 1 or D), P columns of values of one piece of work.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <deque>
#include <type_traits>
#include <vector>

#include "checks.h"
#include "layout.h"
#include "threads.h"
#include "tiles.h"

constexpr int CHUNK = 16;   // tokens
constexpr int SPAN = 128;   // tokens between the states that the forward pass stores
constexpr int PIECE = 64;   // tokens: shorter sequences share a piece of work, and its buffers

template <class Real>
struct Task {
    int64_t threads, batch, heads, groups, tokens, key_size, value_size;
    int64_t sequences, longest;              // S; the most tokens of one in the one row
    int64_t panel;                           // columns of values in one piece of work
    int64_t chunk;                           // tokens, at most CHUNK
    int64_t decays;                          // per token: 0, 1 or D
    int64_t q_steps[3], k_steps[3], v_steps[3], beta_steps[3];  // strides of batch, head, token
    int64_t decay_steps[3], out_steps[3];
    double scale;                            // factor of queries
    const Real *q, *k, *v, *beta, *log_decay;
    const Real* state;                       // [S, H, D, E] before the first tokens; null: zeros
    Real *out, *last_state;                  // last_state: [S, H, D, E], or null
    Real* kept;                              // [B, (T - 1) / SPAN, H, D, E]: states, or null
    const int64_t *starts, *lengths;         // of the sequences in the one row, [S]; null: rows

    FIELDS(threads, batch, heads, groups, tokens, key_size, value_size, sequences, longest, panel,
           chunk, decays, q_steps, k_steps, v_steps, beta_steps, decay_steps, out_steps, scale, q, k, v,
           beta, log_decay, state, out, last_state, kept, starts, lengths)

    int64_t panels() const { return (value_size + panel - 1) / panel; }
    bool are_sequences_inside() const {
        return !starts || are_sequences(starts, lengths, sequences, tokens, longest);
    }

    int64_t length(int64_t sequence) const { return lengths ? lengths[sequence] : tokens; }

    // Return the first sequence of each piece of work, and S.
    std::vector<int64_t> pieces() const {
        std::vector<int64_t> firsts;
        int64_t count = PIECE;
        for (int64_t i = 0; i < sequences; ++i) {
            if (count >= PIECE && (firsts.empty() || length(i))) firsts.push_back(i), count = 0;
            count += length(i);
        }
        firsts.push_back(sequences);
        return firsts;
    }
};

// The tensors of a chunk. Rows after its last token are zero.
template <class Real>
struct Chunk {
    Buffer<Real> buffer;
    int64_t start = 0;     // in its row
    int count = 0;         // tokens
    Real *k, *q;           // [CHUNK, D], [G, CHUNK, D]: keys, scaled queries
    Real *k_read, *q_read, *k_written;  // k and q decayed from the chunk's start; k to its end
    Real *kk, *qk;         // [CHUNK, CHUNK], [G, CHUNK, CHUNK]: decayed products with keys
    Real *decay, *before, *after;  // [CHUNK, F]: decays; products from the start; to the end
    Real *pairs;           // [CHUNK, CHUNK]: products of decays between tokens, F = 1
    Real *total;           // [D]: decay of the state over the chunk; 1 without decays
    Real *beta;            // [CHUNK]
    Real *state, *x, *error;  // [D, P] before the chunk; [CHUNK, P]: x; x before beta

    Chunk(const Task<Real>& t, int64_t width)
        : buffer(CHUNK * (t.key_size * (t.decays ? 3 + 2 * t.groups : 1 + t.groups) +
                          (2 + t.groups) * CHUNK + 3 * std::max<int64_t>(t.decays, CHUNK) + CHUNK +
                          2 * width) + t.key_size * (1 + width)) {
        const int64_t keys = CHUNK * t.key_size, square = CHUNK * CHUNK;
        k = buffer.take(keys);
        q = buffer.take(t.groups * keys);
        k_read = t.decays ? buffer.take(keys) : k;
        k_written = t.decays ? buffer.take(keys) : k;
        q_read = t.decays ? buffer.take(t.groups * keys) : q;
        kk = buffer.take(square);
        qk = buffer.take(t.groups * square);
        pairs = buffer.take(square);
        const int64_t size = CHUNK * std::max<int64_t>(t.decays, CHUNK);
        decay = buffer.take(size);
        before = buffer.take(size);
        after = buffer.take(size);
        total = buffer.take(t.key_size);
        std::fill_n(total, t.key_size, Real(1));
        beta = buffer.take(square);
        x = buffer.take(CHUNK * width);
        error = buffer.take(CHUNK * width);
        state = buffer.take(t.key_size * width);
    }

    // Forget the values of an earlier sequence: rows after the last token must be zero.
    void clear(int64_t width) {
        std::fill_n(x, CHUNK * width, Real(0));
        std::fill_n(error, CHUNK * width, Real(0));
    }
};

template <class Real>
class DeltaRule : protected Tiles<Real> {
  protected:
    using typename Tiles<Real>::Reals;
    using typename Tiles<Real>::Ints;
    using Tiles<Real>::LANES, Tiles<Real>::load, Tiles<Real>::store, Tiles<Real>::broadcast;
    using Tiles<Real>::multiply, Tiles<Real>::for_columns, Tiles<Real>::product;
    using Tiles<Real>::transpose, Tiles<Real>::add_lanes, Tiles<Real>::dot;
    using Tiles<Real>::lane_numbers, Tiles<Real>::exp, Tiles<Real>::scale_row;
    static constexpr int WIDE = CHUNK / LANES;  // vectors per row of CHUNK tokens

    const Task<Real>& t;
    const int64_t head_, column_, size_, width_;
    int64_t sequence_ = 0, row_ = 0, first_ = 0, length_ = 0;  // first_: token in its row
    Buffer<Real> buffer_;
    Real *zeros_, *transposed_;  // [P]; [D, CHUNK]

    // Work on columns `column` to `column + width - 1` of the values of key head `head`.
    DeltaRule(const Task<Real>& task, int64_t head, int64_t panel)
        : t(task), head_(head), column_(panel * t.panel), size_(t.key_size),
          width_(std::min(t.panel, t.value_size - column_)), buffer_(width_ + size_ * CHUNK),
          zeros_(buffer_.take(width_)), transposed_(buffer_.take(size_ * CHUNK)) {}

    void begin(int64_t sequence) {
        sequence_ = sequence;
        row_ = t.starts ? 0 : sequence;
        first_ = t.starts ? t.starts[sequence] : 0;
        length_ = t.length(sequence);
    }

    // -- a chunk ----------------------------------------------------------------------------------

    // Load the tokens of the chunk that begins at token `start` of the sequence, and compute
    // everything that does not depend on the state.
    void prepare(Chunk<Real>& c, int64_t start) {
        const int previous = c.count;
        const int64_t end = std::min(length_, (start / SPAN + 1) * SPAN);
        c.start = first_ + start;
        c.count = (int)std::min(t.chunk, end - start);
        const Real* beta = t.beta + row_ * t.beta_steps[0] + head_ * t.beta_steps[1];
        for (int i = 0; i < CHUNK; ++i)
            c.beta[i] = i < c.count ? beta[(c.start + i) * t.beta_steps[2]] : Real(0);
        copy_rows(t.k, t.k_steps, head_, c, previous, Real(1), c.k);
        for (int64_t g = 0; g < t.groups; ++g)
            copy_rows(t.q, t.q_steps, head_ * t.groups + g, c, previous, Real(t.scale),
                      c.q + g * CHUNK * size_);
        transpose(c.k, size_, CHUNK, size_, transposed_, CHUNK);
        if (t.decays > 1)
            decay_channels(c);
        else
            decay_tokens(c);
    }

    void copy_rows(const Real* tensor, const int64_t* steps, int64_t head, const Chunk<Real>& c,
                   int previous, Real factor, Real* out) const {
        const Real* rows = tensor + row_ * steps[0] + head * steps[1] + c.start * steps[2];
        for (int i = 0; i < std::max(c.count, previous); ++i)
            for (int64_t d = 0; d < size_; d += LANES)
                store(out + i * size_ + d,
                      i < c.count ? load(rows + i * steps[2] + d) * factor : Reals{});
    }

    // Compute the decays and the products of a chunk without decay or with one decay per token.
    void decay_tokens(Chunk<Real>& c) const {
        if (t.decays) {
            const Real* log_decay = t.log_decay + row_ * t.decay_steps[0] +
                                    head_ * t.decay_steps[1] + c.start * t.decay_steps[2];
            Real product = 1;
            for (int i = 0; i < CHUNK; ++i) {
                c.decay[i] = i < c.count ? std::exp(log_decay[i * t.decay_steps[2]]) : Real(1);
                c.before[i] = product *= c.decay[i];
            }
            for (int i = CHUNK - 1; i >= 0; --i)
                c.after[i] = i == CHUNK - 1 ? Real(1) : c.after[i + 1] * c.decay[i + 1];
            std::fill_n(c.total, size_, product);
            for (int i = 0; i < CHUNK; ++i) {
                scale_row(c.k + i * size_, c.before[i], size_, c.k_read + i * size_);
                scale_row(c.k + i * size_, c.after[i], size_, c.k_written + i * size_);
                for (int64_t g = i; g < t.groups * CHUNK; g += CHUNK)
                    scale_row(c.q + g * size_, c.before[i], size_, c.q_read + g * size_);
            }
        }
        product(c.kk, CHUNK, CHUNK, c.k, size_, 1, transposed_, CHUNK, CHUNK, size_);
        product(c.qk, CHUNK, t.groups * CHUNK, c.q, size_, 1, transposed_, CHUNK, CHUNK, size_);
        Reals pairs[WIDE] = {};
        for (int i = 0; i < CHUNK; ++i)
            for (int w = 0; w < WIDE; ++w) {
                const Ints lanes = lane_numbers(w * LANES);
                if (t.decays) pairs[w] *= c.decay[i];
                pairs[w] = lanes == i ? broadcast(1) : pairs[w];
                const int64_t at = i * CHUNK + w * LANES;
                store(c.pairs + at, pairs[w]);
                store(c.kk + at, lanes < i ? load(c.kk + at) * pairs[w] : Reals{});
                for (int64_t g = 0; g < t.groups; ++g) {
                    Real* qk = c.qk + g * CHUNK * CHUNK + at;
                    store(qk, lanes <= i ? load(qk) * pairs[w] : Reals{});
                }
            }
    }

    // Compute the decays and the products of a chunk with one decay per key channel.
    void decay_channels(Chunk<Real>& c) const {
        const Real* log_decay = t.log_decay + row_ * t.decay_steps[0] + head_ * t.decay_steps[1] +
                                c.start * t.decay_steps[2];
        for (int64_t d = 0; d < size_; d += LANES) {
            Reals product = broadcast(1);
            for (int i = 0; i < CHUNK; ++i) {
                const int64_t at = i * size_ + d;
                const Reals decay = i < c.count ? exp(load(log_decay + i * t.decay_steps[2] + d))
                                                : broadcast(1);
                product *= decay;
                store(c.decay + at, decay);
                store(c.before + at, product);
                store(c.k_read + at, load(c.k + at) * product);
                for (int64_t g = 0; g < t.groups; ++g)
                    store(c.q_read + g * CHUNK * size_ + at,
                          load(c.q + g * CHUNK * size_ + at) * product);
            }
            store(c.total + d, product);
            product = broadcast(1);
            for (int i = CHUNK - 1; i >= 0; --i) {
                const int64_t at = i * size_ + d;
                store(c.after + at, product);
                store(c.k_written + at, load(c.k + at) * product);
                product *= load(c.decay + at);
            }
        }
        for (int i = 0; i < CHUNK; ++i) decay_keys(c, i);
    }

    // Multiply the transposed keys of earlier tokens by the decays of token i, in place, and then
    // by its key and queries. The calls for tokens 0 to i accumulate L_ij k_j. Keys of later tokens
    // are not decayed yet; their products are discarded.
    void decay_keys(Chunk<Real>& c, int i) const {
        const Real *k = c.k + i * size_, *decay = c.decay + i * size_;
        for (int w = 0; w < WIDE; ++w) {
            const Ints lanes = lane_numbers(w * LANES);
            Reals sums[4] = {}, q_sums[4] = {};
            for (int64_t d = 0; d < size_; d += 4)
                for (int u = 0; u < 4; ++u) {
                    Real* keys = transposed_ + (d + u) * CHUNK + w * LANES;
                    const Reals value = load(keys), decayed = value * decay[d + u];
                    const Reals now = lanes < i ? decayed : value;
                    store(keys, now);
                    sums[u] += k[d + u] * now;
                    q_sums[u] += c.q[i * size_ + d + u] * now;
                }
            const int64_t at = i * CHUNK + w * LANES;
            const Reals kk = (sums[0] + sums[1]) + (sums[2] + sums[3]);
            store(c.kk + at, lanes < i ? kk : Reals{});
            for (int64_t g = 0; g < t.groups; ++g) {
                if (g) {
                    const Real* q = c.q + (g * CHUNK + i) * size_;
                    for (auto& sum : q_sums) sum = Reals{};
                    for (int64_t d = 0; d < size_; d += 4)
                        for (int u = 0; u < 4; ++u)
                            q_sums[u] +=
                                q[d + u] * load(transposed_ + (d + u) * CHUNK + w * LANES);
                }
                const Reals qk = (q_sums[0] + q_sums[1]) + (q_sums[2] + q_sums[3]);
                store(c.qk + g * CHUNK * CHUNK + at, lanes <= i ? qk : Reals{});
            }
        }
    }

    // Compute x and the errors of a chunk from the state before it.
    void solve(Chunk<Real>& c) const {
        const Real* v = t.v + row_ * t.v_steps[0] + head_ * t.v_steps[1] +
                        c.start * t.v_steps[2] + column_;
        for_columns(width_, [&](auto vectors, int64_t column) {
            constexpr int V = decltype(vectors)::value, R = std::min(TILE / V, CHUNK);
            for (int first = 0; first < c.count; first += R) {
                Reals sums[R][V] = {};
                multiply(sums, c.k_read + first * size_, size_, 1, c.state + column, width_, size_);
                multiply(sums, c.kk + first * CHUNK, CHUNK, 1, c.x + column, width_, first);
                for (int r = 0; r < R; ++r) {
                    const int i = first + r;
                    const Real* value = i < c.count ? v + i * t.v_steps[2] + column : zeros_;
                    for (int j = 0; j < V; ++j) {
                        const Reals error = load(value + j * LANES) - sums[r][j];
                        const Reals x = error * c.beta[i];
                        store(c.error + i * width_ + column + j * LANES, error);
                        store(c.x + i * width_ + column + j * LANES, x);
                        for (int s = r + 1; s < R; ++s)
                            sums[s][j] += c.kk[(first + s) * CHUNK + i] * x;
                    }
                }
            }
        });
    }

    // Compute the state after a chunk; it may overwrite the state before the chunk.
    void advance(const Chunk<Real>& c, Real* state) const {
        for_columns(width_, [&](auto vectors, int64_t column) {
            constexpr int V = decltype(vectors)::value, R = TILE / V;
            for (int64_t d = 0; d < size_; d += R) {
                Reals sums[R][V] = {};
                multiply(sums, c.k_written + d, 1, size_, c.x + column, width_, c.count);
                for (int r = 0; r < R; ++r)
                    for (int j = 0; j < V; ++j) {
                        const int64_t at = (d + r) * width_ + column + j * LANES;
                        const Reals old = load(c.state + at);
                        store(state + at, old * c.total[d + r] + sums[r][j]);
                    }
            }
        });
    }

    // Copy this panel's columns of matrix `index` of [.., D, E] to [D, P]; null: zeros.
    void load_panel(const Real* matrices, int64_t index, Real* panel) const {
        if (!matrices) {
            std::fill_n(panel, size_ * width_, Real(0));
            return;
        }
        const Real* matrix = matrices + index * size_ * t.value_size;
        for (int64_t d = 0; d < size_; ++d)
            std::copy_n(matrix + d * t.value_size + column_, width_, panel + d * width_);
    }

    // Copy [D, P] back, if there are matrices.
    void store_panel(const Real* panel, Real* matrices, int64_t index) const {
        if (!matrices) return;
        Real* matrix = matrices + index * size_ * t.value_size;
        for (int64_t d = 0; d < size_; ++d)
            std::copy_n(panel + d * width_, width_, matrix + d * t.value_size + column_);
    }

    int64_t tokens_index() const { return row_ * t.heads + head_; }
    int64_t state_index() const { return sequence_ * t.heads + head_; }

    // Return the place of the state before token `start` of the sequence, a multiple of SPAN that
    // is not 0. Places of different sequences differ, wherever in the row they begin.
    int64_t kept_index(int64_t start) const {
        const int64_t place = (first_ + start) / SPAN - 1;
        return (row_ * ((t.tokens - 1) / SPAN) + place) * t.heads + head_;
    }
};

// -- the forward pass -----------------------------------------------------------------------------

template <class Real>
class DeltaForward : DeltaRule<Real> {
    using Base = DeltaRule<Real>;
    using typename Base::Reals;
    using Base::LANES, Base::load, Base::store, Base::multiply, Base::for_columns;
    using Base::t, Base::row_, Base::head_, Base::column_, Base::size_, Base::width_;
    using Base::length_;

    Chunk<Real> chunk_;

  public:
    DeltaForward(const Task<Real>& task, int64_t head, int64_t panel)
        : Base(task, head, panel), chunk_(task, width_) {}

    void run(int64_t sequence) {
        this->begin(sequence);
        if (!length_ && !t.last_state) return;
        chunk_.clear(width_);
        this->load_panel(t.state, this->state_index(), chunk_.state);
        for (int64_t start = 0; start < length_; start += chunk_.count) {
            if (t.kept && start && start % SPAN == 0)
                this->store_panel(chunk_.state, t.kept, this->kept_index(start));
            this->prepare(chunk_, start);
            this->solve(chunk_);
            for (int64_t g = 0; g < t.groups; ++g) compute_outputs(g);
            this->advance(chunk_, chunk_.state);
        }
        this->store_panel(chunk_.state, t.last_state, this->state_index());
    }

  private:
    // Compute the outputs of a query head.
    void compute_outputs(int64_t g) const {
        const Chunk<Real>& c = chunk_;
        const Real *q = c.q_read + g * CHUNK * size_, *qk = c.qk + g * CHUNK * CHUNK;
        Real* out = t.out + row_ * t.out_steps[0] + (head_ * t.groups + g) * t.out_steps[1] +
                    c.start * t.out_steps[2] + column_;
        for_columns(width_, [&](auto vectors, int64_t column) {
            constexpr int V = decltype(vectors)::value, R = std::min(TILE / V, CHUNK);
            for (int first = 0; first < c.count; first += R) {
                Reals sums[R][V] = {};
                multiply(sums, q + first * size_, size_, 1, c.state + column, width_, size_);
                multiply(sums, qk + first * CHUNK, CHUNK, 1, c.x + column, width_, first + R);
                for (int r = 0; r < std::min(R, c.count - first); ++r)
                    for (int j = 0; j < V; ++j)
                        store(out + (first + r) * t.out_steps[2] + column + j * LANES, sums[r][j]);
            }
        });
    }
};

// -- the backward pass ----------------------------------------------------------------------------

template <class Real>
struct Gradients {
    int64_t d_out_steps[3];
    const Real *d_out, *d_last_state;
    // Panels share queries, keys, betas and decays, so each writes its own term of their gradients:
    // [panels, B, H G, T, D], [panels, B, H, T, D], [panels, B, H, T] and [panels, B, H, T, F]. dv
    // is [B, H, T, E]. d_last_state and d_state are [S, H, D, E], or null.
    Real *dq, *dk, *d_beta, *d_log_decay, *dv, *d_state;

    FIELDS(d_out_steps, d_out, d_last_state, dq, dk, d_beta, d_log_decay, dv, d_state)
};

// Computes the states of a span again, then processes its chunks in reverse. With Z_i = b_i dx_i:
//     dx_j = (k_j decayed to the end) dS' + sum over i >= j of QK_ij do_i
//            - sum over i > j of KK_ij Z_i,     dKK_ij = -Z_i x_j,     dQK_ij = do_i x_j
template <class Real>
class DeltaBackward : DeltaRule<Real> {
    using Base = DeltaRule<Real>;
    using typename Base::Reals;
    using typename Base::Ints;
    using Base::LANES, Base::WIDE, Base::load, Base::store, Base::broadcast, Base::multiply;
    using Base::for_columns, Base::product, Base::transpose, Base::add_lanes, Base::dot;
    using Base::lane_numbers, Base::t, Base::row_, Base::head_, Base::column_, Base::size_;
    using Base::width_, Base::length_;

    const Gradients<Real>& out_;
    const int64_t panel_, rows_, keys_;  // rows of Z and of output gradients; elements of keys
    std::deque<Chunk<Real>> chunks_;     // of a span
    Buffer<Real> buffer_;
    Real *d_state_, *rows, *rows_t_, *x_t_;  // [D, P]; -Z and do [rows_, P]; transposed
    Real *read_t_, *read_, *written_t_, *written_;  // gradients of k_read and q_read; k_written
    Real *d_products_;           // gradients of KK and QK, [rows_, CHUNK]
    Real *dk_, *dq_, *dg_;       // [CHUNK, D], [G, CHUNK, D], [CHUNK, D]
    Real *d_total_, *d_beta_;    // [D]; [CHUNK, LANES]
    Real* both_;                 // [CHUNK, CHUNK]: decayed dKK plus its transpose

  public:
    DeltaBackward(const Task<Real>& task, const Gradients<Real>& out, int64_t head, int64_t panel)
        : Base(task, head, panel), out_(out), panel_(panel), rows_((1 + t.groups) * CHUNK),
          keys_(CHUNK * size_),
          buffer_(size_ * (width_ + 1) + 2 * rows_ * (width_ + size_) + CHUNK * width_ + 4 * keys_ +
                  t.groups * keys_ + (rows_ + 2 * CHUNK) * CHUNK),
          d_state_(buffer_.take(size_ * width_)), rows(buffer_.take(rows_ * width_)),
          rows_t_(buffer_.take(rows_ * width_)), x_t_(buffer_.take(CHUNK * width_)),
          read_t_(buffer_.take(rows_ * size_)), read_(buffer_.take(rows_ * size_)),
          written_t_(buffer_.take(keys_)), written_(buffer_.take(keys_)),
          d_products_(buffer_.take(rows_ * CHUNK)), dk_(buffer_.take(keys_)),
          dq_(buffer_.take(t.groups * keys_)), dg_(buffer_.take(keys_)),
          d_total_(buffer_.take(size_)), d_beta_(buffer_.take(CHUNK * CHUNK)),
          both_(buffer_.take(CHUNK * CHUNK)) {}

    void run(int64_t sequence) {
        this->begin(sequence);
        if (!length_ && !out_.d_state) return;
        this->load_panel(out_.d_last_state, this->state_index(), d_state_);
        for (Chunk<Real>& chunk : chunks_) chunk.clear(width_);
        for (int64_t span = (length_ + SPAN - 1) / SPAN - 1; span >= 0; --span) {
            size_t count = 0;
            const int64_t end = std::min(length_, (span + 1) * SPAN);
            for (int64_t start = span * SPAN; start < end; ++count) {
                if (count == chunks_.size()) chunks_.emplace_back(t, width_);
                Chunk<Real>& chunk = chunks_[count];
                if (count)
                    this->advance(chunks_[count - 1], chunk.state);
                else if (span)
                    this->load_panel(t.kept, this->kept_index(start), chunk.state);
                else
                    this->load_panel(t.state, this->state_index(), chunk.state);
                this->prepare(chunk, start);
                this->solve(chunk);
                start += chunk.count;
            }
            while (count--) differentiate(chunks_[count]);
        }
        this->store_panel(d_state_, out_.d_state, this->state_index());
    }

  private:
    void differentiate(const Chunk<Real>& c) {
        load_d_out(c);
        solve_transposed(c);
        transpose(rows, width_, rows_, width_, rows_t_, rows_);
        transpose(c.x, width_, CHUNK, width_, x_t_, CHUNK);
        product(read_t_, rows_, size_, c.state, width_, 1, rows_t_, rows_, rows_, width_);
        product(written_t_, CHUNK, size_, d_state_, width_, 1, x_t_, CHUNK, CHUNK, width_);
        product(d_products_, CHUNK, rows_, rows, width_, 1, x_t_, CHUNK, CHUNK, width_);
        transpose(read_t_, rows_, size_, rows_, read_, size_);
        transpose(written_t_, CHUNK, size_, CHUNK, written_, size_);
        for (int64_t d = 0; t.decays && d < size_; ++d)
            d_total_[d] = c.total[d] * dot(c.state + d * width_, d_state_ + d * width_, width_);
        differentiate_state(c);
        if (t.decays > 1)
            differentiate_channels(c);
        else
            differentiate_tokens(c);
        store_gradients(c);
    }

    void load_d_out(const Chunk<Real>& c) {
        std::fill_n(rows, CHUNK * width_, Real(0));
        for (int64_t g = 0; g < t.groups; ++g) {
            const Real* d_out = out_.d_out + row_ * out_.d_out_steps[0] +
                                (head_ * t.groups + g) * out_.d_out_steps[1] +
                                c.start * out_.d_out_steps[2] + column_;
            Real* copy = rows + (1 + g) * CHUNK * width_;
            for (int i = 0; i < CHUNK; ++i, copy += width_)
                if (i < c.count)
                    std::copy_n(d_out + i * out_.d_out_steps[2], width_, copy);
                else
                    std::fill_n(copy, width_, Real(0));
        }
    }

    // Compute -Z, the gradients of v, and those of beta, from the last token to the first.
    void solve_transposed(const Chunk<Real>& c) {
        std::fill_n(d_beta_, CHUNK * LANES, Real(0));
        Real* dv = out_.dv + (this->tokens_index() * t.tokens + c.start) * t.value_size + column_;
        for_columns(width_, [&](auto vectors, int64_t column) {
            constexpr int V = decltype(vectors)::value, R = std::min(TILE / V, CHUNK);
            for (int first = (c.count - 1) / R * R; first >= 0; first -= R) {
                Reals sums[R][V] = {};
                multiply(sums, c.k_written + first * size_, size_, 1, d_state_ + column, width_,
                         size_);
                for (int64_t g = 0; g < t.groups; ++g)
                    multiply(sums, c.qk + (g * CHUNK + first) * CHUNK + first, 1, CHUNK,
                             rows + ((1 + g) * CHUNK + first) * width_ + column, width_,
                             c.count - first);
                multiply(sums, c.kk + (first + R) * CHUNK + first, 1, CHUNK,
                         rows + (first + R) * width_ + column, width_, c.count - first - R);
                for (int r = R - 1; r >= 0; --r) {
                    const int i = first + r;
                    Reals d_beta{};
                    for (int j = 0; j < V; ++j) {
                        const Reals z = sums[r][j] * c.beta[i];
                        d_beta += sums[r][j] * load(c.error + i * width_ + column + j * LANES);
                        store(rows + i * width_ + column + j * LANES, -z);
                        if (i < c.count) store(dv + i * t.value_size + column + j * LANES, z);
                        for (int s = 0; s < r; ++s)
                            sums[s][j] -= c.kk[i * CHUNK + first + s] * z;
                    }
                    store(d_beta_ + i * LANES, load(d_beta_ + i * LANES) + d_beta);
                }
            }
        });
    }

    // Compute the gradient of the state before the chunk from that of the state after it.
    void differentiate_state(const Chunk<Real>& c) {
        for_columns(width_, [&](auto vectors, int64_t column) {
            constexpr int V = decltype(vectors)::value, R = TILE / V;
            for (int64_t d = 0; d < size_; d += R) {
                Reals sums[R][V] = {};
                multiply(sums, c.k_read + d, 1, size_, rows + column, width_, c.count);
                for (int64_t g = 0; g < t.groups; ++g)
                    multiply(sums, c.q_read + g * keys_ + d, 1, size_,
                             rows + (1 + g) * CHUNK * width_ + column, width_, c.count);
                for (int r = 0; r < R; ++r)
                    for (int j = 0; j < V; ++j) {
                        Real* state = d_state_ + (d + r) * width_ + column + j * LANES;
                        const Reals old = load(state);
                        store(state, old * c.total[d + r] + sums[r][j]);
                    }
            }
        });
    }

    // Compute the gradients of keys, queries and log decays, with one decay per token or none.
    void differentiate_tokens(const Chunk<Real>& c) {
        if (t.decays) differentiate_decays(c);
        for (int i = 0; i < CHUNK; ++i)
            for (int64_t g = 0; g <= t.groups; ++g)
                for (int w = 0; w < WIDE; ++w) {
                    const Ints lanes = lane_numbers(w * LANES);
                    Real* d_products = d_products_ + (g * CHUNK + i) * CHUNK + w * LANES;
                    const Reals value =
                        load(d_products) * load(c.pairs + i * CHUNK + w * LANES);
                    store(d_products, (g ? lanes <= i : lanes < i) ? value : Reals{});
                }
        transpose(d_products_, CHUNK, CHUNK, CHUNK, both_, CHUNK);
        for (int i = 0; i < CHUNK * CHUNK; ++i) both_[i] += d_products_[i];
        for_columns(size_, [&](auto vectors, int64_t column) {
            constexpr int V = decltype(vectors)::value, R = std::min(TILE / V, CHUNK);
            for (int first = 0; first < c.count; first += R) {
                Reals sums[R][V] = {};
                multiply(sums, both_ + first * CHUNK, CHUNK, 1, c.k + column, size_, CHUNK);
                for (int64_t g = 0; g < t.groups; ++g)
                    multiply(sums, d_products_ + ((1 + g) * CHUNK + first) * CHUNK + first, 1,
                             CHUNK, c.q + g * keys_ + first * size_ + column, size_,
                             CHUNK - first);
                for (int r = 0; r < R; ++r)
                    for (int j = 0; j < V; ++j) {
                        const int i = first + r;
                        const int64_t at = i * size_ + column + j * LANES;
                        const Reals read = load(read_ + at), written = load(written_ + at);
                        store(dk_ + at, sums[r][j] + (t.decays ? read * c.before[i] +
                                                                     written * c.after[i]
                                                               : read + written));
                    }
                for (int64_t g = 0; g < t.groups; ++g) {
                    for (auto& row : sums)
                        for (auto& sum : row) sum = Reals{};
                    multiply(sums, d_products_ + ((1 + g) * CHUNK + first) * CHUNK, CHUNK, 1,
                             c.k + column, size_, first + R);
                    for (int r = 0; r < R; ++r)
                        for (int j = 0; j < V; ++j) {
                            const int i = first + r;
                            const int64_t at = i * size_ + column + j * LANES;
                            const Reals read = load(read_ + (1 + g) * keys_ + at);
                            store(dq_ + g * keys_ + at,
                                  sums[r][j] + (t.decays ? read * c.before[i] : read));
                        }
                }
            }
        });
    }

    // Compute the gradient of each log decay i: add up the terms of all values that decay with
    // token i. These are reads of the state by tokens i and later, writes to the state by earlier
    // tokens, products of the former with the latter, and the state itself.
    void differentiate_decays(const Chunk<Real>& c) {
        Real state = 0, read[CHUNK], pairs[CHUNK];
        for (int64_t d = 0; d < size_; ++d) state += d_total_[d];
        Reals sums[WIDE] = {};
        for (int i = c.count - 1; i >= 0; --i) {
            const int64_t at = i * size_;
            read[i] = (i + 1 < c.count ? read[i + 1] : Real(0)) +
                      dot(c.k_read + at, read_ + at, size_);
            for (int64_t g = 0; g < t.groups; ++g)
                read[i] += dot(c.q_read + g * keys_ + at, read_ + (1 + g) * keys_ + at, size_);
            Reals before{};
            for (int w = 0; w < WIDE; ++w) {
                const int64_t row = i * CHUNK + w * LANES;
                sums[w] += load(d_products_ + row) * load(c.kk + row);
                for (int64_t g = 0; g < t.groups; ++g)
                    sums[w] += load(d_products_ + (1 + g) * CHUNK * CHUNK + row) *
                               load(c.qk + g * CHUNK * CHUNK + row);
                before += lane_numbers(w * LANES) < i ? sums[w] : Reals{};
            }
            pairs[i] = add_lanes(before);
        }
        Real written = 0;
        for (int i = 0; i < c.count; ++i) {
            dg_[i] = c.decay[i] == 0 ? Real(0) : state + read[i] + written + pairs[i];
            written += dot(c.k_written + i * size_, written_ + i * size_, size_);
        }
    }

    // Compute the gradients of keys, queries and log decays, with one decay per key channel.
    void differentiate_channels(const Chunk<Real>& c) {
        for (int64_t d = 0; d < size_; d += LANES) {
            Reals read{};
            for (int i = c.count - 1; i >= 0; --i) {
                const int64_t at = i * size_ + d;
                const Reals before = load(c.before + at);
                store(dk_ + at, load(read_ + at) * before +
                                    load(written_ + at) * load(c.after + at));
                read += load(c.k_read + at) * load(read_ + at);
                for (int64_t g = 0; g < t.groups; ++g) {
                    const Reals d_q_read = load(read_ + (1 + g) * keys_ + at);
                    store(dq_ + g * keys_ + at, d_q_read * before);
                    read += load(c.q_read + g * keys_ + at) * d_q_read;
                }
                store(dg_ + at, read);
            }
            Reals written = load(d_total_ + d);
            for (int i = 0; i < c.count; ++i) {
                const int64_t at = i * size_ + d;
                store(dg_ + at, load(dg_ + at) + written);
                written += load(c.k_written + at) * load(written_ + at);
            }
            for (int j = 0; j < c.count; ++j) differentiate_pairs(c, j, d);
            for (int i = 0; i < c.count; ++i) {
                const int64_t at = i * size_ + d;
                store(dg_ + at, load(c.decay + at) == Real(0) ? Reals{} : load(dg_ + at));
            }
        }
    }

    // Add the terms of the products of key j with the query of token j and with the keys and
    // queries of later tokens, in the vector of channels that begins at d.
    void differentiate_pairs(const Chunk<Real>& c, int j, int64_t d) {
        const Real *k = c.k + d, *q = c.q + d, *decay = c.decay + d;
        const Reals key = load(k + j * size_);
        Reals d_key = load(dk_ + j * size_ + d), product = broadcast(1), terms[CHUNK];
        for (int64_t g = 0; g < t.groups; ++g) {
            const Real weight = d_products_[((1 + g) * CHUNK + j) * CHUNK + j];
            Real* dq = dq_ + g * keys_ + j * size_ + d;
            store(dq, load(dq) + weight * key);
            d_key += weight * load(q + g * keys_ + j * size_);
        }
        for (int i = j + 1; i < c.count; ++i) {
            product *= load(decay + i * size_);
            const Reals decayed = product * key;
            const Real weight = d_products_[i * CHUNK + j];
            Real* dk = dk_ + i * size_ + d;
            store(dk, load(dk) + weight * decayed);
            Reals sum = weight * load(k + i * size_);
            for (int64_t g = 0; g < t.groups; ++g) {
                const Real q_weight = d_products_[((1 + g) * CHUNK + i) * CHUNK + j];
                Real* dq = dq_ + g * keys_ + i * size_ + d;
                store(dq, load(dq) + q_weight * decayed);
                sum += q_weight * load(q + g * keys_ + i * size_);
            }
            d_key += product * sum;
            terms[i] = decayed * sum;
        }
        store(dk_ + j * size_ + d, d_key);
        Reals sum{};
        for (int i = c.count - 1; i > j; --i) {
            sum += terms[i];
            store(dg_ + i * size_ + d, load(dg_ + i * size_ + d) + sum);
        }
    }

    void store_gradients(const Chunk<Real>& c) const {
        const int64_t index = panel_ * t.batch * t.heads + this->tokens_index();
        const int64_t token = index * t.tokens + c.start;
        for (int i = 0; i < c.count; ++i)
            out_.d_beta[token + i] = add_lanes(load(d_beta_ + i * LANES));
        std::copy_n(dk_, c.count * size_, out_.dk + token * size_);
        if (t.decays) std::copy_n(dg_, c.count * t.decays, out_.d_log_decay + token * t.decays);
        for (int64_t g = 0; g < t.groups; ++g) {
            Real* dq = out_.dq + ((index * t.groups + g) * t.tokens + c.start) * size_;
            for (int64_t i = 0; i < c.count * size_; i += LANES)
                store(dq + i, load(dq_ + g * keys_ + i) * Real(t.scale));
        }
    }
};

// -- decoding -------------------------------------------------------------------------------------

// The arguments of the step for one token; sizes are arbitrary.
template <class Real>
struct Step {
    int64_t threads, batch, states, heads, groups, key_size, value_size, decays;
    int64_t q_row, q_head, k_row, k_head, v_row, v_head;  // strides of batch rows and of heads
    int64_t beta_row, beta_head, decay_row, decay_head, state_row;
    double scale, eps;  // eps is added to squared norms of q and k; below 0: not normalised
    const Real *q, *k, *v, *beta, *log_decay, *state;
    Real *out, *last_state;  // contiguous; last_state has the stride of state, and may be state
    const int64_t* slots;    // row of each batch row in the state, [B]; -1: none; null: its own

    FIELDS(threads, batch, states, heads, groups, key_size, value_size, decays, q_row, q_head, k_row,
           k_head, v_row, v_head, beta_row, beta_head, decay_row, decay_head, state_row, scale, eps,
           q, k, v, beta, log_decay, state, out, last_state, slots)
};

template <class Real>
class DeltaStep : Math<Real> {
    using typename Math<Real>::Reals;
    using Math<Real>::LANES, Math<Real>::load, Math<Real>::store;

    const Step<Real>& t;
    std::vector<Real> k_, q_, decay_;  // [D], [G, D], [D]

  public:
    explicit DeltaStep(const Step<Real>& task)
        : t(task), k_(t.key_size), q_(t.groups * t.key_size), decay_(t.key_size, Real(1)) {}

    void run(int64_t row, int64_t head) {
        const int64_t slot = t.slots ? t.slots[row] : row;
        Real* out = t.out + (row * t.heads + head) * t.groups * t.value_size;
        if (slot < 0) {
            std::fill_n(out, t.groups * t.value_size, Real(0));
            return;
        }
        load_row(t.k + row * t.k_row + head * t.k_head, 1, k_.data());
        for (int64_t g = 0; g < t.groups; ++g)
            load_row(t.q + row * t.q_row + (head * t.groups + g) * t.q_head, t.scale,
                     &q_[g * t.key_size]);
        const Real* log_decay = t.log_decay + row * t.decay_row + head * t.decay_head;
        for (int64_t d = 0; d < t.decays; ++d) decay_[d] = std::exp(log_decay[d]);
        if (t.decays == 1) std::fill(decay_.begin(), decay_.end(), decay_[0]);
        const Real beta = t.beta[row * t.beta_row + head * t.beta_head];
        const Real* v = t.v + row * t.v_row + head * t.v_head;
        const int64_t at = slot * t.state_row + head * t.key_size * t.value_size;
        int64_t column = 0;
        for (; column + 4 * LANES <= t.value_size; column += 4 * LANES)
            update<4>(t.state + at, t.last_state + at, v, beta, out, column);
        for (; column + LANES <= t.value_size; column += LANES)
            update<1>(t.state + at, t.last_state + at, v, beta, out, column);
        for (; column < t.value_size; ++column)
            update_column(t.state + at, t.last_state + at, v, beta, out, column);
    }

  private:
    void load_row(const Real* row, double factor, Real* out) const {
        if (t.eps >= 0) {
            Real sum = 0;
            for (int64_t d = 0; d < t.key_size; ++d) sum += row[d] * row[d];
            factor /= std::sqrt(sum + Real(t.eps));
        }
        for (int64_t d = 0; d < t.key_size; ++d) out[d] = row[d] * Real(factor);
    }

    // Update V vectors of columns of the state, and compute their outputs.
    template <int V>
    void update(const Real* before, Real* after, const Real* v, Real beta, Real* out,
                int64_t column) const {
        Reals change[V] = {};
        for (int64_t d = 0; d < t.key_size; ++d)
            for (int j = 0; j < V; ++j)
                change[j] += k_[d] * decay_[d] *
                             load(before + d * t.value_size + column + j * LANES);
        for (int j = 0; j < V; ++j)
            change[j] = beta * (load(v + column + j * LANES) - change[j]);
        for (int64_t g = 0; g < t.groups; ++g) {
            Reals sums[V] = {};
            for (int64_t d = 0; d < t.key_size; ++d)
                for (int j = 0; j < V; ++j) {
                    const int64_t at = d * t.value_size + column + j * LANES;
                    Reals state = load((g ? after : before) + at);
                    if (!g) store(after + at, state = decay_[d] * state + k_[d] * change[j]);
                    sums[j] += q_[g * t.key_size + d] * state;
                }
            for (int j = 0; j < V; ++j)
                store(out + g * t.value_size + column + j * LANES, sums[j]);
        }
    }

    void update_column(const Real* before, Real* after, const Real* v, Real beta, Real* out,
                       int64_t column) const {
        Real change = 0;
        for (int64_t d = 0; d < t.key_size; ++d)
            change += k_[d] * decay_[d] * before[d * t.value_size + column];
        change = beta * (v[column] - change);
        for (int64_t d = 0; d < t.key_size; ++d) {
            const int64_t at = d * t.value_size + column;
            after[at] = decay_[d] * before[at] + k_[d] * change;
        }
        for (int64_t g = 0; g < t.groups; ++g) {
            Real sum = 0;
            for (int64_t d = 0; d < t.key_size; ++d)
                sum += q_[g * t.key_size + d] * after[d * t.value_size + column];
            out[g * t.value_size + column] = sum;
        }
    }
};

// Refused if slots are not rows of the pool.
template <class Real>
static int64_t step(const Step<Real>& t) {
    if (!are_slots(t.slots, t.batch, t.states)) return REFUSED;
    const int64_t count = t.batch * t.heads;
    const int64_t threads = count * t.key_size * t.value_size < 1 << 18 ? 1 : t.threads;
    const int64_t pieces = std::min(threads, count);
    in_threads(pieces, threads, [&](int64_t piece) {
        const FlushDenormals flush;
        DeltaStep<Real> step(t);
        for (int64_t i = piece * count / pieces; i < (piece + 1) * count / pieces; ++i)
            step.run(i / t.heads, i % t.heads);
    });
    return ACCEPTED;
}

// -- entry points ---------------------------------------------------------------------------------

// Run what make(head, panel) returns on all sequences; refused if they are not within the row.
template <class Real, class Make>
static int64_t run_sequences(const Task<Real>& t, Make make) {
    if (!t.are_sequences_inside()) return REFUSED;
    const std::vector<int64_t> firsts = t.pieces();
    const int64_t panels = t.panels(), columns = t.heads * panels;
    in_threads((int64_t)(firsts.size() - 1) * columns, t.threads, [&](int64_t i) {
        const FlushDenormals flush;
        const int64_t piece = i / columns, column = i % columns;
        auto work = make(column / panels, column % panels);
        for (int64_t s = firsts[piece]; s < firsts[piece + 1]; ++s) work.run(s);
    });
    return ACCEPTED;
}

template <class Real>
static int64_t forward(const Task<Real>& t) {
    return run_sequences(t, [&](int64_t head, int64_t panel) {
        return DeltaForward<Real>(t, head, panel);
    });
}

template <class Real>
static int64_t backward(const Task<Real>& t, const Gradients<Real>& out) {
    return run_sequences(t, [&](int64_t head, int64_t panel) {
        return DeltaBackward<Real>(t, out, head, panel);
    });
}

extern "C" int64_t delta_forward_float(const Task<float>* task) { return forward(*task); }
extern "C" int64_t delta_forward_double(const Task<double>* task) { return forward(*task); }
extern "C" int64_t delta_backward_float(const Task<float>* task, const Gradients<float>* out) {
    return backward(*task, *out);
}
extern "C" int64_t delta_backward_double(const Task<double>* task, const Gradients<double>* out) {
    return backward(*task, *out);
}
extern "C" int64_t delta_step_float(const Step<float>* task) { return step(*task); }
extern "C" int64_t delta_step_double(const Step<double>* task) { return step(*task); }

CALLED_FROM_PYTHON(delta_forward_float, delta_forward_double, delta_backward_float,
                   delta_backward_double, delta_step_float, delta_step_double)
