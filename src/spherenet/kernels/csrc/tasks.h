// How work is cut into tasks and in which types it is done.
//
// Tasks depend on the shapes alone, and sums over tasks are added in order, so results do not depend on scheduling.
#pragma once

#include "halves.h"
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

}  // namespace SN_ISA
