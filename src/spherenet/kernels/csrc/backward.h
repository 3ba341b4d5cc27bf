// The backward pass over a batch: gradients of the products, and what corrects the gradient of x.
#pragma once

#include "tasks.h"

namespace SN_ISA {

SN_INLINE double *sums_of(double *partial, int64_t task, int64_t filters) {
    return partial == nullptr ? nullptr : partial + task * SUMS * filters;
}

template <class E>
void backward_pointwise(const Geometry &g, const PassesOf<E> &passes, const Filters<Work<E>> &filters, const Backward &b,
                        double *partial, int64_t tasks, int threads) {
    using T = Work<E>;
    Blocks blocks(g);
    T *spread = static_cast<T *>(b.spread);
#pragma omp parallel num_threads(threads) if (threads > 1)
    {
        Buffer<T> unused(spread == nullptr ? blocks.length * g.groups : 0);
#pragma omp for schedule(dynamic, turn(tasks, threads))
        for (int64_t block = 0; block < tasks; ++block) {
            int64_t first = blocks.first(block), at = first * g.filters;
            passes.backward_rows({static_cast<const E *>(b.grad) + at, b.saved, at,
                                  static_cast<const T *>(b.inverse_norm) + first * g.groups,
                                  static_cast<E *>(b.grad_product) + at,
                                  spread == nullptr ? unused.get() : spread + first * g.groups,
                                  blocks.last(block) - first, g.filters, g.groups, sums_of(partial, block, g.filters)},
                                 filters);
            if (spread != nullptr && b.mean != nullptr)
                times_mean<T>(spread, static_cast<const T *>(b.mean), static_cast<T *>(b.mean_spread), first * g.groups,
                              blocks.last(block) * g.groups);
        }
    }
}

template <class E>
void backward_band(const Geometry &g, const PassesOf<E> &passes, const Filters<Work<E>> &filters, const Backward &b,
                   int64_t image, int64_t first, int64_t length, Work<E> *s, double *sums) {
    using T = Work<E>;
    const E *grad = static_cast<const E *>(b.grad);
    const T *r = static_cast<const T *>(b.inverse_norm);
    E *grad_product = static_cast<E *>(b.grad_product);
    int64_t pixels = volume(g.out), count = g.filters / g.groups;
    if (g.out_rows) {
        int64_t pixel = image * pixels + first, at = pixel * g.filters;
        passes.backward_rows({grad + at, b.saved, at, r + pixel * g.groups, grad_product + at, s, length, g.filters,
                              g.groups, sums},
                             filters);
        return;
    }
    memset(s, 0, sizeof(T) * length * g.groups);
    for (int64_t o = 0; o < g.filters; ++o) {
        int64_t at = (image * g.filters + o) * pixels + first, group = o / count;
        passes.backward_plane({grad + at, b.saved, at, r + (image * g.groups + group) * pixels + first,
                               grad_product + at, s + group * length, length, o, g.filters, sums},
                              filters);
    }
}

// Spread one map [pixels, inner] onto the pixels of x.
template <class T>
void spread_map(const Geometry &g, int64_t inner, T *map, T *spare, T *spread) {
    const T *padded = window_spread<T>(g, inner, map, spare);
    int64_t height = padded_size(g, 1), width = padded_size(g, 2);
    for (int64_t d = 0; d < g.in[0]; ++d)
        for (int64_t h = 0; h < g.in[1]; ++h)
            memcpy(spread + (d * g.in[1] + h) * g.in[2] * inner,
                   padded + (((d + g.padding[0]) * height + h + g.padding[1]) * width + g.padding[2]) * inner,
                   sizeof(T) * g.in[2] * inner);
}

template <class E>
void backward_windows(const Geometry &g, const PassesOf<E> &passes, const Filters<Work<E>> &filters, const Backward &b,
                      double *partial, int64_t tasks, int threads) {
    using T = Work<E>;
    Bands bands(g, threads);
    int64_t pixels = volume(g.out), maps = g.out_rows ? 1 : g.groups, inner = g.out_rows ? g.groups : 1;
    int64_t largest = 1;
    for (int axis = 0; axis < 3; ++axis) largest *= padded_size(g, axis) > g.out[axis] ? padded_size(g, axis) : g.out[axis];
    T *spread = static_cast<T *>(b.spread), *mean_spread = static_cast<T *>(b.mean_spread);
    const T *mean = static_cast<const T *>(b.mean);
    bool whole_images = bands.per_image == 1;
    // Spread s of one map, and s·mean if patches are centered.
    auto spread_both = [&](const T *s, int64_t map, T *source, T *spare) {
        int64_t numbers = pixels * inner, to = map * volume(g.in) * inner;
        memcpy(source, s, sizeof(T) * numbers);
        spread_map<T>(g, inner, source, spare, spread + to);
        if (mean == nullptr) return;
        times_mean<T>(s, mean + map * numbers, source, 0, numbers);
        spread_map<T>(g, inner, source, spare, mean_spread + to);
    };
    // Bands of one image meet in its map before it is spread; whole images are spread by the thread that has them.
    Buffer<T> shared(!whole_images && spread != nullptr ? g.batch * g.groups * pixels : 0);
#pragma omp parallel num_threads(threads) if (threads > 1)
    {
        // s of the band, then two buffers to spread one of its maps.
        Buffer<T> buffer(largest * (g.groups + 2 * inner));
        T *s = buffer.get(), *source = s + largest * g.groups, *spare = source + largest * inner;
#pragma omp for schedule(dynamic, turn(tasks, threads))
        for (int64_t task = 0; task < tasks; ++task) {
            int64_t from = task * bands.count / tasks, until = (task + 1) * bands.count / tasks;
            for (int64_t band = from; band < until; ++band) {
                Region region = bands.region(g, band);
                int64_t image = band / bands.per_image, first = first_pixel(g, region);
                int64_t length = volume(region.out_size);
                backward_band<E>(g, passes, filters, b, image, first, length, s, sums_of(partial, task, g.filters));
                if (spread == nullptr) continue;
                if (whole_images) {
                    for (int64_t map = 0; map < maps; ++map)
                        spread_both(s + map * pixels * inner, image * maps + map, source, spare);
                } else {
                    for (int64_t map = 0; map < maps; ++map)
                        memcpy(shared.get() + ((image * maps + map) * pixels + first) * inner, s + map * length * inner,
                               sizeof(T) * length * inner);
                }
            }
        }
        if (!whole_images && spread != nullptr) {
#pragma omp for schedule(static)
            for (int64_t map = 0; map < g.batch * maps; ++map)
                spread_both(shared.get() + map * pixels * inner, map, source, spare);
        }
    }
}

void backward(const Geometry *geometry, const Angle *angle, const Backward *pointers, int32_t type, int32_t threads) {
    const Geometry &g = *geometry;
    int used = team(g.batch * g.filters * volume(g.out), threads);
    bool pointwise = is_pointwise(g);
    int64_t bands = Bands(g, used).count, most = TASKS > 4 * used ? TASKS : 4 * used;
    int64_t tasks = pointwise ? Blocks(g).count : bands < most ? bands : most;
    int64_t size = pointers->sums == nullptr ? 0 : SUMS * g.filters;
    Buffer<double> partial(tasks * size);
    if (partial.get() != nullptr) memset(partial.get(), 0, sizeof(double) * tasks * size);
    for_type(type, [&](auto tag) {
        using E = typename decltype(tag)::type;
        Filters<Work<E>> filters(*angle, g.filters);
        auto run = pointwise ? backward_pointwise<E> : backward_windows<E>;
        run(g, passes_of<E>(*angle, pointers->saved_map, size > 0), filters, *pointers, partial.get(),
            tasks, used);
    });
    for (int64_t i = 0; i < size; ++i) {
        double total = 0;
        for (int64_t task = 0; task < tasks; ++task) total += partial.get()[task * size + i];
        if (type == FLOAT64)
            static_cast<double *>(pointers->sums)[i] = total;
        else
            static_cast<float *>(pointers->sums)[i] = float(total);
    }
}

}  // namespace SN_ISA
