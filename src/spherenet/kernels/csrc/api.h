// The C interface of the native kernels: plain structs and pointers, no torch headers.
//
// Every function takes raw pointers to dense tensors, works on `threads` OpenMP threads and returns when it is done.
// A layout is "rows" (channels last in memory, [N, pixels, C]) or "planes" ([N, C, pixels]). Maps with one number per
// pixel and group have the same layout with C = groups.
#pragma once

#include <cstdint>

enum ElementType : int32_t { FLOAT32 = 0, FLOAT64 = 1, BFLOAT16 = 2, FLOAT16 = 3 };

enum AngleType : int32_t { COSINE = 0, LINEAR = 1, SIGMOID = 2, SQUARE_COSINE = 3, SHARPENED_COSINE = 4 };

// h(‖x‖), which multiplies g: 1, min(1, ‖x‖/ρ), tanh(‖x‖/ρ), α‖x‖, α‖x‖ below ρ and β‖x‖ + (α − β)ρ above it,
// α·log(1 + ‖x‖), and α‖x‖ + β·log(1 + ‖x‖).
enum MagnitudeType : int32_t { SPHERE = 0, BALL = 1, TANH = 2, PROPORTIONAL = 3, SEGMENTED = 4, LOG = 5, MIXED = 6 };

// What forward keeps for backward: the output without an affine map, the cosines in the working type, or the products,
// which have the element type: half the size of the cosines in half precision.
enum SavedMap : int32_t { SAVED_OUTPUT = 0, SAVED_COSINE = 1, SAVED_PRODUCT = 2 };

// Geometry of a convolution. Dimensions are (depth, height, width); missing ones have size 1.
struct Geometry {
    int64_t batch, channels, filters, groups;
    int64_t in[3], out[3], kernel[3], stride[3], padding[3], dilation[3];
    int32_t x_rows, out_rows;  // whether x and the output are rows (1) or planes (0)
};

// g and h, and the affine map after them: out = scale·(h·g + bias) + shift. Null pointers mean 1, 0 and 0.
// `parameters` holds k of the sigmoid or p of the sharpened cosine, and `radius` ρ of h, one number for all filters or one for each, in the working
// type.
struct Angle {
    int32_t type, parameter_count;
    const void *parameters, *bias, *scale, *shift;
    int32_t magnitude, radius_count;
    const void *radius;
    double alpha, beta;
};

struct Backward {
    const void *grad, *saved, *inverse_norm;
    const void *mean;    // mean of each patch; null unless patches are centered
    void *grad_product;  // may not overlap grad
    void *spread;        // per pixel of x and group; null when the gradient of x is not needed
    void *mean_spread;   // the same with the means of the patches; null unless patches are centered
    void *sums;          // [4, filters]: Σ grad, Σ grad·hg, Σ grad·h·∂g/∂k, Σ grad·g·∂h/∂ρ; null if not needed
    int32_t saved_map;   // a SavedMap; SAVED_PRODUCT only in half precision
};

// One step of a recurrent cell over `rows` rows and `hidden` units; see cells.h for the shapes.
struct Cell {
    int64_t rows, hidden;
    int32_t gates;  // 4: LSTM, 3: GRU
};

// A 3×3 convolution by Winograd's algorithm with tiles of `tile`² outputs (2 or 4), in float32 on rows. The geometry has
// stride 1, dilation 1, one group, padding of at most 2 and depth 1. Steps of the weight count numbers.
struct Convolution {
    const float *x, *weight;
    int64_t filter_step, channel_step, tap_step;
    float *scratch;  // as many bytes as winograd_scratch returns
    int32_t tile;
};

struct ConvolutionForward {
    float *out;           // [N, pixels, filters]
    const float *bias;    // added if there is no angle; may be null
    float *inverse_norm;  // [N, pixels]; null if it is not kept
    float *mean;          // [N, pixels]; null unless patches are centered and the means are kept
    float *cosine;        // null unless the cosines are kept
    double eps;
    int32_t centered;
};

struct ConvolutionBackward {
    const float *grad, *inverse_norm, *mean;
    const void *saved;
    float *grad_x, *grad_weight;  // null if not needed; the gradient of the weight has its steps
    float *sums;                  // as in Backward
    int32_t saved_map;
};

struct Kernels {
    void (*unit_weight)(const void *weight, void *unit, void *scale, int64_t filters, int64_t size, double eps,
                        int32_t centered, int32_t type, int32_t unit_type, int32_t threads);
    void (*unit_weight_backward)(const void *grad, const void *unit, const void *scale, void *grad_weight,
                                 int64_t filters, int64_t size, int32_t centered, int32_t type, int32_t unit_type,
                                 int32_t threads);
    // out: may be product. mean: the mean of each patch, written if patches are centered; otherwise null. cosine: null
    // unless the cosines are kept.
    void (*forward)(const Geometry *geometry, const Angle *angle, const void *x, void *product, void *out,
                    void *inverse_norm, void *mean, void *cosine, double eps, int32_t type, int32_t threads);
    void (*backward)(const Geometry *geometry, const Angle *angle, const Backward *pointers, int32_t type,
                     int32_t threads);
    void (*correct)(const Geometry *geometry, void *grad_x, const void *x, const void *spread, const void *mean_spread,
                    int32_t type, int32_t threads);
    void (*cell_forward)(const Cell *cell, const void *from_input, const void *from_state, const void *before,
                         void *gates, void *after, void *output, int32_t type, int32_t threads);
    void (*cell_backward)(const Cell *cell, const void *gates, const void *from_state, const void *before,
                          const void *after, const void *grad_output, const void *grad_after, void *grad_gates,
                          void *grad_from_state, void *grad_before, int32_t type, int32_t threads);
    // Without an angle these are the plain convolution and its gradients.
    int64_t (*winograd_scratch)(const Geometry *geometry, int32_t tile, int32_t backward, int32_t threads);
    void (*winograd_forward)(const Geometry *geometry, const Angle *angle, const Convolution *convolution,
                             const ConvolutionForward *pointers, int32_t threads);
    void (*winograd_backward)(const Geometry *geometry, const Angle *angle, const Convolution *convolution,
                              const ConvolutionBackward *pointers, int32_t threads);
};
