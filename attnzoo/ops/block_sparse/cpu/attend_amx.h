// Block-sparse attention of bfloat16 tensors on AMX tiles, see block_sparse.cpp.
//
// The queries of a group are gathered as rows of words, and the keys of a block are the right
// operand of their product. Windows and first tokens are processed first, for consecutive queries
// and with up to NEAR_KEYS keys at a time. Weights and gradients of scores are rounded to bfloat16
// for the products that follow; sums are in float. D and E are multiples of 32. Zeros pad keys.

#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <type_traits>

#include "amx.h"
#include "pairs.h"
#include "tiles.h"

class AmxWorker : PairLists, Tiles<float> {
  public:
    // The tensors contain words: two numbers of bfloat16 in a float; lse contains floats.
    AmxWorker(const Task& task, const Tensors<float>& tensors, int64_t unit, bool is_backward)
        : PairLists(task, unit, true), x(tensors), d_(task.key_size), e_(task.value_size),
          pitch_(e_ + LANES), columns_((std::max(size_, NEAR_KEYS) + 31) / 32 * 32),
          buffer_(buffer_size(is_backward)), q_(buffer_.take(GROUP * d_ / 2)),
          k_(buffer_.take(columns_ * d_ / 2)), v_(buffer_.take(columns_ * e_ / 2)),
          k_columns_(buffer_.take(columns_ * d_ / 2)), v_pairs_(buffer_.take(columns_ * e_ / 2)),
          p_(buffer_.take(GROUP * columns_)), p_words_(buffer_.take(GROUP * columns_ / 2)),
          products_(buffer_.take(GROUP * std::max(d_, e_))), max_(buffer_.take(tile_)),
          sums_(buffer_.take(tile_ * std::max(pitch_, d_))) {
        if (!is_backward) return;
        d_out_ = buffer_.take(GROUP * e_ / 2), v_columns_ = buffer_.take(columns_ * e_ / 2);
        k_pairs_ = buffer_.take(columns_ * d_ / 2), dp_ = buffer_.take(GROUP * columns_);
        q_pairs_ = buffer_.take(GROUP / 2 * d_), d_out_pairs_ = buffer_.take(GROUP / 2 * e_);
        weight_pairs_ = buffer_.take(GROUP / 2 * columns_);
        left_ = buffer_.take(GROUP / 2 * columns_);
        dk_ = buffer_.take((t.keys + columns_) * d_), dv_ = buffer_.take((t.keys + columns_) * e_);
        delta_ = max_;
    }

    void forward() {
        for_each_tile([this](int64_t row, int queries, int64_t first) {
            row_ = row;
            std::fill_n(max_, queries, float(MASKED_SCORE));
            std::fill_n(sums_, queries * pitch_, 0.f);
            attend_all(first, queries, [&](const Pair& pair) __attribute__((always_inline)) {
                prefetch_row(x.q + (row + pair.query) * d_ / 2, d_ / 2);
                prefetch_row(sums_ + pair.query * pitch_, pitch_);
            });
            finish(queries);
        });
    }

    void backward() {
        for_each_tile([this](int64_t row, int queries, int64_t first) {
            row_ = row;
            for (int i = 0; i < queries; ++i) delta_[i] = dot_words(x.d_out, x.out, row + i);
            std::fill_n(sums_, queries * d_, 0.f);
            attend_all(first, queries, [&](const Pair& pair) __attribute__((always_inline)) {
                prefetch_row(x.q + (row + pair.query) * d_ / 2, d_ / 2);
                prefetch_row(x.d_out + (row + pair.query) * e_ / 2, e_ / 2);
                prefetch_row(sums_ + pair.query * d_, d_);
            });
            Amx::round_row(sums_, queries * d_, x.dq + row * d_ / 2);
        });
        Amx::round_row(dk_, t.keys * d_, x.dk + unit_ * t.keys * d_ / 2);
        Amx::round_row(dv_, t.keys * e_, x.dv + unit_ * t.keys * e_ / 2);
    }

