// The drivers: how the passes walk over a batch, in which types, on how many threads.
//
// Compiled once per instruction set; library.cpp picks one table of functions at load time. Work is cut into tasks that
// depend on the shapes alone, and sums over tasks are added in order, so results do not depend on scheduling.

#include "cells.h"
#include "passes.h"
#include "window.h"

namespace SN_ISA {

constexpr int64_t SMALL = 1 << 14;  // elements below which a second thread costs more than it saves

SN_INLINE int team(int64_t elements, int32_t threads) { return elements < SMALL || threads < 2 ? 1 : threads; }

template <class T>
struct Tag {
    using type = T;
};

template <class Run>
SN_INLINE void for_type(int32_t type, Run run) {
    if (type == FLOAT32)
        run(Tag<float>{});
    else if (type == FLOAT64)
        run(Tag<double>{});
    else if (type == BFLOAT16)
        run(Tag<BFloat16>{});
    else
        run(Tag<Float16>{});
}

// --- unit weights -----------------------------------------------------------------------------------------------

template <class E, class U>
void unit_weight_of(const E *weight, U *unit, Work<E> *scale, int64_t filters, int64_t size, double eps, int threads) {
    using T = Work<E>;
#pragma omp parallel for num_threads(threads) schedule(static) if (threads > 1)
    for (int64_t o = 0; o < filters; ++o) {
        const E *w = weight + o * size;
        T inverse = inverse_norm<T>(sum_of_squares<E>(w, size), T(eps * SHRINK * SHRINK));
        scale[o] = inverse;
        U *u = unit + o * size;
        for_each_vector<T>(size,
                           [&](int64_t i, int count) SN_FORCE_INLINE { store<U>(u + i, load<E>(w + i, count) * inverse, count); });
    }
}

// d(w/‖w‖) = (I − uuᵀ)/‖w‖.
template <class E, class U>
void unit_weight_gradient(const U *grad, const U *unit, const Work<E> *scale, E *grad_weight, int64_t filters,
                          int64_t size, int threads) {
    using T = Work<E>;
#pragma omp parallel for num_threads(threads) schedule(static) if (threads > 1)
    for (int64_t o = 0; o < filters; ++o) {
        const U *g = grad + o * size, *u = unit + o * size;
        Vec<T> along{};
        for_each_vector<T>(
            size, [&](int64_t i, int count) SN_FORCE_INLINE { along += load<U>(g + i, count) * load<U>(u + i, count); });
        T radial = sum_of_lanes<T>(along), inverse = scale[o];
        E *result = grad_weight + o * size;
        for_each_vector<T>(size, [&](int64_t i, int count) SN_FORCE_INLINE {
            store<E>(result + i, (load<U>(g + i, count) - load<U>(u + i, count) * radial) * inverse, count);
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

void unit_weight(const void *weight, void *unit, void *scale, int64_t filters, int64_t size, double eps, int32_t type,
                 int32_t unit_type, int32_t threads) {
    for_weight_types(type, unit_type, [&](auto e, auto u) {
        using E = typename decltype(e)::type;
        using U = typename decltype(u)::type;
        unit_weight_of<E, U>(static_cast<const E *>(weight), static_cast<U *>(unit), static_cast<Work<E> *>(scale),
                             filters, size, eps, team(filters * size, threads));
    });
}

void unit_weight_backward(const void *grad, const void *unit, const void *scale, void *grad_weight, int64_t filters,
                          int64_t size, int32_t type, int32_t unit_type, int32_t threads) {
    for_weight_types(type, unit_type, [&](auto e, auto u) {
        using E = typename decltype(e)::type;
        using U = typename decltype(u)::type;
        unit_weight_gradient<E, U>(static_cast<const U *>(grad), static_cast<const U *>(unit),
                                   static_cast<const Work<E> *>(scale), static_cast<E *>(grad_weight), filters, size,
                                   team(filters * size, threads));
    });
}

// --- how a batch is cut into tasks ------------------------------------------------------------------------------

SN_INLINE bool is_pointwise(const Geometry &g) {
    for (int axis = 0; axis < 3; ++axis)
        if (g.kernel[axis] != 1 || g.stride[axis] != 1 || g.padding[axis] != 0) return false;
    return g.x_rows && g.out_rows;
}

constexpr int64_t TASKS = 64;

// Tasks that a thread takes at once: several turns for each, so that a thread that is held up does not hold up all.
SN_INLINE int turn(int64_t tasks, int threads) {
    int64_t size = tasks / (8 * threads);
    return int(size > 0 ? size : 1);
}

// Rows of a pointwise layer in blocks: enough blocks for many threads, none so small that its overhead counts.
struct Blocks {
    int64_t rows, length, count;
    Blocks(const Geometry &g) {
        rows = g.batch * volume(g.out);
        int64_t widest = g.channels > g.filters ? g.channels : g.filters;
        int64_t least = 1 + 8192 / (widest > 0 ? widest : 1);
        length = (rows + TASKS - 1) / TASKS;
        if (length < least) length = least;
        count = (rows + length - 1) / length;
    }
    int64_t first(int64_t block) const { return block * length; }
    int64_t last(int64_t block) const { return (block + 1) * length < rows ? (block + 1) * length : rows; }
};

// Images, or bands of an image when there are fewer images than threads.
struct Bands {
    int64_t per_image, count;
    int axis;
    Bands(const Geometry &g, int threads) {
        axis = g.out[0] > 1 ? 0 : g.out[1] > 1 ? 1 : 2;
        per_image = 1;
        if (g.batch < threads && g.batch > 0) per_image = (2 * threads + g.batch - 1) / g.batch;
        if (per_image > g.out[axis]) per_image = g.out[axis];
        count = g.batch * per_image;
    }
    Region region(const Geometry &g, int64_t task) const {
        int64_t band = task % per_image;
        return region_of(g, axis, band * g.out[axis] / per_image, (band + 1) * g.out[axis] / per_image);
    }
};

// --- forward ----------------------------------------------------------------------------------------------------

// Σ(x/64)² over the channels of a group, on the padded region that the windows of a band see.
template <class E>
void squares_of_region(const Geometry &g, const Region &region, const E *image, int64_t group, Work<E> *map) {
    using T = Work<E>;
    int64_t per_group = g.channels / g.groups, pixels = volume(g.in), inner = g.x_rows ? g.groups : 1;
    memset(map, 0, sizeof(T) * volume(region.size) * inner);
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
            T *target = map + (row * region.size[2] + first[2] + g.padding[2] - region.first[2]) * inner;
            if (g.x_rows) {
                const E *x = image + pixel * g.channels;
                if (per_group == 1) {
                    add_squares<E>(x, target, run * inner);
                } else {
                    sums_of_squares<E>(x, target, run * inner, per_group);
                }
            } else {
                for (int64_t c = group * per_group; c < (group + 1) * per_group; ++c)
                    add_squares<E>(image + c * pixels + pixel, target, run);
            }
        }
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
                       E *product, Work<E> *r, Work<E> *cosine, double eps, int threads) {
    using T = Work<E>;
    Blocks blocks(g);
    int64_t channels = g.channels / g.groups;
    T shrunk_eps = T(eps * SHRINK * SHRINK);
#pragma omp parallel for num_threads(threads) schedule(dynamic, turn(blocks.count, threads)) if (threads > 1)
    for (int64_t block = 0; block < blocks.count; ++block) {
        int64_t first = blocks.first(block), last = blocks.last(block);
        T *of_block = r + first * g.groups;
        sums_of_squares<E>(x + first * g.channels, of_block, (last - first) * g.groups, channels);
        inverse_norms<T>(of_block, of_block, (last - first) * g.groups, shrunk_eps);
        int64_t at = first * g.filters;
        passes.forward_rows({product + at, cosine == nullptr ? nullptr : cosine + at, r + first * g.groups,
                             last - first, g.filters, g.groups},
                            filters);
    }
}

template <class E>
void forward_windows(const Geometry &g, const Passes<E> &passes, const Filters<Work<E>> &filters, const E *x,
                     E *product, Work<E> *r, Work<E> *cosine, double eps, int threads) {
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
        Buffer<T> buffer(2 * volume(whole.size) * inner);
#pragma omp for schedule(dynamic, turn(bands.count, threads))
        for (int64_t task = 0; task < bands.count; ++task) {
            Region region = bands.region(g, task);
            int64_t image = task / bands.per_image, first = first_pixel(g, region), length = volume(region.out_size);
            for (int64_t map = 0; map < maps; ++map) {
                T *squares = buffer.get(), *spare = squares + volume(region.size) * inner;
                squares_of_region<E>(g, region, x + image * g.channels * volume(g.in), map, squares);
                T *inverse = r + ((image * maps + map) * pixels + first) * inner;
                inverse_norms<T>(window_sum<T>(g, region, inner, squares, spare), inverse, length * inner, shrunk_eps);
                if (g.out_rows) {
                    int64_t at = (image * pixels + first) * g.filters;
                    passes.forward_rows({product + at, cosine == nullptr ? nullptr : cosine + at, inverse,
                                         length, g.filters, g.groups},
                                        filters);
                    continue;
                }
                for (int64_t o = map * count; o < (map + 1) * count; ++o) {
                    int64_t at = (image * g.filters + o) * pixels + first;
                    passes.forward_plane(
                        {product + at, cosine == nullptr ? nullptr : cosine + at, inverse, length, o},
                        filters);
                }
            }
        }
    }
}

void forward(const Geometry *geometry, const Angle *angle, const void *x, void *product, void *inverse_norm,
             void *cosine, double eps, int32_t type, int32_t threads) {
    const Geometry &g = *geometry;
    int used = team(g.batch * (g.filters * volume(g.out) + g.channels * volume(g.in)), threads);
    for_type(type, [&](auto tag) {
        using E = typename decltype(tag)::type;
        using T = Work<E>;
        Filters<T> filters(*angle, g.filters);
        auto run = is_pointwise(g) ? forward_pointwise<E> : forward_windows<E>;
        run(g, passes_for<E>(*angle, true, false), filters, static_cast<const E *>(x),
            static_cast<E *>(product), static_cast<T *>(inverse_norm), static_cast<T *>(cosine), eps, used);
    });
}

// --- backward ---------------------------------------------------------------------------------------------------

SN_INLINE double *sums_of(double *partial, int64_t task, int64_t filters) {
    return partial == nullptr ? nullptr : partial + task * 3 * filters;
}

template <class E>
void backward_pointwise(const Geometry &g, const Passes<E> &passes, const Filters<Work<E>> &filters, const Backward &b,
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
        }
    }
}

template <class E>
void backward_band(const Geometry &g, const Passes<E> &passes, const Filters<Work<E>> &filters, const Backward &b,
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
void backward_windows(const Geometry &g, const Passes<E> &passes, const Filters<Work<E>> &filters, const Backward &b,
                      double *partial, int64_t tasks, int threads) {
    using T = Work<E>;
    Bands bands(g, threads);
    int64_t pixels = volume(g.out), maps = g.out_rows ? 1 : g.groups, inner = g.out_rows ? g.groups : 1;
    int64_t largest = 1;
    for (int axis = 0; axis < 3; ++axis) largest *= padded_size(g, axis) > g.out[axis] ? padded_size(g, axis) : g.out[axis];
    T *spread = static_cast<T *>(b.spread);
    bool whole_images = bands.per_image == 1;
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
                    for (int64_t map = 0; map < maps; ++map) {
                        memcpy(source, s + map * pixels * inner, sizeof(T) * pixels * inner);
                        spread_map<T>(g, inner, source, spare, spread + (image * maps + map) * volume(g.in) * inner);
                    }
                } else {
                    for (int64_t map = 0; map < maps; ++map)
                        memcpy(shared.get() + ((image * maps + map) * pixels + first) * inner, s + map * length * inner,
                               sizeof(T) * length * inner);
                }
            }
        }
        if (!whole_images && spread != nullptr) {
#pragma omp for schedule(static)
            for (int64_t map = 0; map < g.batch * maps; ++map) {
                memcpy(source, shared.get() + map * pixels * inner, sizeof(T) * pixels * inner);
                spread_map<T>(g, inner, source, spare, spread + map * volume(g.in) * inner);
            }
        }
    }
}

