// The gradients by Winograd's algorithm: both products share the transformed tiles of the products' gradient D.
//
// D, s and the sums are computed for a row of tiles at a time, and the gradient of x is corrected as soon as a row of
// pixels is complete. Each worker has consecutive rows of tiles. Where they begin inside of an image, the first two rows
// of pixels also belong to the worker before: they wait in a halo until all workers are done. So results depend on the
// number of workers alone.
#pragma once

#include "winograd_plan.h"

namespace SN_ISA {

template <int M>
class WinogradBackward {
  public:
    WinogradBackward(const Geometry &g, const Angle *angle, const Convolution &c, const ConvolutionBackward &p,
                     int workers)
        : angle_(angle), c_(c), p_(p), workers_(workers), tiling_(g, workers), buffers_(tiling_, c.scratch, workers) {}

    void run() const {
        const Tiling<M> &t = tiling_;
        // The lanes of the packed weights are the channels; the products sum over the filters.
        const Weights weights{c_.weight, t.channels, t.filters, c_.channel_step, c_.filter_step, c_.tap_step};
        const int64_t vectors = t.in_step / LANES, size = p_.sums == nullptr ? 0 : SUMS * t.filters;
        const int packers = workers_for_weights(t.channels * t.filters, workers_);
        if (p_.grad_x != nullptr) {
            use_large_pages(p_.grad_x, t.batch * t.height * t.width * t.channels * int64_t(sizeof(float)));
#pragma omp parallel for num_threads(packers) schedule(static) if (packers > 1)
            for (int64_t v = 0; v < vectors; ++v)
                pack_weights<M>(weights, v * LANES, buffers_.weights, angle_ == nullptr ? nullptr : buffers_.taps);
        }
        Buffer<double> partial(workers_ * size);
        if (size > 0) memset(partial.get(), 0, sizeof(double) * workers_ * size);
        Buffer<float *> sums(workers_), direct(workers_);
#pragma omp parallel for num_threads(workers_) schedule(static, 1) if (workers_ > 1)
        for (int64_t worker = 0; worker < workers_; ++worker) {
            sums.get()[worker] = buffers_.of(worker, buffers_.sums);
            direct.get()[worker] = nullptr;
            work(worker, size == 0 ? nullptr : partial.get() + worker * size, direct.get()[worker]);
        }
        if (p_.grad_x != nullptr)
            for (int64_t worker = 1; worker < workers_; ++worker) join(worker);
        if (p_.grad_weight != nullptr) {
#pragma omp parallel for num_threads(packers) schedule(static) if (packers > 1)
            for (int64_t o = 0; o < t.filters; ++o)
                unpack_gradient<M>(sums.get(), direct.get(), workers_, o, t.filters, weights, p_.grad_weight);
        }
        for (int64_t i = 0; i < size; ++i) {
            double total = 0;
            for (int64_t worker = 0; worker < workers_; ++worker) total += partial.get()[worker * size + i];
            p_.sums[i] = float(total);
        }
    }

  private:
    // What a worker has at hand: its rows of tiles and its buffers.
    struct Worker {
        int64_t number, first, last;
        float *gradient, *input, *output, *sums, *halo;
    };

    Worker worker_of(int64_t number) const {
        const int64_t all = tiling_.all_rows();
        return {number, all * number / workers_, all * (number + 1) / workers_,
                buffers_.of(number, buffers_.gradient), buffers_.of(number, buffers_.input),
                buffers_.of(number, buffers_.output), buffers_.of(number, buffers_.sums),
                buffers_.of(number, buffers_.halo)};
    }

    void work(int64_t number, double *partial, float *&direct) const {
        const Tiling<M> &t = tiling_;
        const Worker worker = worker_of(number);
        const Angle none{};
        const Filters<float> filters(angle_ == nullptr ? none : *angle_, angle_ == nullptr ? 0 : t.filters);
        const Passes<float> passes = angle_ == nullptr ? Passes<float>{}
                                                       : passes_for<float>(*angle_, p_.saved_map, partial != nullptr);
        if (p_.grad_weight != nullptr) memset(worker.sums, 0, sizeof(float) * t.F * frequency_step(t.filters, t.channels));
        Buffer<uint32_t> skipped(t.block * t.columns);
        for (int64_t first = worker.first; first < worker.last; first += t.block) {
            int64_t last = first + t.block < worker.last ? first + t.block : worker.last;
            int64_t pixel = t.first_pixel(first), pixels = t.first_pixel(last) - pixel;
            const float *d = p_.grad + pixel * t.filters;
            if (angle_ != nullptr) {
                passes.backward_rows({d, p_.saved, pixel * t.filters, p_.inverse_norm + pixel, worker.gradient,
                                      buffers_.spread + pixel, pixels, t.filters, 1, partial},
                                     filters);
                d = worker.gradient;
            }
            find_skipped(first, last, skipped.get());
            const int64_t tiles = (last - first) * t.columns;
            for (int64_t begin = 0; begin < tiles; begin += t.chunk) {
                int64_t count = tiles - begin < t.chunk ? tiles - begin : t.chunk;
                convolve(worker, first, begin, count, d, skipped.get());
            }
            for (int64_t row = first; row < last; ++row) {
                add_directly(worker, row, d + (t.first_pixel(row) - pixel) * t.filters,
                             skipped.get() + (row - first) * t.columns, direct);
                if (p_.grad_x != nullptr) finish(worker, row);
            }
        }
    }

