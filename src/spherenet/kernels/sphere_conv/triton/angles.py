"""Formulas of g for the Triton kernels: the device code of `spherenet.angles`.

Each g has its value, its derivative dg/dc and its inverse, as functions of c = cos θ (docs/concepts.md, Eq. 1). They
use only functions that Triton has on every backend and in its interpreter: exp, log, sqrt, and sin and cos for float64.
In float32, asin and sin are polynomials, and tanh and its inverse switch to a series near 0, so that g keeps its
digits for large k. NaN propagates through every function. Constants are right operands, because the interpreter does
not unwrap them on the left.
"""

import math

import triton
import triton.language as tl

HALF_PI, QUARTER_PI = tl.constexpr(math.pi / 2), tl.constexpr(math.pi / 4)
LINEAR = tl.constexpr(2 / math.pi)

# Minimax fits of benchmarks/fit_approximations.py, lowest power first.
# asin(t) = t + t·z·Q(z), z = t² ≤ ¼
A0, A1, A2, A3, A4 = (
    tl.constexpr(c) for c in (0.1666675248, 0.07495297643, 0.0454703759, 0.02417951499, 0.04216630789)
)
# sin(h) = h + h·z·S(z), z = h² ≤ (π/2)²
S0, S1, S2, S3 = (tl.constexpr(c) for c in (-0.1666665955, 0.008333066246, -0.0001980960289, 2.605780622e-06))

# Taylor series, lowest power first: tanh v = v + v·z·T(z), atanh t = t + t·z·U(z), below `SERIES_BELOW`.
SERIES_BELOW = tl.constexpr(0.25)
T0, T1, T2, T3 = (tl.constexpr(c) for c in (-1 / 3, 2 / 15, -17 / 315, 62 / 2835))
U0, U1, U2, U3, U4 = (tl.constexpr(c) for c in (1 / 3, 1 / 5, 1 / 7, 1 / 9, 1 / 11))

# 4·sqrt(ε), the floor of sin θ in `elementary.sine`, and 1 − ε, where atanh ends.
FLOOR_32, FLOOR_64 = tl.constexpr(4 * 2.0**-11.5), tl.constexpr(4 * 2.0**-26)
BELOW_ONE_32, BELOW_ONE_64 = tl.constexpr(1 - 2.0**-23), tl.constexpr(1 - 2.0**-52)

KERNEL_IDS = ("cosine", "linear", "sigmoid", "square-cosine", "sharpened-cosine")
"""Angle functions with formulas here, by `AngleFunction.kernel_id`."""

# The smallest normal number, and the floor log(4·sqrt(ε)) of log|c| in the slope of the sharpened cosine for p < 1.
TINY_32, TINY_64 = tl.constexpr(2.0**-126), tl.constexpr(2.0**-1022)
LOG_ROOT_32, LOG_ROOT_64 = tl.constexpr(-9.5 * math.log(2)), tl.constexpr(-24 * math.log(2))


@triton.jit
def clamp_to_one(cosine):
    """Clamp to [−1, 1] and keep NaN, which minimum and maximum may drop."""
    return tl.where(cosine > 1, 1.0, tl.where(cosine < -1, -1.0, cosine))


@triton.jit
def with_sign(size, of):
    """Return `size`, negated where `of` is negative: every g is odd in c."""
    return tl.where(of < 0, -size, size)


@triton.jit
def floored(sin_theta):
    """Keep sin θ above its floor."""
    floor: tl.constexpr = FLOOR_64 if sin_theta.dtype == tl.float64 else FLOOR_32
    return tl.where(sin_theta < floor, floor, sin_theta)


@triton.jit
def sine(cosine):
    """Compute sin θ from c, floored."""
    square = (1 - cosine) * (1 + cosine)
    return floored(tl.sqrt(tl.where(square < 0, 0.0, square)))


@triton.jit
def asin(size):
    """Compute asin on [0, 1]; above ½ as π/2 − 2·asin(sqrt((1 − x)/2)), which has no cancellation."""
    outer = size > 0.5
    z = tl.where(outer, (1 - size) * 0.5, size * size)
    t = tl.where(outer, tl.sqrt(z), size)
    inner = t + t * z * ((((z * A4 + A3) * z + A2) * z + A1) * z + A0)
    if size.dtype == tl.float64:
        # One Newton step squares the polynomial's error of 3e-7, a second one leaves rounding only.
        inner += (t - tl.sin(inner)) / tl.cos(inner)
        inner += (t - tl.sin(inner)) / tl.cos(inner)
    return tl.where(outer, -2 * inner + HALF_PI, inner)


@triton.jit
def sin(angle):
    """Compute sin on [0, π/2]."""
    if angle.dtype == tl.float64:
        result = tl.sin(angle)
    else:
        z = angle * angle
        result = angle + angle * z * (((z * S3 + S2) * z + S1) * z + S0)
    return result


@triton.jit
def tanh(size):
    """Compute tanh for arguments ≥ 0; e^{−2v} underflows to 0, which gives 1."""
    decay = tl.exp(-2 * size)
    result = (1 - decay) / (1 + decay)
    if size.dtype != tl.float64:
        z = size * size
        series = size + size * z * (((z * T3 + T2) * z + T1) * z + T0)
        result = tl.where(size < SERIES_BELOW, series, result)
    return result


@triton.jit
def atanh(size):
    """Compute atanh on [0, 1)."""
    result = 0.5 * tl.log((1 + size) / (1 - size))
    if size.dtype != tl.float64:
        z = size * size
        series = size + size * z * ((((z * U4 + U3) * z + U2) * z + U1) * z + U0)
        result = tl.where(size < SERIES_BELOW, series, result)
    return result


