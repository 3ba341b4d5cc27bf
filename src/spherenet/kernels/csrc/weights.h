// Unit weights, centered or not, and their gradient.
#pragma once

#include "tasks.h"

namespace SN_ISA {

// The mean of n numbers, 0 unless the kernel is centered.
template <class E>
SN_INLINE Work<E> mean_of(const E *x, int64_t n, bool centered) {
    using T = Work<E>;
    if (!centered) return 0;
    Vec<T> total{};
    for_each_vector<T>(n, [&](int64_t i, int count) SN_FORCE_INLINE { total += load<E>(x + i, count); });
    return sum_of_lanes<T>(total) / T(n);
}

// u = (w − mean)/‖w − mean‖, with a mean of 0 unless centered.
template <class E, class U>
void unit_weight_of(const E *weight, U *unit, Work<E> *scale, int64_t filters, int64_t size, double eps, bool centered,
                    int threads) {
    using T = Work<E>;
#pragma omp parallel for num_threads(threads) schedule(static) if (threads > 1)
    for (int64_t o = 0; o < filters; ++o) {
        const E *w = weight + o * size;
        U *u = unit + o * size;
        const T mean = mean_of<E>(w, size, centered);
        T squares;
        if (!centered) {
            squares = sum_of_squares<E>(w, size);
        } else {
            Vec<T> total{};
            for (int64_t i = 0; i < size; i += WIDTH<T>) {
                int count = int(size - i < WIDTH<T> ? size - i : WIDTH<T>);
                Vec<T> a = (load<E>(w + i, count) - mean) * T(SHRINK);
                if (count < WIDTH<T>)
                    for (int lane = count; lane < WIDTH<T>; ++lane) a[lane] = 0;
                total += a * a;
            }
            squares = sum_of_lanes<T>(total);
        }
        T inverse = inverse_norm<T>(squares, T(eps * SHRINK * SHRINK));
        scale[o] = inverse;
        for_each_vector<T>(size, [&](int64_t i, int count) SN_FORCE_INLINE {
            store<U>(u + i, (load<E>(w + i, count) - mean) * inverse, count);
        });
    }
}

// d(w/‖w‖) = (I − uuᵀ)/‖w‖, and of a centered kernel its mean removed once more.
template <class E, class U>
void unit_weight_gradient(const U *grad, const U *unit, const Work<E> *scale, E *grad_weight, int64_t filters,
                          int64_t size, bool centered, int threads) {
    using T = Work<E>;
#pragma omp parallel for num_threads(threads) schedule(static) if (threads > 1)
    for (int64_t o = 0; o < filters; ++o) {
        const U *g = grad + o * size, *u = unit + o * size;
        Vec<T> along{};
        for_each_vector<T>(
            size, [&](int64_t i, int count) SN_FORCE_INLINE { along += load<U>(g + i, count) * load<U>(u + i, count); });
        T radial = sum_of_lanes<T>(along), inverse = scale[o];
        // The mean of g − u·radial: a centered u has the mean 0.
        const T mean = mean_of<U>(g, size, centered);
        E *result = grad_weight + o * size;
        for_each_vector<T>(size, [&](int64_t i, int count) SN_FORCE_INLINE {
            store<E>(result + i, (load<U>(g + i, count) - mean - load<U>(u + i, count) * radial) * inverse, count);
        });
    }
}

// A weight in float32 may have unit weights in half precision (autocast); otherwise the types agree.
template <class Run>
SN_INLINE void for_weight_types(int32_t type, int32_t unit_type, Run run) {
    for_type(type, [&](auto weight) {
        using E = typename decltype(weight)::type;
        if constexpr (sizeof(E) == 4) {
            for_type(unit_type, [&](auto unit) {
                using U = typename decltype(unit)::type;
                if constexpr (sizeof(U) != 8) run(weight, unit);
            });
        } else {
            run(weight, weight);
        }
    });
}

void unit_weight(const void *weight, void *unit, void *scale, int64_t filters, int64_t size, double eps,
                 int32_t centered, int32_t type, int32_t unit_type, int32_t threads) {
    for_weight_types(type, unit_type, [&](auto e, auto u) {
        using E = typename decltype(e)::type;
        using U = typename decltype(u)::type;
        unit_weight_of<E, U>(static_cast<const E *>(weight), static_cast<U *>(unit), static_cast<Work<E> *>(scale),
                             filters, size, eps, centered != 0, team(filters * size, threads));
    });
}

void unit_weight_backward(const void *grad, const void *unit, const void *scale, void *grad_weight, int64_t filters,
                          int64_t size, int32_t centered, int32_t type, int32_t unit_type, int32_t threads) {
    for_weight_types(type, unit_type, [&](auto e, auto u) {
        using E = typename decltype(e)::type;
        using U = typename decltype(u)::type;
        unit_weight_gradient<E, U>(static_cast<const U *>(grad), static_cast<const U *>(unit),
                                   static_cast<const Work<E> *>(scale), static_cast<E *>(grad_weight), filters, size,
                                   centered != 0, team(filters * size, threads));
    });
}

}  // namespace SN_ISA
