// The forward pass by Winograd's algorithm. Norms of patches, g and the affine map are computed block by block, while
// the pixels and products are in the cache.
#pragma once

#include <atomic>

#include "winograd_plan.h"

namespace SN_ISA {

template <int M>
class WinogradForward {
  public:
    WinogradForward(const Geometry &g, const Angle *angle, const Convolution &c, const ConvolutionForward &p,
                    int workers)
        : g_(g), angle_(angle), c_(c), p_(p), workers_(workers), tiling_(g, workers),
          buffers_(tiling_, c.scratch, workers) {}

    void run() const {
        const Tiling<M> &t = tiling_;
        const Weights weights{c_.weight, t.filters, t.channels, c_.filter_step, c_.channel_step, c_.tap_step};
        const int64_t vectors = t.out_step / LANES, outputs = t.batch * t.out_height * t.out_width * t.filters;
        use_large_pages(p_.out, outputs * int64_t(sizeof(float)));
        use_large_pages(p_.cosine, outputs * int64_t(sizeof(float)));
        const int packers = workers_for_weights(t.channels * t.filters, workers_);
#pragma omp parallel for num_threads(packers) schedule(static) if (packers > 1)
        for (int64_t v = 0; v < vectors; ++v)
            pack_weights<M>(weights, v * LANES, buffers_.weights, angle_ == nullptr ? nullptr : buffers_.taps);
        std::atomic<int64_t> next{0};
#pragma omp parallel for num_threads(workers_) schedule(static, 1) if (workers_ > 1)
        for (int64_t worker = 0; worker < workers_; ++worker) work(worker, next);
    }

  private:
    void work(int64_t worker, std::atomic<int64_t> &next) const {
        const Tiling<M> &t = tiling_;
        const Angle none{};
        const Filters<float> filters(angle_ == nullptr ? none : *angle_, angle_ == nullptr ? 0 : t.filters);
        const Passes<float> passes = angle_ == nullptr ? Passes<float>{} : passes_for<float>(*angle_, SAVED_COSINE, false);
        const int64_t pixels = angle_ == nullptr ? 0 : t.block * M * t.out_width;
        Buffer<float> norms(2 * pixels);
        int64_t region = angle_ == nullptr ? 0 : (t.block * M + 2) * (t.out_width + 2);
        Buffer<float> squares(p_.centered ? 0 : 2 * region);
        Buffer<double> moments(p_.centered ? 3 * region : 0);
        Buffer<uint8_t> flat(p_.centered ? pixels : 0);
        float *products = buffers_.of(worker, buffers_.products);  // in the cache, unlike the output
        for (int64_t first; (first = next.fetch_add(t.block)) < t.all_rows();) {
            int64_t last = first + t.block < t.all_rows() ? first + t.block : t.all_rows();
            int64_t pixel = t.first_pixel(first), count = t.first_pixel(last) - pixel;
            float *out = p_.out + pixel * t.filters;
            if (angle_ == nullptr) {
                convolve(worker, first, last, out);
                continue;
            }
            float *inverse = p_.inverse_norm == nullptr ? norms.get() : p_.inverse_norm + pixel;
            float *mean = !p_.centered ? nullptr : p_.mean == nullptr ? norms.get() + pixels : p_.mean + pixel;
            // The norms first: they read the pixels in order, and so bring them into the cache for the tiles.
            for_each_image(first, last, [&](int64_t row, int64_t end) {
                int64_t at = t.first_pixel(row) - pixel;
                if (mean == nullptr)
                    measure(row, end, inverse + at, squares.get());
                else
                    measure_centered(row, end, inverse + at, mean + at, moments.get(), flat.get() + at);
            });
            convolve(worker, first, last, products);
            for_each_image(first, last, [&](int64_t row, int64_t end) {
                int64_t at = t.first_pixel(row) - pixel;
                repair(row, end, {inverse + at, mean == nullptr ? nullptr : mean + at, rows_of(row, end), t.out_width,
                                  float(9 * t.channels)},
                       products + at * t.filters);
            });
            if (mean != nullptr)
                for (int64_t i = 0; i < count; ++i)
                    if (flat.get()[i]) memset(products + i * t.filters, 0, sizeof(float) * t.filters);
            float *cosine = p_.cosine == nullptr ? nullptr : p_.cosine + pixel * t.filters;
            passes.forward_rows({products, out, cosine, inverse, count, t.filters, 1}, filters);
        }
    }

    // Call body(first, last) for the rows of tiles of each image among the rows of a block.
    template <class Body>
    void for_each_image(int64_t first, int64_t last, Body body) const {
        while (first < last) {
            int64_t end = (first / tiling_.rows + 1) * tiling_.rows;
            if (end > last) end = last;
            body(first, end);
            first = end;
        }
    }