@triton.jit
def log_size(cosine):
    """Compute log|c|, with |c| at least the smallest normal number."""
    size = tl.abs(cosine)
    tiny: tl.constexpr = TINY_64 if cosine.dtype == tl.float64 else TINY_32
    return tl.log(tl.where(size < tiny, tiny, size))


@triton.jit
def power(cosine, log_size, p):
    """Compute sign(c)·|c|^p from log|c|."""
    return with_sign(tl.where(cosine == 0, 0.0, tl.exp(log_size * p)), cosine)


@triton.jit
def power_slope(log_size, p):
    """Compute p·|c|^(p − 1) from log|c|, bounded at c = 0 for p < 1."""
    floor: tl.constexpr = LOG_ROOT_64 if log_size.dtype == tl.float64 else LOG_ROOT_32
    return p * tl.exp(tl.where((p < 1) & (log_size < floor), floor, log_size) * (p - 1))


@triton.jit
def parameters(k, ANGLE: tl.constexpr):
    """Return what `value` and `derivatives` need of k, per filter: p three times for a power."""
    return (k, k, k) if ANGLE == "sharpened-cosine" else steepness(k)


@triton.jit
def steepness(k):
    """Return 1/(2k), τ = tanh(π/(4k)) and D(π/(4k)), which ∂g/∂k contains, per filter."""
    quarter = 1 / k * QUARTER_PI
    return 0.5 / k, tanh(quarter), sinh_decline(quarter)


@triton.jit
def sinh_decline(size):
    """Compute D(v) = 1 − 2v/sinh 2v for v ≥ 0; below ½ with sinh y − y by its series, which keeps all digits."""
    z = size * size * 4
    excess = z / 272 + 1
    excess = excess * z / 210 + 1
    excess = excess * z / 156 + 1
    excess = excess * z / 110 + 1
    excess = excess * z / 72 + 1
    excess = excess * z / 42 + 1
    excess = (excess * z / 20 + 1) * z
    decay = tl.exp(-2 * size)
    below = tl.where(size < 0.5, 1.0, 1 - decay * decay)
    return tl.where(size < 0.5, excess / (excess + 6), 1 - 4 * size * decay / below)


@triton.jit
def value(cosine, half_inverse, tau, ANGLE: tl.constexpr):
    """Compute g from a clamped cosine; half_inverse and τ are used by the sigmoid only, and are p for a power."""
    if ANGLE == "cosine":
        result = cosine
    elif ANGLE == "square-cosine":
        result = cosine * tl.abs(cosine)
    elif ANGLE == "sharpened-cosine":
        result = power(cosine, log_size(cosine), half_inverse)
    elif ANGLE == "linear":
        result = with_sign(asin(tl.abs(cosine)) * LINEAR, cosine)
    else:
        size = tanh(asin(tl.abs(cosine)) * half_inverse) / tau
        result = with_sign(tl.where(size > 1, 1.0, size), cosine)
    return result


@triton.jit
def inverse(output, half_inverse, tau, ANGLE: tl.constexpr):
    """Recover c and sin θ from g; where tanh saturates, the largest c that the format can tell apart."""
    size = tl.abs(output)
    if ANGLE == "linear":
        latitude = size * HALF_PI
    else:
        limit: tl.constexpr = BELOW_ONE_64 if output.dtype == tl.float64 else BELOW_ONE_32
        t = size * tau
        latitude = atanh(tl.where(t > limit, limit, t)) / half_inverse
        latitude = tl.where(latitude > HALF_PI, HALF_PI, latitude)
    return with_sign(sin(latitude), output), floored(sin(-latitude + HALF_PI))


@triton.jit
def derivatives(saved, half_inverse, tau, decline, ANGLE: tl.constexpr, SAVED_IS_COSINE: tl.constexpr):
    """Return c, dg/dc and ∂g/∂k, if g has a parameter, from the cosine or from g itself; of powers, from the cosine.

    With v = asin|c|/(2k), u = π/(4k) and D of `sinh_decline`:  ∂g/∂k = g·(D(v) − D(u))/k.
    """
    by_k = 0.0
    if ANGLE == "cosine":
        cosine = saved
        slope = 1.0
    elif ANGLE == "square-cosine":
        cosine = saved
        slope = 2 * tl.abs(saved)
    elif ANGLE == "sharpened-cosine":
        cosine = saved
        logarithm = log_size(saved)
        slope = power_slope(logarithm, half_inverse)
        by_k = power(saved, logarithm, half_inverse) * logarithm
    else:
        if SAVED_IS_COSINE:
            cosine = saved
            sin_theta = sine(saved)
        else:
            cosine, sin_theta = inverse(saved, half_inverse, tau, ANGLE)
        if ANGLE == "linear":
            slope = 1 / sin_theta * LINEAR
        else:
            if SAVED_IS_COSINE:
                v = asin(tl.abs(saved)) * half_inverse
                t = tanh(v)
            else:
                limit: tl.constexpr = BELOW_ONE_64 if saved.dtype == tl.float64 else BELOW_ONE_32
                t = tl.abs(saved) * tau
                t = tl.where(t > limit, limit, t)
                v = atanh(t)
            flat = 1 - t * t
            slope = flat * half_inverse / (tau * sin_theta)
            by_k = with_sign(t * (sinh_decline(v) - decline) * (2 * half_inverse) / tau, saved)
    return cosine, slope, by_k
