// The angle functions g as functions of c = cos θ: value, inverse, slope dg/dc and derivative by the parameter.
//
// A new g is one struct with the members of `CosineAngle` and one line in `for_angle`. The filters' constants are
// computed once per call by `Filters`.
#pragma once

#include "api.h"
#include "functions.h"

namespace SN_ISA {

// What a g needs of one filter, or of a vector of neighboring filters.
template <class V>
struct Filter {
    V k, half_inverse, tau, inverse_tau, decline;  // k (or p), 1/(2k), τ = tanh u, 1/τ, 1 − 2u/sinh 2u, u = π/(4k)
    V scale, offset;                               // out = scale·h·g + offset
    V radius, inverse_radius;                      // ρ and 1/ρ of h
};

// What backward needs of one element.
template <class V>
struct Local {
    V cosine, slope, value, by_parameter;
};

template <class V>
SN_INLINE V sine_from_cosine(V c) {
    using T = Element<V>;
    constexpr T floor = sizeof(T) == 4 ? T(16 * 1.1920929e-7) : T(16 * 2.220446049250313e-16);
    return square_root(at_least((1 - c) * (1 + c), floor));
}

template <class T>
constexpr T SINE_FLOOR = sizeof(T) == 4 ? T(4 * 3.4526698e-4) : T(4 * 1.4901161193847656e-8);

template <class T>
constexpr T BELOW_ONE = sizeof(T) == 4 ? T(1 - 1.1920929e-7) : T(1 - 2.220446049250313e-16);

struct CosineAngle {
    template <class T, class V>
    SN_INLINE V value(V c, const Filter<V> &) {
        return c;
    }
    template <class T, class V>
    SN_INLINE Local<V> from_value(V g, const Filter<V> &) {
        return {g, 1 - V{}, g, V{}};
    }
    template <class T, class V>
    SN_INLINE Local<V> from_cosine(V c, const Filter<V> &) {
        return {c, 1 - V{}, c, V{}};
    }
};

struct LinearAngle {
    template <class T, class V>
    SN_INLINE V value(V c, const Filter<V> &) {
        return with_sign(arc_sine(absolute(c)) * T(0.63661977236758134), c);
    }
    template <class T, class V>
    SN_INLINE Local<V> from_value(V g, const Filter<V> &) {
        V size = absolute(g);
        V c = with_sign(sine(size * T(1.5707963267948966)), g);
        V complement = at_least(sine((1 - size) * T(1.5707963267948966)), SINE_FLOOR<T>);
        return {c, T(0.63661977236758134) * reciprocal(complement), g, V{}};
    }
    template <class T, class V>
    SN_INLINE Local<V> from_cosine(V c, const Filter<V> &f) {
        return {c, T(0.63661977236758134) * reciprocal(sine_from_cosine(c)), value<T>(c, f), V{}};
    }
};

struct SigmoidAngle {
    template <class T, class V>
    SN_INLINE V value(V c, const Filter<V> &f) {
        V t = hyperbolic_tangent(arc_sine(absolute(c)) * f.half_inverse);
        return with_sign(at_most(t * f.inverse_tau, T(1)), c);
    }
    // v = asin|c|/(2k), t = tanh v. With D(x) = 1 − 2x/sinh 2x, ∂g/∂k = g·(D(v) − D(u))/k: for large k both are small,
    // and the difference of 2v/sinh 2v and 2u/sinh 2u themselves would be rounding noise.
    template <class T, class V>
    SN_INLINE Local<V> local(V c, V sine_of_angle, V v, V t, V signed_by, const Filter<V> &f) {
        V rest = 1 - t * t;
        V slope = rest * f.half_inverse * f.inverse_tau * reciprocal(sine_of_angle);
        V change = v * v < T(0.5) ? t * (sinh_decline(v) - f.decline) : t * (1 - f.decline) - v * rest;
        V by_k = change * (2 * f.half_inverse) * f.inverse_tau;
        V value = at_most(t * f.inverse_tau, T(1));
        return {c, slope, with_sign(value, signed_by), with_sign(by_k, signed_by)};
    }
    template <class T, class V>
    SN_INLINE Local<V> from_value(V g, const Filter<V> &f) {
        V t = at_most(absolute(g) * f.tau, BELOW_ONE<T>);
        V v = inverse_hyperbolic_tangent(t);
        // Rounding may carry the latitude past π/2 by a last digit.
        V latitude = at_most(2 * f.k * v, T(1.5707963267948966));
        V complement = at_least(sine(T(1.5707963267948966) - latitude), SINE_FLOOR<T>);
        return local<T>(with_sign(sine(latitude), g), complement, v, t, g, f);
    }
    template <class T, class V>
    SN_INLINE Local<V> from_cosine(V c, const Filter<V> &f) {
        V v = arc_sine(absolute(c)) * f.half_inverse;
        return local<T>(c, sine_from_cosine(c), v, hyperbolic_tangent(v), c, f);
    }
};

// sign(c)·c². The cosine cannot be recovered from small values, so backward always knows the cosine.
struct SquareCosineAngle {
    template <class T, class V>
    SN_INLINE V value(V c, const Filter<V> &) {
        return c * absolute(c);
    }
    template <class T, class V>
    SN_INLINE Local<V> from_value(V g, const Filter<V> &f) {
        return from_cosine<T>(with_sign(square_root(absolute(g)), g), f);
    }
    template <class T, class V>
    SN_INLINE Local<V> from_cosine(V c, const Filter<V> &) {
        V size = absolute(c);
        return {c, 2 * size, c * size, V{}};
    }
};

// sign(c)·|c|^p with p in the place of k. For p < 1 the slope is bounded at c = 0, as in cosine_powers.py.
struct SharpenedCosineAngle {
    // log|c|. c − c is NaN if c is, and 0 otherwise: the logarithm does not know NaN.
    template <class T, class V>
    SN_INLINE V log_size(V c) {
        constexpr T smallest = sizeof(T) == 4 ? T(1.2e-38) : T(2.3e-308);
        return logarithm(at_least(absolute(c), smallest)) + (c - c);
    }
    template <class T, class V>
    SN_INLINE V power(V c, V log_size, const Filter<V> &f) {
        return with_sign(c == 0 ? V{} : exponential(f.k * log_size), c);
    }
    template <class T, class V>
    SN_INLINE V value(V c, const Filter<V> &f) {
        return power<T>(c, log_size<T>(c), f);
    }
    template <class T, class V>
    SN_INLINE Local<V> from_value(V g, const Filter<V> &f) {
        return from_cosine<T>(with_sign(g == 0 ? V{} : exponential(log_size<T>(g) / f.k), g), f);
    }
    template <class T, class V>
    SN_INLINE Local<V> from_cosine(V c, const Filter<V> &f) {
        constexpr T log_floor = sizeof(T) == 4 ? T(-6.5848982153193655) : T(-16.635532333438687);  // of 4·sqrt(ε)
        V size = log_size<T>(c);
        V slope = f.k * exponential((f.k < 1 ? at_least(size, log_floor) : size) * (f.k - 1));
        V value = power<T>(c, size, f);
        return {c, slope, value, c == 0 ? V{} : value * size};
    }
};

template <class Run>
SN_INLINE void for_angle(int32_t type, Run run) {
    if (type == COSINE)
        run(CosineAngle{});
    else if (type == SQUARE_COSINE)
        run(SquareCosineAngle{});
    else if (type == LINEAR)
        run(LinearAngle{});
    else if (type == SHARPENED_COSINE)
        run(SharpenedCosineAngle{});
    else
        run(SigmoidAngle{});
}

// h of a patch norm, dh/d‖x‖ and ∂h/∂ρ.
template <class V>
struct Length {
    V value, slope, by_radius;
};

template <class T>
struct Magnitude {
    int32_t type;
    T alpha, beta;

