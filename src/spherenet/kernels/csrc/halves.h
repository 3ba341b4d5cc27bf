// The passes in half precision: those of float, on blocks of numbers that are converted and stay in the cache.
//
// So every g, h and affine map is compiled for float and double only.
#pragma once

#include "passes.h"

namespace SN_ISA {

constexpr int64_t CONVERTED = 4096;  // numbers of a block, unless a few rows have more

template <class E>
void to_floats(const E *from, float *to, int64_t n) {
    for_each_vector<float>(n, [&](int64_t i, int count) SN_FORCE_INLINE {
        store<float>(to + i, load<E>(from + i, count), count);
    });
}

template <class E>
void from_floats(const float *from, E *to, int64_t n) {
    for_each_vector<float>(n, [&](int64_t i, int count) SN_FORCE_INLINE {
        store<E>(to + i, load<float>(from + i, count), count);
    });
}

template <class E>
class HalfPasses {
  public:
    HalfPasses(const Passes<float> &passes, int32_t saved_map) : passes_(passes), saved_map_(saved_map) {}

    void forward_rows(const ForwardRows<E> &a, const Filters<float> &filters) const {
        const int64_t most = rows_of_block(a.filters);
        Buffer<float> block(most * a.filters);
        for (int64_t row = 0; row < a.rows; row += most) {
            int64_t rows = a.rows - row < most ? a.rows - row : most, at = row * a.filters, n = rows * a.filters;
            to_floats(a.product + at, block.get(), n);
            passes_.forward_rows({block.get(), block.get(), a.cosine == nullptr ? nullptr : a.cosine + at,
                                  a.r + row * a.groups, rows, a.filters, a.groups},
                                 filters);
            from_floats(block.get(), a.out + at, n);
        }
    }

    void forward_plane(const ForwardPlane<E> &a, const Filters<float> &filters) const {
        float block[CONVERTED];
        for (int64_t at = 0; at < a.length; at += CONVERTED) {
            int64_t n = a.length - at < CONVERTED ? a.length - at : CONVERTED;
            to_floats(a.product + at, block, n);
            passes_.forward_plane({block, block, a.cosine == nullptr ? nullptr : a.cosine + at, a.r + at, n, a.filter},
                                  filters);
            from_floats(block, a.out + at, n);
        }
    }

    void backward_rows(const BackwardRows<E> &a, const Filters<float> &filters) const {
        const int64_t most = rows_of_block(a.filters);
        Buffer<float> block(3 * most * a.filters);
        float *grad = block.get(), *grad_product = grad + most * a.filters, *map = grad_product + most * a.filters;
        for (int64_t row = 0; row < a.rows; row += most) {
            int64_t rows = a.rows - row < most ? a.rows - row : most, at = row * a.filters, n = rows * a.filters;
            const float *r = a.r + row * a.groups;
            to_floats(a.grad + at, grad, n);
            if (saved_map_ != SAVED_COSINE) to_floats(static_cast<const E *>(a.saved) + a.saved_at + at, map, n);
            if (saved_map_ == SAVED_PRODUCT)
                SN_ISA::forward_rows<CosineAngle, PLAIN, float>({map, map, nullptr, r, rows, a.filters, a.groups}, filters);
            passes_.backward_rows({grad, saved_map_ == SAVED_COSINE ? a.saved : map,
                                   saved_map_ == SAVED_COSINE ? a.saved_at + at : 0, r, grad_product,
                                   a.s + row * a.groups, rows, a.filters, a.groups, a.sums},
                                  filters);
            from_floats(grad_product, a.grad_product + at, n);
        }
    }

    void backward_plane(const BackwardPlane<E> &a, const Filters<float> &filters) const {
        float grad[CONVERTED], grad_product[CONVERTED], map[CONVERTED];
        for (int64_t at = 0; at < a.length; at += CONVERTED) {
            int64_t n = a.length - at < CONVERTED ? a.length - at : CONVERTED;
            to_floats(a.grad + at, grad, n);
            if (saved_map_ != SAVED_COSINE) to_floats(static_cast<const E *>(a.saved) + a.saved_at + at, map, n);
            if (saved_map_ == SAVED_PRODUCT)
                SN_ISA::forward_plane<CosineAngle, PLAIN, float>({map, map, nullptr, a.r + at, n, a.filter}, filters);
            passes_.backward_plane({grad, saved_map_ == SAVED_COSINE ? a.saved : map,
                                    saved_map_ == SAVED_COSINE ? a.saved_at + at : 0, a.r + at, grad_product, a.s + at,
                                    n, a.filter, a.filters, a.sums},
                                   filters);
            from_floats(grad_product, a.grad_product + at, n);
        }
    }

  private:
    // A multiple of the rows whose sums are added up, so that sums do not depend on the blocks.
    static int64_t rows_of_block(int64_t filters) {
        int64_t fitting = CONVERTED / (filters * ROWS_PER_SUM);
        return (fitting > 1 ? fitting : 1) * ROWS_PER_SUM;
    }

    Passes<float> passes_;
    int32_t saved_map_;
};

// The passes of an element type.
template <class E>
using PassesOf = typename std::conditional<sizeof(E) < 4, HalfPasses<E>, Passes<E>>::type;

template <class E>
PassesOf<E> passes_of(const Angle &angle, int32_t saved_map, bool with_sums) {
    if constexpr (sizeof(E) < 4)
        return {passes_for<float>(angle, saved_map == SAVED_OUTPUT ? SAVED_OUTPUT : SAVED_COSINE, with_sums), saved_map};
    else
        return passes_for<E>(angle, saved_map, with_sums);
}

}  // namespace SN_ISA
