// Outputs that Winograd's algorithm cannot compute well, by the direct algorithm.
//
// The rounding errors of a tile are relative to its strongest pixels. A patch that is weak beside them would get a
// direction made of rounding errors, and a NaN or an infinity would fill its tile. Such outputs are computed one by one.
#pragma once

#include "winograd_weights.h"

namespace SN_ISA {

constexpr float WEAK = 32;  // norms of patches of one tile may differ by this factor

// 1/‖patch‖ of each output of an image, and the means of centered patches or null.
struct Norms {
    const float *inverse, *mean;
    int64_t height, width;
    float size;  // numbers per patch
};

// A bit for each output of the tile from (h, w) on that must be computed directly.
template <int M>
SN_INLINE uint32_t direct_outputs(const Norms &norms, int64_t h, int64_t w) {
    int64_t last_h = h + M < norms.height ? h + M : norms.height, last_w = w + M < norms.width ? w + M : norms.width;
    float strongest = std::numeric_limits<float>::infinity(), weakest = 0;
    bool broken = false;
    for (int64_t i = h; i < last_h; ++i)
        for (int64_t j = w; j < last_w; ++j) {
            float r = norms.inverse[i * norms.width + j], whole = r;
            if (norms.mean != nullptr) {  // ‖patch‖ with its mean, from which rounding errors come
                float along = norms.mean[i * norms.width + j] * r;
                whole = r / std::sqrt(1 + norms.size * along * along);
            }
            broken |= !(r > 0) || !(whole > 0);
            strongest = whole < strongest ? whole : strongest;
            weakest = r > weakest ? r : weakest;
        }
    if (broken) return (1u << (M * M)) - 1;
    float limit = WEAK * strongest;
    if (weakest <= limit) return 0;
    uint32_t bits = 0;
    for (int64_t i = h; i < last_h; ++i)
        for (int64_t j = w; j < last_w; ++j)
            if (norms.inverse[i * norms.width + j] > limit) bits |= 1u << ((i - h) * M + j - w);
    return bits;
}

// Call body(h, w) for the outputs of a tile that have a bit.
template <int M, class Body>
SN_INLINE void for_each_direct(uint32_t bits, int64_t height, int64_t width, int64_t h, int64_t w, Body body) {
    for (int i = 0; i < M; ++i)
        for (int j = 0; j < M; ++j)
            if ((bits >> (i * M + j) & 1) && h + i < height && w + j < width) body(h + i, w + j);
}

// Call body(tap, pixel) for the pixels of the patch whose first pixel is (h, w).
template <class T, class Body>
SN_INLINE void for_each_tap(const Image<T> &image, int64_t h, int64_t w, Body body) {
    for (int tap = 0; tap < 9; ++tap)
        if (image.has(h + tap / 3, w + tap % 3)) body(tap, image.at(h + tap / 3, w + tap % 3));
}

// The product of one patch with all filters. `taps` is [9, channels, padded filters].
SN_INLINE void direct_product(const Image<const float> &x, int64_t h, int64_t w, const float *taps, int64_t filters,
                              float *product) {
    int64_t all = padded(filters);
    for_each_vector<float>(filters, [&](int64_t o, int count) {
        Floats total{};
        for_each_tap(x, h, w, [&](int tap, const float *pixel) {
            const float *weights = taps + tap * x.channels * all + o;
            for (int64_t c = 0; c < x.channels; ++c) total += pixel[c] * Storage<float>::load(weights + c * all);
        });
        store<float>(product + o, total, count);
    });
}

// ∂x of one patch: `taps` is [9, filters, padded channels].
template <class Target>
SN_INLINE void add_direct_input(const float *d, int64_t filters, const float *taps, int64_t channels, int tap,
                                Target *to) {
    int64_t all = padded(channels);
    for_each_vector<float>(channels, [&](int64_t c, int count) {
        Floats total{};
        const float *weights = taps + tap * filters * all + c;
        for (int64_t o = 0; o < filters; ++o) total += d[o] * Storage<float>::load(weights + o * all);
        store<float>(to + c, load<float>(to + c, count) + total, count);
    });
}

// ∂w of one patch, added to `sums` [9, filters, padded channels].
SN_INLINE void add_direct_weight(const float *d, int64_t filters, const Image<const float> &x, int64_t h, int64_t w,
                                 float *sums) {
    int64_t all = padded(x.channels);
    for_each_tap(x, h, w, [&](int tap, const float *pixel) {
        for (int64_t o = 0; o < filters; ++o)
            for_each_vector<float>(x.channels, [&](int64_t c, int count) {
                float *to = sums + (tap * filters + o) * all + c;
                Storage<float>::store(to, Storage<float>::load(to) + d[o] * load<float>(pixel + c, count));
            });
    });
}

}  // namespace SN_ISA