    SN_FORCE_INLINE Length<Vec<T>> at(Vec<T> norm, const Filter<Vec<T>> &f) const {
        using V = Vec<T>;
        switch (type) {
            case BALL: {
                V ratio = norm * f.inverse_radius;
                auto inside = ratio < 1;
                return {inside ? ratio : 1 - V{}, inside ? f.inverse_radius : V{},
                        inside ? -ratio * f.inverse_radius : V{}};
            }
            case TANH: {
                V ratio = norm * f.inverse_radius, slope = inverse_cosh_squared(ratio) * f.inverse_radius;
                return {hyperbolic_tangent(ratio), slope, -slope * at_most(ratio, T(1000))};
            }
            case PROPORTIONAL:
                return {alpha * norm, alpha - V{}, V{}};
            case SEGMENTED: {
                auto inside = norm < f.radius;
                return {inside ? alpha * norm : beta * norm + (alpha - beta) * f.radius,
                        inside ? alpha - V{} : beta - V{}, inside ? V{} : (alpha - beta) - V{}};
            }
            case LOG:
                return {alpha * logarithm_of_one_plus(norm), alpha / (1 + norm), V{}};
            case MIXED:
                return {alpha * norm + beta * logarithm_of_one_plus(norm), alpha + beta / (1 + norm), V{}};
            default:
                return {1 - V{}, V{}, V{}};
        }
    }
};

// The constants of all filters: nine consecutive arrays, and h.
template <class T>
struct Constants {
    const T *arrays;
    int64_t count;
    Magnitude<T> magnitude;
};

// The constants of filter o, as vectors of equal numbers.
template <class T>
SN_INLINE Filter<Vec<T>> one(const Constants<T> &c, int64_t o) {
    auto at = [&](int field) SN_FORCE_INLINE { return broadcast<T>(c.arrays[field * c.count + o]); };
    return {at(0), at(1), at(2), at(3), at(4), at(5), at(6), at(7), at(8)};
}

// The constants of n neighboring filters from o on.
template <class T>
SN_INLINE Filter<Vec<T>> some(const Constants<T> &c, int64_t o, int n) {
    auto at = [&](int field) SN_FORCE_INLINE { return load<T>(c.arrays + field * c.count + o, n); };
    return {at(0), at(1), at(2), at(3), at(4), at(5), at(6), at(7), at(8)};
}

template <class T>
class Filters {
  public:
    Filters(const Angle &angle, int64_t count)
        : count_(count),
          storage_(new T[9 * count]),
          magnitude_{angle.magnitude, T(angle.alpha), T(angle.beta)} {
        const T *k = static_cast<const T *>(angle.parameters);
        const T *bias = static_cast<const T *>(angle.bias), *scale = static_cast<const T *>(angle.scale),
                *shift = static_cast<const T *>(angle.shift), *radius = static_cast<const T *>(angle.radius);
        for (int64_t o = 0; o < count; ++o) {
            if (k != nullptr && (o == 0 || angle.parameter_count > 1)) set_k(o, k[o]);
            else for (int j = 0; j < 5; ++j) at(j, o) = o == 0 ? T(0) : at(j, 0);
            T s = scale == nullptr ? T(1) : scale[o];
            at(5, o) = s;
            at(6, o) = (bias == nullptr ? T(0) : s * bias[o]) + (shift == nullptr ? T(0) : shift[o]);
            T rho = radius == nullptr ? T(1) : radius[angle.radius_count > 1 ? o : 0];
            at(7, o) = rho;
            at(8, o) = 1 / rho;
        }
    }
    ~Filters() { delete[] storage_; }
    Filters(const Filters &) = delete;
    Filters &operator=(const Filters &) = delete;

    Constants<T> constants() const { return {storage_, count_, magnitude_}; }

  private:
    T &at(int64_t field, int64_t o) const { return storage_[field * count_ + o]; }

    void set_k(int64_t o, T value) {
        double k = double(value), u = 0.78539816339744831 / k, tau = __builtin_tanh(u);
        at(0, o) = T(k);
        at(1, o) = T(0.5 / k);
        at(2, o) = T(tau);
        at(3, o) = T(1 / tau);
        at(4, o) = T(sinh_decline(u));
    }

    int64_t count_;
    T *storage_;
    Magnitude<T> magnitude_;
};

}  // namespace SN_ISA
