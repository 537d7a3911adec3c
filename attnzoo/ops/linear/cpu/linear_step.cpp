// One token of linear attention on a CPU: decoding.
//
//     S = decay S + f_k v^T,   z = decay z + f_k,   o = s f_q S,   normalised: / (s f_q z + eps)
// RWKV-6 has a bonus u: the query reads S and z before the update, and (f_q . u f_k) (v, 1) is
// added. mLSTM has an input gate i: m' = max(log decay + m, i), the decay is
// e^(log decay + m - m'), f_k is multiplied by e^(i - m'), and the denominator is
// max(|f_q z|, e^-m').
//
// work     one key head and its queries; sizes are arbitrary
// reads    tokens of any floating type, with stride 1 in the last dimension; states that are
//          contiguous, with any stride between those of two sequences
// writes   the next state, which may overwrite the previous one; with slots, that of a row of the batch
//          is at its slot of a pool, and the output of a row without a slot is 0
// oracle   linear_attention(impl="reference"), float64 included
//
// Letters: B batch, H key heads, G query heads per key head, D key size, E value size.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>

#include "checks.h"
#include "feature_maps.h"
#include "lanes.h"
#include "layout.h"
#include "rows.h"
#include "threads.h"
#include "tiles.h"

struct Step {
    int64_t threads, batch, states, heads, groups, key_size, value_size;
    int64_t decays;  // per token: 0, 1 or D
    int64_t normalize;
    int64_t q_map, k_map;                        // values of Map, without weights
    int64_t q_type, k_type, v_type, decay_type;  // values of Type; the output has that of v
    int64_t q_row, q_head, k_row, k_head, v_row, v_head;  // strides of batch rows and of heads
    int64_t decay_row, decay_head;
    int64_t kv_row, z_row, m_row;  // strides of states
    double map_scale, scale, eps;
    const char *q, *k, *v, *log_decay;
    const void *kv, *z;  // the state, per head: [D, E], [D]
    void *out, *next_kv, *next_z;
    const void *bonus;          // [heads, D], or null
    const void *log_input, *m;  // [batch, heads], and with the rows of the state; or null
    void* next_m;
    const int64_t* slots;       // row of the state of each row of the batch, -1 for none; or null

    FIELDS(threads, batch, states, heads, groups, key_size, value_size, decays, normalize, q_map,
           k_map, q_type, k_type, v_type, decay_type, q_row, q_head, k_row, k_head, v_row, v_head,
           decay_row, decay_head, kv_row, z_row, m_row, map_scale, scale, eps, q, k, v, log_decay, kv, z, out, next_kv,
           next_z, bonus, log_input, m, next_m, slots)
};

constexpr double LOWEST_STABILIZER = -87;  // as in ops/gated/common.py: exp(87) is finite in float32

template <class Real>
class LinearStep : Tiles<Real>, Rows<Real> {
    using typename Tiles<Real>::Reals;
    using Tiles<Real>::LANES, Tiles<Real>::load, Tiles<Real>::store, Tiles<Real>::broadcast;

    const Step& t;
    const int64_t keys_, values_;  // D and E rounded up to vectors
    Buffer<Real> buffer_;
    Real *q_, *k_, *v_, *decay_, *sums_;
    Real lowest_ = 0;  // lower bound of the denominator of mLSTM

    static int64_t rounded(int64_t size) { return (size + LANES - 1) / LANES * LANES; }

  public:
    // The places of the state of a key head in kv, z and m.
    struct Place {
        int64_t kv, z, m;
    };

    explicit LinearStep(const Step& task)
        : t(task), keys_(rounded(t.key_size)), values_(rounded(t.value_size)),
          buffer_(3 * keys_ + 2 * values_), q_(buffer_.take(keys_)), k_(buffer_.take(keys_)),
          v_(buffer_.take(values_)), decay_(buffer_.take(keys_)), sums_(buffer_.take(values_)) {}

    void run(int64_t row, int64_t head) {
        const int64_t slot = t.slots ? t.slots[row] : row;
        if (slot < 0) return clear_outputs(row, head);
        const Place at{slot * t.kv_row + head * t.key_size * t.value_size,
                       slot * t.z_row + head * t.key_size, slot * t.m_row + head};
        read(t.k, t.k_type, row * t.k_row + head * t.k_head, t.key_size, keys_, k_);
        read(t.v, t.v_type, row * t.v_row + head * t.v_head, t.value_size, values_, v_);
        map_row<Real>(t.k_map, t.map_scale, t.key_size, k_);
        read_decay(row, head);
        if (t.log_input) stabilize(at.m, row * t.heads + head);
        if (t.bonus) read_queries(at, row, head, t.kv, t.z);
        update_state(at);
        if (!t.bonus) read_queries(at, row, head, t.next_kv, t.next_z);
    }

  private:
    void clear_outputs(int64_t row, int64_t head) const {
        const int64_t size = bytes(t.v_type) * t.groups * t.value_size;
        std::memset(static_cast<char*>(t.out) + (row * t.heads + head) * size, 0, size);
    }

    static int64_t bytes(int64_t type) { return type == DOUBLE ? 8 : type == FLOAT ? 4 : 2; }

