// Products of bfloat16 matrices, summed in float, on the tiles of AMX (Intel CPUs since 2023).
//
// Matrices consist of words of 32 bits, stored as floats that are never computed with; each contains
// two bfloat16 numbers, the first one in its low half.
//
//     rows of words     [M, K / 2]: a word contains the numbers of two consecutive columns
//     pairs of rows     [K / 2, N]: a word contains the numbers of two consecutive rows
//
// A product takes its left operand as rows of words, and its right one as pairs of rows. The
// transpose of the one as a matrix of words is the other one for the transposed matrix. M and N are
// multiples of 16, and K is one of 32. As in the instruction, denormal numbers count as 0.
//
// Without AMX everything is computed by plain loops, which only tests use (EMULATE_AMX).

#pragma once

#include <cstdint>
#include <cstring>

#include "tiles.h"

#if defined(__AMX_BF16__) && defined(__AVX512BF16__) && defined(__linux__) && !defined(EMULATE_AMX)
#define HAS_AMX 1
#include <immintrin.h>
#include <sys/syscall.h>
#include <unistd.h>
#else
#define HAS_AMX 0
#endif

class Amx : Tiles<float> {
    using Tiles<float>::load, Tiles<float>::store, Tiles<float>::broadcast, Tiles<float>::LANES;
    typedef uint16_t Halves __attribute__((vector_size(VECTOR_BYTES)));

    struct Config {
        uint8_t palette = 0, start_row = 0, reserved[14] = {};
        uint16_t row_bytes[16] = {};
        uint8_t rows[16] = {};
    };
    Config saved_;

  public:
    using Words = Reals;

    // Whether this CPU has AMX, and the operating system lets the process use it.
    static bool is_available() {
#if HAS_AMX
        constexpr long REQUEST_PERMISSION = 0x1023, TILE_DATA = 18;  // of arch_prctl in Linux
        static const bool permitted = syscall(SYS_arch_prctl, REQUEST_PERMISSION, TILE_DATA) == 0;
        return permitted;
#elif defined(EMULATE_AMX)
        return true;
#else
        return false;
#endif
    }

    // Configure the tiles of this thread in a scope; PyTorch's own configuration is restored.
    Amx() {
#if HAS_AMX
        keep_stores(&saved_);
        _tile_storeconfig(&saved_);
        keep_stores(&saved_);
        alignas(64) Config config;
        config.palette = 1;
        for (int i = 0; i < 8; ++i) config.row_bytes[i] = 64, config.rows[i] = 16;
        keep_stores(&config);
        _tile_loadconfig(&config);
#endif
    }

    ~Amx() {
#if HAS_AMX
        if (saved_.palette) _tile_loadconfig(&saved_);
        else _tile_release();
#endif
    }

    Amx(const Amx&) = delete;
    Amx& operator=(const Amx&) = delete;

    // -- rounding and packing ---------------------------------------------------------------------

    // Words of two vectors of floats, rounded to nearest; NaN stays NaN.
    static Words pairs(Reals first, Reals second) {
#if HAS_AMX
        return (Words)interleave((Halves)_mm512_cvtne2ps_pbh((__m512)second, (__m512)first));
#else
        return (Words)((round(first) >> 16 & 0xffff) | (round(second) & (int)0xffff0000));
#endif
    }

    // Round a row of floats to a row of words; the size is a multiple of two vectors.
    static void round_row(const float* x, int64_t size, float* words) {
        for (int64_t i = 0; i < size; i += 2 * LANES) {
#if HAS_AMX
            const auto halves =
                _mm512_cvtne2ps_pbh((__m512)load(x + i + LANES), (__m512)load(x + i));
            std::memcpy(words + i / 2, &halves, sizeof halves);
#else
            for (int j = 0; j < LANES; ++j) {
                Reals first{}, second{};
                first[0] = x[i + 2 * j], second[0] = x[i + 2 * j + 1];
                words[i / 2 + j] = pairs(first, second)[0];
            }
#endif
        }
    }

