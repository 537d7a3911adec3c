// SIMD vectors, exp2, and register tiles: dot products and weighted sums of rows, which are given
// by their addresses.
//
// Uses the vector extensions of GCC and Clang. A vector is as wide as the registers of the CPU.

#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <utility>
#if defined(__AVX512F__) && defined(__AVX512DQ__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

#if defined(__AVX512F__)
constexpr int VECTOR_BYTES = 64;
constexpr int DOT_ROWS = 8;  // rows per tile of dot_products; its float sums use 16 of 32 registers
constexpr int SUM_ROWS = 4;  // rows per tile of add_weighted_rows
#elif defined(__aarch64__)
// NEON: float sums use 16 of 32 registers. GCC keeps vectors of two registers in memory. SUM_ROWS is
// at most the lanes of a vector, in double too, and at most DOT_ROWS: kernels set weights beyond the
// range of a vector of queries to 0, up to a multiple of these.
constexpr int VECTOR_BYTES = 16, DOT_ROWS = 2, SUM_ROWS = 2;
#else
constexpr int VECTOR_BYTES = 32, DOT_ROWS = 2, SUM_ROWS = 2;  // sums use 8 of 16 registers
#endif

template <class Real>
struct Vectors;
template <>
struct Vectors<float> {
    typedef float Reals __attribute__((vector_size(VECTOR_BYTES)));
    typedef int32_t Ints __attribute__((vector_size(VECTOR_BYTES)));
};
template <>
struct Vectors<double> {
    typedef double Reals __attribute__((vector_size(VECTOR_BYTES)));
    typedef int64_t Ints __attribute__((vector_size(VECTOR_BYTES)));
};

constexpr double LOG2_E = 1.4426950408889634;
constexpr int BLOCK = 32;  // columns of a block, one lane each; a multiple of every vector length

template <class Real>
struct Math {
    using Reals = typename Vectors<Real>::Reals;
    using Ints = typename Vectors<Real>::Ints;
    static constexpr int LANES = VECTOR_BYTES / sizeof(Real);

    static Reals load(const Real* x) {
        Reals values;
        std::memcpy(&values, x, sizeof values);
        return values;
    }

    static void store(Real* x, Reals values) { std::memcpy(x, &values, sizeof values); }

    static Reals broadcast(Real value) { return value - Reals{}; }

    // 2^x for x between -1/2 and 1/2.
    static Reals polynomial(Reals x) {
        Reals p = broadcast(1.5403530e-4f);
        for (float coefficient :
             {1.3333558e-3f, 9.6181291e-3f, 5.5504109e-2f, 2.4022651e-1f, 6.9314718e-1f, 1.f})
            p = p * x + coefficient;
        return p;
    }

    // x between low and high, in float; NaN stays NaN.
    static Reals clamp(Reals x, Real low, Real high) {
#if defined(__AVX512F__) && defined(__AVX512DQ__)
        if constexpr (sizeof(Real) == 4) {
            const __m512 most = _mm512_set1_ps(high), least = _mm512_set1_ps(low);
            return (Reals)_mm512_min_ps(most, _mm512_max_ps(least, (__m512)x));
        }
#elif defined(__aarch64__)
        if constexpr (sizeof(Real) == 4) {
            const float32x4_t most = vdupq_n_f32(high), least = vdupq_n_f32(low);
            return (Reals)vminq_f32(most, vmaxq_f32(least, (float32x4_t)x));
        }
#endif
        return x < low ? broadcast(low) : x > high ? broadcast(high) : x;
    }

    // p 2^n for normal results in float, where `rounded` is n + 1.5 * 2^23; x where x is NaN.
    static Reals scale(Reals p, Reals rounded, Reals x) {
#if defined(__aarch64__)
        (void)x;  // p is NaN too, and a product keeps it
        return p * (Reals)(((Ints)rounded << 23) + 0x3f800000);  // times the float 2^n
#else
        const Reals result = (Reals)((Ints)p + ((Ints)rounded << 23));
        return x == x ? result : x;  // the addition to the exponent bits does not keep NaN
#endif
    }

