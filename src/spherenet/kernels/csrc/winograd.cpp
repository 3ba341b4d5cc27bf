// Convolutions by Winograd's algorithm, for one instruction set.

#include "winograd_backward.h"
#include "winograd_forward.h"

namespace SN_ISA {

extern template Passes<float> passes_for<float>(const Angle &, int32_t, bool);  // in kernels.cpp

int64_t winograd_scratch(const Geometry *geometry, int32_t tile, int32_t backward, int32_t threads) {
    const int workers = workers_for(*geometry, threads);
    auto bytes = [&](auto tiling) {
        using T = decltype(tiling);
        constexpr int M = T::F == 36 ? 4 : 2;
        return backward ? BackwardBuffers<M>(tiling, nullptr, workers).bytes
                        : ForwardBuffers<M>(tiling, nullptr, workers).bytes;
    };
    return tile == 4 ? bytes(Tiling<4>(*geometry, workers)) : bytes(Tiling<2>(*geometry, workers));
}

void winograd_forward(const Geometry *geometry, const Angle *angle, const Convolution *convolution,
                      const ConvolutionForward *pointers, int32_t threads) {
    const int workers = workers_for(*geometry, threads);
    if (convolution->tile == 4)
        WinogradForward<4>(*geometry, angle, *convolution, *pointers, workers).run();
    else
        WinogradForward<2>(*geometry, angle, *convolution, *pointers, workers).run();
}

void winograd_backward(const Geometry *geometry, const Angle *angle, const Convolution *convolution,
                       const ConvolutionBackward *pointers, int32_t threads) {
    const int workers = workers_for(*geometry, threads);
    if (convolution->tile == 4)
        WinogradBackward<4>(*geometry, angle, *convolution, *pointers, workers).run();
    else
        WinogradBackward<2>(*geometry, angle, *convolution, *pointers, workers).run();
}

}  // namespace SN_ISA