    // Rows of pixels of rows of tiles of one image.
    int64_t rows_of(int64_t row, int64_t end) const {
        return (tiling_.first_pixel(end) - tiling_.first_pixel(row)) / tiling_.out_width;
    }

    Region region(int64_t row, int64_t end) const {
        int64_t from = tiling_.out_row(row);
        return region_of(g_, 1, from, from + rows_of(row, end));
    }

    // The products of a block.
    void convolve(int64_t worker, int64_t first, int64_t last, float *products) const {
        const Tiling<M> &t = tiling_;
        const Panels panels(t.filters);
        float *input = buffers_.of(worker, buffers_.input), *output = buffers_.of(worker, buffers_.output);
        const int64_t tiles = (last - first) * t.columns, step = frequency_step(t.channels, t.filters);
        for (int64_t begin = 0; begin < tiles; begin += t.chunk) {
            int64_t count = tiles - begin < t.chunk ? tiles - begin : t.chunk;
            for (int64_t i = 0; i < count; ++i) {
                int64_t row = first + (begin + i) / t.columns, column = (begin + i) % t.columns;
                transform_input<M>(t.input(c_.x, row), t.out_row(row) - t.pad_height, column * M - t.pad_width,
                                   input + i * t.in_tile(), t.in_step);
            }
            for (int64_t f = 0; f < t.F; ++f)
                multiply_packed(input + f * t.in_step, t.in_tile(), buffers_.weights + f * step,
                                output + f * t.out_step, t.out_tile(), count, t.channels, panels);
            for (int64_t i = 0; i < count; ++i) {
                int64_t row = first + (begin + i) / t.columns, column = (begin + i) % t.columns;
                Image<float> out{products + (t.first_pixel(row) - t.first_pixel(first)) * t.filters,
                                 t.out_height - t.out_row(row), t.out_width, t.filters};
                transform_output<M>(output + i * t.out_tile(), t.out_step, out, 0, column * M, p_.bias);
            }
        }
    }

    void measure(int64_t row, int64_t end, float *inverse, float *buffer) const {
        const Tiling<M> &t = tiling_;
        Region seen = region(row, end);
        const float *image = t.input(c_.x, row).data;
        float *squares = buffer, *spare = squares + volume(seen.size);
        squares_of_region<float>(g_, seen, image, 0, squares);
        float *summed = window_sum<float>(g_, seen, 1, squares, spare);
        inverse_norms<float>(summed, inverse, volume(seen.out_size), float(p_.eps * SHRINK * SHRINK));
    }

    void measure_centered(int64_t row, int64_t end, float *inverse, float *mean, double *buffer, uint8_t *flat) const {
        const Tiling<M> &t = tiling_;
        Region seen = region(row, end);
        const float *image = t.input(c_.x, row).data;
        int64_t numbers = volume(seen.size), outputs = volume(seen.out_size);
        double *sums = buffer, *squares = sums + numbers, *spare = squares + numbers;
        moments_of_region<float>(g_, seen, image, 0, sums, squares);
        double *summed = window_sum<double>(g_, seen, 1, sums, spare);
        spare = summed == sums ? spare : sums;
        double *summed_squares = window_sum<double>(g_, seen, 1, squares, spare);
        memset(flat, 0, outputs);
        centered_norms<float>(summed, summed_squares, inverse, mean, outputs, double(9 * t.channels), p_.eps,
                              [&](int64_t i) { flat[i] = 1; });
    }

    // Compute directly what the tiles of one image got wrong. Norms and products begin at the first row.
    void repair(int64_t row, int64_t end, const Norms &norms, float *products) const {
        const Tiling<M> &t = tiling_;
        const Image<const float> x = t.input(c_.x, row);
        int64_t top = t.out_row(row);
        for (int64_t h = 0; h < (end - row) * M; h += M)
            for (int64_t w = 0; w < t.columns * M; w += M) {
                uint32_t bits = direct_outputs<M>(norms, h, w);
                if (__builtin_expect(bits == 0, 1)) continue;
                for_each_direct<M>(bits, norms.height, norms.width, h, w, [&](int64_t i, int64_t j) {
                    direct_product(x, top + i - t.pad_height, j - t.pad_width, buffers_.taps, t.filters,
                                   products + (i * t.out_width + j) * t.filters);
                });
            }
    }

    const Geometry &g_;
    const Angle *angle_;
    const Convolution &c_;
    const ConvolutionForward &p_;
    const int workers_;
    const Tiling<M> tiling_;
    const ForwardBuffers<M> buffers_;
};

}  // namespace SN_ISA