    // The rows of an image as the pixels of D from row of tiles `row` on.
    int64_t rows_left(int64_t row) const { return tiling_.out_height - tiling_.out_row(row); }

    void find_skipped(int64_t first, int64_t last, uint32_t *skipped) const {
        const Tiling<M> &t = tiling_;
        if (angle_ == nullptr) {
            memset(skipped, 0, sizeof(uint32_t) * (last - first) * t.columns);
            return;
        }
        for (int64_t row = first; row < last; ++row) {
            int64_t pixel = t.first_pixel(row);
            Norms norms{p_.inverse_norm + pixel, p_.mean == nullptr ? nullptr : p_.mean + pixel, rows_left(row),
                        t.out_width, float(9 * t.channels)};
            const float *s = buffers_.spread + pixel;
            for (int64_t column = 0; column < t.columns; ++column) {
                uint32_t bits = direct_outputs<M>(norms, 0, column * M);
                for (int64_t i = 0; i < M && i < norms.height; ++i)  // a gradient that is not finite
                    for (int64_t j = column * M; j < (column + 1) * M && j < t.out_width; ++j)
                        if (!std::isfinite(s[i * t.out_width + j])) bits |= 1u << (i * M + j - column * M);
                *skipped++ = bits;
            }
        }
    }

    void convolve(const Worker &worker, int64_t first, int64_t begin, int64_t count, const float *d,
                  const uint32_t *skipped) const {
        const Tiling<M> &t = tiling_;
        constexpr uint32_t ALL = (1u << (M * M)) - 1;
        const int64_t pixel = t.first_pixel(first), step = frequency_step(t.filters, t.channels);
        const Panels panels(t.channels);
        for (int64_t i = 0; i < count; ++i) {
            int64_t row = first + (begin + i) / t.columns, column = (begin + i) % t.columns;
            uint32_t bits = skipped[begin + i];
            Image<const float> of_d{d + (t.first_pixel(row) - pixel) * t.filters, rows_left(row), t.out_width, t.filters};
            transform_gradient<M>(of_d, 0, column * M, bits, worker.output + i * t.out_tile(), t.out_step);
            if (p_.grad_weight == nullptr) continue;
            float *input = worker.input + i * t.in_tile();
            if (bits == ALL)
                memset(input, 0, sizeof(float) * t.F * t.in_step);  // it may not be finite
            else
                transform_input<M>(t.input(c_.x, row), t.out_row(row) - t.pad_height, column * M - t.pad_width, input,
                                   t.in_step);
        }
        for (int64_t f = 0; f < t.F; ++f) {
            const float *output = worker.output + f * t.out_step;
            float *input = worker.input + f * t.in_step;
            if (p_.grad_weight != nullptr)
                add_packed_transposed(output, t.out_tile(), input, t.in_tile(), worker.sums + f * step,
                                      t.in_step, t.filters, count, panels);
            if (p_.grad_x != nullptr)
                multiply_packed(output, t.out_tile(), buffers_.weights + f * step, input, t.in_tile(),
                                count, t.filters, panels);
        }
        if (p_.grad_x == nullptr) return;
        for (int64_t i = 0; i < count; ++i) {
            int64_t row = first + (begin + i) / t.columns, column = (begin + i) % t.columns;
            add_input_gradient<M>(worker.input + i * t.in_tile(), t.in_step, target(worker, row), t.width, t.channels,
                                  column * M - t.pad_width, column == 0);
        }
    }

    // Whether a worker begins inside of an image with this row of tiles.
    bool begins_inside(const Worker &worker, int64_t row) const {
        return row == worker.first && row % tiling_.rows != 0;
    }

    TargetRows<M> target(const Worker &worker, int64_t row) const {
        const Tiling<M> &t = tiling_;
        TargetRows<M> rows;
        int64_t top = t.out_row(row) - t.pad_height;
        bool halo = begins_inside(worker, row);
        float *image = p_.grad_x + row / t.rows * t.height * t.width * t.channels;
        for (int i = 0; i < M + 2; ++i) {
            int64_t h = top + i;
            bool inside = h >= 0 && h < t.height;
            rows.at[i] = !inside ? nullptr
                         : halo && i < 2 ? worker.halo + i * t.width * t.channels
                                         : image + h * t.width * t.channels;
        }
        rows.overlap = row % t.rows == 0 || halo ? 0 : 2;
        return rows;
    }