void backward(const Geometry *geometry, const Angle *angle, const Backward *pointers, int32_t type, int32_t threads) {
    const Geometry &g = *geometry;
    int used = team(g.batch * g.filters * volume(g.out), threads);
    bool pointwise = is_pointwise(g);
    int64_t bands = Bands(g, used).count, most = TASKS > 4 * used ? TASKS : 4 * used;
    int64_t tasks = pointwise ? Blocks(g).count : bands < most ? bands : most;
    int64_t size = pointers->sums == nullptr ? 0 : 3 * g.filters;
    Buffer<double> partial(tasks * size);
    if (partial.get() != nullptr) memset(partial.get(), 0, sizeof(double) * tasks * size);
    for_type(type, [&](auto tag) {
        using E = typename decltype(tag)::type;
        Filters<Work<E>> filters(*angle, g.filters);
        auto run = pointwise ? backward_pointwise<E> : backward_windows<E>;
        run(g, passes_for<E>(*angle, pointers->saved_is_cosine, size > 0), filters, *pointers, partial.get(),
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

// --- the correction of the input's gradient ---------------------------------------------------------------------

void correct(const Geometry *geometry, void *grad_x, const void *x, const void *spread, int32_t type,
             int32_t threads) {
    const Geometry &g = *geometry;
    int64_t pixels = volume(g.in), channels = g.channels / g.groups;
    int used = team(g.batch * g.channels * pixels, threads);
    // Tasks are the pixels of rows, which are independent, or the planes of one channel and image.
    int64_t tasks = g.x_rows ? g.batch * pixels : g.batch * g.channels;
    for_type(type, [&](auto tag) {
        using E = typename decltype(tag)::type;
        const E *from = static_cast<const E *>(x);
        E *to = static_cast<E *>(grad_x);
        const Work<E> *m = static_cast<const Work<E> *>(spread);
        if (g.x_rows) {
#pragma omp parallel for num_threads(used) schedule(static) if (used > 1)
            for (int64_t pixel = 0; pixel < tasks; ++pixel) {
                for (int64_t group = 0; group < g.groups; ++group) {
                    int64_t at = pixel * g.channels + group * channels;
                    correct_row<E>(to + at, from + at, channels, m[pixel * g.groups + group]);
                }
            }
        } else {
#pragma omp parallel for num_threads(used) schedule(static) if (used > 1)
            for (int64_t plane = 0; plane < tasks; ++plane) {
                int64_t map = plane / g.channels * g.groups + plane % g.channels / channels;
                correct_plane<E>(to + plane * pixels, from + plane * pixels, pixels, m + map * pixels);
            }
        }
    });
}

// --- recurrent cells --------------------------------------------------------------------------------------------

void cell_forward(const Cell *cell, const void *from_input, const void *from_state, const void *before, void *gates,
                  void *after, void *output, int32_t type, int32_t threads) {
    int used = team(cell->rows * cell->hidden * cell->gates, threads);
    auto run = [&](auto zero) {
        using T = decltype(zero);
        run_cell_forward<T>(*cell,
                            {static_cast<const T *>(from_input), static_cast<const T *>(from_state),
                             static_cast<const T *>(before), static_cast<T *>(gates), static_cast<T *>(after),
                             static_cast<T *>(output)},
                            used);
    };
    if (type == FLOAT64)
        run(0.0);
    else
        run(0.0f);
}

void cell_backward(const Cell *cell, const void *gates, const void *from_state, const void *before, const void *after,
                   const void *grad_output, const void *grad_after, void *grad_gates, void *grad_from_state,
                   void *grad_before, int32_t type, int32_t threads) {
    int used = team(cell->rows * cell->hidden * cell->gates, threads);
    auto run = [&](auto zero) {
        using T = decltype(zero);
        run_cell_backward<T>(*cell,
                             {static_cast<const T *>(gates), static_cast<const T *>(from_state),
                              static_cast<const T *>(before), static_cast<const T *>(after),
                              static_cast<const T *>(grad_output), static_cast<const T *>(grad_after),
                              static_cast<T *>(grad_gates), static_cast<T *>(grad_from_state),
                              static_cast<T *>(grad_before)},
                             used);
    };
    if (type == FLOAT64)
        run(0.0);
    else
        run(0.0f);
}

// --- whether a weight has changed -------------------------------------------------------------------------------

// A checksum of memory: sums and sums of sums in eight lanes. Any single change alters it; it is not cryptographic.
uint64_t checksum(const void *data, int64_t bytes) {
    typedef uint64_t Lanes __attribute__((vector_size(64)));
    const char *from = static_cast<const char *>(data);
    Lanes sum{}, sum_of_sums{}, word;
    int64_t i = 0;
    for (; i + 64 <= bytes; i += 64) {
        memcpy(&word, from + i, 64);
        sum += word;
        sum_of_sums += sum;
    }
    if (i < bytes) {
        word = Lanes{};
        memcpy(&word, from + i, size_t(bytes - i));
        sum += word;
        sum_of_sums += sum;
    }
    uint64_t result = uint64_t(bytes);
    for (int lane = 0; lane < 8; ++lane) {
        result = (result ^ sum[lane]) * 0x9e3779b97f4a7c15u;
        result = ((result >> 31) ^ result ^ sum_of_sums[lane]) * 0xff51afd7ed558ccdu;
    }
    return result;
}

Kernels table() {
    return {unit_weight, unit_weight_backward, forward, backward, correct, cell_forward, cell_backward, checksum};
}

}  // namespace SN_ISA