    // 2^x, with x clamped to [-126, 126]. The relative error in float is 2.1e-7. NaN stays NaN.
    static Reals exp2(Reals x) {
#if defined(__AVX512F__) && defined(__AVX512DQ__)
        if constexpr (sizeof(Real) == 4) {  // bitwise equal to the generic code below
            const __m512 low = _mm512_set1_ps(-126), high = _mm512_set1_ps(126);
            const __m512 bounded = _mm512_min_ps(high, _mm512_max_ps(low, (__m512)x));  // keeps NaN
            const Reals fraction = (Reals)_mm512_reduce_ps(bounded, 0);
            const __m512 rounded = _mm512_roundscale_ps(bounded, 0);
            return (Reals)_mm512_scalef_ps((__m512)polynomial(fraction), rounded);
        }
#endif
        x = clamp(x, -126, 126);
        if constexpr (sizeof(Real) == 4) {
            const Reals rounded = x + Real(12582912);  // adding 1.5 * 2^23 rounds to an integer
            const Reals fraction = x - (rounded - Real(12582912));
            return scale(polynomial(fraction), rounded, x);
        } else {
            for (int i = 0; i < LANES; ++i) x[i] = std::exp2(x[i]);
            return x;
        }
    }

    // Write a row, multiplied by a factor, as a column of a [size, BLOCK] matrix.
    static void store_column(const Real* row, int64_t size, Real factor, Real* column) {
        for (int64_t d = 0; d < size; ++d) column[d * BLOCK] = row[d] * factor;
    }

    // Return x, and keep it in a register. Otherwise compilers load it again for every
    // multiplication, and loads are the bottleneck.
    static inline __attribute__((always_inline)) Reals in_register(Reals x) {
#if defined(__AVX512F__)
        asm("" : "+v"(x));
#elif defined(__AVX__)
        asm("" : "+x"(x));
#endif
        return x;
    }

    // sums[r][:] = sum over d of rows[r][d] columns[d][:], for V vectors of columns.
    template <int V, int R>
    static void dot_products(const Real* const* rows, const Real* columns, int64_t depth,
                             Reals (&sums)[R][V]) {
        for (auto& row : sums)
            for (auto& sum : row) sum = Reals{};
        for (int64_t d = 0; d < depth; ++d) {
            Reals values[V];
            for (int i = 0; i < V; ++i)
                values[i] = in_register(load(columns + d * BLOCK + i * LANES));
            for (int r = 0; r < R; ++r)
                for (int i = 0; i < V; ++i) sums[r][i] += rows[r][d] * values[i];
        }
    }

    // For SUM_ROWS rows r, with i from range.first to range.second - 1:
    // out[r][:] = scale[r] out[r][:] + sum over i of weights[r row_stride + i stride] rows[i][:].
    // If scale is null, it is 1 for all rows.
    static void add_weighted_rows(Real* const* out, const Real* scale, const Real* weights,
                                  int64_t row_stride, int64_t stride, const Real* const* rows,
                                  std::pair<int, int> range, int64_t size) {
        int64_t column = 0;
#if defined(__aarch64__)
        for (; column + 8 * LANES <= size; column += 8 * LANES)
            add_columns<8>(out, scale, weights, row_stride, stride, rows, range, column);
#endif
        for (; column + 4 * LANES <= size; column += 4 * LANES)
            add_columns<4>(out, scale, weights, row_stride, stride, rows, range, column);
        for (; column < size; column += LANES)
            add_columns<1>(out, scale, weights, row_stride, stride, rows, range, column);
    }

  private:
    // add_weighted_rows for V vectors of columns.
    template <int V>
    static void add_columns(Real* const* out, const Real* scale, const Real* weights,
                            int64_t row_stride, int64_t stride, const Real* const* rows,
                            std::pair<int, int> range, int64_t column) {
        Reals sums[SUM_ROWS][V] = {};
        for (int i = range.first; i < range.second; ++i) {
            Reals row[V];
            for (int j = 0; j < V; ++j) row[j] = load(rows[i] + column + j * LANES);
            for (int r = 0; r < SUM_ROWS; ++r)
                for (int j = 0; j < V; ++j)
                    sums[r][j] += weights[r * row_stride + i * stride] * row[j];
        }
        for (int r = 0; r < SUM_ROWS; ++r)
            for (int j = 0; j < V; ++j) {
                Real* x = out[r] + column + j * LANES;
                store(x, load(x) * (scale ? scale[r] : Real(1)) + sums[r][j]);
            }
    }
};
