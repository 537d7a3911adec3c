// One token of the window hybrid on a CPU: decoding.
//
// The oldest key leaves the window and is added to the sums over earlier keys, and the new key
// enters the window:
//     S = decay S + f_0 (v_0, 1)^T,   o = (ww near + lw far) / (ww + lw total),   (far, total) = f_q S
// near is the output of the softmax over the window, and total the sum of the weights of all
// earlier keys. The factors ww and lw are divided by the larger of the two sums of weights, so that
// nothing overflows. The state stores the first N tokens of a row before the window; every softmax
// contains them, and no sum does. The window is a ring buffer: token n is in row n mod W. The next
// state may overwrite the given one. With slots, both are pools of states, of which each token reads
// and writes one row.
//
// work     one key head and its queries; sizes are arbitrary
// reads    tokens with stride 1 in the last dimension; a contiguous state
// oracle   hybrid_attention(impl="reference"), float64 included
//
// Letters: B batch, H key heads, G query heads per key head, W window, D key size, E value size,
// F features, N first tokens.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>

#include "checks.h"
#include "feature_maps.h"
#include "lanes.h"
#include "layout.h"
#include "threads.h"
#include "tiles.h"

constexpr double MIN_WEIGHT = 1e-30;  // a smaller total counts as 0; as in attnzoo/ops/hybrid/parts.py

struct Bfloat16 {
    uint16_t bits;

    operator float() const {
        const uint32_t wide = uint32_t(bits) << 16;
        float value;
        std::memcpy(&value, &wide, sizeof value);
        return value;
    }
};

// Key is the element type of keys, and Real that of all other tensors.
template <class Real, class Key>
struct Step {
    int64_t threads, batch, states, heads, groups, sinks, window, key_size, value_size, features;
    int64_t decays;                           // per token: 0, 1 or F
    int64_t counted;                          // whether lw is divided by the number of keys
    int64_t relative;                         // whether lw is relative to the window's sum
    int64_t q_map, k_map;                     // values of Map, without weights: of fq and fk
    int64_t q_row, q_head, k_row, k_head, v_row, v_head;  // strides of batch rows and of heads
    int64_t fq_row, fq_head, fk_row, fk_head, decay_row, decay_head, weight_row, weight_head;
    int64_t keys_row, values_row, far_row, kv_row, z_row, seen_row;  // strides of states
    double scale, map_scale;
    const Real* q;
    const Key* k;
    const Real *v, *fq, *fk, *log_decay, *log_weight;
    const Key* keys;                           // per head: [N + W, D]
    const Real *values, *far, *kv, *z;         // per head: [N + W, E], [W, F], [F, E + 1], [F]
    const int64_t* seen;                       // per state: tokens before this one
    const int64_t* slots;                      // [B]: rows of the pool, negative: no token; or null
    Real* out;
    Key* next_keys;
    Real *next_values, *next_far, *next_kv, *next_z;
    int64_t* next_seen;

    FIELDS(threads, batch, states, heads, groups, sinks, window, key_size, value_size, features,
           decays, counted, relative, q_map, k_map, q_row, q_head, k_row, k_head, v_row, v_head,
           fq_row, fq_head, fk_row, fk_head, decay_row, decay_head, weight_row, weight_head, keys_row, values_row, far_row,
           kv_row, z_row, seen_row, scale, map_scale, q, k, v, fq, fk,
           log_decay, log_weight, keys, values, far, kv, z, seen, slots, out, next_keys, next_values,
           next_far, next_kv, next_z, next_seen)
};

template <class Real, class Key>
class HybridStep : Math<Real> {
    using typename Math<Real>::Reals;
    using Math<Real>::LANES, Math<Real>::load;

    const Step<Real, Key>& t;
    std::vector<Real> weights_, sums_, near_, key_;  // [N + W], [E + 1], [E], [D]
    std::vector<Real> fq_, fk_;                      // [F], rounded up to vectors

  public:
    explicit HybridStep(const Step<Real, Key>& task)
        : t(task), weights_(t.sinks + t.window), sums_(t.value_size + 1), near_(t.value_size),
          key_(t.key_size), fq_(t.features + LANES), fk_(t.features + LANES) {}

