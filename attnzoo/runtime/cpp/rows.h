// Load rows of tensors of any floating type into buffers of float or double, and store them.
//
// 16-bit numbers are converted in registers, so no tensor is copied to a wider type first.

#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <type_traits>
#if defined(__F16C__)
#include <immintrin.h>
#endif

#include "lanes.h"
#include "layout.h"

enum Type : int64_t { FLOAT, DOUBLE, BFLOAT16, HALF };

// A tensor [B, H, T, X] with stride 1 in the last dimension and any other strides; the class Rows of
// attnzoo/runtime/kernel_calls.py.
struct Tensor {
    char* data;
    int64_t type;      // a value of Type
    int64_t steps[3];  // strides of batch, head and token, in elements

    FIELDS(data, type, steps)

    int64_t bytes() const { return type == DOUBLE ? 8 : type == FLOAT ? 4 : 2; }

    // Return the address of an element of a token's row.
    char* at(int64_t row, int64_t head, int64_t token, int64_t column = 0) const {
        return data + bytes() * (row * steps[0] + head * steps[1] + token * steps[2] + column);
    }

    // Return the tensor without the columns before `column`.
    Tensor from(int64_t column) const {
        return {data + bytes() * column, type, {steps[0], steps[1], steps[2]}};
    }

    // Prefetch part of a row into the L2 cache. Always inlined, because GCC 12 treats a function
    // that only prefetches as one without side effects, and removes its calls.
    inline __attribute__((always_inline)) void prefetch(int64_t row, int64_t head, int64_t token,
                                                        int64_t column, int64_t size) const {
        const char* x = at(row, head, token, column);
        for (int64_t i = 0; i < size * bytes(); i += 64) __builtin_prefetch(x + i, 0, 2);
    }
};

// 32-bit and 16-bit integers, one for each lane of a vector of floats
typedef uint32_t Words __attribute__((vector_size(VECTOR_BYTES)));
typedef uint16_t HalfWords __attribute__((vector_size(VECTOR_BYTES / 2)));

template <class Real>
struct Rows : Math<Real> {
    using typename Math<Real>::Reals;
    using Math<Real>::LANES;

    // out[:] = factor x[:] for `size` elements, then zeros up to `padded` elements.
    static void load_row(const char* x, int64_t type, int64_t size, int64_t padded, Real factor,
                         Real* out) {
        switch (type) {
            case FLOAT: load_as<FLOAT, float>(x, size, factor, out); break;
            case DOUBLE: load_as<DOUBLE, double>(x, size, factor, out); break;
            case BFLOAT16: load_as<BFLOAT16, uint16_t>(x, size, factor, out); break;
            default: load_as<HALF, uint16_t>(x, size, factor, out);
        }
        std::fill(out + size, out + padded, Real(0));
    }

    // Write `size` elements, rounded to the nearest number of the type.
    static void store_row(const Real* row, int64_t size, char* out, int64_t type) {
        switch (type) {
            case FLOAT: store_as<FLOAT, float>(row, size, out); break;
            case DOUBLE: store_as<DOUBLE, double>(row, size, out); break;
            case BFLOAT16: store_as<BFLOAT16, uint16_t>(row, size, out); break;
            default: store_as<HALF, uint16_t>(row, size, out);
        }
    }

  private:
    template <Type TYPE, class Number>
    static void load_as(const char* x, int64_t size, Real factor, Real* out) {
        int64_t i = 0;
        for (; i + LANES <= size; i += LANES)
            Math<Real>::store(out + i, widen<TYPE, Number>(x + i * sizeof(Number)) * factor);
        for (; i < size; ++i) out[i] = widen_one<TYPE, Number>(x + i * sizeof(Number)) * factor;
    }

    template <Type TYPE, class Number>
    static void store_as(const Real* row, int64_t size, char* out) {
        int64_t i = 0;
        for (; i + LANES <= size; i += LANES)
            narrow<TYPE, Number>(Math<Real>::load(row + i), out + i * sizeof(Number));
        for (; i < size; ++i) narrow_one<TYPE, Number>(row[i], out + i * sizeof(Number));
    }

    template <Type TYPE, class Number>
    static Reals widen(const char* x) {
        if constexpr (std::is_same_v<Real, Number>) {
            return Math<Real>::load(reinterpret_cast<const Real*>(x));
        } else if constexpr (TYPE == BFLOAT16 && sizeof(Real) == 4) {
            HalfWords bits;
            std::memcpy(&bits, x, sizeof bits);
#if defined(__aarch64__)
            return (Reals)vshll_n_u16((uint16x4_t)bits, 16);  // GCC 12 widens lane by lane
#else
            return (Reals)(__builtin_convertvector(bits, Words) << 16);
#endif
#if defined(__AVX512F__)
        } else if constexpr (TYPE == HALF && sizeof(Real) == 4) {
            return (Reals)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)x));
