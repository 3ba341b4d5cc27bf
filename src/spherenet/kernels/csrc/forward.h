// The forward pass over a batch: patch norms, then g of every element.
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

template <class E>
void forward_pointwise(const Geometry &g, const Passes<E> &passes, const Filters<Work<E>> &filters, const E *x,
                       E *product, E *out, Work<E> *r, Work<E> *mean, Work<E> *cosine, double eps, int threads) {
    using T = Work<E>;
    Blocks blocks(g);
    int64_t channels = g.channels / g.groups, count = g.filters / g.groups;
    T shrunk_eps = T(eps * SHRINK * SHRINK);
#pragma omp parallel for num_threads(threads) schedule(dynamic, turn(blocks.count, threads)) if (threads > 1)
    for (int64_t block = 0; block < blocks.count; ++block) {
        int64_t first = blocks.first(block), last = blocks.last(block), segments = (last - first) * g.groups;
        T *of_block = r + first * g.groups;
        if (mean == nullptr) {
            sums_of_squares<E>(x + first * g.channels, of_block, segments, channels);
            inverse_norms<T>(of_block, of_block, segments, shrunk_eps);
        } else {
            Buffer<double> moments(2 * segments);
            double *sums = moments.get(), *squares = sums + segments;
            moments_of_rows<E>(x + first * g.channels, sums, squares, segments, channels);
            centered_norms<T>(sums, squares, of_block, mean + first * g.groups, segments, double(channels), eps,
                              [&](int64_t i) { memset(product + first * g.filters + i * count, 0, sizeof(E) * count); });
        }
        int64_t at = first * g.filters;
        passes.forward_rows({product + at, out + at, cosine == nullptr ? nullptr : cosine + at, r + first * g.groups,
                             last - first, g.filters, g.groups},
                            filters);
    }
}

// Set the products of one patch to 0: i counts pixels and groups of a map from pixel `first` on.
template <class E>
void clear_flat(const Geometry &g, E *product, int64_t image, int64_t first, int64_t map, int64_t i) {
    int64_t pixels = volume(g.out), count = g.filters / g.groups;
    if (g.out_rows) {
        memset(product + (image * pixels + first) * g.filters + i * count, 0, sizeof(E) * count);
        return;
    }
    for (int64_t o = map * count; o < (map + 1) * count; ++o)
        memset(product + (image * g.filters + o) * pixels + first + i, 0, sizeof(E));
}

template <class E>
void forward_windows(const Geometry &g, const Passes<E> &passes, const Filters<Work<E>> &filters, const E *x,
                     E *product, E *out, Work<E> *r, Work<E> *mean, Work<E> *cosine, double eps, int threads) {
    using T = Work<E>;
    Bands bands(g, threads);
    int64_t pixels = volume(g.out), count = g.filters / g.groups;
    // With groups the maps of x and of the output have one layout; without groups both layouts are the same.
    bool rows = g.groups == 1 || g.out_rows;
    int64_t inner = rows ? g.groups : 1, maps = rows ? 1 : g.groups;
    T shrunk_eps = T(eps * SHRINK * SHRINK);
#pragma omp parallel num_threads(threads) if (threads > 1)
    {
        Region whole = region_of(g, 0, 0, g.out[0]);
        Buffer<T> buffer(mean == nullptr ? 2 * volume(whole.size) * inner : 0);
        Buffer<double> moments(mean == nullptr ? 0 : 3 * volume(whole.size) * inner);
        const double size = double(g.channels / g.groups * volume(g.kernel));
#pragma omp for schedule(dynamic, turn(bands.count, threads))
        for (int64_t task = 0; task < bands.count; ++task) {
            Region region = bands.region(g, task);
            int64_t image = task / bands.per_image, first = first_pixel(g, region), length = volume(region.out_size);
            for (int64_t map = 0; map < maps; ++map) {
                const E *of_image = x + image * g.channels * volume(g.in);
                int64_t at_map = ((image * maps + map) * pixels + first) * inner;
                T *inverse = r + at_map;
                if (mean == nullptr) {
                    T *squares = buffer.get(), *spare = squares + volume(region.size) * inner;
                    squares_of_region<E>(g, region, of_image, map, squares);
                    T *summed = window_sum<T>(g, region, inner, squares, spare);
                    inverse_norms<T>(summed, inverse, length * inner, shrunk_eps);
                } else {
                    int64_t numbers = volume(region.size) * inner;
                    double *sums = moments.get(), *squares = sums + numbers, *spare = squares + numbers;
                    moments_of_region<E>(g, region, of_image, map, sums, squares);
                    // A window sum needs two buffers and leaves one of them free for the next.
                    double *summed = window_sum<double>(g, region, inner, sums, spare);
                    spare = summed == sums ? spare : sums;
                    double *summed_squares = window_sum<double>(g, region, inner, squares, spare);
                    centered_norms<T>(summed, summed_squares, inverse, mean + at_map, length * inner, size, eps,
                                      [&](int64_t i) { clear_flat<E>(g, product, image, first, map, i); });
                }
                if (g.out_rows) {
                    int64_t at = (image * pixels + first) * g.filters;
                    passes.forward_rows({product + at, out + at, cosine == nullptr ? nullptr : cosine + at, inverse,
                                         length, g.filters, g.groups},
                                        filters);
                    continue;
                }
                for (int64_t o = map * count; o < (map + 1) * count; ++o) {
                    int64_t at = (image * g.filters + o) * pixels + first;
                    passes.forward_plane(
                        {product + at, out + at, cosine == nullptr ? nullptr : cosine + at, inverse, length, o},
                        filters);
                }
            }
        }
    }
}

void forward(const Geometry *geometry, const Angle *angle, const void *x, void *product, void *out,
             void *inverse_norm, void *mean, void *cosine, double eps, int32_t type, int32_t threads) {
    const Geometry &g = *geometry;
    int used = team(g.batch * (g.filters * volume(g.out) + g.channels * volume(g.in)), threads);
    for_type(type, [&](auto tag) {
        using E = typename decltype(tag)::type;
        using T = Work<E>;
        Filters<T> filters(*angle, g.filters);
        auto run = is_pointwise(g) ? forward_pointwise<E> : forward_windows<E>;
        run(g, passes_for<E>(*angle, SAVED_COSINE, false), filters, static_cast<const E *>(x),
            static_cast<E *>(product), static_cast<E *>(out), static_cast<T *>(inverse_norm), static_cast<T *>(mean),
            static_cast<T *>(cosine), eps, used);
    });
}

}  // namespace SN_ISA
