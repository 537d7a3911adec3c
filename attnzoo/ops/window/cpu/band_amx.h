// Products of a block of queries with a tile of keys on AMX, for bfloat16 queries, keys and values.
//
// Rows of queries, keys and values are rows of words, see amx.h. Weights and gradients of scores
// are rounded to bfloat16 before they are multiplied. In these buffers D and E are rounded up to
// multiples of 32.

#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "amx.h"
#include "rows.h"

// BLOCK queries, one per row or lane, and up to KEY_TILE keys, whose rows are in two ring buffers.
template <int KEY_TILE>
class BandProducts : Tiles<float> {
    using Tiles<float>::load, Tiles<float>::store, Tiles<float>::transpose, Tiles<float>::LANES;

    // A ring buffer of keys or values, and the pairs of its rows.
    struct Ring {
        const int64_t size;                // D or E
        const AlignedVector<float>& rows;  // [ring + 16, size / 2]: the last ones are not used
        AlignedVector<float> pairs;        // [ring / 2, size]

        Ring(int64_t size, const AlignedVector<float>& rows)
            : size(size), rows(rows), pairs(rows.size()) {}
    };

    const Amx amx_;
    AlignedVector<float> q_, d_out_;               // [D / 2, BLOCK], [E / 2, BLOCK]: transposed
    AlignedVector<float> q_pairs_, d_out_pairs_;   // [BLOCK / 2, D], [BLOCK / 2, E]
    AlignedVector<float> gathered_, row_pairs_;    // [KEY_TILE, D or E / 2], [KEY_TILE / 2, D or E]
    AlignedVector<float> weight_pairs_, weights_;  // [KEY_TILE / 2, BLOCK]; its transpose
    AlignedVector<float> product_;                 // [KEY_TILE, D or E]
    AlignedVector<float> zeros_;                   // [D or E / 2]: in place of keys beyond the last

    static int64_t pad(int64_t size) { return (size + 31) / 32 * 32; }

  public:
    Ring k, v;

    BandProducts(int64_t size, int64_t width, const AlignedVector<float>& k_ring,
                 const AlignedVector<float>& v_ring)
        : q_(pad(size) / 2 * BLOCK), d_out_(pad(width) / 2 * BLOCK),
          q_pairs_(BLOCK / 2 * pad(size)), d_out_pairs_(BLOCK / 2 * pad(width)),
          gathered_(KEY_TILE / 2 * pad(std::max(size, width))), row_pairs_(gathered_.size()),
          weight_pairs_(KEY_TILE / 2 * BLOCK), weights_(weight_pairs_.size()),
          product_(2 * gathered_.size()), zeros_(pad(std::max(size, width)) / 2),
          k(pad(size), k_ring), v(pad(width), v_ring) {}

    // Pair a row of the ring buffers with the one before, if its number is odd.
    void pair_ring(int64_t row) {
        if (row % 2 == 0) return;
        for (Ring* x : {&k, &v}) {
            const float* last = &x->rows[row * x->size / 2];
            Amx::pair_words(last - x->size / 2, last, x->size, &x->pairs[row / 2 * x->size]);
        }
    }

    // Copy a row of bfloat16 numbers, followed by zeros up to a multiple of 32 numbers.
    static void copy_row(const char* x, int64_t size, float* words) {
        std::fill_n(words + size / 2, pad(size) / 2 - size / 2, 0.f);
        std::memcpy(words, x, 2 * size);
    }

    // Round a row of floats to bfloat16 numbers, and widen them again.
    static void round(float* row, int64_t size) {
        for (int64_t i = 0; i < size; i += LANES) {
            const Reals second = Amx::pairs(Reals{}, load(row + i));  // in the high halves
            store(row + i, second);
        }
    }

    // Prepare BLOCK rows of queries: rows of words.
    void set_queries(const float* rows) { set(rows, k.size, q_, q_pairs_); }

    // Prepare BLOCK rows of gradients of outputs, `pitch` floats apart, a multiple of 16.
    void set_output_gradients(const float* rows, int64_t pitch) {
        for (int c = 0; c < BLOCK; ++c)
            Amx::round_padded_row(rows + c * pitch, pitch, &gathered_[c * v.size / 2]);
        set(gathered_.data(), v.size, d_out_, d_out_pairs_);
    }

