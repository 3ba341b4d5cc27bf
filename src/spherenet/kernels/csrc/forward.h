// The forward pass over a batch: patch norms, then g of every element.
#pragma once

#include "norms.h"

namespace SN_ISA {

template <class E>
void forward_pointwise(const Geometry &g, const PassesOf<E> &passes, const Filters<Work<E>> &filters, const E *x,
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
void forward_windows(const Geometry &g, const PassesOf<E> &passes, const Filters<Work<E>> &filters, const E *x,
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
        run(g, passes_of<E>(*angle, SAVED_COSINE, false), filters, static_cast<const E *>(x),
            static_cast<E *>(product), static_cast<E *>(out), static_cast<T *>(inverse_norm), static_cast<T *>(mean),
            static_cast<T *>(cosine), eps, used);
    });
}

}  // namespace SN_ISA
