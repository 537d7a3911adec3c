// Sums of products in the vector registers of a CPU, for rows that lie anywhere.
//
// GCC's vector types, which Clang knows too, become whatever registers the CPU has.

#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <utility>

#if defined(__AVX512F__)
constexpr int BYTES = 64, TALL = 8, FLAT = 4;  // 16 of 32 registers hold sums of float
#else
constexpr int BYTES = 32, TALL = 2, FLAT = 2;  // 8 of 16
#endif

template <class Real>
struct Vectors;
template <>
struct Vectors<float> {
    typedef float Reals __attribute__((vector_size(BYTES)));
    typedef int32_t Ints __attribute__((vector_size(BYTES)));
};
template <>
struct Vectors<double> {
    typedef double Reals __attribute__((vector_size(BYTES)));
    typedef int64_t Ints __attribute__((vector_size(BYTES)));
};

constexpr double LOG2_E = 1.4426950408889634;
constexpr int BLOCK = 32;  // lanes at hand: whole vectors of any kind

template <class Real>
struct Math {
    using Reals = typename Vectors<Real>::Reals;
    using Ints = typename Vectors<Real>::Ints;
    static constexpr int LANES = BYTES / sizeof(Real);

    static Reals load(const Real* at) {
        Reals found;
        std::memcpy(&found, at, sizeof found);
        return found;
    }

    static void store(Real* at, Reals what) { std::memcpy(at, &what, sizeof what); }

    static Reals all(Real number) { return number - Reals{}; }

    // 2^x, which is 2^-126 where it is less; float: to 2e-7 of itself.
    static Reals exp2(Reals power) {
        power = power < Real(-126) ? all(-126) : power;
        power = power > Real(126) ? all(126) : power;
        if constexpr (sizeof(Real) == 4) {
            const Reals whole = power + Real(12582912);  // 1.5 2^23: nothing is left of fractions
            const Reals f = power - (whole - Real(12582912));
            Reals p = all(1.5403530e-4f);
            for (float next : {1.3333558e-3f, 9.6181291e-3f, 5.5504109e-2f, 2.4022651e-1f,
                               6.9314718e-1f, 1.f})
                p = p * f + next;
            return (Reals)((Ints)p + ((Ints)whole << 23));
        } else {
            for (int i = 0; i < LANES; ++i) power[i] = std::exp2(power[i]);
            return power;
        }
    }

    // Turn a row into the column of a lane.
    static void column(const Real* row, int64_t size, Real factor, Real* to) {
        for (int64_t d = 0; d < size; ++d) to[d * BLOCK] = row[d] * factor;
    }

    // sums[r][:] = sum over d of rows[r][d] lanes[d][:].
    template <int V>
    static void products(const Real* const* rows, const Real* lanes, int64_t depth,
                         Reals (&sums)[TALL][V]) {
        for (auto& its : sums)
            for (auto& sum : its) sum = Reals{};
        for (int64_t d = 0; d < depth; ++d) {
            Reals beside[V];
            for (int i = 0; i < V; ++i) beside[i] = load(lanes + d * BLOCK + i * LANES);
            for (int r = 0; r < TALL; ++r)
                for (int i = 0; i < V; ++i) sums[r][i] += rows[r][d] * beside[i];
        }
    }

    // into[r][:] = scale[r] into[r][:] + sum over i from .. to - 1 of weights[r across + i down]
    // rows[i][:], for FLAT rows and some columns.
    template <int V>
    static void add_columns(Real* const* into, const Real* scale, const Real* weights,
                            int64_t across, int64_t down, const Real* const* rows, std::pair<int, int> some,
                            int64_t column) {
        Reals sums[FLAT][V] = {};
        for (int i = some.first; i < some.second; ++i) {
            Reals row[V];
            for (int j = 0; j < V; ++j) row[j] = load(rows[i] + column + j * LANES);
            for (int r = 0; r < FLAT; ++r)
                for (int j = 0; j < V; ++j) sums[r][j] += weights[r * across + i * down] * row[j];
        }
        for (int r = 0; r < FLAT; ++r)
            for (int j = 0; j < V; ++j) {
                Real* at = into[r] + column + j * LANES;
                store(at, load(at) * (scale ? scale[r] : Real(1)) + sums[r][j]);
            }
    }

    static void add(Real* const* into, const Real* scale, const Real* weights, int64_t across,
                    int64_t down, const Real* const* rows, std::pair<int, int> some, int64_t size) {
        int64_t column = 0;
        for (; column + 4 * LANES <= size; column += 4 * LANES)
            add_columns<4>(into, scale, weights, across, down, rows, some, column);
        for (; column < size; column += LANES)
            add_columns<1>(into, scale, weights, across, down, rows, some, column);
    }
};