  private:
    const Tensors<float>& x;
    const int64_t d_, e_, pitch_;
    const int columns_;       // most keys of a block or part of a window, a multiple of 32
    int64_t row_ = 0;         // first query of the tile
    int64_t key_ = 0;         // first key that is loaded
    int keys_ = 0;            // number of keys that are loaded
    int width_ = 0, depth_ = 0;  // the same as a multiple of 16, and of 32
    bool is_whole_ = false;   // whether no zeros replace keys other than padding
    bool is_finite_ = true;   // whether loaded keys and values are finite
    Buffer<float> buffer_;
    float *q_, *k_, *v_;      // words: [GROUP, D / 2], [columns_, D / 2], [columns_, E / 2]
    float *k_columns_;        // words: [D / 2, width_]
    float *v_pairs_;          // words: [columns_ / 2, E]
    float *p_, *p_words_;     // [GROUP, depth_]: scores or weights; as words
    float *products_;         // [GROUP, D or E]
    float *max_;              // [tile_]: reference of each query
    float *sums_;             // forward: [tile_, E and LANES], of values and of weights; or dq
    float *d_out_, *v_columns_, *k_pairs_, *dp_;  // backward, as q_, k_columns_, v_pairs_, p_
    float *q_pairs_, *d_out_pairs_;               // words: [GROUP / 2, D or E]
    float *weight_pairs_, *left_;                 // words: [GROUP / 2, width_], [width_, GROUP / 2]
    float *dk_ = nullptr, *dv_ = nullptr;         // [keys and columns_, D or E]
    float *delta_;                                // [tile_]: sums of d_out times out

    size_t buffer_size(bool is_backward) const {
        const int64_t sizes = d_ + e_, columns = columns_;
        const int64_t forward = GROUP * (d_ + std::max(d_, e_) + 2 * columns) + columns * sizes;
        const int64_t tile = tile_ * (1 + std::max(pitch_, d_));
        const int64_t backward = GROUP * (2 * sizes + 3 * columns) + columns * sizes +
                                 (t.keys + columns) * sizes;
        return forward + tile + is_backward * backward;
    }

    // -- loading ---------------------------------------------------------------------------------

    // Load keys `key` to key + size - 1 and their values; zeros replace those of them before `low`
    // and from `high` on, and padding.
    void load_keys(int64_t key, int size, int low, int high) {
        if (is_whole_ && key == key_ && size == keys_ && is_finite_) return;
        const int rows = std::max(size, keys_);  // zeros replace earlier keys too
        is_whole_ = low == 0 && high == size;
        high = (int)std::min<int64_t>(high, n_ - key);
        key_ = key, keys_ = size, width_ = (size + 15) / 16 * 16, depth_ = (size + 31) / 32 * 32;
        const int64_t first = unit_ * t.keys + key;
        is_finite_ = load_rows(x.k + first * d_ / 2, d_ / 2, rows, low, high, k_);
        is_finite_ &= load_rows(x.v + first * e_ / 2, e_ / 2, rows, low, high, v_);
        transpose(k_, d_ / 2, width_, d_ / 2, k_columns_, width_);
        pair_rows(v_, rows, e_, v_pairs_);
        if (!dk_) return;
        transpose(v_, e_ / 2, width_, e_ / 2, v_columns_, width_);
        pair_rows(k_, rows, d_, k_pairs_);
    }

    // Copy rows low to high - 1 of words, and return whether their numbers are finite. The others
    // of `count` rows become zeros.
    static bool load_rows(const float* rows, int64_t words, int count, int low, int high,
                          float* out) {
        Ints infinite{};
        for (int i = 0; i < count; ++i, out += words) {
            if (i < low || i >= high) {
                std::fill_n(out, words, 0.f);
                continue;
            }
            for (int64_t j = 0; j < words; j += LANES) {
                const Reals row = load(rows + i * words + j);
                infinite |= ((Ints)row & 0x7f800000) == 0x7f800000;
                infinite |= ((Ints)row & 0x7f80) == 0x7f80;
                store(out + j, row);
            }
        }
        return !any_lane<float>(infinite);
    }

    // Copy the rows of queries, in words; zeros follow.
    void gather(const float* rows, int64_t words, const Pair* pairs, int count, float* out) const {
        rows += row_ * words;
        for (int r = 0; r < count; ++r, out += words) {
            const float* row = rows + pairs[r].query * words;
            for (int64_t i = 0; i < words; i += LANES) store(out + i, load(row + i));
        }
        std::fill_n(out, (GROUP - count) * words, 0.f);
    }

    // Pairs of rows of words. After an odd number of rows, a row of zeros follows.
    static void pair_rows(const float* rows, int count, int64_t size, float* out) {
        for (int i = 0; i < count; i += 2)
            Amx::pair_words(rows + i * size / 2, rows + (i + 1) * size / 2, size,
                            out + i / 2 * size);
    }