    void read(const char* x, int64_t type, int64_t begin, int64_t size, int64_t padded,
              Real* out) const {
        Rows<Real>::load_row(x + bytes(type) * begin, type, size, padded, Real(1), out);
    }

    void read_decay(int64_t row, int64_t head) {
        if (!t.decays) return;
        const int64_t begin = row * t.decay_row + head * t.decay_head;
        read(t.log_decay, t.decay_type, begin, t.decays, t.decays, decay_);
        if (t.log_input) return;  // stabilize needs the logarithm
        for (int64_t d = 0; d < t.decays; ++d) decay_[d] = std::exp(decay_[d]);
    }

    // Update the stabilizer m of mLSTM at i, and scale the decay and the key by it.
    void stabilize(int64_t i, int64_t token) {
        const Real kept = decay_[0] + static_cast<const Real*>(t.m)[i];
        const Real input = static_cast<const Real*>(t.log_input)[token], m = std::max(kept, input);
        static_cast<Real*>(t.next_m)[i] = m;
        decay_[0] = std::exp(kept - m);
        const Real weight = std::exp(input - m);
        for (int64_t d = 0; d < t.key_size; ++d) k_[d] *= weight;
        lowest_ = std::exp(-std::max(m, Real(LOWEST_STABILIZER)));
    }

    void update_state(const Place& at) {
        const int64_t size = t.value_size;
        const Real *kv = static_cast<const Real*>(t.kv) + at.kv, *z = static_cast<const Real*>(t.z) + at.z;
        Real *next_kv = static_cast<Real*>(t.next_kv) + at.kv, *next_z = static_cast<Real*>(t.next_z) + at.z;
        for (int64_t d = 0; d < t.key_size; ++d) {
            const Real decay = t.decays ? decay_[t.decays > 1 ? d : 0] : Real(1), key = k_[d];
            const Real* before = kv + d * size;
            Real* after = next_kv + d * size;
            for (int64_t e = 0; e < size; ++e) after[e] = decay * before[e] + key * v_[e];
            next_z[d] = decay * z[d] + key;
        }
    }

    // Write the outputs of the queries of key head `head` from its place in kv and z.
    void read_queries(const Place& at, int64_t row, int64_t head, const void* kv, const void* z) {
        const Real* sums = static_cast<const Real*>(kv) + at.kv;
        const Real* weights = static_cast<const Real*>(z) + at.z;
        for (int64_t g = 0; g < t.groups; ++g) {
            const int64_t begin = row * t.q_row + (head * t.groups + g) * t.q_head;
            read(t.q, t.q_type, begin, t.key_size, keys_, q_);
            map_row<Real>(t.q_map, t.map_scale, t.key_size, q_);
            read_state(head, (row * t.heads + head) * t.groups + g, sums, weights);
        }
    }

    // Write the output of one query from the state of its head; `query` is its index in [B, H G].
    void read_state(int64_t head, int64_t query, const Real* kv, const Real* z) {
        const int64_t size = t.value_size;
        Real total = 0;
        std::fill_n(sums_, values_, Real(0));
        for (int64_t d = 0; d < t.key_size; ++d) {
            const Real weight = Real(t.scale) * q_[d];
            total += weight * z[d];
            for (int64_t e = 0; e < size; ++e) sums_[e] += weight * kv[d * size + e];
        }
        if (t.bonus) {
            const Real* bonus = static_cast<const Real*>(t.bonus) + head * t.key_size;
            Real weight = 0;
            for (int64_t d = 0; d < t.key_size; ++d) weight += q_[d] * bonus[d] * k_[d];
            weight *= Real(t.scale);
            total += weight;
            for (int64_t e = 0; e < size; ++e) sums_[e] += weight * v_[e];
        }
        if (t.log_input) {
            const Real denominator = std::max(std::abs(total), lowest_);
            for (int64_t e = 0; e < size; ++e) sums_[e] /= denominator;
        } else if (t.normalize) {
            for (int64_t e = 0; e < size; ++e) sums_[e] /= total + Real(t.eps);
        }
        char* out = static_cast<char*>(t.out) + bytes(t.v_type) * query * size;
        Rows<Real>::store_row(sums_, size, out, t.v_type);
    }
};

// Refused if slots are not rows of the pool.
template <class Real>
static int64_t step(const Step& t) {
    if (!are_slots(t.slots, t.batch, t.states)) return REFUSED;
    const int64_t count = t.batch * t.heads;
    const bool is_small = count * t.key_size * t.value_size < 1 << 18;
    const int64_t pieces = is_small ? 1 : std::min(t.threads, count);
    in_threads(pieces, pieces, [&](int64_t piece) {
        const FlushDenormals flush;
        LinearStep<Real> step(t);
        for (int64_t i = piece * count / pieces; i < (piece + 1) * count / pieces; ++i)
            step.run(i / t.heads, i % t.heads);
    });
    return ACCEPTED;
}

extern "C" int64_t linear_step_float(const Step* task) { return step<float>(*task); }
extern "C" int64_t linear_step_double(const Step* task) { return step<double>(*task); }

CALLED_FROM_PYTHON(feature_map_names, linear_step_float, linear_step_double)
