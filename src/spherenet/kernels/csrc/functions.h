// Elementary functions on vectors: minimax polynomials for float, the C library for double.
//
// The coefficients are printed by benchmarks/fit_approximations.py with the errors of the fits, at most 2.1e-8 relative.
// tests/kernels/test_sphere_conv.py bounds what reaches outputs and gradients, rounding included.
#pragma once

#include "vector.h"

namespace SN_ISA {

template <class V>
using Bits = typename VectorOf<Element<V>>::mask;

template <class V>
SN_INLINE Bits<V> sign_bit() {
    using T = Element<V>;
    return (Bits<V>)(T(-0.0) - V{});
}

template <class V>
SN_INLINE V absolute(V x) {
    return (V)((Bits<V>)x & ~sign_bit<V>());
}

// A value ≥ 0 with the sign of `of`: every function here is odd.
template <class V>
SN_INLINE V with_sign(V value, V of) {
    return (V)((Bits<V>)value ^ ((Bits<V>)of & sign_bit<V>()));
}

// NaN fails every comparison, so the three bounds below let it through.
template <class V>
SN_INLINE V at_most(V x, Element<V> bound) {
    V b = bound - V{};
#if defined(__AVX512F__)
    if constexpr (sizeof(V) == 64) return (V)_mm512_min_ps((__m512)b, (__m512)x);  // the second operand if one is NaN
#elif defined(__AVX2__)
    if constexpr (sizeof(V) == 32) return (V)_mm256_min_ps((__m256)b, (__m256)x);
#endif
    return x > b ? b : x;
}

template <class V>
SN_INLINE V at_least(V x, Element<V> bound) {
    V b = bound - V{};
#if defined(__AVX512F__)
    if constexpr (sizeof(V) == 64) return (V)_mm512_max_ps((__m512)b, (__m512)x);
#elif defined(__AVX2__)
    if constexpr (sizeof(V) == 32) return (V)_mm256_max_ps((__m256)b, (__m256)x);
#endif
    return x < b ? b : x;
}

// 1/x and 1/sqrt(x) of normal numbers > 0, to the last two bits: an estimate and Newton steps take a third of the time
// of the processor's division.
SN_INLINE Vec<float> reciprocal(Vec<float> x) {
#if defined(__AVX512F__)
    Vec<float> y = (Vec<float>)_mm512_rcp14_ps((__m512)x);
    return y + y * (1 - x * y);
#else
    Vec<float> y = (Vec<float>)(0x7ef311c7 - (Int)x);
    y = y * (2 - x * y);
    y = y * (2 - x * y);
    return y + y * (1 - x * y);
#endif
}

SN_INLINE Vec<double> reciprocal(Vec<double> x) { return 1 / x; }

SN_INLINE Vec<float> square_root(Vec<float> x) {  // of numbers ≥ 0
#if defined(__AVX512F__)
    Vec<float> y = (Vec<float>)_mm512_rsqrt14_ps((__m512)at_least(x, 1e-37f));
#else
    Vec<float> z = at_least(x, 1e-37f);
    Vec<float> y = (Vec<float>)(0x5f3759df - ((Int)z >> 1));
    y = y * (1.5f - 0.5f * z * y * y);
    y = y * (1.5f - 0.5f * z * y * y);
#endif
    Vec<float> root = x * y;
    return root + 0.5f * y * (x - root * root);
}

// Rounded correctly, inf included.
SN_INLINE Vec<float> exact_square_root(Vec<float> x) {
#if defined(__AVX512F__)
    return (Vec<float>)_mm512_sqrt_ps((__m512)x);
#elif defined(__AVX2__)
    return (Vec<float>)_mm256_sqrt_ps((__m256)x);
#else
    for (int i = 0; i < WIDTH<float>; ++i) x[i] = __builtin_sqrtf(x[i]);
    return x;
#endif
}

SN_INLINE Vec<double> exact_square_root(Vec<double> x) {
    for (int i = 0; i < WIDTH<double>; ++i) x[i] = __builtin_sqrt(x[i]);
    return x;
}

#define SN_BY_ELEMENT(name, function)                                            \
    SN_INLINE Vec<double> name(Vec<double> x) {                                  \
        Vec<double> y{};                                                         \
        for (int i = 0; i < WIDTH<double>; ++i) y[i] = __builtin_##function(x[i]); \
        return y;                                                                \
    }
SN_BY_ELEMENT(square_root, sqrt)
SN_BY_ELEMENT(arc_sine, asin)
SN_BY_ELEMENT(sine, sin)
SN_BY_ELEMENT(hyperbolic_tangent, tanh)
SN_BY_ELEMENT(inverse_hyperbolic_tangent, atanh)
SN_BY_ELEMENT(logarithm, log)
SN_BY_ELEMENT(exponential, exp)
SN_BY_ELEMENT(logarithm_of_one_plus, log1p)
#undef SN_BY_ELEMENT

// asin of x ∈ [0, 1]; above ½ by asin x = π/2 − 2·asin sqrt((1−x)/2), which has no cancellation.
SN_INLINE Vec<float> arc_sine(Vec<float> x) {
    Int outer = x > 0.5f;
    Vec<float> half = (1 - x) * 0.5f;
    Vec<float> z = outer ? half : x * x;
    Vec<float> t = outer ? square_root(half) : x;
    Vec<float> q = 0.04216630789f * z + 0.02417951499f;
    q = q * z + 0.0454703759f;
    q = q * z + 0.07495297643f;
    q = q * z + 0.1666675248f;
    Vec<float> inner = t + t * z * q;
    return outer ? 1.57079632679f - 2 * inner : inner;
}

// sin of h ∈ [0, π/2].
SN_INLINE Vec<float> sine(Vec<float> h) {
    Vec<float> z = h * h;
    Vec<float> s = 2.605780622e-06f * z - 0.0001980960289f;
    s = s * z + 0.008333066246f;
    s = s * z - 0.1666665955f;
    return h + h * z * s;
}

// tanh of v ≥ 0 as v·P(v²)/Q(v²); exactly 1 beyond 9, so that 1 − tanh² is 0 and not a last digit.
SN_INLINE Vec<float> hyperbolic_tangent(Vec<float> v) {
    Vec<float> w = at_most(v, 9.0f), z = w * w;
    Vec<float> p = 1.33546996e-08f * z + 2.06091121e-05f;
    p = p * z + 0.00349559003f;
    p = p * z + 0.133810273f;
    p = p * z + 0.999999979f;
    Vec<float> q = 7.77657458e-07f * z + 0.000328563787f;
    q = q * z + 0.0258769895f;
    q = q * z + 0.467143429f;
    q = q * z + 1;
    return v > 9.0f ? 1 - Vec<float>{} : at_most(w * p * reciprocal(q), 1.0f);
}

// 1 − 2v/sinh 2v of 0 ≤ v² ≤ ½, which does not cancel for small v.
SN_INLINE Vec<float> sinh_decline(Vec<float> v) {
    Vec<float> z = v * v;
    Vec<float> d = 0.01993417035f - 0.005025576498f * z;
    d = d * z - 0.05328720598f;
    d = d * z + 0.1311634182f;
    d = d * z - 0.3111088434f;
    d = d * z + 0.6666666509f;
    return d * z;
}

// The same of any v ≥ 0; for small v as (sinh y − y)/sinh y with both by their series.
inline double sinh_decline(double v) {
    double y = 2 * v, z = y * y, sum = 1;
    if (v >= 0.5) return 1 - y / __builtin_sinh(y);
    for (int n = 17; n > 3; n -= 2) sum = 1 + sum * z / (n * (n - 1));
    return z * sum / (6 + z * sum);
}

SN_INLINE Vec<double> sinh_decline(Vec<double> v) {
    for (int i = 0; i < WIDTH<double>; ++i) v[i] = sinh_decline(v[i]);
    return v;
}

// atanh of t ∈ [0, 1 − ε]. With q = (1+t)/(1−t) ≈ 2^e: atanh t = e·ln2/2 + atanh u, where
// u = (q/2^e − 1)/(q/2^e + 1) lies in ±0.2. Small t have e = 0 and u = t: no digit is lost.
SN_INLINE Vec<float> inverse_hyperbolic_tangent(Vec<float> t) {
    Int e = ((Int)(1 + t) - (Int)(1 - t) + 0x400000) >> 23;
    Vec<float> power = (Vec<float>)((127 - e) << 23);  // 2^-e
    Vec<float> u = ((power - 1) + t * (power + 1)) * reciprocal((power + 1) + t * (power - 1));
    Vec<float> z = u * u;
    Vec<float> a = 0.1518891583f * z + 0.1997851719f;
    a = a * z + 0.333334775f;
    return __builtin_convertvector(e, Vec<float>) * 0.34657359028f + (u + u * z * a);
}

// log x of normal numbers x > 0: the exponent, and 2·atanh((m − 1)/(m + 1)) of the mantissa m ∈ [√½, √2).
SN_INLINE Vec<float> logarithm(Vec<float> x) {
    Int e = ((Int)x - 0x3f3504f3) >> 23;
    Vec<float> m = (Vec<float>)((Int)x - (e << 23));
    Vec<float> u = (m - 1) * reciprocal(m + 1), z = u * u;
    Vec<float> a = 0.1518891583f * z + 0.1997851719f;
    a = a * z + 0.333334775f;
    return __builtin_convertvector(e, Vec<float>) * 0.69314718056f + 2 * (u + u * z * a);
}

// log(1 + x) of x ≥ 0. Below 1 it is 2·atanh(x/(2 + x)), which has no cancellation.
SN_INLINE Vec<float> logarithm_of_one_plus(Vec<float> x) {
    Int below_one = x < 1.0f;
    Vec<float> small = below_one ? x : 1 - Vec<float>{};
    return below_one ? 2 * inverse_hyperbolic_tangent(small * reciprocal(2 + small)) : logarithm(1 + x);
}

// exp x of x ≤ 88, as 2^n·exp r with |r| ≤ ln2/2; 0 below −87, for results less than 1.7e-38.
SN_INLINE Vec<float> exponential(Vec<float> x) {
    constexpr float to_integer = 12582912.0f;  // 1.5·2²³: the sum has no digit behind the point
    Int vanishes = x < -87.0f;
    x = at_least(x, -87.0f);
    Vec<float> shifted = x * 1.44269504089f + to_integer, n = shifted - to_integer;
    Vec<float> r = (x - n * 0.693359375f) + n * 2.12194440e-4f;  // ln2 in two parts: the first product is exact
    Vec<float> q = 0.001381461309f * r + 0.008368709832f;
    q = q * r + 0.04166838736f;
    q = q * r + 0.1666652069f;
    q = q * r + 0.4999999345f;
    Int power = ((Int)shifted - (Int)(to_integer - Vec<float>{}) + 127) << 23;
    return vanishes ? Vec<float>{} : (1 + r + r * r * q) * (Vec<float>)power;
}

// 1/cosh² of v ≥ 0, from exp(−2v): 1 − tanh² would be rounding noise where tanh is close to 1.
template <class V>
SN_INLINE V inverse_cosh_squared(V v) {
    V decay = exponential(-2 * v), root = reciprocal(1 + decay);
    return 4 * decay * root * root;
}

}  // namespace SN_ISA
