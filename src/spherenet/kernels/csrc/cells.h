// What a recurrent cell does after its two products: gates, the next state, and their gradients.
//
// LSTM: i, f, n, o = σ, σ, tanh, σ of (from_input + from_state); c' = f·c + i·n; h' = o·tanh c'.
//       `before` is c, `after` c', `output` h'.
// GRU:  r, z = σ of (from_input + from_state); n = tanh(from_input_n + r·from_state_n); h' = (1−z)·n + z·h.
//       `before` is h, `output` h', `after` is not used.
// from_input, from_state and gates have shape [rows, gates·hidden], all others [rows, hidden].
#pragma once

#include "api.h"
#include "functions.h"

namespace SN_ISA {

template <class V>
SN_INLINE V signed_tanh(V x) {
    return with_sign(hyperbolic_tangent(absolute(x)), x);
}

template <class V>
SN_INLINE V logistic(V x) {
    return (1 + signed_tanh(x / 2)) / 2;
}

template <class T>
struct CellForward {
    const T *from_input, *from_state, *before;
    T *gates, *after, *output;
};

template <class T>
SN_INLINE void lstm_row(const CellForward<T> &p, int64_t row, int64_t hidden) {
    const T *a = p.from_input + row * 4 * hidden, *b = p.from_state + row * 4 * hidden, *c = p.before + row * hidden;
    T *gates = p.gates + row * 4 * hidden, *after = p.after + row * hidden, *output = p.output + row * hidden;
    for_each_vector<T>(hidden, [&](int64_t j, int n) SN_FORCE_INLINE {
        Vec<T> i = logistic(load<T>(a + j, n) + load<T>(b + j, n));
        Vec<T> f = logistic(load<T>(a + hidden + j, n) + load<T>(b + hidden + j, n));
        Vec<T> g = signed_tanh(load<T>(a + 2 * hidden + j, n) + load<T>(b + 2 * hidden + j, n));
        Vec<T> o = logistic(load<T>(a + 3 * hidden + j, n) + load<T>(b + 3 * hidden + j, n));
        Vec<T> next = f * load<T>(c + j, n) + i * g;
        store<T>(gates + j, i, n);
        store<T>(gates + hidden + j, f, n);
        store<T>(gates + 2 * hidden + j, g, n);
        store<T>(gates + 3 * hidden + j, o, n);
        store<T>(after + j, next, n);
        store<T>(output + j, o * signed_tanh(next), n);
    });
}

template <class T>
SN_INLINE void gru_row(const CellForward<T> &p, int64_t row, int64_t hidden) {
    const T *a = p.from_input + row * 3 * hidden, *b = p.from_state + row * 3 * hidden, *h = p.before + row * hidden;
    T *gates = p.gates + row * 3 * hidden, *output = p.output + row * hidden;
    for_each_vector<T>(hidden, [&](int64_t j, int n) SN_FORCE_INLINE {
        Vec<T> r = logistic(load<T>(a + j, n) + load<T>(b + j, n));
        Vec<T> z = logistic(load<T>(a + hidden + j, n) + load<T>(b + hidden + j, n));
        Vec<T> g = signed_tanh(load<T>(a + 2 * hidden + j, n) + r * load<T>(b + 2 * hidden + j, n));
        store<T>(gates + j, r, n);
        store<T>(gates + hidden + j, z, n);
        store<T>(gates + 2 * hidden + j, g, n);
        store<T>(output + j, (1 - z) * g + z * load<T>(h + j, n), n);
    });
}

template <class T>
struct CellBackward {
    const T *gates, *from_state, *before, *after, *grad_output, *grad_after;
    T *grad_gates, *grad_from_state, *grad_before;
};

template <class T>
SN_INLINE void lstm_row_backward(const CellBackward<T> &p, int64_t row, int64_t hidden) {
    const T *gates = p.gates + row * 4 * hidden, *c = p.before + row * hidden, *next = p.after + row * hidden;
    const T *dh = p.grad_output + row * hidden, *dnext = p.grad_after + row * hidden;
    T *to = p.grad_gates + row * 4 * hidden, *dc = p.grad_before + row * hidden;
    for_each_vector<T>(hidden, [&](int64_t j, int n) SN_FORCE_INLINE {
        Vec<T> i = load<T>(gates + j, n), f = load<T>(gates + hidden + j, n);
        Vec<T> g = load<T>(gates + 2 * hidden + j, n), o = load<T>(gates + 3 * hidden + j, n);
        Vec<T> t = signed_tanh(load<T>(next + j, n)), grad = load<T>(dh + j, n);
        Vec<T> state = load<T>(dnext + j, n) + grad * o * (1 - t * t);
        store<T>(to + j, state * g * i * (1 - i), n);
        store<T>(to + hidden + j, state * load<T>(c + j, n) * f * (1 - f), n);
        store<T>(to + 2 * hidden + j, state * i * (1 - g * g), n);
        store<T>(to + 3 * hidden + j, grad * t * o * (1 - o), n);
        store<T>(dc + j, state * f, n);
    });
}

template <class T>
SN_INLINE void gru_row_backward(const CellBackward<T> &p, int64_t row, int64_t hidden) {
    const T *gates = p.gates + row * 3 * hidden, *b = p.from_state + row * 3 * hidden, *h = p.before + row * hidden;
    const T *dh = p.grad_output + row * hidden;
    T *to_input = p.grad_gates + row * 3 * hidden, *to_state = p.grad_from_state + row * 3 * hidden;
    T *before = p.grad_before + row * hidden;
    for_each_vector<T>(hidden, [&](int64_t j, int n) SN_FORCE_INLINE {
        Vec<T> r = load<T>(gates + j, n), z = load<T>(gates + hidden + j, n), g = load<T>(gates + 2 * hidden + j, n);
        Vec<T> grad = load<T>(dh + j, n);
        Vec<T> dn = grad * (1 - z) * (1 - g * g);
        Vec<T> dr = dn * load<T>(b + 2 * hidden + j, n) * r * (1 - r);
        Vec<T> dz = grad * (load<T>(h + j, n) - g) * z * (1 - z);
        store<T>(to_input + j, dr, n);
        store<T>(to_input + hidden + j, dz, n);
        store<T>(to_input + 2 * hidden + j, dn, n);
        store<T>(to_state + j, dr, n);
        store<T>(to_state + hidden + j, dz, n);
        store<T>(to_state + 2 * hidden + j, dn * r, n);
        store<T>(before + j, grad * z, n);
    });
}

template <class Row, class P>
void for_rows(const Cell &cell, const P &pointers, int threads, Row row) {
#pragma omp parallel for num_threads(threads) schedule(static) if (threads > 1)
    for (int64_t r = 0; r < cell.rows; ++r) row(pointers, r, cell.hidden);
}

template <class T>
void run_cell_forward(const Cell &cell, const CellForward<T> &p, int threads) {
    if (cell.gates == 4)
        for_rows(cell, p, threads, [](auto &q, int64_t r, int64_t hidden) { lstm_row<T>(q, r, hidden); });
    else
        for_rows(cell, p, threads, [](auto &q, int64_t r, int64_t hidden) { gru_row<T>(q, r, hidden); });
}

template <class T>
void run_cell_backward(const Cell &cell, const CellBackward<T> &p, int threads) {
    if (cell.gates == 4)
        for_rows(cell, p, threads, [](auto &q, int64_t r, int64_t hidden) { lstm_row_backward<T>(q, r, hidden); });
    else
        for_rows(cell, p, threads, [](auto &q, int64_t r, int64_t hidden) { gru_row_backward<T>(q, r, hidden); });
}

}  // namespace SN_ISA
