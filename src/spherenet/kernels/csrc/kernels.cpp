// The functions of one instruction set.
//
// Compiled once per instruction set; library.cpp picks one table of functions at load time.

#include "backward.h"
#include "cells.h"
#include "forward.h"
#include "weights.h"

namespace SN_ISA {

// --- the correction of the input's gradient ---------------------------------------------------------------------

void correct(const Geometry *geometry, void *grad_x, const void *x, const void *spread, const void *mean_spread,
             int32_t type, int32_t threads) {
    const Geometry &g = *geometry;
    int64_t pixels = volume(g.in), channels = g.channels / g.groups;
    int used = team(g.batch * g.channels * pixels, threads);
    // Tasks are the pixels of rows, which are independent, or the planes of one channel and image.
    int64_t tasks = g.x_rows ? g.batch * pixels : g.batch * g.channels;
    for_type(type, [&](auto tag) {
        using E = typename decltype(tag)::type;
        const E *from = static_cast<const E *>(x);
        E *to = static_cast<E *>(grad_x);
        const Work<E> *m = static_cast<const Work<E> *>(spread), *added = static_cast<const Work<E> *>(mean_spread);
        if (g.x_rows) {
#pragma omp parallel for num_threads(used) schedule(static) if (used > 1)
            for (int64_t pixel = 0; pixel < tasks; ++pixel) {
                for (int64_t group = 0; group < g.groups; ++group) {
                    int64_t at = pixel * g.channels + group * channels;
                    int64_t map = pixel * g.groups + group;
                    correct_row<E>(to + at, from + at, channels, m[map], added == nullptr ? 0 : added[map]);
                }
            }
        } else {
#pragma omp parallel for num_threads(used) schedule(static) if (used > 1)
            for (int64_t plane = 0; plane < tasks; ++plane) {
                int64_t map = plane / g.channels * g.groups + plane % g.channels / channels;
                correct_plane<E>(to + plane * pixels, from + plane * pixels, pixels, m + map * pixels,
                                 added == nullptr ? nullptr : added + map * pixels);
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

template Passes<float> passes_for<float>(const Angle &, int32_t, bool);  // which winograd.cpp uses, too

int64_t winograd_scratch(const Geometry *, int32_t, int32_t, int32_t);
void winograd_forward(const Geometry *, const Angle *, const Convolution *, const ConvolutionForward *, int32_t);
void winograd_backward(const Geometry *, const Angle *, const Convolution *, const ConvolutionBackward *, int32_t);

Kernels table() {
    return {unit_weight, unit_weight_backward, forward, backward, correct, cell_forward, cell_backward,
            winograd_scratch, winograd_forward, winograd_backward};
}

}  // namespace SN_ISA
