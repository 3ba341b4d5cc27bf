// Tiles of channels-last maps: loading and transforming them, and transforming back into a map.
//
// A transformed tile holds F = (M+2)² frequencies of `step` numbers each, one per channel; the numbers beyond the last
// channel are 0.
#pragma once

#include "winograd_product.h"

namespace SN_ISA {

// A map [height, width, channels] of one image.
template <class T>
struct Image {
    T *data;
    int64_t height, width, channels;
    SN_FORCE_INLINE T *at(int64_t h, int64_t w) const { return data + (h * width + w) * channels; }
    SN_FORCE_INLINE bool has(int64_t h, int64_t w) const { return h >= 0 && h < height && w >= 0 && w < width; }
};

// The pixels [N, N] from (h, w) on. Those outside of the image, and those that `skipped` has a bit for, are 0.
template <int N>
class Pixels {
  public:
    Pixels(const Image<const float> &image, int64_t h, int64_t w, uint64_t skipped) {
        for (int i = 0; i < N; ++i)
            for (int j = 0; j < N; ++j) {
                bool used = image.has(h + i, w + j) && !(skipped >> (i * N + j) & 1);
                at_[i][j] = used ? image.at(h + i, w + j) : ZEROS;
                mask_[i][j] = used ? -1 : 0;
            }
    }
    SN_FORCE_INLINE Floats load(int i, int j, int64_t c, int count) const {
        return SN_ISA::load<float>(at_[i][j] + (c & mask_[i][j]), count);
    }

