// How a convolution is cut into tiles, blocks and workers, and where its buffers are.
#pragma once

#include "memory.h"
#include "norms.h"
#include "winograd_direct.h"

namespace SN_ISA {

constexpr int64_t CACHE = 512 << 10;  // bytes of transformed tiles that stay in a core's cache
constexpr int64_t MOST_TILES = 64;

// Rows of tiles are counted through the batch; those of one worker or block follow one another, and so do their pixels.
template <int M>
struct Tiling {
    static constexpr int64_t F = (M + 2) * (M + 2);
    int64_t batch, channels, filters, rows, columns, in_step, out_step;
    int64_t height, width, out_height, out_width, pad_height, pad_width;
    int64_t chunk, block;  // tiles that are transformed together, rows of tiles that are finished together

    Tiling(const Geometry &g, int workers)
        : batch(g.batch), channels(g.channels), filters(g.filters), rows((g.out[1] + M - 1) / M),
          columns((g.out[2] + M - 1) / M), in_step(padded(channels)), out_step(padded(filters)), height(g.in[1]),
          width(g.in[2]), out_height(g.out[1]), out_width(g.out[2]), pad_height(g.padding[1]), pad_width(g.padding[2]) {
        int64_t fitting = CACHE / (F * (in_step + out_step) * int64_t(sizeof(float)));
        int64_t most = fitting < 14 ? 14 : fitting > MOST_TILES ? MOST_TILES : fitting;
        block = most / columns > 1 ? most / columns : 1;
        int64_t share = (all_rows() + workers - 1) / workers;
        if (block > share) block = share;
        int64_t parts = (columns + most - 1) / most;
        chunk = block > 1 ? block * columns : (columns + parts - 1) / parts;
    }
    int64_t all_rows() const { return batch * rows; }
    int64_t in_tile() const { return F * in_step + LANES; }  // the lanes between tiles keep them apart in the cache
    int64_t out_tile() const { return F * out_step + LANES; }
    int64_t out_row(int64_t row) const { return row % rows * M; }  // first row of pixels of a row of tiles
    // Pixels before a row of tiles.
    int64_t first_pixel(int64_t row) const {
        return (row / rows * out_height + row % rows * M) * out_width;
    }
    Image<const float> input(const float *x, int64_t row) const {
        return {x + row / rows * height * width * channels, height, width, channels};
    }
};

// The parts of a scratch buffer, one after another in steps of 64 bytes. Without memory it only counts.
class Parts {
  public:
    explicit Parts(float *memory) : memory_(memory) {}
    // Where the next part begins, counted from the first.
    int64_t skip(int64_t numbers) {
        int64_t at = used_;
        used_ += (numbers + 15) / 16 * 16;
        return at;
    }
    float *take(int64_t numbers) {
        int64_t at = skip(numbers);
        return memory_ == nullptr ? nullptr : memory_ + at;
    }
    int64_t used() const { return used_; }
    int64_t bytes() const { return used_ * int64_t(sizeof(float)); }

  private:
    float *memory_;
    int64_t used_ = 0;
};

template <int M>
struct ForwardBuffers {
    float *weights, *taps;
    float *worker_memory;
    int64_t input, output, products, per_worker;  // offsets in the memory of a worker
    int64_t bytes;
    ForwardBuffers(const Tiling<M> &t, float *scratch, int workers) {
        Parts parts(scratch), own(nullptr);
        weights = parts.take(t.F * frequency_step(t.channels, t.filters));
        taps = parts.take(9 * t.channels * t.out_step);
        input = own.skip(t.chunk * t.in_tile());
        output = own.skip(t.chunk * t.out_tile());
        products = own.skip(t.block * M * t.out_width * t.filters);
        per_worker = own.used();
        worker_memory = parts.take(per_worker * workers);
        bytes = parts.bytes();
    }
    float *of(int64_t worker, int64_t offset) const { return worker_memory + worker * per_worker + offset; }
};

template <int M>
struct BackwardBuffers {
    float *weights, *taps, *spread;  // spread: s of every output
    float *worker_memory;
    int64_t gradient, input, output, sums, direct, halo, per_worker;  // offsets in the memory of a worker
    int64_t bytes;
    BackwardBuffers(const Tiling<M> &t, float *scratch, int workers) {
        Parts parts(scratch), own(nullptr);
        weights = parts.take(t.F * frequency_step(t.filters, t.channels));
        taps = parts.take(9 * t.filters * t.in_step);
        spread = parts.take(t.batch * t.out_height * t.out_width);
        gradient = own.skip(t.block * M * t.out_width * t.filters);
        input = own.skip(t.chunk * t.in_tile());
        output = own.skip(t.chunk * t.out_tile());
        sums = own.skip(t.F * frequency_step(t.filters, t.channels));
        direct = own.skip(9 * t.filters * t.in_step);
        halo = own.skip(2 * t.width * t.channels);
        per_worker = own.used();
        worker_memory = parts.take(per_worker * workers);
        bytes = parts.bytes();
    }
    float *of(int64_t worker, int64_t offset) const { return worker_memory + worker * per_worker + offset; }
};

// Workers that transform weights: a second one pays only for many of them.
SN_INLINE int workers_for_weights(int64_t pairs, int workers) { return pairs < 4096 ? 1 : workers; }

// Workers for a convolution: the second one costs more than it saves below this number of multiplications.
SN_INLINE int workers_for(const Geometry &g, int32_t threads) {
    return team(g.batch * volume(g.out) * g.channels * g.filters / 64, threads);
}

}  // namespace SN_ISA
