// Vectors of the widest registers of one instruction set, on the vector extensions of GCC and Clang.
//
// This file is compiled once per instruction set. SN_ISA names the namespace, so that the copies do not collide.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <type_traits>

#if defined(__AVX512F__) || defined(__AVX2__)
#include <immintrin.h>
#endif

#define SN_FORCE_INLINE __attribute__((always_inline))
#define SN_INLINE static inline SN_FORCE_INLINE

namespace SN_ISA {

#if defined(__AVX512F__)
constexpr int BYTES = 64;
#elif defined(__AVX2__)
constexpr int BYTES = 32;
#else
constexpr int BYTES = 16;
#endif

template <class T>
struct VectorOf;
template <>
struct VectorOf<float> {
    typedef float type __attribute__((vector_size(BYTES)));
    typedef int32_t mask __attribute__((vector_size(BYTES)));
    typedef uint16_t halves __attribute__((vector_size(BYTES / 2)));
};
template <>
struct VectorOf<double> {  // for exactness, not for speed: functions come from the C library, one element at a time
    typedef double type __attribute__((vector_size(16)));
    typedef int64_t mask __attribute__((vector_size(16)));
};
template <class T>
using Vec = typename VectorOf<T>::type;
using Int = VectorOf<float>::mask;
using Halves = VectorOf<float>::halves;

template <class T>
constexpr int WIDTH = int(sizeof(Vec<T>) / sizeof(T));

template <class V>
using Element = typename std::remove_reference<decltype(V{}[0])>::type;

template <class T>
SN_INLINE Vec<T> broadcast(T value) {
    return value - Vec<T>{};
}

// --- storage: what lies in memory, and the type it is computed in --------------------------------------------------

struct BFloat16 {
    uint16_t bits;
};
struct Float16 {
    uint16_t bits;
};

template <class E>
struct Storage {  // float and double are computed in as they are
    using Work = E;
    SN_INLINE Vec<E> load(const E *p) {
        Vec<E> v;
        memcpy(&v, p, sizeof(v));
        return v;
    }
    SN_INLINE void store(E *p, Vec<E> v) { memcpy(p, &v, sizeof(v)); }
};

SN_INLINE Vec<float> from_bfloat16(Halves bits) {
    return (Vec<float>)(__builtin_convertvector(bits, Int) << 16);
}

SN_INLINE Halves to_bfloat16(Vec<float> v) {
    typedef uint32_t Unsigned __attribute__((vector_size(BYTES)));
    Unsigned bits = (Unsigned)v;
    Unsigned rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;  // to nearest, ties to even
    Int is_nan = v != v;
    Int result = is_nan ? ((Int)(bits >> 16) | 0x40) : (Int)rounded;
    return __builtin_convertvector((Unsigned)result, Halves);
}

#if !defined(__AVX512F__) && !(defined(__AVX2__) && defined(__F16C__))
static float half_to_float(uint16_t half) {
    uint32_t sign = uint32_t(half & 0x8000) << 16, magnitude = half & 0x7fff, bits;
    float value;
    if (magnitude >= 0x7c00) {  // inf, NaN
        bits = 0x7f800000 | (magnitude << 13);
    } else if (magnitude >= 0x400) {
        bits = (magnitude << 13) + (112u << 23);
    } else {  // subnormal: magnitude · 2^-24
        value = float(magnitude) * 5.9604644775390625e-8f;
        memcpy(&bits, &value, 4);
    }
    bits |= sign;
    memcpy(&value, &bits, 4);
    return value;
}

static uint16_t float_to_half(float value) {
    uint32_t bits;
    memcpy(&bits, &value, 4);
    uint16_t sign = uint16_t((bits >> 16) & 0x8000);
    bits &= 0x7fffffff;
    if (bits > 0x7f800000) return sign | 0x7e00;   // NaN
    if (bits >= 0x477ff000) return sign | 0x7c00;  // overflows: inf
    if (bits < 0x38800000) {                       // subnormal: the addition rounds to a multiple of 2^-24
        float magnitude;
        memcpy(&magnitude, &bits, 4);
        magnitude += 0.5f;
        memcpy(&bits, &magnitude, 4);
        return sign | uint16_t(bits - 0x3f000000);
    }
    bits += 0xfff + ((bits >> 13) & 1);  // to nearest, ties to even
    return sign | uint16_t((bits - (112u << 23)) >> 13);
}
#endif

SN_INLINE Vec<float> from_float16(Halves bits) {
#if defined(__AVX512F__)
    return (Vec<float>)_mm512_cvtph_ps((__m256i)bits);
#elif defined(__AVX2__) && defined(__F16C__)
    return (Vec<float>)_mm256_cvtph_ps((__m128i)bits);
#else
    Vec<float> v;
    for (int i = 0; i < WIDTH<float>; ++i) v[i] = half_to_float(bits[i]);
    return v;
#endif
}

SN_INLINE Halves to_float16(Vec<float> v) {
#if defined(__AVX512F__)
    return (Halves)_mm512_cvtps_ph((__m512)v, _MM_FROUND_TO_NEAREST_INT);
#elif defined(__AVX2__) && defined(__F16C__)
    return (Halves)_mm256_cvtps_ph((__m256)v, _MM_FROUND_TO_NEAREST_INT);
#else
    Halves bits;
    for (int i = 0; i < WIDTH<float>; ++i) bits[i] = float_to_half(v[i]);
    return bits;
#endif
}

template <>
struct Storage<BFloat16> {
    using Work = float;
    SN_INLINE Vec<float> load(const BFloat16 *p) {
        Halves h;
        memcpy(&h, p, sizeof(h));
        return from_bfloat16(h);
    }
    SN_INLINE void store(BFloat16 *p, Vec<float> v) {
        Halves h = to_bfloat16(v);
        memcpy(p, &h, sizeof(h));
    }
};

template <>
struct Storage<Float16> {
    using Work = float;
    SN_INLINE Vec<float> load(const Float16 *p) {
        Halves h;
        memcpy(&h, p, sizeof(h));
        return from_float16(h);
    }
    SN_INLINE void store(Float16 *p, Vec<float> v) {
        Halves h = to_float16(v);
        memcpy(p, &h, sizeof(h));
    }
};

template <class E>
using Work = typename Storage<E>::Work;

// The last n < WIDTH elements of a row: elements beyond the end are read as 0.
template <class E>
SN_INLINE Vec<Work<E>> load_tail(const E *p, int n) {
    E buffer[WIDTH<Work<E>>];
    memset(buffer, 0, sizeof(buffer));
    for (int i = 0; i < n; ++i) buffer[i] = p[i];
    return Storage<E>::load(buffer);
}

template <class E>
SN_INLINE void store_tail(E *p, Vec<Work<E>> v, int n) {
    E buffer[WIDTH<Work<E>>];
    Storage<E>::store(buffer, v);
    for (int i = 0; i < n; ++i) p[i] = buffer[i];
}

#if defined(__AVX512F__)
template <>
inline __attribute__((always_inline)) Vec<float> load_tail<float>(const float *p, int n) {
    return (Vec<float>)_mm512_maskz_loadu_ps(__mmask16((1u << n) - 1), p);
}
template <>
inline __attribute__((always_inline)) void store_tail<float>(float *p, Vec<float> v, int n) {
    _mm512_mask_storeu_ps(p, __mmask16((1u << n) - 1), (__m512)v);
}
#elif defined(__AVX2__)
SN_INLINE __m256i first_lanes(int n) {
    return _mm256_cmpgt_epi32(_mm256_set1_epi32(n), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
}
template <>
inline __attribute__((always_inline)) Vec<float> load_tail<float>(const float *p, int n) {
    return (Vec<float>)_mm256_maskload_ps(p, first_lanes(n));
}
template <>
inline __attribute__((always_inline)) void store_tail<float>(float *p, Vec<float> v, int n) {
    _mm256_maskstore_ps(p, first_lanes(n), (__m256)v);
}
#endif

template <class T>
SN_INLINE T sum_of_lanes(Vec<T> v) {
#if defined(__AVX512F__)
    if constexpr (sizeof(T) == 4) return _mm512_reduce_add_ps((__m512)v);
#endif
    T total = 0;
    for (int i = 0; i < WIDTH<T>; ++i) total += v[i];
    return total;
}

// The sums of four vectors at once: a third of the work of four single sums.
template <class T>
SN_INLINE void sums_of_lanes(const Vec<T> v[4], T *to) {
#if defined(__AVX512F__)
    if constexpr (sizeof(T) == 4) {
        __m512 a = (__m512)v[0], b = (__m512)v[1], c = (__m512)v[2], d = (__m512)v[3];
        __m512 ab = _mm512_add_ps(_mm512_unpacklo_ps(a, b), _mm512_unpackhi_ps(a, b));
        __m512 cd = _mm512_add_ps(_mm512_unpacklo_ps(c, d), _mm512_unpackhi_ps(c, d));
        __m512 quarters = _mm512_add_ps(_mm512_shuffle_ps(ab, cd, 0x44), _mm512_shuffle_ps(ab, cd, 0xee));
        __m256 halves = _mm256_add_ps(_mm512_castps512_ps256(quarters), _mm512_extractf32x8_ps(quarters, 1));
        __m128 sums = _mm_add_ps(_mm256_castps256_ps128(halves), _mm256_extractf128_ps(halves, 1));
        _mm_storeu_ps(to, sums);
        return;
    }
#endif
    for (int i = 0; i < 4; ++i) to[i] = sum_of_lanes<T>(v[i]);
}

template <class T>
class Buffer {
  public:
    explicit Buffer(int64_t size) : data_(size > 0 ? new T[size] : nullptr) {}
    ~Buffer() { delete[] data_; }
    Buffer(const Buffer &) = delete;
    Buffer &operator=(const Buffer &) = delete;
    T *get() const { return data_; }

  private:
    T *data_;
};

// Calls body(offset, count) for every full vector of a row of n elements, then for the rest with count < WIDTH.
// `count` is a compile-time constant in the first case, so that loads and stores take full vectors.
template <class T, class Body>
SN_INLINE void for_each_vector(int64_t n, Body body) {
    constexpr int width = WIDTH<T>;
    int64_t i = 0;
    for (; i + width <= n; i += width) body(i, width);
    if (i < n) body(i, int(n - i));
}

template <class E>
SN_INLINE Vec<Work<E>> load(const E *p, int count) {
    return count == WIDTH<Work<E>> ? Storage<E>::load(p) : load_tail<E>(p, count);
}

template <class E>
SN_INLINE void store(E *p, Vec<Work<E>> v, int count) {
    if (count == WIDTH<Work<E>>)
        Storage<E>::store(p, v);
    else
        store_tail<E>(p, v, count);
}

}  // namespace SN_ISA