#elif defined(__F16C__)
        } else if constexpr (TYPE == HALF && sizeof(Real) == 4) {
            return (Reals)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)x));
#elif defined(__aarch64__)
        } else if constexpr (TYPE == HALF && sizeof(Real) == 4) {
            float16x4_t halves;
            std::memcpy(&halves, x, sizeof halves);
            return (Reals)vcvt_f32_f16(halves);
#endif
        } else {
            Reals values;
            for (int i = 0; i < LANES; ++i)
                values[i] = widen_one<TYPE, Number>(x + i * sizeof(Number));
            return values;
        }
    }

    template <Type TYPE, class Number>
    static void narrow(Reals values, char* out) {
        if constexpr (std::is_same_v<Real, Number>) {
            Math<Real>::store(reinterpret_cast<Real*>(out), values);
        } else if constexpr (TYPE == BFLOAT16 && sizeof(Real) == 4) {
            const Words bits = (Words)values, nan = (bits >> 16) | 0x40;
            const Words rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
            const Words chosen = values == values ? rounded : nan;
            const HalfWords narrow = __builtin_convertvector(chosen, HalfWords);
            std::memcpy(out, &narrow, sizeof narrow);
#if defined(__AVX512F__)
        } else if constexpr (TYPE == HALF && sizeof(Real) == 4) {
            _mm256_storeu_si256((__m256i*)out, _mm512_cvtps_ph((__m512)values, 0));
#elif defined(__F16C__)
        } else if constexpr (TYPE == HALF && sizeof(Real) == 4) {
            _mm_storeu_si128((__m128i*)out, _mm256_cvtps_ph((__m256)values, 0));
#elif defined(__aarch64__)
        } else if constexpr (TYPE == HALF && sizeof(Real) == 4) {
            const float16x4_t halves = vcvt_f16_f32((float32x4_t)values);
            std::memcpy(out, &halves, sizeof halves);
#endif
        } else {
            for (int i = 0; i < LANES; ++i)
                narrow_one<TYPE, Number>(values[i], out + i * sizeof(Number));
        }
    }

    template <Type TYPE, class Number>
    static Real widen_one(const char* x) {
        Number number;
        std::memcpy(&number, x, sizeof number);
        if constexpr (TYPE == BFLOAT16) return Real(to_float((uint32_t)number << 16));
        if constexpr (TYPE == HALF) return Real(half_to_float(number));
        return Real(number);
    }

    template <Type TYPE, class Number>
    static void narrow_one(Real value, char* out) {
        Number number = Number(value);
        if constexpr (TYPE == BFLOAT16) {
            const uint32_t bits = to_bits((float)value);
            number = value == value ? (bits + 0x7fff + ((bits >> 16) & 1)) >> 16
                                    : (bits >> 16) | 0x40;
        }
        if constexpr (TYPE == HALF) number = float_to_half((float)value);
        std::memcpy(out, &number, sizeof number);
    }

    static float to_float(uint32_t bits) {
        float value;
        std::memcpy(&value, &bits, sizeof value);
        return value;
    }

    static uint32_t to_bits(float value) {
        uint32_t bits;
        std::memcpy(&bits, &value, sizeof bits);
        return bits;
    }

    static float half_to_float(uint16_t half) {
#if defined(__F16C__)
        return _cvtsh_ss(half);
#elif defined(__aarch64__)
        __fp16 value;
        std::memcpy(&value, &half, sizeof value);
        return value;
#else
        const uint32_t sign = (uint32_t)(half & 0x8000) << 16, magnitude = half & 0x7fff;
        if (magnitude >= 0x7c00) return to_float(sign | 0x7f800000 | (magnitude & 0x3ff) << 13);
        if (magnitude < 0x400) return (sign ? -1.f : 1.f) * magnitude * 0x1p-24f;
        return to_float(sign | ((magnitude << 13) + (112u << 23)));
#endif
    }

    static uint16_t float_to_half(float value) {
#if defined(__F16C__)
        return _cvtss_sh(value, 0);
#elif defined(__aarch64__)
        const __fp16 rounded = (__fp16)value;
        uint16_t half;
        std::memcpy(&half, &rounded, sizeof half);
        return half;
#else
        const uint32_t bits = to_bits(value), magnitude = bits & 0x7fffffff;
        const uint16_t sign = (bits >> 16) & 0x8000;
        if (value != value) return sign | 0x7e00;
        if (magnitude >= 0x477ff000) return sign | 0x7c00;  // 65520 and above round to infinity
        if (magnitude < 0x38800000)  // below 2^-14, subnormal: a multiple of 2^-24
            return sign | (uint16_t)std::nearbyint(to_float(magnitude) * 0x1p24f);
        return sign | (uint16_t)((magnitude - (112u << 23) + 0xfff + ((bits >> 13) & 1)) >> 13);
#endif
    }
};
