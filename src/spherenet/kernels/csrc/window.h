// Sums over the window of a convolution, and their transpose, on maps with few channels.
//
// A box is separable: sums run along one axis after the other. A map is [depth, height, width, groups] with the groups
// last; for planes each group is a separate map.
#pragma once

#include "api.h"
#include "vector.h"

namespace SN_ISA {

// Where the windows of a range of output positions look, in coordinates of the padded input.
struct Region {
    int64_t out_first[3], out_size[3];
    int64_t first[3], size[3];
};

SN_INLINE int64_t reach(const Geometry &g, int axis) { return g.dilation[axis] * (g.kernel[axis] - 1) + 1; }

SN_INLINE Region region_of(const Geometry &g, int axis_of_band, int64_t from, int64_t to) {
    Region r;
    for (int axis = 0; axis < 3; ++axis) {
        r.out_first[axis] = axis == axis_of_band ? from : 0;
        r.out_size[axis] = axis == axis_of_band ? to - from : g.out[axis];
        r.first[axis] = r.out_first[axis] * g.stride[axis];
        r.size[axis] = (r.out_size[axis] - 1) * g.stride[axis] + reach(g, axis);
    }
    return r;
}

SN_INLINE int64_t volume(const int64_t *size) { return size[0] * size[1] * size[2]; }

SN_INLINE int64_t first_pixel(const Geometry &g, const Region &r) {
    return (r.out_first[0] * g.out[1] + r.out_first[1]) * g.out[2] + r.out_first[2];
}

template <class T>
SN_INLINE void add_into(T *to, const T *from, int64_t n) {
    for_each_vector<T>(n, [&](int64_t i, int count) SN_FORCE_INLINE {
        store<T>(to + i, load<T>(to + i, count) + load<T>(from + i, count), count);
    });
}

// One axis of a window sum: to[o] = Σ over taps of from[o·stride + tap·dilation], for `outer` slabs of `inner` numbers.
template <class T>
void sum_axis(const T *from, T *to, int64_t outer, int64_t from_size, int64_t to_size, int64_t inner, int64_t kernel,
              int64_t stride, int64_t dilation) {
    for (int64_t slab = 0; slab < outer; ++slab) {
        const T *source = from + slab * from_size * inner;
        T *target = to + slab * to_size * inner;
        memset(target, 0, sizeof(T) * to_size * inner);
        for (int64_t tap = 0; tap < kernel; ++tap) {
            const T *shifted = source + tap * dilation * inner;
            if (stride == 1) {
                add_into(target, shifted, to_size * inner);
            } else if (inner == 1) {
                for (int64_t o = 0; o < to_size; ++o) target[o] += shifted[o * stride];
            } else {
                for (int64_t o = 0; o < to_size; ++o) add_into(target + o * inner, shifted + o * stride * inner, inner);
            }
        }
    }
}

// The transpose: to[o·stride + tap·dilation] += from[o] for every tap.
template <class T>
void spread_axis(const T *from, T *to, int64_t outer, int64_t from_size, int64_t to_size, int64_t inner, int64_t kernel,
                 int64_t stride, int64_t dilation) {
    memset(to, 0, sizeof(T) * outer * to_size * inner);
    for (int64_t slab = 0; slab < outer; ++slab) {
        const T *source = from + slab * from_size * inner;
        T *target = to + slab * to_size * inner;
        for (int64_t tap = 0; tap < kernel; ++tap) {
            T *shifted = target + tap * dilation * inner;
            if (stride == 1) {
                add_into(shifted, source, from_size * inner);
            } else if (inner == 1) {
                for (int64_t o = 0; o < from_size; ++o) shifted[o * stride] += source[o];
            } else {
                for (int64_t o = 0; o < from_size; ++o) add_into(shifted + o * stride * inner, source + o * inner, inner);
            }
        }
    }
}

// Sum a map of region.size over every window → region.out_size. Returns whichever of the two buffers holds the result.
template <class T>
T *window_sum(const Geometry &g, const Region &region, int64_t groups, T *map, T *spare) {
    int64_t size[3] = {region.size[0], region.size[1], region.size[2]};
    for (int axis = 0; axis < 3; ++axis) {
        if (g.kernel[axis] == 1 && g.stride[axis] == 1) continue;
        int64_t outer = 1, inner = groups;
        for (int a = 0; a < axis; ++a) outer *= size[a];
        for (int a = axis + 1; a < 3; ++a) inner *= size[a];
        sum_axis(map, spare, outer, size[axis], region.out_size[axis], inner, g.kernel[axis], g.stride[axis],
                 g.dilation[axis]);
        size[axis] = region.out_size[axis];
        T *held = map;
        map = spare;
        spare = held;
    }
    return map;
}

// The size that spreading needs along an axis: the padded input, or more when the last window ends beyond it.
SN_INLINE int64_t padded_size(const Geometry &g, int axis) { return g.in[axis] + 2 * g.padding[axis]; }

// Give every pixel of the padded input the sum of the windows that saw it. Returns the buffer that holds the result.
template <class T>
T *window_spread(const Geometry &g, int64_t groups, T *map, T *spare) {
    int64_t size[3] = {g.out[0], g.out[1], g.out[2]};
    for (int axis = 0; axis < 3; ++axis) {
        if (g.kernel[axis] == 1 && g.stride[axis] == 1 && g.padding[axis] == 0) continue;
        int64_t outer = 1, inner = groups;
        for (int a = 0; a < axis; ++a) outer *= size[a];
        for (int a = axis + 1; a < 3; ++a) inner *= size[a];
        spread_axis(map, spare, outer, size[axis], padded_size(g, axis), inner, g.kernel[axis], g.stride[axis],
                    g.dilation[axis]);
        size[axis] = padded_size(g, axis);
        T *held = map;
        map = spare;
        spare = held;
    }
    return map;
}

}  // namespace SN_ISA
