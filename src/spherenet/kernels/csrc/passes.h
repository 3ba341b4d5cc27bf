// The passes over memory that turn a convolution into a SphereConv, on one row or one plane of numbers.
//
//     forward    c = P·r,  out = scale·h·g(c) + offset
//     backward   D = grad·scale·h·g'(c)·r,  s = r·Σ grad·scale·(r·h·g'(c)·c − h'·g(c)) over the filters of a group
//     correct    gx − x·m + n,  m and n the transposed window sums of s and of s·mean(patch)
//
// with r = 1/‖patch‖ and h = h(1/r), 1 for a SphereConv. n appears only if patches are centered. In a row the filters are neighbors and r is one number; in a plane the pixels are neighbors and
// the filter's constants are. r = 0 marks a patch whose squares overflowed: its cosine is 0 whatever P is.
#pragma once

#include "angles.h"

namespace SN_ISA {

constexpr double SHRINK = 1.0 / 64;  // a power of two: squares of x/64 overflow later and lose no digit

template <class E>
SN_INLINE Vec<Work<E>> squares_in_lanes(const E *x, int64_t n) {
    using T = Work<E>;
    Vec<T> total{};
    for_each_vector<T>(n, [&](int64_t i, int count) SN_FORCE_INLINE {
        Vec<T> a = load<E>(x + i, count) * T(SHRINK);
        total += a * a;
    });
    return total;
}

template <class E>
SN_INLINE Work<E> sum_of_squares(const E *x, int64_t n) {
    return sum_of_lanes<Work<E>>(squares_in_lanes<E>(x, n));
}

// Σ(x/64)² of `rows` rows of n numbers.
template <class E>
SN_INLINE void sums_of_squares(const E *x, Work<E> *sums, int64_t rows, int64_t n) {
    using T = Work<E>;
    int64_t row = 0;
    for (; row + 4 <= rows; row += 4, x += 4 * n) {
        Vec<T> totals[4] = {squares_in_lanes<E>(x, n), squares_in_lanes<E>(x + n, n), squares_in_lanes<E>(x + 2 * n, n),
                            squares_in_lanes<E>(x + 3 * n, n)};
        sums_of_lanes<T>(totals, sums + row);
    }
    for (; row < rows; ++row, x += n) sums[row] = sum_of_squares<E>(x, n);
}

template <class E>
SN_INLINE void add_squares(const E *x, Work<E> *sums, int64_t n) {
    using T = Work<E>;
    for_each_vector<T>(n, [&](int64_t i, int count) SN_FORCE_INLINE {
        Vec<T> a = load<E>(x + i, count) * T(SHRINK);
        store<T>(sums + i, load<T>(sums + i, count) + a * a, count);
    });
}

template <class T>
SN_INLINE T inverse_norm(T shrunk_squares, T shrunk_eps) {
    return T(SHRINK) / std::sqrt(shrunk_squares + shrunk_eps);
}

template <class V>
SN_INLINE V clamp_cosine(V c) {
    return at_least(at_most(c, 1), -1);
}

// What forward works on: `rows` pixels of `filters` filters in rows, or `length` pixels of one filter in a plane.
template <class E>
struct ForwardRows {
    const E *product;
    E *out;            // may be product
    Work<E> *cosine;   // null unless the cosines are kept
    const Work<E> *r;  // [rows, groups]
    int64_t rows, filters, groups;
};

template <class E>
struct ForwardPlane {
    const E *product;
    E *out;
    Work<E> *cosine;
    const Work<E> *r;  // [length]
    int64_t length, filter;
};

// The forms of the forward pass: h = 1 with or without an affine map, or any h with an affine map.
enum Form { PLAIN, AFFINE_MAP, WITH_MAGNITUDE };

// out = scale·h·g + offset, or g itself.
template <class A, Form FORM, class T>
SN_INLINE Vec<T> output(Vec<T> c, Vec<T> norm, const Filter<Vec<T>> &f, const Magnitude<T> &magnitude) {
    Vec<T> g = A::template value<T>(c, f);
    if constexpr (FORM == WITH_MAGNITUDE) g *= magnitude.at(norm, f).value;
    return FORM == PLAIN ? g : g * f.scale + f.offset;
}

// ‖patch‖ = 1/r, and 0 if it overflowed.
template <class T>
SN_INLINE Vec<T> norm_of(Vec<T> inverse) {
    return inverse == 0 ? Vec<T>{} : 1 / inverse;
}

template <class A, Form FORM, class T>
void forward_rows(const ForwardRows<T> &a, const Filters<T> &filters) {
    const int64_t n = a.filters / a.groups, groups = a.groups, segments = a.rows * groups;
    const T *product = a.product;
    T *out = a.out;
    T *cosine = a.cosine;
    const T *__restrict r = a.r;
    const Constants<T> constants = filters.constants();
    for (int64_t segment = 0, group = 0; segment < segments; ++segment) {
        const T inverse = r[segment];
        const int64_t at = segment * n;
        const Vec<T> norm = FORM == WITH_MAGNITUDE ? norm_of<T>(broadcast<T>(inverse)) : Vec<T>{};
        for_each_vector<T>(n, [&](int64_t i, int count) SN_FORCE_INLINE {
            Vec<T> c = clamp_cosine(load<T>(product + at + i, count) * inverse);
            if (__builtin_expect(inverse == 0, 0)) c = Vec<T>{};
            if (__builtin_expect(cosine != nullptr, 0)) store<T>(cosine + at + i, c, count);
            Filter<Vec<T>> f = some(constants, group + i, count);
            store<T>(out + at + i, output<A, FORM, T>(c, norm, f, constants.magnitude), count);
        });
        group = group + n == a.filters ? 0 : group + n;
    }
}

template <class A, Form FORM, class T>
void forward_plane(const ForwardPlane<T> &a, const Filters<T> &filters) {
    const Constants<T> constants = filters.constants();
    const Filter<Vec<T>> f = one(constants, a.filter);
    const T *product = a.product;
    T *out = a.out;
    T *cosine = a.cosine;
    const T *__restrict r = a.r;
    for_each_vector<T>(a.length, [&](int64_t i, int count) SN_FORCE_INLINE {
        Vec<T> inverse = load<T>(r + i, count);
        Vec<T> c = inverse == 0 ? Vec<T>{} : clamp_cosine(load<T>(product + i, count) * inverse);
        if (__builtin_expect(cosine != nullptr, 0)) store<T>(cosine + i, c, count);
        const Vec<T> norm = FORM == WITH_MAGNITUDE ? norm_of<T>(inverse) : Vec<T>{};
        store<T>(out + i, output<A, FORM, T>(c, norm, f, constants.magnitude), count);
    });
}

// The cosine as backward gets it from what forward has saved.
template <class A, SavedMap MAP>
struct Saved {
    // After an affine map the output does not suffice: with it there is no scale, and no sum but that of k.
    static constexpr bool AFFINE = MAP != SAVED_OUTPUT;
    template <class T>
    SN_INLINE Vec<T> scaled(Vec<T> grad, const Filter<Vec<T>> &f) {
        return AFFINE ? grad * f.scale : grad;
    }
    template <class T>
    SN_INLINE Local<Vec<T>> at(const T *saved, int count, const Filter<Vec<T>> &f) {
        if constexpr (MAP == SAVED_OUTPUT)
            return A::template from_value<T>(load<T>(saved, count), f);
        else
            return A::template from_cosine<T>(load<T>(saved, count), f);
    }
};

template <class E>
struct BackwardRows {
    const E *grad;
    const void *saved;
    int64_t saved_at;  // offset of the first row in `saved`
    const Work<E> *r;  // [rows, groups]
    E *grad_product;
    Work<E> *s;  // [rows, groups]
    int64_t rows, filters, groups;
    double *sums;  // [4, filters]
};

template <class E>
struct BackwardPlane {
    const E *grad;
    const void *saved;
    int64_t saved_at;
    const Work<E> *r;  // [length]
    E *grad_product;
    Work<E> *s;  // [length], added to
    int64_t length, filter, filters;
    double *sums;
};

constexpr int64_t SUMS = 4;           // sums per filter: see Backward in api.h
constexpr int64_t ROWS_PER_SUM = 64;  // rows whose sums are added up in the working type before they go to double

template <class K, bool WITH_SUMS, bool MAGNITUDE, class T>
void backward_rows(const BackwardRows<T> &a, const Filters<T> &filters) {
    const int64_t n = a.filters / a.groups, groups = a.groups, segments = a.rows * groups, all = a.filters;
    const T *__restrict grad = a.grad;
    T *__restrict grad_product = a.grad_product;
    const T *__restrict r = a.r;
    T *__restrict s = a.s;
    const T *__restrict saved = static_cast<const T *>(a.saved) + a.saved_at;
    const Constants<T> constants = filters.constants();
    Buffer<T> buffer(WITH_SUMS ? SUMS * all : 0);
    T *sums = buffer.get();
    if constexpr (WITH_SUMS) memset(sums, 0, sizeof(T) * SUMS * all);
    Vec<T> totals[4];  // of s without its last factor, for four segments: their lanes are added up together
    T factors[4];
    for (int64_t segment = 0, group = 0, pending = 0; segment < segments; ++segment) {
        const T inverse = r[segment];
        const int64_t at = segment * n;
        Vec<T> total{};
        const Vec<T> norm = MAGNITUDE ? norm_of<T>(broadcast<T>(inverse)) : Vec<T>{};
        for_each_vector<T>(n, [&](int64_t i, int count) SN_FORCE_INLINE {
            int64_t o = group + i;
            Filter<Vec<T>> f = some(constants, o, count);
            Local<Vec<T>> local = K::template at<T>(saved + at + i, count, f);
            Vec<T> incoming = load<T>(grad + at + i, count);
            Vec<T> scaled = K::template scaled<T>(incoming, f), u = scaled * local.slope;
            Length<Vec<T>> length{};
            if constexpr (MAGNITUDE) {
                length = constants.magnitude.at(norm, f);
                u *= length.value;
            }
            store<T>(grad_product + at + i, u * inverse, count);
            // Beyond the row the gradient reads as 0, and so do the products.
            if constexpr (MAGNITUDE)
                total += u * local.cosine * inverse - scaled * local.value * length.slope;
            else
                total += u * local.cosine;
            if constexpr (WITH_SUMS && MAGNITUDE) {
                T *by_radius = sums + 3 * all + o;
                store<T>(by_radius, load<T>(by_radius, count) + incoming * local.value * length.by_radius, count);
                local.value *= length.value;
                local.by_parameter *= length.value;
            }
            if constexpr (WITH_SUMS && K::AFFINE) {
                store<T>(sums + o, load<T>(sums + o, count) + incoming, count);
                store<T>(sums + all + o, load<T>(sums + all + o, count) + incoming * local.value, count);
            }
            if constexpr (WITH_SUMS) {
                T *by_parameter = sums + 2 * all + o;
                store<T>(by_parameter, load<T>(by_parameter, count) + incoming * local.by_parameter, count);
            }
        });
        group = group + n == all ? 0 : group + n;
        totals[segment & 3] = total;
        factors[segment & 3] = MAGNITUDE ? inverse : inverse * inverse;
        if ((segment & 3) == 3) {
            T added[4];
            sums_of_lanes<T>(totals, added);
            for (int i = 0; i < 4; ++i) s[segment - 3 + i] = added[i] * factors[i];
        }
        if constexpr (WITH_SUMS) {
            if (++pending == ROWS_PER_SUM * groups || segment + 1 == segments) {
                for (int64_t i = 0; i < SUMS * all; ++i) a.sums[i] += double(sums[i]);
                memset(sums, 0, sizeof(T) * SUMS * all);
                pending = 0;
            }
        }
    }
    for (int64_t segment = segments & ~int64_t(3); segment < segments; ++segment)
        s[segment] = sum_of_lanes<T>(totals[segment & 3]) * factors[segment & 3];
}

template <class K, bool WITH_SUMS, bool MAGNITUDE, class T>
void backward_plane(const BackwardPlane<T> &a, const Filters<T> &filters) {
    const Constants<T> constants = filters.constants();
    const Filter<Vec<T>> f = one(constants, a.filter);
    const T *grad = a.grad;
    T *grad_product = a.grad_product;
    const T *r = a.r;
    T *s = a.s;
    const T *saved = static_cast<const T *>(a.saved) + a.saved_at;
    Vec<T> by_grad{}, by_value{}, by_parameter{}, by_radius{};
    for_each_vector<T>(a.length, [&](int64_t i, int count) SN_FORCE_INLINE {
        Vec<T> inverse = load<T>(r + i, count), incoming = load<T>(grad + i, count);
        Local<Vec<T>> local = K::template at<T>(saved + i, count, f);
        Vec<T> scaled = K::template scaled<T>(incoming, f), u = scaled * local.slope * inverse;
        Vec<T> along = u * local.cosine;
        if constexpr (MAGNITUDE) {
            const Length<Vec<T>> length = constants.magnitude.at(norm_of<T>(inverse), f);
            u *= length.value;
            along = u * local.cosine - scaled * local.value * length.slope;
            by_radius += incoming * local.value * length.by_radius;
            local.value *= length.value;
            local.by_parameter *= length.value;
        }
        store<T>(grad_product + i, u, count);
        store<T>(s + i, load<T>(s + i, count) + along * inverse, count);
        if constexpr (WITH_SUMS && K::AFFINE) {
            by_grad += incoming;
            by_value += incoming * local.value;
        }
        if constexpr (WITH_SUMS) {
            by_parameter += incoming * local.by_parameter;
        }
    });
    if constexpr (WITH_SUMS) {
        a.sums[a.filter] += double(sum_of_lanes<T>(by_grad));
        a.sums[a.filters + a.filter] += double(sum_of_lanes<T>(by_value));
        a.sums[2 * a.filters + a.filter] += double(sum_of_lanes<T>(by_parameter));
        a.sums[3 * a.filters + a.filter] += double(sum_of_lanes<T>(by_radius));
    }
}

// The passes of one angle function, as the drivers call them, in float or double.
template <class T>
struct Passes {
    void (*forward_rows)(const ForwardRows<T> &, const Filters<T> &);
    void (*forward_plane)(const ForwardPlane<T> &, const Filters<T> &);
    void (*backward_rows)(const BackwardRows<T> &, const Filters<T> &);
    void (*backward_plane)(const BackwardPlane<T> &, const Filters<T> &);
};

template <class A, Form FORM, class K, bool MAGNITUDE, class T>
Passes<T> passes_with(bool with_sums) {
    return {forward_rows<A, FORM, T>, forward_plane<A, FORM, T>,
            with_sums ? backward_rows<K, true, MAGNITUDE, T> : backward_rows<K, false, MAGNITUDE, T>,
            with_sums ? backward_plane<K, true, MAGNITUDE, T> : backward_plane<K, false, MAGNITUDE, T>};
}

// The passes for what forward has saved: its output, or the cosine and with it every g, h and affine map.
template <class T>
Passes<T> passes_for(const Angle &angle, int32_t saved_map, bool with_sums) {
    Passes<T> chosen{};
    for_angle(angle.type, [&](auto g) {
        using A = decltype(g);
        using K = Saved<A, SAVED_COSINE>;
        bool affine = angle.bias != nullptr || angle.scale != nullptr || angle.shift != nullptr;
        if (angle.magnitude != SPHERE)
            chosen = passes_with<A, WITH_MAGNITUDE, K, true, T>(with_sums);
        else if (saved_map == SAVED_OUTPUT)
            chosen = passes_with<A, PLAIN, Saved<A, SAVED_OUTPUT>, false, T>(with_sums);
        else if (affine)
            chosen = passes_with<A, AFFINE_MAP, K, false, T>(with_sums);
        else
            chosen = passes_with<A, PLAIN, K, false, T>(with_sums);
    });
    return chosen;
}

// gx − x·m + n. Without centered patches n is 0.
template <class E>
SN_INLINE void correct_row(E *grad_x, const E *x, int64_t n, Work<E> m, Work<E> added) {
    using T = Work<E>;
    for_each_vector<T>(n, [&](int64_t i, int count) SN_FORCE_INLINE {
        store<E>(grad_x + i, load<E>(grad_x + i, count) - load<E>(x + i, count) * m + added, count);
    });
}

template <class E>
SN_INLINE void correct_plane(E *grad_x, const E *x, int64_t n, const Work<E> *m, const Work<E> *added) {
    using T = Work<E>;
    for_each_vector<T>(n, [&](int64_t i, int count) SN_FORCE_INLINE {
        Vec<T> corrected = load<E>(grad_x + i, count) - load<E>(x + i, count) * load<T>(m + i, count);
        if (added != nullptr) corrected += load<T>(added + i, count);
        store<E>(grad_x + i, corrected, count);
    });
}

// s·mean for the numbers from `first` to `last` of a map.
template <class T>
SN_INLINE void times_mean(const T *s, const T *mean, T *result, int64_t first, int64_t last) {
    for (int64_t i = first; i < last; ++i) result[i] = s[i] * mean[i];
}

}  // namespace SN_ISA