  private:
    static constexpr float ZEROS[LANES] = {};
    const float *at_[N][N];
    int64_t mask_[N][N];
};
template <int N>
constexpr float Pixels<N>::ZEROS[LANES];

template <int N>
SN_INLINE bool is_inside(int64_t height, int64_t width, int64_t h, int64_t w) {
    return h >= 0 && w >= 0 && h + N <= height && w + N <= width;
}

// Bᵀ·d·B or A·d·Aᵀ: IN×IN numbers per channel → OUT×OUT frequencies. pixel(i, j, c, count) loads a vector of channels.
template <int IN, int OUT, class Transform, class Pixel>
SN_INLINE void transform_tile(int64_t channels, float *to, int64_t step, Transform transform, Pixel pixel) {
    for_each_vector<float>(channels, [&](int64_t c, int count) SN_FORCE_INLINE {
        Floats half[OUT][IN];
#pragma GCC unroll 1
        for (int j = 0; j < IN; ++j) {
            Floats column[IN], result[OUT];
#pragma GCC unroll 6
            for (int i = 0; i < IN; ++i) column[i] = pixel(i, j, c, count);
            transform(column, result);
#pragma GCC unroll 6
            for (int i = 0; i < OUT; ++i) half[i][j] = result[i];
        }
#pragma GCC unroll 1
        for (int i = 0; i < OUT; ++i) {
            Floats result[OUT];
            transform(half[i], result);
#pragma GCC unroll 6
            for (int j = 0; j < OUT; ++j) Storage<float>::store(to + (i * OUT + j) * step + c, result[j]);
        }
    });
}

template <int IN, int OUT, class Transform>
SN_INLINE void transform_pixels(const Image<const float> &image, int64_t h, int64_t w, uint32_t skipped, float *to,
                                int64_t step, Transform transform) {
    if (skipped == 0 && is_inside<IN>(image.height, image.width, h, w)) {
        const float *first = image.at(h, w);
        int64_t row = image.width * image.channels, pixel = image.channels;
        transform_tile<IN, OUT>(image.channels, to, step, transform, [&](int i, int j, int64_t c, int count) SN_FORCE_INLINE {
            return load<float>(first + i * row + j * pixel + c, count);
        });
        return;
    }
    Pixels<IN> pixels(image, h, w, skipped);
    transform_tile<IN, OUT>(image.channels, to, step, transform, [&](int i, int j, int64_t c, int count) SN_FORCE_INLINE {
        return pixels.load(i, j, c, count);
    });
}

// The input tile whose first pixel is (h, w).
template <int M>
void transform_input(const Image<const float> &x, int64_t h, int64_t w, float *to, int64_t step) {
    transform_pixels<M + 2, M + 2>(x, h, w, 0, to, step,
                                   [](const Floats *d, Floats *v) SN_FORCE_INLINE { Winograd<M>::input(d, v); });
}

// The tile of the products' gradient whose first pixel is (h, w), without the pixels that `skipped` has a bit for.
template <int M>
void transform_gradient(const Image<const float> &d, int64_t h, int64_t w, uint32_t skipped, float *to, int64_t step) {
    transform_pixels<M, M + 2>(d, h, w, skipped, to, step,
                               [](const Floats *y, Floats *m) SN_FORCE_INLINE { Winograd<M>::output_adjoint(y, m); });
}

// Aᵀ·m·A into the output tile whose first pixel is (h, w); `bias` may be null.
template <int M>
void transform_output(const float *from, int64_t step, const Image<float> &out, int64_t h, int64_t w,
                      const float *bias) {
    constexpr int N = M + 2;
    bool inside = is_inside<M>(out.height, out.width, h, w);
    for_each_vector<float>(out.channels, [&](int64_t c, int count) SN_FORCE_INLINE {
        Floats half[M][N];
#pragma GCC unroll 1
        for (int j = 0; j < N; ++j) {
            Floats column[N], result[M];
#pragma GCC unroll 6
            for (int i = 0; i < N; ++i) column[i] = Storage<float>::load(from + (i * N + j) * step + c);
            Winograd<M>::output(column, result);
#pragma GCC unroll 6
            for (int i = 0; i < M; ++i) half[i][j] = result[i];
        }
        Floats added = bias == nullptr ? Floats{} : load<float>(bias + c, count);
#pragma GCC unroll 1
        for (int i = 0; i < M; ++i) {
            Floats result[M];
            Winograd<M>::output(half[i], result);
#pragma GCC unroll 6
            for (int j = 0; j < M; ++j)
                if (inside || (h + i < out.height && w + j < out.width))
                    store<float>(out.at(h + i, w + j) + c, result[j] + added, count);
        }
    });
}

// Rows of the gradient of x that one tile touches: null outside of the image. The first `overlap` rows and, from the
// second tile of a row on, the first two columns have been written by other tiles and are added to.
template <int M>
struct TargetRows {
    float *at[M + 2];
    int overlap;
};

// B·v·Bᵀ into the gradient of x. The tile's first column is w.
template <int M, bool INSIDE>
SN_INLINE void add_input_gradient(const float *from, int64_t step, const TargetRows<M> &rows, int64_t width,
                                  int64_t channels, int64_t w, bool first_column) {
    constexpr int N = M + 2;
    for_each_vector<float>(channels, [&](int64_t c, int count) SN_FORCE_INLINE {
        Floats half[N][N];
#pragma GCC unroll 1
        for (int j = 0; j < N; ++j) {
            Floats column[N], result[N];
#pragma GCC unroll 6
            for (int i = 0; i < N; ++i) column[i] = Storage<float>::load(from + (i * N + j) * step + c);
            Winograd<M>::input_adjoint(column, result);
#pragma GCC unroll 6
            for (int i = 0; i < N; ++i) half[i][j] = result[i];
        }
#pragma GCC unroll 1
        for (int i = 0; i < N; ++i) {
            if (rows.at[i] == nullptr) continue;
            Floats result[N];
            Winograd<M>::input_adjoint(half[i], result);
            float *row = rows.at[i] + w * channels + c;
            bool overlaps = i < rows.overlap;
#pragma GCC unroll 6
            for (int j = 0; j < N; ++j) {
                if (!INSIDE && (w + j < 0 || w + j >= width)) continue;
                float *to = row + j * channels;
                bool written = overlaps || (j < 2 && (INSIDE || !first_column));
                store<float>(to, written ? load<float>(to, count) + result[j] : result[j], count);
            }
        }
    });
}

template <int M>
void add_input_gradient(const float *from, int64_t step, const TargetRows<M> &rows, int64_t width, int64_t channels,
                        int64_t w, bool first_column) {
    if (!first_column && w >= 0 && w + M + 2 <= width)
        add_input_gradient<M, true>(from, step, rows, width, channels, w, false);
    else
        add_input_gradient<M, false>(from, step, rows, width, channels, w, first_column);
}

}  // namespace SN_ISA