    // The product of two rows of values in bfloat16.
    float dot_words(const float* a, const float* b, int64_t row) const {
        Reals sum{};
        for (int64_t i = row * e_ / 2; i < (row + 1) * e_ / 2; i += LANES) {
            const Ints first = (Ints)load(a + i), second = (Ints)load(b + i);
            sum += (Reals)(first << 16) * (Reals)(second << 16);
            sum += (Reals)(first & (int)0xffff0000) * (Reals)(second & (int)0xffff0000);
        }
        return add_lanes(sum);
    }

    // -- forward and backward --------------------------------------------------------------------

    // Attend to the keys of all pairs of the tile, after prefetch(pair) for each selected pair.
    template <class Prefetch>
    void attend_all(int64_t first, int queries, Prefetch prefetch) {
        for_each_near_group(first, queries,
                            [&](int64_t key, int size, const Pair* pairs, int count) {
                                load_keys(key, size, 0, size);
                                attend_finite(pairs, count);
                            });
        for_each_group(
            [&](int64_t block) { load_keys(block * size_, size_, 0, size_); },
            [&](int64_t, const Pair* pairs, int count) { attend_finite(pairs, count); }, prefetch);
    }

    static Ints attended(const Pair& pair, int lane) {
        const Ints key = lane_numbers(lane);
        return (key >= pair.low) & (key < pair.high);
    }

    // Attend to the loaded keys, with one query at a time if some of them are not finite: they must
    // not reach a query that does not attend to them, and 0 times NaN is NaN.
    void attend_finite(const Pair* pairs, int count) {
        if (is_finite_) return dk_ ? attend_backward(pairs, count) : attend(pairs, count);
        for (int i = 0; i < count; ++i) {
            load_keys(key_, keys_, pairs[i].low, pairs[i].high);
            if (dk_) attend_backward(pairs + i, 1);
            else attend(pairs + i, 1);
        }
        is_finite_ = false;  // for the next queries, which need other keys
    }

    void attend(const Pair* pairs, int count) {
        const int rows = count <= 16 ? 16 : GROUP;
        gather(x.q, d_ / 2, pairs, count, q_);
        Amx::product(p_, depth_, rows, q_, d_ / 2, k_columns_, width_, width_, d_);
        float rescale[GROUP];
        if (width_ == 16) compute_weights(pairs, count, rescale, std::integral_constant<int, 16>());
        else compute_weights(pairs, count, rescale, width_);
        Amx::product(products_, e_, rows, p_words_, depth_ / 2, v_pairs_, e_, e_, depth_);
        const int64_t size = e_, pitch = pitch_;
        for (int r = 0; r < count; ++r) {
            float* sums = sums_ + pairs[r].query * pitch;
            const float *products = products_ + r * size, factor = rescale[r];
            for (int64_t i = 0; i < size; i += LANES)
                store(sums + i, load(sums + i) * factor + load(products + i));
        }
    }

    // Turn the products of queries and keys into weights, as words, add the weights to the sums of
    // the queries, and return the factors that their earlier sums need.
    template <class Width>
    void compute_weights(const Pair* pairs, int count, float* rescale, Width width) {
        const float scale = float(t.scale * LOG2_E);
        const int64_t pitch = pitch_, depth = depth_;
        float *sums = sums_ + e_, *p = p_, *words = p_words_, *references = max_;
        for (int r = 0; r < count; ++r, p += depth, words += depth / 2) {
            const Pair pair = pairs[r];
            const float limit = references[pair.query] + float(HEADROOM);
            float* const sum = sums + pair.query * pitch;
            const int begin = width == 16 ? 0 : pair.low / LANES * LANES;
            const int end = width == 16 ? 16 : pair.high;
            Reals largest = broadcast(limit);
            for (int lane = begin; lane < end; lane += LANES) {
                const Reals score = load(p + lane) * scale;
                largest = attended(pair, lane) & (score > largest) ? score : largest;
                store(p + lane, score);
            }
            rescale[r] = 1;
            if (any_lane<float>(largest > limit))
                rescale[r] = raise_reference(largest, references[pair.query], sum);
            const float reference = references[pair.query];
            Reals total = load(sum);
            for (int lane = 0; lane < begin; lane += LANES) store(p + lane, Reals{});
            int lane = begin;
            for (; lane < end; lane += LANES) {
                const Reals weight = Amx::exp2(load(p + lane) - reference);
                const Reals kept = attended(pair, lane) ? weight : Reals{};
                total += kept;
                store(p + lane, kept);
            }
            store(sum, total);
            for (; lane < depth; lane += LANES) store(p + lane, Reals{});
            Amx::round_row(p, depth, words);
        }
    }