    void run(int64_t row, int64_t head) {
        const int64_t state = t.slots ? t.slots[row] : row;
        Real* out = t.out + (row * t.heads + head) * t.groups * t.value_size;
        if (state < 0) {
            std::fill_n(out, t.groups * t.value_size, Real(0));
            return;
        }
        const int64_t seen = t.seen[state * t.seen_row];
        const int64_t stored = t.sinks + t.window;
        const Place at{state * t.keys_row + head * stored * t.key_size,
                       state * t.values_row + head * stored * t.value_size,
                       state * t.far_row + head * t.window * t.features,
                       state * t.kv_row + head * t.features * (t.value_size + 1),
                       state * t.z_row + head * t.features};
        update_sums(at, seen, row, head);
        const Key* k = t.k + row * t.k_row + head * t.k_head;
        const Real* v = t.v + row * t.v_row + head * t.v_head;
        const Real* fk = features(t.fk + row * t.fk_row + head * t.fk_head, t.k_map, fk_);
        append(t.keys + at.keys, k, t.key_size, t.sinks, seen, t.next_keys + at.keys);
        append(t.values + at.values, v, t.value_size, t.sinks, seen, t.next_values + at.values);
        append(t.far + at.far, fk, t.features, 0, seen, t.next_far + at.far);
        const int64_t before = seen + 1 - t.window;  // tokens before the window
        const int64_t stop = t.sinks + std::min(seen + 1, t.window);
        const int64_t outside = std::clamp<int64_t>(before, 0, t.sinks);  // first tokens of these
        for (int64_t g = 0; g < t.groups; ++g) {
            const int64_t query = head * t.groups + g;
            const Real lse = attend(t.q + row * t.q_row + query * t.q_head, at, outside, stop);
            read_sums(features(t.fq + row * t.fq_row + query * t.fq_head, t.q_map, fq_),
                      t.next_kv + at.kv);
            combine(lse, t.log_weight[row * t.weight_row + query * t.weight_head],
                    before - t.sinks, out + g * t.value_size);
        }
    }

  private:
    // The places of the state of a key head in its tensors.
    struct Place {
        int64_t keys, values, far, kv, z;
    };

    // Return the features of a query or a key, which may be written to `row`.
    const Real* features(const Real* x, int64_t kind, std::vector<Real>& row) const {
        if (kind == IDENTITY) return x;
        std::copy_n(x, t.features, row.begin());
        map_row<Real>(kind, Real(t.map_scale), t.features, row.data());
        return row.data();
    }

    // Add the oldest key of the window to the sums over earlier keys, unless it is one of the first
    // N tokens.
    void update_sums(const Place& at, int64_t seen, int64_t row, int64_t head) {
        const int64_t columns = t.value_size + 1;
        const int64_t oldest = seen % t.window;
        const bool is_first = seen - t.window < t.sinks;  // or the window is not full
        const Real* far = t.far + at.far + oldest * t.features;
        const Real* value = t.values + at.values + (t.sinks + oldest) * t.value_size;
        const Real* log_decay = t.log_decay + row * t.decay_row + head * t.decay_head;
        Real decay = t.decays ? std::exp(log_decay[0]) : Real(1);
        for (int64_t f = 0; f < t.features; ++f) {
            if (t.decays > 1) decay = std::exp(log_decay[f]);
            const Real weight = is_first ? 0 : far[f];
            const Real* before = t.kv + at.kv + f * columns;
            Real* after = t.next_kv + at.kv + f * columns;
            for (int64_t e = 0; e < t.value_size; ++e)
                after[e] = decay * before[e] + weight * value[e];
            after[t.value_size] = decay * before[t.value_size] + weight;
            t.next_z[at.z + f] = decay * t.z[at.z + f] + weight;
        }
    }

    // Overwrite the oldest row of the window with the new one; one of the first N tokens is stored
    // among them too.
    template <class X>
    void append(const X* state, const X* row, int64_t size, int64_t sinks, int64_t seen,
                X* next) const {
        if (next != state) std::copy_n(state, (sinks + t.window) * size, next);
        if (seen < sinks) std::copy_n(row, size, next + seen * size);
        std::copy_n(row, size, next + (sinks + seen % t.window) * size);
    }

    Real dot(const Real* a, const Real* b) const {
        Reals sums{};
        int64_t d = 0;
        for (; d + LANES <= t.key_size; d += LANES) sums += load(a + d) * load(b + d);
        Real sum = 0;
        for (int j = 0; j < LANES; ++j) sum += sums[j];
        for (; d < t.key_size; ++d) sum += a[d] * b[d];
        return sum;
    }