    // Round a row of floats, whose size is a multiple of 16, and append zeros up to a multiple of 32
    // numbers, the depth of a product.
    static void round_padded_row(const float* x, int64_t size, float* words) {
        const int64_t whole = size / 32 * 32;
        round_row(x, whole, words);
        if (whole == size) return;
        float last[32] = {};
        std::memcpy(last, x + whole, sizeof(float) * (size - whole));
        round_row(last, 32, words + whole / 2);
    }

    // Pairs of two rows of words: [size / 2] twice -> [size].
    static void pair_words(const float* first, const float* second, int64_t size, float* words) {
        for (int64_t i = 0; i < size / 2; i += LANES) {
            Halves a, b, low, high;
            std::memcpy(&a, first + i, sizeof a);
            std::memcpy(&b, second + i, sizeof b);
            for (int j = 0; j < 2 * LANES; ++j) {
                low[j] = j / 2 + (j % 2 ? 2 * LANES : 0);
                high[j] = low[j] + LANES;
            }
            low = choose_halves(a, b, low), high = choose_halves(a, b, high);
            std::memcpy(words + 2 * i, &low, sizeof low);
            std::memcpy(words + 2 * i + LANES, &high, sizeof high);
        }
    }

    // 2^x for x up to 126, with a relative error of 7.5e-5, a 26th of the largest error of rounding
    // to bfloat16. NaN stays NaN.
    static Reals exp2(Reals x) {
#if HAS_AMX
        const Reals fraction = (Reals)_mm512_reduce_ps((__m512)x, 0);
        Reals p = broadcast(5.517166722e-2f);
        for (float coefficient : {2.426111221e-1f, 6.932609858e-1f, 9.999280736e-1f})
            p = p * fraction + coefficient;
        return (Reals)_mm512_scalef_ps((__m512)p, _mm512_roundscale_ps((__m512)x, 0));
#else
        return Tiles<float>::exp2(x);
#endif
    }

    // -- products ---------------------------------------------------------------------------------

    // The operands of a product, [m, k] and [k, n]. Pitches are in words.
    struct Operands {
        const float* a;
        int64_t a_pitch;
        const float* b;
        int64_t b_pitch, k;
    };

    // out = a b, or out + a b if ADD: [m, n] = [m, k] [k, n]. Pitches are in words.
    template <bool ADD = false>
    static void product(float* out, int64_t out_pitch, int64_t m, const float* a, int64_t a_pitch,
                        const float* b, int64_t b_pitch, int64_t n, int64_t k) {
        add_products<ADD, 1>(out, out_pitch, m, n, {{a, a_pitch, b, b_pitch, k}});
    }

    // out = the sum of products, or out + the sum if ADD.
    template <bool ADD, int COUNT>
    static void add_products(float* out, int64_t out_pitch, int64_t m, int64_t n,
                             const Operands (&products)[COUNT]) {
        for (int64_t column = 0; column < n; column += 32)
            for (int64_t row = 0; row < m; row += 32) {
                float* to = out + row * out_pitch + column;
                Operands parts[COUNT];
                for (int i = 0; i < COUNT; ++i) {
                    parts[i] = products[i];
                    parts[i].a += row * parts[i].a_pitch;
                    parts[i].b += column;
                }
                const bool tall = row + 16 < m, wide = column + 16 < n;
                if (tall && wide) tile<ADD, 2, 2>(to, out_pitch, parts);
                else if (tall) tile<ADD, 2, 1>(to, out_pitch, parts);
                else if (wide) tile<ADD, 1, 2>(to, out_pitch, parts);
                else tile<ADD, 1, 1>(to, out_pitch, parts);
            }
    }