    // Raise the reference of a query to its largest score, and return the factor of earlier sums.
    static float raise_reference(Reals scores, float& reference, float* sum) {
        float lanes[LANES];
        store(lanes, scores);
        const float largest = *std::max_element(lanes, lanes + LANES);
        const float rescale = exp2(broadcast(reference - largest))[0];
        reference = largest;
        store(sum, load(sum) * rescale);
        return rescale;
    }

    // Divide by the sums of weights, and write outputs and log-sum-exp.
    void finish(int queries) {
        for (int i = 0; i < queries; ++i) {
            float* sums = sums_ + i * pitch_;
            const float total = add_lanes(load(sums + e_));
            const float inverse = total == 0 ? 0 : 1 / total;  // NaN stays NaN
            x.lse[row_ + i] = total == 0 ? INFINITY : max_[i] + std::log2(total);
            scale_row(sums, inverse, e_, sums);
            Amx::round_row(sums, e_, x.out + (row_ + i) * e_ / 2);
        }
    }

    void attend_backward(const Pair* pairs, int count) {
        const int rows = count <= 16 ? 16 : GROUP;
        gather(x.q, d_ / 2, pairs, count, q_);
        gather(x.d_out, e_ / 2, pairs, count, d_out_);
        Amx::product(p_, depth_, rows, q_, d_ / 2, k_columns_, width_, width_, d_);
        Amx::product(dp_, depth_, rows, d_out_, e_ / 2, v_columns_, width_, width_, e_);
        if (width_ == 16) compute_gradients(pairs, count, std::integral_constant<int, 16>());
        else compute_gradients(pairs, count, width_);
        std::fill_n(p_ + count * depth_, (GROUP - count) * depth_, 0.f);
        std::fill_n(dp_ + count * depth_, (GROUP - count) * depth_, 0.f);
        Amx::product(products_, d_, rows, p_words_, depth_ / 2, k_pairs_, d_, d_, depth_);
        const int64_t size = d_;
        for (int r = 0; r < count; ++r) {
            float* dq = sums_ + pairs[r].query * size;
            const float* products = products_ + r * size;
            for (int64_t i = 0; i < size; i += LANES)
                store(dq + i, load(dq + i) + load(products + i));
        }
        add_key_gradients(dp_, q_, d_, q_pairs_, dk_ + key_ * d_);
        add_key_gradients(p_, d_out_, e_, d_out_pairs_, dv_ + key_ * e_);
    }

    // Turn the products of queries with keys and of their output gradients with values into weights
    // and gradients of scores, the latter also as words.
    template <class Width>
    void compute_gradients(const Pair* pairs, int count, Width width) {
        const float factor = float(t.scale * LOG2_E), scale = float(t.scale);
        const int64_t depth = depth_;
        const float *logs = x.lse + row_, *deltas = delta_;
        float *p = p_, *dp = dp_, *words = p_words_;
        for (int r = 0; r < count; ++r, p += depth, dp += depth, words += depth / 2) {
            const Pair pair = pairs[r];
            const float log = logs[pair.query], delta = deltas[pair.query];
            const int begin = width == 16 ? 0 : pair.low / LANES * LANES;
            const int end = width == 16 ? 16 : pair.high;
            for (int lane = 0; lane < begin; lane += LANES)
                store(p + lane, Reals{}), store(dp + lane, Reals{});
            int lane = begin;
            for (; lane < end; lane += LANES) {
                const Ints is_attended = attended(pair, lane);
                const Reals weight = Amx::exp2(load(p + lane) * factor - log);
                const Reals d_score = weight * (load(dp + lane) - delta) * scale;
                store(p + lane, is_attended ? weight : Reals{});
                store(dp + lane, is_attended ? d_score : Reals{});
            }
            for (; lane < depth; lane += LANES)
                store(p + lane, Reals{}), store(dp + lane, Reals{});
            Amx::round_row(dp, depth, words);
        }
    }

    // Add the transposed weights [GROUP, width_] times rows of words of the group's queries.
    void add_key_gradients(const float* weights, const float* rows, int64_t size, float* pairs,
                           float* out) {
        const int64_t width = width_, depth = depth_;
        float* words = weight_pairs_;
        for (int i = 0; i < GROUP; i += 2, weights += 2 * depth, words += width)
            for (int64_t lane = 0; lane < width; lane += LANES)
                store(words + lane,
                      Amx::pairs(load(weights + lane), load(weights + depth + lane)));
        transpose(weight_pairs_, width_, GROUP / 2, width_, left_, GROUP / 2);
        pair_rows(rows, GROUP, size, pairs);
        Amx::product<true>(out, size, width_, left_, GROUP / 2, pairs, size, size, GROUP);
    }
};
