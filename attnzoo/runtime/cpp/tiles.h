// Products of small matrices in registers, transposes, exponentials, and sums over the lanes of a
// vector.
//
// Sizes of matrices are multiples of 16, and their rows are contiguous. The left operand of a
// product is broadcast element by element, so it may have any strides (`row_step`, `step`), and a
// transposed matrix needs no copy. The right operand is read in vectors of columns.

#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <new>
#include <type_traits>
#include <vector>
#if defined(__SSE__)
#include <xmmintrin.h>
#endif

#include "lanes.h"

#if defined(__AVX512F__) || defined(__aarch64__)
constexpr int TILE = 16;  // vectors that accumulate a tile of a product, of 32 registers
#else
constexpr int TILE = 8;  // of 16 registers
#endif

// Treat denormal numbers as 0 in the current scope, because some CPUs are slow with them.
class FlushDenormals {
#if defined(__SSE__)
    const unsigned saved_ = _mm_getcsr();

  public:
    FlushDenormals() { _mm_setcsr(saved_ | 0x8040); }
    ~FlushDenormals() { _mm_setcsr(saved_); }
#endif
};

// Allocates memory for vectors that is aligned to cache lines: SIMD loads and stores then touch one.
template <class Number>
struct AlignedAllocator {
    using value_type = Number;
    static constexpr std::align_val_t ALIGNMENT{64};

    AlignedAllocator() = default;
    template <class Other>
    AlignedAllocator(const AlignedAllocator<Other>&) {}

    Number* allocate(size_t size) {
        return static_cast<Number*>(::operator new(size * sizeof(Number), ALIGNMENT));
    }
    void deallocate(Number* x, size_t) { ::operator delete(x, ALIGNMENT); }
    bool operator==(const AlignedAllocator&) const { return true; }
    bool operator!=(const AlignedAllocator&) const { return false; }
};

template <class Number>
using AlignedVector = std::vector<Number, AlignedAllocator<Number>>;

// Memory that is filled with zeros and aligned to the vector size; take() returns the next part.
template <class Real>
class Buffer {
    std::vector<Real> storage_;
    size_t used_ = 0;

  public:
    explicit Buffer(size_t size) : storage_(size + VECTOR_BYTES / sizeof(Real)) {
        while (reinterpret_cast<uintptr_t>(&storage_[used_]) % VECTOR_BYTES) ++used_;
    }

    Real* take(size_t size) {
        Real* piece = storage_.data() + used_;
        used_ += size;
        return piece;
    }
};

template <class Real>
struct Tiles : Math<Real> {
    using typename Math<Real>::Reals;
    using typename Math<Real>::Ints;
    using Math<Real>::LANES, Math<Real>::load, Math<Real>::store, Math<Real>::broadcast;
    using Math<Real>::in_register, Math<Real>::clamp, Math<Real>::scale;

    // -- products ---------------------------------------------------------------------------------

    // sums[r][:] += sum over i < depth of a[r row_step + i step] b[i pitch + :].
    template <int R, int V>
    static inline __attribute__((always_inline)) void multiply(
        Reals (&sums)[R][V], const Real* a, int64_t row_step, int64_t step, const Real* b,
        int64_t pitch, int64_t depth) {
        // One pointer per four rows: registers do not suffice for more pointers
        const Real* rows[(R + 3) / 4];
        for (int r = 0; r < R; r += 4) rows[r / 4] = a + r * row_step;
        for (int64_t i = 0; i < depth; ++i) {
            Reals row[V];
            for (int j = 0; j < V; ++j) row[j] = in_register(load(b + i * pitch + j * LANES));
            for (int r = 0; r < R; ++r)
                for (int j = 0; j < V; ++j) sums[r][j] += rows[r / 4][r % 4 * row_step] * row[j];
            for (auto& pointer : rows) pointer += step;
        }
    }

    // Call tile(vectors, column) for tiles that cover all columns. `vectors` is the width of the
    // tile, 4, 2 or 1 vectors, as a std::integral_constant.
    template <class Tile>
    static inline __attribute__((always_inline)) void for_columns(int64_t width, Tile tile) {
        int64_t column = 0;
        for (; column + 4 * LANES <= width; column += 4 * LANES)
            tile(std::integral_constant<int, 4>(), column);
        for (; column + 2 * LANES <= width; column += 2 * LANES)
            tile(std::integral_constant<int, 2>(), column);
        for (; column < width; column += LANES) tile(std::integral_constant<int, 1>(), column);
    }

    // out[r][:] = sum over i < depth of a[r row_step + i step] b[i][:], for a multiple of 16 rows.
    static void product(Real* out, int64_t out_pitch, int64_t rows, const Real* a,
                        int64_t row_step, int64_t step, const Real* b, int64_t pitch,
                        int64_t width, int64_t depth) {
        for_columns(width, [&](auto vectors, int64_t column) {
            constexpr int V = decltype(vectors)::value, R = TILE / V;
            for (int64_t first = 0; first < rows; first += R) {
                Reals sums[R][V] = {};
                multiply(sums, a + first * row_step, row_step, step, b + column, pitch, depth);
                for (int r = 0; r < R; ++r)
                    for (int j = 0; j < V; ++j)
                        store(out + (first + r) * out_pitch + column + j * LANES, sums[r][j]);
            }
        });
    }

    static Real dot(const Real* a, const Real* b, int64_t size) {
        Reals sum{};
        for (int64_t i = 0; i < size; i += LANES) sum += load(a + i) * load(b + i);
        return add_lanes(sum);
    }

    // -- transposes and sums of lanes -------------------------------------------------------------

