// Feature maps of queries and keys, computed for the rows of a chunk, and their gradients.
//
//     y = x, or W x + b with the W and b of the head,     f = map(y), see ENTRY_MAPS and ROW_MAPS
//
// Letters: D size of x, N size of y, F features. N and the number of rows of a chunk are multiples
// of 16.

#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>

#include "layout.h"
#include "tiles.h"

// The values of attnzoo/ops/features/functional.py
constexpr double RELU_FLOOR = 1e-3, EXP_BOUND = 30;

// Maps that act on each entry of y, with their derivatives: `value` returns f of y, and `gradient`
// the gradient of y from y, f and the gradient d of f; s is the scale of the task. Each has a row in
// ENTRY_MAPS. The table FIXED or LEARNED of attnzoo/ops/features/functional.py has its name too.

template <class Real>
struct Identity {
    using Reals = typename Tiles<Real>::Reals;
    static Reals value(Reals y, Real) { return y; }
    static Reals gradient(Reals, Reals, Reals d, Real) { return d; }
};

template <class Real>
struct EluPlusOne {
    using Reals = typename Tiles<Real>::Reals;
    static Reals value(Reals y, Real) {
        const Reals low = Tiles<Real>::exp(y);
        return y > Real(0) ? y + Real(1) : low;
    }
    static Reals gradient(Reals y, Reals f, Reals d, Real) {
        const Reals low = d * f;
        return y > Real(0) ? d : low;
    }
};

template <class Real>
struct Relu {  // max(y, 0) + RELU_FLOOR; NaN stays NaN
    using Reals = typename Tiles<Real>::Reals;
    static Reals value(Reals y, Real) {
        return (y < Real(0) ? Reals{} : y) + Real(RELU_FLOOR);
    }
    static Reals gradient(Reals y, Reals, Reals d, Real) { return y > Real(0) ? d : Reals{}; }
};

template <class Real>
struct Exp {  // exp(min(s y, EXP_BOUND))
    using Reals = typename Tiles<Real>::Reals;
    static Reals value(Reals y, Real s) {
        y *= s;
        return Tiles<Real>::exp(y > Real(EXP_BOUND) ? Tiles<Real>::broadcast(EXP_BOUND) : y);
    }
    static Reals gradient(Reals y, Reals f, Reals d, Real s) {
        d = d * f * s;
        return y * s > Real(EXP_BOUND) ? Reals{} : d;
    }
};

#define ENTRY_MAPS(ROW)           \
    ROW(IDENTITY, Identity)       \
    ROW(ELU_PLUS_ONE, EluPlusOne) \
    ROW(RELU, Relu)               \
    ROW(EXP, Exp)

// Maps that act on a row of y; class FeatureMap has their functions and derivatives
#define ROW_MAPS(ROW)                                                                       \
    ROW(EXP_OF_QUERIES, exp(s y - m), where m is the maximum of s y over the row)           \
    ROW(HEDGEHOG, softmax(y), then softmax(-y))

#define NUMBER(NAME, ...) NAME,
enum Map : int64_t { ENTRY_MAPS(NUMBER) ROW_MAPS(NUMBER) };
#undef NUMBER

// The names of Map, in order, from which Python has their numbers.
#define NAME_AND_SPACE(NAME, ...) #NAME " "
extern "C" const char* feature_map_names() {
    return ENTRY_MAPS(NAME_AND_SPACE) ROW_MAPS(NAME_AND_SPACE);
}
#undef NAME_AND_SPACE

// Call `use` with the map that acts on entries, and return true; false if `kind` acts on rows.
template <class Real, class Use>
bool with_entry_map(int64_t kind, Use use) {
    switch (kind) {
#define CASE(NAME, Function) \
    case NAME: use(Function<Real>{}); return true;
        ENTRY_MAPS(CASE)
#undef CASE
        default: return false;
    }
}