    // out[w][:] = products of key w, or of its value, with all queries or gradients of outputs.
    void multiply_keys(const float* const* rows, int count, float* out) {
        multiply(rows, count, k, q_, out);
    }
    void multiply_values(const float* const* rows, int count, float* out) {
        multiply(rows, count, v, d_out_, out);
    }

    // out[c][:] = sum over keys w of weights[w][c] rows[w][:], for `columns` columns, plus
    // out[c][:] if `add`. `ring` is k or v. Up to the next multiple of 32 keys, weights are 0.
    void sum_rows(const float* weights, const float* const* rows, int count, const Ring& ring,
                  int64_t columns, bool add, float* out) {
        const int keys = (int)pad(count);
        for (int w = 0; w < keys; w += 2) {
            const float* x = weights + w * BLOCK;
            for (int c = 0; c < BLOCK; c += LANES)
                store(&weight_pairs_[w / 2 * BLOCK + c],
                      Amx::pairs(load(x + c), load(x + BLOCK + c)));
        }
        transpose(weight_pairs_.data(), BLOCK, keys / 2, BLOCK, weights_.data(), KEY_TILE / 2);
        const auto product = add ? Amx::product<true> : Amx::product<false>;
        product(out, columns, BLOCK, weights_.data(), KEY_TILE / 2, pairs(rows, count, ring),
                ring.size, columns, keys);
    }

    // Return rows [w][:] = sum over queries c of weights[w][c] x[c][:], `columns` apart, with the
    // queries or the gradients of outputs as x.
    const float* multiply_queries(const float* weights, int count, int64_t columns) {
        return multiply_block(weights, count, columns, q_pairs_, k.size);
    }
    const float* multiply_output_gradients(const float* weights, int count, int64_t columns) {
        return multiply_block(weights, count, columns, d_out_pairs_, v.size);
    }

  private:
    static void set(const float* rows, int64_t size, AlignedVector<float>& columns,
                    AlignedVector<float>& pairs) {
        transpose(rows, size / 2, BLOCK, size / 2, columns.data(), BLOCK);
        for (int c = 0; c < BLOCK; c += 2)
            Amx::pair_words(rows + c * size / 2, rows + (c + 1) * size / 2, size,
                            &pairs[c / 2 * size]);
    }

    // Whether rows follow each other in a ring buffer.
    static bool are_contiguous(const float* const* rows, int count, const Ring& ring) {
        const float* begin = ring.rows.data();
        return rows[0] >= begin && rows[0] < begin + ring.rows.size() &&
               rows[count - 1] == rows[0] + (count - 1) * ring.size / 2;
    }

    void multiply(const float* const* rows, int count, const Ring& ring,
                  const AlignedVector<float>& columns, float* out) {
        const int tall = (count + 15) / 16 * 16;  // further rows of the result are not used
        const float* left = rows[0];
        if (!are_contiguous(rows, count, ring)) {
            left = gathered_.data();
            for (int w = 0; w < count; ++w)
                std::copy_n(rows[w], ring.size / 2, &gathered_[w * ring.size / 2]);
        }
        Amx::product(out, BLOCK, tall, left, ring.size / 2, columns.data(), BLOCK, BLOCK,
                     ring.size);
    }

    // Return the pairs of rows, followed by zeros up to a multiple of 32 rows.
    const float* pairs(const float* const* rows, int count, const Ring& ring) {
        const int64_t first = (rows[0] - ring.rows.data()) / (ring.size / 2);
        if (count % 32 == 0 && are_contiguous(rows, count, ring) && first % 2 == 0)
            return &ring.pairs[first / 2 * ring.size];
        for (int w = 0; w < pad(count); w += 2)
            Amx::pair_words(w < count ? rows[w] : zeros_.data(),
                            w + 1 < count ? rows[w + 1] : zeros_.data(), ring.size,
                            &row_pairs_[w / 2 * ring.size]);
        return row_pairs_.data();
    }

    const float* multiply_block(const float* weights, int count, int64_t columns,
                                const AlignedVector<float>& pairs, int64_t pitch) {
        const int tall = (count + 15) / 16 * 16;
        for (int w = 0; w < count; ++w)
            Amx::round_row(weights + w * BLOCK, BLOCK, &weights_[w * BLOCK / 2]);
        Amx::product(product_.data(), columns, tall, weights_.data(), BLOCK / 2, pairs.data(),
                     pitch, columns, BLOCK);
        return product_.data();
    }
};

// Stands for BandProducts where they are not used.
struct NoProducts {
    template <class... Arguments>
    explicit NoProducts(const Arguments&...) {}
};
