// Norms of patches: sums over the channels of a region of x, and 1/norm from their window sums.
#pragma once

#include "tasks.h"

namespace SN_ISA {

// Call fill_rows(x, target, rows) or add_run(x, target, pixels) for each run of pixels in the padded region that the
// windows of a band see. `target` counts numbers of a map that is 0 where the region is padding.
template <class E, class FillRows, class AddRun>
SN_INLINE void for_each_run(const Geometry &g, const Region &region, const E *image, int64_t group, FillRows fill_rows,
                            AddRun add_run) {
    int64_t per_group = g.channels / g.groups, pixels = volume(g.in), inner = g.x_rows ? g.groups : 1;
    int64_t first[3], last[3];  // the part of the region that is not padding, in input coordinates
    for (int axis = 0; axis < 3; ++axis) {
        int64_t from = region.first[axis] - g.padding[axis], to = from + region.size[axis];
        first[axis] = from > 0 ? from : 0;
        last[axis] = to < g.in[axis] ? to : g.in[axis];
        if (first[axis] >= last[axis]) return;
    }
    for (int64_t d = first[0]; d < last[0]; ++d) {
        for (int64_t h = first[1]; h < last[1]; ++h) {
            int64_t pixel = (d * g.in[1] + h) * g.in[2] + first[2], run = last[2] - first[2];
            int64_t row = (d + g.padding[0] - region.first[0]) * region.size[1] + h + g.padding[1] - region.first[1];
            int64_t target = (row * region.size[2] + first[2] + g.padding[2] - region.first[2]) * inner;
            if (g.x_rows)
                fill_rows(image + pixel * g.channels, target, run * inner);
            else
                for (int64_t c = group * per_group; c < (group + 1) * per_group; ++c)
                    add_run(image + c * pixels + pixel, target, run);
        }
    }
}

// Σ(x/64)² over the channels of a group, on the padded region that the windows of a band see.
template <class E>
void squares_of_region(const Geometry &g, const Region &region, const E *image, int64_t group, Work<E> *map) {
    int64_t per_group = g.channels / g.groups, inner = g.x_rows ? g.groups : 1;
    memset(map, 0, sizeof(Work<E>) * volume(region.size) * inner);
    for_each_run<E>(
        g, region, image, group,
        [&](const E *x, int64_t target, int64_t rows) SN_FORCE_INLINE {
            if (per_group == 1)
                add_squares<E>(x, map + target, rows);
            else
                sums_of_squares<E>(x, map + target, rows, per_group);
        },
        [&](const E *x, int64_t target, int64_t run) SN_FORCE_INLINE { add_squares<E>(x, map + target, run); });
}

// Σx and Σx² in double: their difference Σx² − (Σx)²/n cancels for patches of low contrast.
template <class E>
void add_moments(const E *x, double *sums, double *squares, int64_t n) {
    using T = Work<E>;
    for_each_vector<T>(n, [&](int64_t i, int count) SN_FORCE_INLINE {
        Vec<T> v = load<E>(x + i, count);
        for (int lane = 0; lane < count; ++lane) {
            double a = double(v[lane]);
            sums[i + lane] += a;
            squares[i + lane] += a * a;
        }
    });
}

template <class E>
void moments_of_rows(const E *x, double *sums, double *squares, int64_t rows, int64_t n) {
    using T = Work<E>;
    for (int64_t row = 0; row < rows; ++row, x += n) {
        double sum[WIDTH<T>] = {}, square[WIDTH<T>] = {};
        for_each_vector<T>(n, [&](int64_t i, int count) SN_FORCE_INLINE {
            Vec<T> v = load<E>(x + i, count);  // 0 beyond the row
            for (int lane = 0; lane < WIDTH<T>; ++lane) {
                double a = double(v[lane]);
                sum[lane] += a;
                square[lane] += a * a;
            }
        });
        double total = 0, total_square = 0;
        for (int lane = 0; lane < WIDTH<T>; ++lane) total += sum[lane], total_square += square[lane];
        sums[row] = total;
        squares[row] = total_square;
    }
}

template <class E>
void moments_of_region(const Geometry &g, const Region &region, const E *image, int64_t group, double *sums,
                       double *squares) {
    int64_t per_group = g.channels / g.groups, inner = g.x_rows ? g.groups : 1;
    memset(sums, 0, sizeof(double) * volume(region.size) * inner);
    memset(squares, 0, sizeof(double) * volume(region.size) * inner);
    for_each_run<E>(
        g, region, image, group,
        [&](const E *x, int64_t target, int64_t rows) SN_FORCE_INLINE {
            moments_of_rows<E>(x, sums + target, squares + target, rows, per_group);
        },
        [&](const E *x, int64_t target, int64_t run) SN_FORCE_INLINE {
            add_moments<E>(x, sums + target, squares + target, run);
        });
}

// A patch whose contrast (Σx² − (Σx)²/n)/Σx² is below this has no direction that float32 can distinguish from rounding.
constexpr double FLAT = 1.0 / (1ll << 32);

// 1/‖patch − mean‖ and the mean. A flat patch has the norm sqrt(eps), and `flat(i)` makes its cosines 0; an overflowed
// one is marked by 0.
template <class T, class Flat>
void centered_norms(const double *sums, const double *squares, T *inverse, T *mean, int64_t n, double size, double eps,
                    Flat flat) {
    for (int64_t i = 0; i < n; ++i) {
        double average = sums[i] / size, variation = squares[i] - sums[i] * average;
        // The same bound as without centering, where Σ(x/64)² overflows in T. NaN is not flat and propagates.
        bool overflow = squares[i] >= double(std::numeric_limits<T>::max()) / (SHRINK * SHRINK);
        if (!overflow && variation <= FLAT * squares[i]) {
            variation = 0;
            flat(i);
        }
        inverse[i] = overflow ? T(0) : T(1 / __builtin_sqrt(variation + eps));
        mean[i] = overflow ? T(0) : T(average);
    }
}

template <class T>
SN_INLINE void inverse_norms(const T *sums, T *inverse, int64_t n, T shrunk_eps) {
    for_each_vector<T>(n, [&](int64_t i, int count) SN_FORCE_INLINE {
        store<T>(inverse + i, T(SHRINK) / exact_square_root(load<T>(sums + i, count) + shrunk_eps), count);
    });
}

}  // namespace SN_ISA