// Replace a row by its features, of a map without weights. The row has room for whole vectors.
template <class Real>
void map_row(int64_t kind, Real scale, int64_t size, Real* x) {
    using T = Tiles<Real>;
    with_entry_map<Real>(kind, [&](auto map) {
        for (int64_t d = 0; d < size; d += T::LANES)
            T::store(x + d, map.value(T::load(x + d), scale));
    });
    if (kind != EXP_OF_QUERIES) return;
    Real maximum = -INFINITY;
    for (int64_t d = 0; d < size; ++d) maximum = std::max(maximum, scale * x[d]);
    for (int64_t d = 0; d < size; d += T::LANES)
        T::store(x + d, T::exp(T::load(x + d) * scale - maximum));
}

template <class Real>
struct MapTask {
    int64_t kind;        // a value of Map
    int64_t size;        // N
    double scale;        // s
    const Real* weight;  // W, [H, N, D], or null
    const Real* bias;    // b, [H, N], or null
    Real *d_weight, *d_bias;  // [B, H, spans, N, D] and [B, H, spans, N], or null

    FIELDS(kind, size, scale, weight, bias, d_weight, d_bias)

    // Return whether a feature depends on one channel of x alone, and its number does not matter.
    bool acts_on_channels() const {
        return !weight && !bias && with_entry_map<Real>(kind, [](auto) {});
    }
};

// The feature map of one head.
template <class Real>
class FeatureMap : Tiles<Real> {
    using typename Tiles<Real>::Reals;
    using Tiles<Real>::LANES, Tiles<Real>::load, Tiles<Real>::store, Tiles<Real>::broadcast;
    using Tiles<Real>::exp, Tiles<Real>::multiply, Tiles<Real>::for_columns, Tiles<Real>::product;
    using Tiles<Real>::transpose, Tiles<Real>::add_lanes_of_rows, Tiles<Real>::largest_of_rows;
    static constexpr int ROWS = 16;

    const MapTask<Real>& t;
    const int64_t x_size_, x_width_, y_size_, f_size_;  // D, D rounded up, N, F
    Buffer<Real> buffer_;
    Real *weight_, *columns_, *bias_;      // W [N, D], its transpose [D, N], b [N]
    Real *d_weight_, *d_bias_;             // gradients, summed over the rows so far
    Real *a_, *b_;                         // [ROWS]: maxima or sums of rows
    Real* d_y_;                            // [ROWS, N]

    static int64_t rounded(int64_t size) { return (size + 15) / 16 * 16; }
    bool has_matrix() const { return t.weight != nullptr; }
    bool has_halves() const { return t.kind == HEDGEHOG; }

  public:
    FeatureMap(const MapTask<Real>& task, int64_t head, int64_t x_size)
        : t(task), x_size_(x_size), x_width_(rounded(x_size)), y_size_(task.size),
          f_size_(has_halves() ? 2 * y_size_ : y_size_),
          buffer_((has_matrix() ? 3 * x_width_ * y_size_ : 0) + 2 * y_size_ + 2 * ROWS +
                  ROWS * y_size_),
          weight_(buffer_.take(has_matrix() ? x_width_ * y_size_ : 0)),
          columns_(buffer_.take(has_matrix() ? x_width_ * y_size_ : 0)),
          bias_(buffer_.take(y_size_)),
          d_weight_(buffer_.take(has_matrix() ? x_width_ * y_size_ : 0)),
          d_bias_(buffer_.take(y_size_)),
          a_(buffer_.take(ROWS)), b_(buffer_.take(ROWS)), d_y_(buffer_.take(ROWS * y_size_)) {
        if (t.bias) std::copy_n(t.bias + head * y_size_, y_size_, bias_);
        if (!has_matrix()) return;
        for (int64_t n = 0; n < y_size_; ++n)
            std::copy_n(t.weight + (head * y_size_ + n) * x_size, x_size, weight_ + n * x_width_);
        transpose(weight_, x_width_, y_size_, x_width_, columns_, y_size_);
    }

    // Whether the features are x itself, so that nothing has to be computed.
    bool is_identity() const { return t.kind == IDENTITY && !has_matrix(); }