    // out[c][r] = in[r][c]; rows and columns are multiples of 16.
    static void transpose(const Real* in, int64_t in_pitch, int64_t rows, int64_t columns,
                          Real* out, int64_t out_pitch) {
        for (int64_t r = 0; r < rows; r += LANES)
            for (int64_t c = 0; c < columns; c += LANES) {
                Reals block[LANES];
                for (int i = 0; i < LANES; ++i) block[i] = load(in + (r + i) * in_pitch + c);
                transpose_block<LANES / 2>(block);
                for (int i = 0; i < LANES; ++i) store(out + (c + i) * out_pitch + r, block[i]);
            }
    }

    // Transpose a square: exchange its two off-diagonal S x S blocks, then those of half the size
    // in each block, recursively.
    template <int S>
    static inline __attribute__((always_inline)) void transpose_block(Reals (&rows)[LANES]) {
        if constexpr (S > 0) {
            Ints upper, lower;
            for (int i = 0; i < LANES; ++i) {
                upper[i] = i & S ? LANES + (i ^ S) : i;
                lower[i] = i & S ? LANES + i : i ^ S;
            }
            for (int r = 0; r < LANES; ++r)
                if (!(r & S)) {
                    const Reals a = rows[r], b = rows[r + S];
                    rows[r] = choose(a, b, upper);
                    rows[r + S] = choose(a, b, lower);
                }
            transpose_block<S / 2>(rows);
        }
    }

    // Lane i of the result is lane indices[i] of the concatenation of a and b.
    static inline __attribute__((always_inline)) Reals choose(Reals a, Reals b, Ints indices) {
#if defined(__clang__)
        Reals chosen;
        for (int i = 0; i < LANES; ++i)
            chosen[i] = indices[i] < LANES ? a[indices[i]] : b[indices[i] - LANES];
        return chosen;
#else
        return __builtin_shuffle(a, b, indices);
#endif
    }

    static Real add_lanes(Reals x) {
#if defined(__aarch64__)
        // Bitwise equal to the generic code below, for which GCC keeps x in memory
        if constexpr (sizeof(Real) == 4) {
            const float32x4_t all = (float32x4_t)x;
            return vpadds_f32(vadd_f32(vget_low_f32(all), vget_high_f32(all)));
        } else {
            return vpaddd_f64((float64x2_t)x);
        }
#else
        Real lanes[LANES];
        store(lanes, x);
        for (int half = LANES / 2; half > 0; half /= 2)
            for (int i = 0; i < half; ++i) lanes[i] += lanes[i + half];
        return lanes[0];
#endif
    }

    // out[r] = the sum of the lanes of row(r), for a multiple of LANES rows.
    template <class Row>
    static inline __attribute__((always_inline)) void add_lanes_of_rows(int64_t rows, Real* out,
                                                                        Row row) {
        for (int64_t first = 0; first < rows; first += LANES) {
            Reals block[LANES], sum{};
            for (int i = 0; i < LANES; ++i) block[i] = row(first + i);
            transpose_block<LANES / 2>(block);
            for (int i = 0; i < LANES; ++i) sum += block[i];
            store(out + first, sum);
        }
    }

    // out[r] = the maximum over i of factor x[r][i], for a multiple of LANES rows and columns.
    static void largest_of_rows(int64_t rows, int64_t columns, const Real* x, int64_t pitch,
                                Real factor, Real* out) {
        for (int64_t first = 0; first < rows; first += LANES) {
            Reals block[LANES];
            for (int r = 0; r < LANES; ++r) {
                const Real* row = x + (first + r) * pitch;
                block[r] = load(row) * factor;
                for (int64_t i = LANES; i < columns; i += LANES) {
                    const Reals other = load(row + i) * factor;
                    block[r] = other > block[r] ? other : block[r];
                }
            }
            transpose_block<LANES / 2>(block);
            for (int r = 1; r < LANES; ++r) block[0] = block[r] > block[0] ? block[r] : block[0];
            store(out + first, block[0]);
        }
    }

    static Ints lane_numbers(int first) {
        Ints lanes;
        for (int i = 0; i < LANES; ++i) lanes[i] = first + i;
        return lanes;
    }

    // -- functions --------------------------------------------------------------------------------

    // e^x within one unit in the last place; in float, for x of at most 88, and 0 for x below -87,
    // where results become denormal. NaN stays NaN.
    static Reals exp(Reals x) {
        if constexpr (sizeof(Real) == 4) {
            const Reals bounded = clamp(x, -88, 88);
            const Reals shifted = bounded * Real(LOG2_E) + Real(12582912);  // rounds to an integer
            const Reals n = shifted - Real(12582912);
            const Reals r = bounded - n * 0.693359375f - n * -2.12194440e-4f;
            Reals p = broadcast(1.9875691500e-4f);
            for (float coefficient : {1.3981999507e-3f, 8.3334519073e-3f, 4.1665795894e-2f,
                                      1.6666665459e-1f, 5.0000001201e-1f})
                p = p * r + coefficient;
            p = p * (r * r) + r + 1.f;
#if defined(__AVX512F__) && defined(__AVX512DQ__)
            // Bitwise equal to the generic code below; the comparison is true for NaN
            const __mmask16 kept = _mm512_cmp_ps_mask((__m512)x, _mm512_set1_ps(-87), _CMP_NLT_UQ);
            return (Reals)_mm512_maskz_scalef_ps(kept, (__m512)p, (__m512)n);
#else
            const Reals result = scale(p, shifted, x);
            return x < Real(-87) ? Reals{} : result;
#endif
        } else {
            for (int i = 0; i < LANES; ++i) x[i] = std::exp(x[i]);
            return x;
        }
    }

    static void scale_row(const Real* row, Real factor, int64_t size, Real* out) {
        for (int64_t d = 0; d < size; d += LANES) store(out + d, load(row + d) * factor);
    }
};
