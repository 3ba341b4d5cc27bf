// The matrix products between Winograd's transforms, in blocks that fit the registers.
#pragma once

#include <utility>

#include "winograd_transforms.h"

namespace SN_ISA {

// Registers hold ROWS[v] × v vectors of sums, v vectors of the right factor and one number of the left one.
#if defined(__AVX512F__) || defined(__aarch64__)
constexpr int PANEL = 4;  // vectors of columns
constexpr int ROWS[PANEL + 1] = {0, 14, 14, 9, 6};
#else
constexpr int PANEL = 2;
constexpr int ROWS[PANEL + 1] = {0, 10, 6};
#endif

SN_INLINE int64_t padded(int64_t channels) { return (channels + LANES - 1) / LANES * LANES; }

// Numbers between the weights of two frequencies. A power of two would put all frequencies of a weight into the same
// lines of the cache.
SN_INLINE int64_t frequency_step(int64_t depth, int64_t lanes) { return depth * padded(lanes) + LANES; }

// Columns in panels of at most PANEL vectors, as even as possible. A packed factor holds one panel after another.
struct Panels {
    int64_t vectors, count;
    explicit Panels(int64_t columns) : vectors(padded(columns) / LANES), count((vectors + PANEL - 1) / PANEL) {}
    int64_t first(int64_t panel) const { return panel * vectors / count * LANES; }
    int width(int64_t panel) const { return int((first(panel + 1) - first(panel)) / LANES); }
    int64_t of(int64_t column) const {
        int64_t panel = column / LANES * count / vectors;
        while (first(panel + 1) <= column) ++panel;
        return panel;
    }
};

struct Factors {
    const float *left, *right;
    float *result;
    int64_t left_step, right_step, result_step, depth;
};

// result = left·right for R rows: left [R, depth], right [depth, V vectors] without gaps.
template <int R, int V>
void multiply(const Factors &f) {
    Floats sums[R][V];
#pragma GCC unroll 14
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
        for (int v = 0; v < V; ++v) sums[r][v] = Floats{};
    const float *left = f.left, *right = f.right;
    for (int64_t k = 0; k < f.depth; ++k, right += V * LANES) {
        Floats row[V];
#pragma GCC unroll 4
        for (int v = 0; v < V; ++v) row[v] = Storage<float>::load(right + v * LANES);
#pragma GCC unroll 14
        for (int r = 0; r < R; ++r) {
            float a = left[r * f.left_step + k];
#pragma GCC unroll 4
            for (int v = 0; v < V; ++v) sums[r][v] += a * row[v];
        }
    }
#pragma GCC unroll 14
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
        for (int v = 0; v < V; ++v) Storage<float>::store(f.result + r * f.result_step + v * LANES, sums[r][v]);
}

// result += leftᵀ·right for R rows: left [depth, R], right [depth, V vectors].
template <int R, int V>
void add_transposed(const Factors &f) {
    Floats sums[R][V];
#pragma GCC unroll 14
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
        for (int v = 0; v < V; ++v) sums[r][v] = Floats{};
    const float *left = f.left, *right = f.right;
    for (int64_t k = 0; k < f.depth; ++k, left += f.left_step, right += f.right_step) {
        Floats row[V];
#pragma GCC unroll 4
        for (int v = 0; v < V; ++v) row[v] = Storage<float>::load(right + v * LANES);
#pragma GCC unroll 14
        for (int r = 0; r < R; ++r) {
            float a = left[r];
#pragma GCC unroll 4
            for (int v = 0; v < V; ++v) sums[r][v] += a * row[v];
        }
    }
#pragma GCC unroll 14
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
        for (int v = 0; v < V; ++v) {
            float *to = f.result + r * f.result_step + v * LANES;
            Storage<float>::store(to, Storage<float>::load(to) + sums[r][v]);
        }
}

using Multiply = void (*)(const Factors &);

template <int V, bool TRANSPOSED, int... R>
SN_INLINE Multiply of_rows(int rows, std::integer_sequence<int, R...>) {
    static constexpr Multiply functions[] = {(TRANSPOSED ? add_transposed<R + 1, V> : multiply<R + 1, V>)...};
    return functions[rows - 1];
}

template <bool TRANSPOSED>
SN_INLINE Multiply multiply_for(int rows, int vectors) {
    if (vectors == 1) return of_rows<1, TRANSPOSED>(rows, std::make_integer_sequence<int, ROWS[1]>());
#if defined(__AVX512F__) || defined(__aarch64__)
    if (vectors == 3) return of_rows<3, TRANSPOSED>(rows, std::make_integer_sequence<int, ROWS[3]>());
    if (vectors == 4) return of_rows<4, TRANSPOSED>(rows, std::make_integer_sequence<int, ROWS[4]>());
#endif
    return of_rows<2, TRANSPOSED>(rows, std::make_integer_sequence<int, ROWS[2]>());
}

// Call body(first, rows) for groups of rows that are as even as possible and at most `most` long.
template <class Body>
SN_INLINE void for_each_group(int64_t rows, int most, Body body) {
    int64_t groups = (rows + most - 1) / most;
    for (int64_t group = 0; group < groups; ++group) {
        int64_t first = group * rows / groups;
        body(first, int((group + 1) * rows / groups - first));
    }
}

// result [rows, columns] = left [rows, depth] · right [depth, columns], the right factor packed in panels.
SN_INLINE void multiply_packed(const float *left, int64_t left_step, const float *right, float *result,
                               int64_t result_step, int64_t rows, int64_t depth, const Panels &panels) {
    for (int64_t panel = 0; panel < panels.count; ++panel) {
        int64_t first = panels.first(panel);
        int width = panels.width(panel);
        for_each_group(rows, ROWS[width], [&](int64_t row, int count) {
            multiply_for<false>(count, width)({left + row * left_step, right + first * depth,
                                               result + row * result_step + first, left_step, 0, result_step, depth});
        });
    }
}

// result [rows, columns] += leftᵀ·right with left [depth, rows] and right [depth, columns].
SN_INLINE void add_packed_transposed(const float *left, int64_t left_step, const float *right, int64_t right_step,
                                     float *result, int64_t result_step, int64_t rows, int64_t depth,
                                     const Panels &panels) {
    for (int64_t panel = 0; panel < panels.count; ++panel) {
        int64_t first = panels.first(panel);
        int width = panels.width(panel);
        for_each_group(rows, ROWS[width], [&](int64_t row, int count) {
            multiply_for<true>(count, width)({left + row, right + first, result + row * result_step + first, left_step,
                                              right_step, result_step, depth});
        });
    }
}

}  // namespace SN_ISA