    // Compute y and f of ROWS rows x, [ROWS, D rounded up]. Rows that are not valid are set to 0,
    // because their NaN would reach the gradient of W, and so are their features. If is_identity(),
    // y and f may be x.
    void features(Real* x, const bool* valid, Real* y, Real* f) {
        for (int r = 0; r < ROWS; ++r)
            if (!valid[r]) std::fill_n(x + r * x_width_, x_width_, Real(0));
        if (has_matrix()) {
            product(y, y_size_, ROWS, x, x_width_, 1, columns_, y_size_, y_size_, x_width_);
            for (int64_t i = 0; t.bias && i < ROWS * y_size_; i += y_size_)
                for (int64_t n = 0; n < y_size_; n += LANES)
                    store(y + i + n, load(y + i + n) + load(bias_ + n));
        } else {
            std::copy_n(x, ROWS * y_size_, y);
        }
        const Real s = Real(t.scale);
        const bool done = with_entry_map<Real>(t.kind, [&](auto map) {
            for (int64_t i = 0; i < ROWS * y_size_; i += LANES)
                store(f + i, map.value(load(y + i), s));
        });
        if (t.kind == EXP_OF_QUERIES) {
            largest_of_rows(ROWS, y_size_, y, y_size_, s, a_);
            for (int r = 0; r < ROWS; ++r)
                for (int64_t n = r * y_size_; n < (r + 1) * y_size_; n += LANES)
                    store(f + n, exp(load(y + n) * s - a_[r]));
        } else if (!done) {
            softmax_halves(y, f);
        }
        for (int r = 0; r < ROWS; ++r)
            if (!valid[r]) std::fill_n(f + r * f_size_, f_size_, Real(0));
    }

    // Compute the gradient of x from x, y, f and the gradient of f, and add to the gradients of W
    // and b. With a matrix W, d_x may be null.
    void gradients(const Real* x, const bool* valid, const Real* y, const Real* f, const Real* d_f,
                   Real* d_x) {
        Real* d_y = has_matrix() ? d_y_ : d_x;
        differentiate(y, f, d_f, d_y);
        for (int r = 0; r < ROWS; ++r)
            if (!valid[r]) std::fill_n(d_y + r * y_size_, y_size_, Real(0));
        if (!has_matrix()) return;
        if (d_x)
            product(d_x, x_width_, ROWS, d_y, y_size_, 1, weight_, x_width_, x_width_, y_size_);
        if (t.d_bias)
            for (int64_t n = 0; n < y_size_; n += LANES) {
                Reals sum = load(d_bias_ + n);
                for (int r = 0; r < ROWS; ++r) sum += load(d_y + r * y_size_ + n);
                store(d_bias_ + n, sum);
            }
        if (!t.d_weight) return;
        for_columns(x_width_, [&](auto vectors, int64_t column) {
            constexpr int V = decltype(vectors)::value, R = TILE / V;
            for (int64_t n = 0; n < y_size_; n += R) {
                Real* d_weight = d_weight_ + n * x_width_ + column;
                Reals sums[R][V];
                for (int r = 0; r < R; ++r)
                    for (int j = 0; j < V; ++j)
                        sums[r][j] = load(d_weight + r * x_width_ + j * LANES);
                multiply(sums, d_y + n, 1, y_size_, x + column, x_width_, ROWS);
                for (int r = 0; r < R; ++r)
                    for (int j = 0; j < V; ++j)
                        store(d_weight + r * x_width_ + j * LANES, sums[r][j]);
            }
        });
    }

    // Write the accumulated gradients of W and b at index `number` of their tensors, and reset
    // them.
    void store_weight_gradients(int64_t number) {
        if (t.d_weight)
            for (int64_t n = 0; n < y_size_; ++n)
                std::copy_n(d_weight_ + n * x_width_, x_size_,
                            t.d_weight + (number * y_size_ + n) * x_size_);
        if (t.d_bias) std::copy_n(d_bias_, y_size_, t.d_bias + number * y_size_);
        if (has_matrix()) std::fill_n(d_weight_, x_width_ * y_size_, Real(0));
        std::fill_n(d_bias_, y_size_, Real(0));
    }

