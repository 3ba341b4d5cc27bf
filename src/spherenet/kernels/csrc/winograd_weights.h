// The weights of Winograd's convolution: G·w·Gᵀ packed for the products, and the gradient back to 3×3 taps.
#pragma once

#include "winograd_tiles.h"

namespace SN_ISA {

// Weights [lanes, depth, 3, 3] with any strides: forward sums over the channels, backward over the filters.
struct Weights {
    const float *data;
    int64_t lanes, depth, lane_step, depth_step, tap_step;
};

// Transform the weights of LANES neighboring lanes from `first` on. `packed` is [F][panels, depth, width of the panel];
// `taps` holds the weights themselves, [9, depth, padded lanes], for outputs that are computed directly.
template <int M>
void pack_weights(const Weights &w, int64_t first, float *packed, float *taps) {
    constexpr int N = M + 2;
    const Panels panels(w.lanes);
    int64_t all = padded(w.lanes), panel = panels.of(first), begin = panels.first(panel);
    int64_t width = int64_t(panels.width(panel)) * LANES, used = w.lanes - first < LANES ? w.lanes - first : LANES;
    const int64_t step = frequency_step(w.depth, w.lanes);
    float *to = packed + begin * w.depth + first - begin;
    for (int64_t k = 0; k < w.depth; ++k) {
        Floats tap[3][3], half[N][3];
        for (int t = 0; t < 9; ++t) {
            float values[LANES] = {};
            const float *from = w.data + first * w.lane_step + k * w.depth_step + t * w.tap_step;
            for (int64_t lane = 0; lane < used; ++lane) values[lane] = from[lane * w.lane_step];
            tap[t / 3][t % 3] = Storage<float>::load(values);
            if (taps != nullptr) Storage<float>::store(taps + (t * w.depth + k) * all + first, tap[t / 3][t % 3]);
        }
        for (int i = 0; i < N; ++i) {
            const float *g = Winograd<M>::weights[i];
            for (int j = 0; j < 3; ++j) half[i][j] = g[0] * tap[0][j] + g[1] * tap[1][j] + g[2] * tap[2][j];
        }
        for (int i = 0; i < N; ++i)
            for (int j = 0; j < N; ++j) {
                const float *g = Winograd<M>::weights[j];
                Floats value = g[0] * half[i][0] + g[1] * half[i][1] + g[2] * half[i][2];
                Storage<float>::store(to + (i * N + j) * step + k * width, value);
            }
    }
}

// The gradient of one filter from the sums of `threads` threads: transformed [F][filters, step] and, for outputs that
// were computed directly, [9, filters, step] or null. The result has the strides of `w`, whose lanes are the channels.
template <int M>
void unpack_gradient(float *const *sums, float *const *direct, int threads, int64_t filter, int64_t filters,
                     const Weights &w, float *gradient) {
    constexpr int N = M + 2;
    const int64_t step = padded(w.lanes), frequency = frequency_step(filters, w.lanes);
    for_each_vector<float>(w.lanes, [&](int64_t c, int count) SN_FORCE_INLINE {
        Floats half[3][N];
        for (int j = 0; j < N; ++j) {
            Floats total[3] = {};
            for (int i = 0; i < N; ++i) {
                Floats value{};
                for (int thread = 0; thread < threads; ++thread)
                    value += Storage<float>::load(sums[thread] + (i * N + j) * frequency + filter * step + c);
                for (int tap = 0; tap < 3; ++tap) total[tap] += Winograd<M>::weights[i][tap] * value;
            }
            for (int tap = 0; tap < 3; ++tap) half[tap][j] = total[tap];
        }
        for (int tap = 0; tap < 9; ++tap) {
            Floats value{};
            for (int j = 0; j < N; ++j) value += Winograd<M>::weights[j][tap % 3] * half[tap / 3][j];
            for (int thread = 0; thread < threads; ++thread)
                if (direct[thread] != nullptr)
                    value += Storage<float>::load(direct[thread] + (tap * filters + filter) * step + c);
            float *to = gradient + filter * w.depth_step + tap * w.tap_step + c * w.lane_step;
            if (w.lane_step == 1) {
                store<float>(to, value, count);
            } else {
                for (int lane = 0; lane < count; ++lane) to[lane * w.lane_step] = value[lane];
            }
        }
    });
}

}  // namespace SN_ISA