  private:
    // The sum of products of 16 R rows and 16 C columns.
    template <bool ADD, int R, int C, int COUNT>
    static void tile(float* out, int64_t out_pitch, const Operands (&products)[COUNT]) {
#if HAS_AMX
        const int64_t to = 4 * out_pitch;  // bytes
        float* below = out + 16 * out_pitch;
        keep_stores(out);
        for (const auto& part : products) keep_stores(part.a), keep_stores(part.b);
        if constexpr (ADD) {
            _tile_loadd(0, out, to);
            if constexpr (C > 1) _tile_loadd(1, out + 16, to);
            if constexpr (R > 1) _tile_loadd(2, below, to);
            if constexpr (R > 1 && C > 1) _tile_loadd(3, below + 16, to);
        } else {
            _tile_zero(0);
            if constexpr (C > 1) _tile_zero(1);
            if constexpr (R > 1) _tile_zero(2);
            if constexpr (R > 1 && C > 1) _tile_zero(3);
        }
        for (const auto& [a_first, a_pitch, b_first, b_pitch, k] : products) {
            const float *a = a_first, *b = b_first;
            const int64_t left = 4 * a_pitch, right = 4 * b_pitch;  // bytes
            for (int64_t i = 0; i < k; i += 32, a += 16, b += 16 * b_pitch) {
                _tile_loadd(4, a, left);
                _tile_loadd(6, b, right);
                _tile_dpbf16ps(0, 4, 6);
                if constexpr (C > 1) _tile_loadd(7, b + 16, right);
                if constexpr (C > 1) _tile_dpbf16ps(1, 4, 7);
                if constexpr (R > 1) _tile_loadd(5, a + 16 * a_pitch, left);
                if constexpr (R > 1) _tile_dpbf16ps(2, 5, 6);
                if constexpr (R > 1 && C > 1) _tile_dpbf16ps(3, 5, 7);
            }
        }
        _tile_stored(0, out, to);
        if constexpr (C > 1) _tile_stored(1, out + 16, to);
        if constexpr (R > 1) _tile_stored(2, below, to);
        if constexpr (R > 1 && C > 1) _tile_stored(3, below + 16, to);
#else
        for (int64_t r = 0; r < 16 * R; ++r)
            for (int64_t c = 0; c < 16 * C; ++c) {
                float sum = ADD ? out[r * out_pitch + c] : 0;
                for (const auto& [a, a_pitch, b, b_pitch, k] : products)
                    for (int64_t i = 0; i < k / 2; ++i) {
                        const float x = a[r * a_pitch + i], y = b[i * b_pitch + c];
                        sum += number(x, 0) * number(y, 0);
                        sum += number(x, 1) * number(y, 1);
                    }
                out[r * out_pitch + c] = sum;
            }
#endif
    }

#if HAS_AMX
    // Finish earlier stores to an object first. GCC does not know which memory the intrinsics of
    // tiles read, and removes stores that nothing else reads.
    static void keep_stores(const void* object) { asm volatile("" ::"r"(object) : "memory"); }

    // Reorder the halves of a vector: 0, n, 1, n + 1, ...
    static Halves interleave(Halves x) {
        Halves order;
        for (int i = 0; i < 2 * LANES; ++i) order[i] = i / 2 + i % 2 * LANES;
        return (Halves)_mm512_permutexvar_epi16((__m512i)order, (__m512i)x);
    }

    static Halves choose_halves(Halves a, Halves b, Halves indices) {
        return (Halves)_mm512_permutex2var_epi16((__m512i)a, (__m512i)indices, (__m512i)b);
    }
#else
    static Halves choose_halves(Halves a, Halves b, Halves indices) {
        Halves chosen;
        for (int i = 0; i < 2 * LANES; ++i) {
            const int from = indices[i];
            chosen[i] = from < 2 * LANES ? a[from] : b[from - 2 * LANES];
        }
        return chosen;
    }

    // The bits of floats rounded to bfloat16, in the high halves.
    static Ints round(Reals x) {
        const Ints bits = (Ints)x, rounded = bits + 0x7fff + ((bits >> 16) & 1);
        return x == x ? rounded : bits | 0x400000;
    }

    // One of the two numbers of a word.
    static float number(float word, int half) {
        uint32_t bits;
        std::memcpy(&bits, &word, sizeof bits);
        bits = half ? bits & 0xffff0000u : bits << 16;
        if (!(bits & 0x7f800000u)) bits &= 0x80000000u;  // a denormal number counts as 0
        float value;
        std::memcpy(&value, &bits, sizeof value);
        return value;
    }
#endif
};