  private:
    // Compute both halves of f: the softmax of y and that of -y.
    void softmax_halves(const Real* y, Real* f) {
        largest_of_rows(ROWS, y_size_, y, y_size_, Real(1), a_);
        largest_of_rows(ROWS, y_size_, y, y_size_, Real(-1), b_);
        Reals sums[ROWS], others[ROWS];
        for (int r = 0; r < ROWS; ++r) {
            Reals sum{}, other{};
            Real* row = f + r * f_size_;
            for (int64_t n = 0; n < y_size_; n += LANES) {
                const Reals v = load(y + r * y_size_ + n);
                const Reals positive = exp(v - a_[r]), negative = exp(-v - b_[r]);
                store(row + n, positive);
                store(row + y_size_ + n, negative);
                sum += positive;
                other += negative;
            }
            sums[r] = sum;
            others[r] = other;
        }
        add_lanes_of_rows(ROWS, a_, [&](int64_t r) { return sums[r]; });
        add_lanes_of_rows(ROWS, b_, [&](int64_t r) { return others[r]; });
        for (int r = 0; r < ROWS; ++r) {
            Real* row = f + r * f_size_;
            const Real a = 1 / a_[r], b = 1 / b_[r];
            for (int64_t n = 0; n < y_size_; n += LANES) {
                store(row + n, load(row + n) * a);
                store(row + y_size_ + n, load(row + y_size_ + n) * b);
            }
        }
    }

    // Compute a_ and b_ of each row: the sums of f d_f over the first and the last N features.
    void add_products(const Real* f, const Real* d_f) {
        for (int64_t half = 0; half < f_size_ / y_size_; ++half)
            add_lanes_of_rows(ROWS, half ? b_ : a_, [&](int64_t r) {
                Reals sum{};
                const int64_t first = r * f_size_ + half * y_size_;
                for (int64_t i = first; i < first + y_size_; i += LANES)
                    sum += load(f + i) * load(d_f + i);
                return sum;
            });
    }

    void differentiate(const Real* y, const Real* f, const Real* d_f, Real* d_y) {
        const Real s = Real(t.scale);
        const bool done = with_entry_map<Real>(t.kind, [&](auto map) {
            for (int64_t i = 0; i < ROWS * y_size_; i += LANES)
                store(d_y + i, map.gradient(load(y + i), load(f + i), load(d_f + i), s));
        });
        if (t.kind == EXP_OF_QUERIES)
            differentiate_exp_of_queries(y, f, d_f, d_y);
        else if (!done)
            differentiate_halves(f, d_f, d_y);
    }

    // The gradient of the maximum of a row is divided equally among all entries that equal it.
    void differentiate_exp_of_queries(const Real* y, const Real* f, const Real* d_f, Real* d_y) {
        const Real s = Real(t.scale);
        add_products(f, d_f);
        largest_of_rows(ROWS, y_size_, y, y_size_, s, b_);
        for (int r = 0; r < ROWS; ++r) {
            Reals equal{};
            for (int64_t i = r * y_size_; i < (r + 1) * y_size_; i += LANES)
                equal += load(y + i) * s == b_[r] ? broadcast(1) : Reals{};
            const Real share = a_[r] / this->add_lanes(equal);
            for (int64_t i = r * y_size_; i < (r + 1) * y_size_; i += LANES) {
                const Reals d = load(d_f + i) * load(f + i);
                store(d_y + i, (load(y + i) * s == b_[r] ? d - share : d) * s);
            }
        }
    }

    void differentiate_halves(const Real* f, const Real* d_f, Real* d_y) {
        add_products(f, d_f);
        for (int r = 0; r < ROWS; ++r) {
            const Real *row = f + r * f_size_, *d_row = d_f + r * f_size_;
            for (int64_t n = 0; n < y_size_; n += LANES) {
                const Reals a = load(row + n) * (load(d_row + n) - a_[r]);
                const Reals b = load(row + y_size_ + n) * (load(d_row + y_size_ + n) - b_[r]);
                store(d_y + r * y_size_ + n, a - b);
            }
        }
    }
};