    // Write the output of the softmax over the rows before `outside` and the rows of the window
    // before `stop` to near_, and return the log-sum-exp of its scores.
    Real attend(const Real* q, const Place& at, int64_t outside, int64_t stop) {
        const Key* keys = t.next_keys + at.keys;
        const Real* values = t.next_values + at.values;
        Real maximum = -INFINITY, sum = 0;
        const auto next = [=](int64_t j) { return j + 1 == outside ? t.sinks : j + 1; };
        const int64_t begin = outside ? 0 : t.sinks;
        for (int64_t j = begin; j < stop; j = next(j)) {
            std::copy_n(keys + j * t.key_size, t.key_size, key_.data());  // converts Key to Real
            weights_[j] = Real(t.scale) * dot(q, key_.data());
            maximum = std::max(maximum, weights_[j]);
        }
        for (int64_t j = begin; j < stop; j = next(j))
            sum += weights_[j] = std::exp(weights_[j] - maximum);
        std::fill(near_.begin(), near_.end(), Real(0));
        for (int64_t j = begin; j < stop; j = next(j)) {
            const Real weight = weights_[j] / sum;
            for (int64_t e = 0; e < t.value_size; ++e)
                near_[e] += weight * values[j * t.value_size + e];
        }
        return maximum + std::log(sum);
    }

    void read_sums(const Real* fq, const Real* kv) {
        const int64_t columns = t.value_size + 1;
        std::fill(sums_.begin(), sums_.end(), Real(0));
        for (int64_t f = 0; f < t.features; ++f)
            for (int64_t e = 0; e < columns; ++e) sums_[e] += fq[f] * kv[f * columns + e];
    }

    void combine(Real lse, Real log_weight, int64_t count, Real* out) const {
        if (t.counted) log_weight -= std::log(Real(std::max<int64_t>(count, 1)));
        if (t.relative) lse = 0;  // the window's sum is a factor of both terms and cancels
        const Real total = sums_[t.value_size];
        Real window_weight = 1, linear_weight = 0;
        if (total > Real(MIN_WEIGHT)) {
            const Real maximum = std::max(lse, log_weight + std::log(total));
            window_weight = std::exp(lse - maximum);
            linear_weight = std::exp(log_weight - maximum);
        }
        const Real factor = 1 / (window_weight + linear_weight * total);
        for (int64_t e = 0; e < t.value_size; ++e)
            out[e] = (window_weight * near_[e] + linear_weight * sums_[e]) * factor;
    }
};

// Return whether the states that are read have numbers of tokens, which choose rows of the window.
template <class Real, class Key>
static bool are_counts(const Step<Real, Key>& t) {
    for (int64_t row = 0; row < t.batch; ++row) {
        const int64_t state = t.slots ? t.slots[row] : row;
        if (state < 0) continue;
        const int64_t seen = t.seen[state * t.seen_row];
        if (seen < 0 || seen > INT64_MAX / 2) return false;
    }
    return true;
}

// Refused if slots are not rows of the pool, or a state has no number of tokens.
template <class Real, class Key>
static int64_t step(const Step<Real, Key>& t) {
    if (!are_slots(t.slots, t.batch, t.states) || !are_counts(t)) return REFUSED;
    const int64_t count = t.batch * t.heads;
    const int64_t size = t.features * t.value_size + (t.sinks + t.window) * (t.key_size + t.value_size);
    const int64_t pieces = count * size < 1 << 18 ? 1 : std::min(t.threads, count);
    in_threads(pieces, pieces, [&](int64_t piece) {
        const FlushDenormals flush;
        HybridStep<Real, Key> step(t);
        for (int64_t i = piece * count / pieces; i < (piece + 1) * count / pieces; ++i)
            step.run(i / t.heads, i % t.heads);
    });
    for (int64_t row = 0; row < t.batch; ++row) {  // all heads have read it
        const int64_t state = t.slots ? t.slots[row] : row;
        if (state >= 0) t.next_seen[state * t.seen_row] = t.seen[state * t.seen_row] + 1;
    }
    return ACCEPTED;
}

extern "C" int64_t hybrid_step_float32(const Step<float, float>* task) { return step(*task); }
extern "C" int64_t hybrid_step_float64(const Step<double, double>* task) { return step(*task); }
extern "C" int64_t hybrid_step_bfloat16(const Step<float, Bfloat16>* task) { return step(*task); }

CALLED_FROM_PYTHON(feature_map_names, hybrid_step_float32, hybrid_step_float64, hybrid_step_bfloat16)