    // The outputs of a row of tiles that have been skipped. `d` begins with the row.
    void add_directly(const Worker &worker, int64_t row, const float *d, const uint32_t *skipped, float *&direct) const {
        const Tiling<M> &t = tiling_;
        for (int64_t column = 0; column < t.columns; ++column) {
            if (__builtin_expect(skipped[column] == 0, 1)) continue;
            const Image<const float> x = t.input(c_.x, row);
            const int64_t top = t.out_row(row) - t.pad_height;
            for_each_direct<M>(skipped[column], rows_left(row), t.out_width, 0, column * M, [&](int64_t i, int64_t j) {
                const float *of_pixel = d + (i * t.out_width + j) * t.filters;
                if (p_.grad_weight != nullptr) {
                    if (direct == nullptr) {
                        direct = buffers_.of(worker.number, buffers_.direct);
                        memset(direct, 0, sizeof(float) * 9 * t.filters * t.in_step);
                    }
                    add_direct_weight(of_pixel, t.filters, x, top + i, j - t.pad_width, direct);
                }
                if (p_.grad_x == nullptr) return;
                const TargetRows<M> rows = target(worker, row);
                for (int tap = 0; tap < 9; ++tap) {
                    int64_t w = j - t.pad_width + tap % 3;
                    float *to = rows.at[i + tap / 3];
                    if (to != nullptr && w >= 0 && w < t.width)
                        add_direct_input(of_pixel, t.filters, buffers_.taps, t.channels, tap, to + w * t.channels);
                }
            });
        }
    }

    // Correct the rows of pixels that are complete after a row of tiles.
    void finish(const Worker &worker, int64_t row) const {
        const Tiling<M> &t = tiling_;
        if (angle_ == nullptr) return;
        int64_t top = t.out_row(row) - t.pad_height, bottom = top + M;
        if (begins_inside(worker, row)) top += 2;
        if ((row + 1) % t.rows == 0) bottom = t.height;
        correct_rows(row / t.rows, top, bottom);
    }

    // gx − x·m + n of rows of pixels of an image.
    void correct_rows(int64_t image, int64_t from, int64_t to) const {
        const Tiling<M> &t = tiling_;
        from = from < 0 ? 0 : from;
        to = to > t.height ? t.height : to;
        const int64_t map = image * t.out_height * t.out_width;
        Buffer<float> buffer(4 * t.out_width);
        float *m = buffer.get(), *n = m + t.out_width, *product = n + t.out_width;
        for (int64_t h = from; h < to; ++h) {
            memset(m, 0, sizeof(float) * 2 * t.out_width);
            for (int64_t i = h + t.pad_height - 2; i <= h + t.pad_height; ++i) {
                if (i < 0 || i >= t.out_height) continue;
                const float *s = buffers_.spread + map + i * t.out_width;
                add_into<float>(m, s, t.out_width);
                if (p_.mean == nullptr) continue;
                times_mean<float>(s, p_.mean + map + i * t.out_width, product, 0, t.out_width);
                add_into<float>(n, product, t.out_width);
            }
            for (int64_t w = 0; w < t.width; ++w) {
                int64_t first = w + t.pad_width - 2 < 0 ? 0 : w + t.pad_width - 2;
                int64_t last = w + t.pad_width < t.out_width ? w + t.pad_width : t.out_width - 1;
                float total = 0, added = 0;
                for (int64_t j = first; j <= last; ++j) total += m[j], added += n[j];
                int64_t at = ((image * t.height + h) * t.width + w) * t.channels;
                correct_row<float>(p_.grad_x + at, c_.x + at, t.channels, total, added);
            }
        }
    }

    // Add the halo of a worker to the rows of the worker before it.
    void join(int64_t number) const {
        const Tiling<M> &t = tiling_;
        const Worker worker = worker_of(number);
        if (worker.first >= worker.last || !begins_inside(worker, worker.first)) return;
        int64_t image = worker.first / t.rows, top = t.out_row(worker.first) - t.pad_height, row = t.width * t.channels;
        for (int64_t i = 0; i < 2 && top + i < t.height; ++i)
            add_into<float>(p_.grad_x + (image * t.height + top + i) * row, worker.halo + i * row, row);
        if (angle_ != nullptr) correct_rows(image, top, top + 2);
    }

    const Angle *angle_;
    const Convolution &c_;
    const ConvolutionBackward &p_;
    const int workers_;
    const Tiling<M> tiling_;
    const BackwardBuffers<M> buffers_;
};

}  // namespace SN_ISA
