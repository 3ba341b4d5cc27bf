// The transforms of Winograd's convolution F(M×M, 3×3): tiles of M×M outputs from (M+2)×(M+2) inputs.
//
//     forward    Y = Aᵀ[(G·w·Gᵀ) ⊙ (Bᵀ·x·B)]·A        summed over the channels: one matrix product per frequency
//     backward   the adjoint: P = A·D·Aᵀ,  ∂w = Gᵀ(Σ P ⊙ BᵀxB)G,  ∂x = B(Σ P ⊙ GwGᵀ)Bᵀ, added where tiles overlap
//
// F(4×4, 3×3) interpolates at 0, ±2/3, ±3/2 and ∞. Its errors are a fifth of those of 0, ±1, ±2 and ∞ at the same
// number of operations: docs/performance.md has the table.
#pragma once

#include "vector.h"

namespace SN_ISA {

using Floats = Vec<float>;
constexpr int LANES = WIDTH<float>;

// One-dimensional transforms on vectors of channels. `weights` is G, one row per frequency.
template <int M>
struct Winograd;

template <>
struct Winograd<4> {
    static constexpr double A = 2.0 / 3, B = 3.0 / 2;  // A·B = 1
    static constexpr float A1 = float(A), A2 = float(A * A), A3 = float(A * A * A);
    static constexpr float B1 = float(B), B2 = float(B * B), B3 = float(B * B * B);
    static constexpr float SUM = float(A * A + B * B);
    static constexpr double NA = 1 / (2 * A * A * (A * A - B * B)), NB = 1 / (2 * B * B * (B * B - A * A));
    static constexpr float weights[6][3] = {
        {1, 0, 0},
        {float(NA), float(A *NA), float(A *A *NA)},
        {float(NA), float(-A * NA), float(A *A *NA)},
        {float(NB), float(B *NB), float(B *B *NB)},
        {float(NB), float(-B * NB), float(B *B *NB)},
        {0, 0, 1},
    };
    SN_INLINE void input(const Floats d[6], Floats v[6]) {  // Bᵀ
        Floats even_a = d[4] - B2 * d[2], odd_a = d[3] - B2 * d[1];
        Floats even_b = d[4] - A2 * d[2], odd_b = d[3] - A2 * d[1];
        v[0] = d[0] + d[4] - SUM * d[2];
        v[1] = even_a + A1 * odd_a;
        v[2] = even_a - A1 * odd_a;
        v[3] = even_b + B1 * odd_b;
        v[4] = even_b - B1 * odd_b;
        v[5] = d[1] + d[5] - SUM * d[3];
    }
    SN_INLINE void input_adjoint(const Floats v[6], Floats d[6]) {  // B
        Floats plus_a = v[1] + v[2], minus_a = v[1] - v[2], plus_b = v[3] + v[4], minus_b = v[3] - v[4];
        d[0] = v[0];
        d[1] = v[5] - B1 * minus_a - A1 * minus_b;  // A·B² = B and B·A² = A
        d[2] = -SUM * v[0] - B2 * plus_a - A2 * plus_b;
        d[3] = A1 * minus_a + B1 * minus_b - SUM * v[5];
        d[4] = v[0] + plus_a + plus_b;
        d[5] = v[5];
    }
    SN_INLINE void output(const Floats m[6], Floats y[4]) {  // Aᵀ
        Floats plus_a = m[1] + m[2], minus_a = m[1] - m[2], plus_b = m[3] + m[4], minus_b = m[3] - m[4];
        y[0] = m[0] + plus_a + plus_b;
        y[1] = A1 * minus_a + B1 * minus_b;
        y[2] = A2 * plus_a + B2 * plus_b;
        y[3] = m[5] + A3 * minus_a + B3 * minus_b;
    }
    SN_INLINE void output_adjoint(const Floats y[4], Floats m[6]) {  // A
        Floats even_a = y[0] + A2 * y[2], odd_a = A1 * y[1] + A3 * y[3];
        Floats even_b = y[0] + B2 * y[2], odd_b = B1 * y[1] + B3 * y[3];
        m[0] = y[0];
        m[1] = even_a + odd_a;
        m[2] = even_a - odd_a;
        m[3] = even_b + odd_b;
        m[4] = even_b - odd_b;
        m[5] = y[3];
    }
};
constexpr float Winograd<4>::weights[6][3];

template <>
struct Winograd<2> {  // at 0, ±1 and ∞
    static constexpr float weights[4][3] = {{1, 0, 0}, {0.5f, 0.5f, 0.5f}, {0.5f, -0.5f, 0.5f}, {0, 0, 1}};
    SN_INLINE void input(const Floats d[4], Floats v[4]) {
        v[0] = d[0] - d[2];
        v[1] = d[2] + d[1];
        v[2] = d[2] - d[1];
        v[3] = d[3] - d[1];
    }
    SN_INLINE void input_adjoint(const Floats v[4], Floats d[4]) {
        d[0] = v[0];
        d[1] = v[1] - v[2] - v[3];
        d[2] = v[1] + v[2] - v[0];
        d[3] = v[3];
    }
    SN_INLINE void output(const Floats m[4], Floats y[2]) {
        y[0] = m[0] + m[1] + m[2];
        y[1] = m[1] - m[2] + m[3];
    }
    SN_INLINE void output_adjoint(const Floats y[2], Floats m[4]) {
        m[0] = y[0];
        m[1] = y[0] + y[1];
        m[2] = y[0] - y[1];
        m[3] = y[1];
    }
};
constexpr float Winograd<2>::weights[4][3];

}  // namespace SN_ISA
