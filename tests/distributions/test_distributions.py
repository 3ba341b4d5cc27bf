"""Distributions on hyperspheres: densities, samples, gradients, divergences and their edges."""

import math

import mpmath
import pytest
import torch
import torch.nn.functional as F
from torch.distributions import kl_divergence

import spherenet as sn
from spherenet.distributions import HypersphericalUniform, PowerSpherical, VonMisesFisher
from spherenet.distributions.von_mises_fisher import _angle_slope

AROUND = [VonMisesFisher, PowerSpherical]


def directions(*shape, seed=0, dtype=torch.float64):
    return F.normalize(torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=dtype), dim=-1)


def log_weight(cls, kappa, cosine):
    """Return the log of the density up to a constant, in mpmath."""
    if cls is VonMisesFisher or kappa == 0:
        return kappa * cosine
    return kappa * mpmath.log(max((1 + cosine) / 2, mpmath.mpf("1e-300")))  # an end of the integrals is opposite


def integral(function, cls, kappa, dimension):
    """Return the integral over the sphere of a function of the cosine times the unnormalized density."""
    surface = 2 * mpmath.pi ** (mpmath.mpf(dimension - 1) / 2) / mpmath.gamma(mpmath.mpf(dimension - 1) / 2)

    def integrand(angle):
        cosine = mpmath.cos(angle)
        return function(cosine) * mpmath.exp(log_weight(cls, kappa, cosine)) * mpmath.sin(angle) ** (dimension - 2)

    return surface * mpmath.quad(integrand, [0, 0.2, 0.5, 1, 2, mpmath.pi])


@pytest.mark.parametrize("cls", AROUND)
@pytest.mark.parametrize("dimension", [2, 3, 10])
@pytest.mark.parametrize("kappa", [0.0, 0.7, 30.0])
def test_density_moments_and_entropy_equal_integrals(cls, dimension, kappa):
    direction, value = directions(2, dimension)
    distribution = cls(direction, torch.tensor(kappa, dtype=torch.float64))
    total = integral(lambda c: 1, cls, kappa, dimension)
    cosine = float(direction @ value)
    expected = float(log_weight(cls, kappa, mpmath.mpf(cosine)) - mpmath.log(total))
    assert float(distribution.log_prob(value)) == pytest.approx(expected, rel=1e-11)
    mean = integral(lambda c: c, cls, kappa, dimension) / total
    assert float(distribution.mean_resultant_length) == pytest.approx(float(mean), abs=1e-11)
    square = integral(lambda c: c * c, cls, kappa, dimension) / total
    along, across = float(square - mean**2), float((1 - square) / (dimension - 1))
    torch.testing.assert_close(distribution.variance, across + (along - across) * direction**2)
    energy = integral(lambda c: log_weight(cls, kappa, c), cls, kappa, dimension) / total
    entropy = float(mpmath.log(total) - energy)
    assert float(distribution.entropy()) == pytest.approx(entropy, rel=1e-10)
    uniform = HypersphericalUniform(dimension, dtype=torch.float64)
    divergence = float(kl_divergence(distribution, uniform))
    assert divergence == pytest.approx(float(uniform.entropy()) - entropy, abs=1e-10)


@pytest.mark.parametrize(("dtype", "bound"), [(torch.float64, 1e-12), (torch.float32, 1e-6)])
@pytest.mark.parametrize("dimension", [2, 3, 64, 4096])
@pytest.mark.parametrize("kappa", [1e-6, 1.0, 1e3, 1e6])
def test_power_spherical_normalizer_equals_mpmath(dimension, kappa, dtype, bound):
    direction = torch.zeros(dimension, dtype=dtype)
    direction[0] = 1
    concentration = torch.tensor(kappa, dtype=dtype)
    result = float(PowerSpherical(direction, concentration).log_prob(direction))
    with mpmath.workdps(40):
        beta = mpmath.mpf(dimension - 1) / 2
        alpha = beta + mpmath.mpf(concentration.item())
        expected = mpmath.loggamma(alpha + beta) - mpmath.loggamma(alpha)
        expected -= 2 * beta * mpmath.log(2) + beta * mpmath.log(mpmath.pi)
        # In 2 dimensions the density is near 1 / 2π, not near 1: no relative bound is lost to a zero of the logarithm.
        assert abs(result - expected) < bound * max(1, abs(expected))


@pytest.mark.parametrize("cls", AROUND)
@pytest.mark.parametrize("dimension", [2, 3, 16, 512])
@pytest.mark.parametrize("kappa", [0.0, 1.0, 50.0, 1e6])
def test_samples_have_norm_one_and_the_mean_resultant_length(cls, dimension, kappa):
    torch.manual_seed(dimension)
    direction = directions(dimension)
    distribution = cls(direction, torch.tensor(kappa, dtype=torch.float64))
    count = 4000
    samples = distribution.sample((count,))
    assert samples.shape == (count, dimension)
    torch.testing.assert_close(samples.norm(dim=1), torch.ones(count, dtype=torch.float64))
    cosines = samples @ direction
    along = distribution._variances()[0]
    standard_error = float((along / count).sqrt())
    assert abs(float(cosines.mean() - distribution.mean_resultant_length)) < 4.5 * standard_error + 1e-15
    assert float(cosines.var(correction=0)) == pytest.approx(float(along), rel=0.25)
    across = samples - cosines.unsqueeze(1) * direction
    assert float(across.mean(0).norm()) < 4.5 * math.sqrt(float(1 - cosines.square().mean()) / count) + 1e-12


@pytest.mark.parametrize("cls", AROUND)
def test_concentration_zero_is_uniform(cls):
    value = directions(5, 8)
    distribution = cls(directions(8), 0.0)
    uniform = HypersphericalUniform(8, dtype=torch.float64)
    torch.testing.assert_close(distribution.log_prob(value), uniform.log_prob(value))
    torch.testing.assert_close(distribution.entropy(), uniform.entropy())
    assert float(kl_divergence(distribution, uniform)) == pytest.approx(0, abs=1e-12)
    assert bool((distribution.mean == 0).all())
    torch.testing.assert_close(distribution.variance, uniform.variance)


@pytest.mark.parametrize("cls", AROUND)
@pytest.mark.parametrize("dimension", [2, 3, 40, 100])
def test_gradients_of_densities_and_entropies(cls, dimension):
    direction, value = directions(2, 3, dimension)
    kappa = torch.tensor([0.5, 4.0, 30.0], dtype=torch.float64)
    inputs = [tensor.requires_grad_() for tensor in (direction, kappa, value)]

    def log_prob(direction, kappa, value):
        return cls(direction, kappa, validate_args=False).log_prob(value)

    def summaries(kappa):
        distribution = cls(direction.detach(), kappa, validate_args=False)
        return distribution.entropy(), distribution.mean_resultant_length, distribution.variance

    assert torch.autograd.gradcheck(log_prob, inputs)
    assert torch.autograd.gradcheck(summaries, kappa)
    assert torch.autograd.gradgradcheck(log_prob, inputs)


@pytest.mark.parametrize(("dimension", "kappa"), [(2, 0.5), (2, 40.0), (3, 3.0), (10, 0.0), (10, 25.0), (200, 900.0)])
def test_gradient_of_a_von_mises_fisher_angle_is_that_of_its_quantile(dimension, kappa):
    torch.manual_seed(0)
    kappas = torch.full((6,), kappa, dtype=torch.float64)
    e1 = torch.eye(dimension, dtype=torch.float64)[0]
    angles = VonMisesFisher(e1, kappas)._angles(kappas.shape)
    slopes = _angle_slope(kappas, angles, dimension)

    center, width = float(angles.mean()), 1 / math.sqrt(dimension + kappa)
    cuts = sorted({0, *(min(math.pi, max(0, center + i * width)) for i in range(-12, 13)), math.pi})

    def density(angle):
        power = (mpmath.sin(angle) / math.sin(center)) ** (dimension - 2)
        return mpmath.exp(kappa * (mpmath.cos(angle) - math.cos(center))) * power

    with mpmath.workdps(30):
        mean = mpmath.quad(lambda a: mpmath.cos(a) * density(a), cuts) / mpmath.quad(density, cuts)
        for angle, slope in zip(angles.tolist(), slopes.tolist(), strict=True):
            below = [cut for cut in cuts if cut < angle] + [angle]
            partial = mpmath.quad(lambda a: (mpmath.cos(a) - mean) * density(a), below)
            assert slope == pytest.approx(float(-partial / density(mpmath.mpf(angle))), rel=1e-10)


@pytest.mark.parametrize("cls", AROUND)
@pytest.mark.parametrize("dimension", [2, 3, 20])
def test_gradients_of_samples_are_unbiased(cls, dimension):
    """The mean gradient of v·x over samples is the gradient of v·E x."""
    torch.manual_seed(1)
    vector = directions(dimension, seed=5)
    raw = directions(dimension, seed=6).requires_grad_()
    kappa = torch.tensor(5.0, dtype=torch.float64, requires_grad=True)
    count = 20000

    def expected():
        return cls(F.normalize(raw, dim=0), kappa).mean @ vector

    truth = torch.autograd.grad(expected(), [raw, kappa])
    values = cls(F.normalize(raw, dim=0), kappa).rsample((count,)) @ vector
    estimate = torch.autograd.grad(values.mean(), [raw, kappa])
    torch.testing.assert_close(estimate[0], truth[0], atol=0.03, rtol=0)
    torch.testing.assert_close(estimate[1], truth[1], atol=0.004, rtol=0)


@pytest.mark.parametrize("dimension", [2, 3, 64, 4096])
@pytest.mark.parametrize("kappa", [0.0, 1e-4, 1e2, 1e6])
@pytest.mark.parametrize("cls", AROUND)
def test_float32_values_and_gradients_are_finite_on_the_whole_range(cls, dimension, kappa):
    torch.manual_seed(2)
    direction = directions(2, dimension, dtype=torch.float32).requires_grad_()
    concentration = torch.full((2,), kappa, requires_grad=True)
    distribution = cls(direction, concentration)
    samples = distribution.rsample((3,))
    assert samples.dtype == torch.float32
    outputs = [samples.sum(), distribution.log_prob(samples.detach()).sum(), distribution.entropy().sum()]
    for output in outputs:
        gradients = torch.autograd.grad(output, [direction, concentration], retain_graph=True, allow_unused=True)
        assert bool(output.isfinite())
        assert all(bool(gradient.isfinite().all()) for gradient in gradients if gradient is not None)


def test_samples_along_an_axis_have_gradients():
    """Reflections that carry the first axis to μ have none at μ = the axis itself."""
    axis = torch.eye(4, dtype=torch.float64)[0].requires_grad_()
    (gradient,) = torch.autograd.grad(VonMisesFisher(axis, 3.0).rsample((10,)).sum(), axis)
    assert bool(gradient.isfinite().all())


def test_divergences_equal_means_over_samples():
    torch.manual_seed(3)
    first, second = directions(2, 6)
    q = VonMisesFisher(second, 4.0)
    for p in (VonMisesFisher(first, 9.0), PowerSpherical(first, 9.0)):
        samples = p.sample((40000,))
        differences = p.log_prob(samples) - q.log_prob(samples)
        standard_error = float(differences.std()) / math.sqrt(len(samples))
        assert float(kl_divergence(p, q)) == pytest.approx(float(differences.mean()), abs=4.5 * standard_error)
    assert float(kl_divergence(q, q)) == pytest.approx(0, abs=1e-12)
    uniform = HypersphericalUniform(6, dtype=torch.float64)
    assert float(kl_divergence(uniform, uniform)) == 0
    samples = uniform.sample((40000,))
    for q in (VonMisesFisher(first, 3.0), PowerSpherical(first, 3.0)):
        differences = uniform.log_prob(samples) - q.log_prob(samples)
        standard_error = float(differences.std()) / math.sqrt(len(samples))
        assert float(kl_divergence(uniform, q)) == pytest.approx(float(differences.mean()), abs=4.5 * standard_error)
    with pytest.raises(NotImplementedError):
        kl_divergence(q, PowerSpherical(second, 4.0))


@pytest.mark.parametrize(("dtype", "bound"), [(torch.float64, 1e-11), (torch.float32, 1e-6)])
@pytest.mark.parametrize("dimension", [2, 3, 64, 4096])
@pytest.mark.parametrize("kappa", [0.0, 1e-6, 1.0, 1e3, 1e6])
def test_divergences_equal_mpmath_on_the_whole_range(dimension, kappa, dtype, bound):
    direction = torch.zeros(dimension, dtype=dtype)
    direction[0] = 1
    kappas = torch.tensor(kappa, dtype=dtype)
    uniform = HypersphericalUniform(dimension, dtype=dtype)
    fisher, power = VonMisesFisher(direction, kappas), PowerSpherical(direction, kappas)
    opposite = VonMisesFisher(-direction, 300.0)
    with mpmath.workdps(60):
        d, half, k = mpmath.mpf(dimension), mpmath.mpf(dimension - 1) / 2, mpmath.mpf(kappas.item())

        def log_mean(order, k):
            """Return log E exp(κ μ·x) for d = 2·order + 2."""
            if k < 300:
                return mpmath.log(mpmath.hyp0f1(order + 1, k * k / 4))
            return mpmath.loggamma(order + 1) + order * mpmath.log(2 / k) + mpmath.log(mpmath.besseli(order, k))

        log_m, length = log_mean(d / 2 - 1, k), k / d * mpmath.exp(log_mean(d / 2, k) - log_mean(d / 2 - 1, k))
        beta = mpmath.loggamma(2 * half) - mpmath.loggamma(half)
        mode = mpmath.loggamma(2 * half + k) - mpmath.loggamma(half + k) - beta
        divergence = mode - k * (mpmath.digamma(2 * half + k) - mpmath.digamma(half + k))
        log_opposite = log_mean(d / 2 - 1, mpmath.mpf(300))
        expected = {
            (fisher, uniform): k * length - log_m,
            (uniform, fisher): log_m,
            (power, uniform): divergence,
            (uniform, power): k * (mpmath.digamma(2 * half) - mpmath.digamma(half)) - mode,
            (fisher, opposite): k * length - log_m + 300 * length + log_opposite,
            (power, opposite): divergence + 300 * k / (k + 2 * half) + log_opposite,
        }
        for (p, q), value in expected.items():
            assert abs(float(kl_divergence(p, q)) - value) < bound * max(1, abs(value)), (p, q)


@pytest.mark.parametrize("cls", AROUND)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_variance_along_the_mean_direction_is_exact(cls, dtype):
    """It is 1e-6 of the variances across, in which a difference would lose it."""
    distribution = cls(torch.eye(3, dtype=dtype)[0], torch.tensor(1e6, dtype=dtype))
    along, across = distribution._variances()
    torch.testing.assert_close(distribution.variance[0], along.to(dtype), rtol=1e-6, atol=0)
    torch.testing.assert_close(distribution.variance[1:], across.to(dtype).expand(2), rtol=1e-6, atol=0)
    longer = cls(1.000009 * torch.eye(3, dtype=dtype)[0], 1e6)  # the norm may have this error
    assert (longer.variance > 0).all()


def test_divergences_of_other_dimensions_are_refused():
    with pytest.raises(ValueError, match=r"^q must have 3 dimensions as p, got 4\.$"):
        kl_divergence(VonMisesFisher(directions(3), 1.0), HypersphericalUniform(4))


@pytest.mark.parametrize("cls", AROUND)
def test_shapes_and_expand(cls):
    distribution = cls(directions(5, 1, 3), torch.ones(4, dtype=torch.float64))
    assert (distribution.batch_shape, distribution.event_shape) == ((5, 4), (3,))
    assert distribution.sample((2,)).shape == (2, 5, 4, 3)
    assert distribution.mean.shape == distribution.mode.shape == distribution.variance.shape == (5, 4, 3)
    assert distribution.log_prob(directions(7, 5, 4, 3)).shape == (7, 5, 4)
    assert distribution.log_prob(directions(3)).shape == distribution.entropy().shape == (5, 4)
    larger = distribution.expand((6, 5, 4))
    assert type(larger) is cls
    assert larger.sample().shape == (6, 5, 4, 3)
    torch.testing.assert_close(larger.entropy()[2], distribution.entropy())
    uniform = HypersphericalUniform(3, (4,), dtype=torch.float64)
    assert kl_divergence(distribution, uniform).shape == (5, 4)
    assert uniform.expand((2, 4)).rsample((3,)).shape == (3, 2, 4, 3)
    assert uniform.log_prob(directions(6, 4, 3)).shape == (6, 4)
    assert distribution.sample((0,)).shape == (0, 5, 4, 3)


def test_dtypes():
    assert VonMisesFisher(directions(3, dtype=torch.float32), 1).sample().dtype == torch.float32
    mixed = VonMisesFisher(directions(3, dtype=torch.float32), torch.ones((), dtype=torch.float64))
    assert mixed.sample().dtype == mixed.entropy().dtype == torch.float64
    half = VonMisesFisher(directions(3).to(torch.bfloat16), 1.0)
    assert half.sample().dtype == half.log_prob(half.sample()).dtype == torch.bfloat16
    assert HypersphericalUniform(3).sample().dtype == torch.get_default_dtype()


@pytest.mark.parametrize("cls", AROUND)
@pytest.mark.parametrize("kappa", [-1.0, math.inf, math.nan])
def test_wrong_concentrations_are_refused(cls, kappa):
    with pytest.raises(ValueError, match=rf"^concentration must be finite and not negative, got {kappa:g}\.$"):
        cls(directions(3), kappa)


@pytest.mark.parametrize("cls", AROUND)
def test_wrong_directions_are_refused(cls):
    with pytest.raises(ValueError, match=r"^mean_direction must be unit vectors, got norm 1\.73205\.$"):
        cls(torch.ones(3), 1.0)
    with pytest.raises(ValueError, match=r"^mean_direction must be unit vectors, got norm nan\."):
        cls(torch.full((3,), math.nan), 1.0)
    with pytest.raises(ValueError, match=r"^mean_direction must have at least 2 entries .* got shape \[1\]\.$"):
        cls(torch.ones(1), 1.0)
    with pytest.raises(ValueError, match=r"^mean_direction must have at least 2 entries .* got shape \[\]\.$"):
        cls(torch.tensor(1.0), 1.0)
    with pytest.raises(TypeError, match=r"^mean_direction must be a tensor of floating point .* got torch\.int64\.$"):
        cls(torch.tensor([1, 0]), 1.0)
    with pytest.raises(TypeError, match=r"^mean_direction must be a tensor of floating point .* got list\.$"):
        cls([1.0, 0.0], 1.0)
    with pytest.raises(TypeError, match=r"^concentration must be a number or a tensor, got 'high'\.$"):
        cls(directions(3), "high")
    with pytest.raises(TypeError, match=r"^concentration must be real, got torch\.complex64\.$"):
        cls(directions(3), torch.tensor(1j))
    with pytest.raises(ValueError, match=r"^concentration must have a shape that broadcasts with \[2\], got \[3\]\.$"):
        cls(directions(2, 4), torch.ones(3))


@pytest.mark.parametrize("distribution", [*(cls(directions(3), 2.0) for cls in AROUND), HypersphericalUniform(3)])
def test_values_off_the_sphere_are_refused(distribution):
    with pytest.raises(ValueError, match=r"^value must be unit vectors, got norm 1\.73205\.$"):
        distribution.log_prob(torch.ones(3))
    with pytest.raises(ValueError, match=r"^value must have a shape that broadcasts with \[3\], got \[4\]\.$"):
        distribution.log_prob(directions(4))
    with pytest.raises(TypeError, match=r"^value must be a tensor, got float\.$"):
        distribution.log_prob(1.0)


@pytest.mark.parametrize("cls", AROUND)
def test_values_are_checked_after_torch_switches_its_default_off(cls):
    before = torch.distributions.Distribution._validate_args
    torch.distributions.Distribution.set_default_validate_args(False)  # as torch.compile does
    try:
        with pytest.raises(ValueError, match=r"^concentration must be "):
            cls(directions(3), -1.0)
        with pytest.raises(ValueError, match=r"^value must be unit vectors"):
            HypersphericalUniform(3).log_prob(torch.ones(3))
        assert cls(directions(3), -1.0, validate_args=False).concentration == -1
    finally:
        torch.distributions.Distribution.set_default_validate_args(before)


@pytest.mark.parametrize("cls", AROUND)
@pytest.mark.filterwarnings("error:Dynamo detected")
def test_densities_compile_without_a_graph_break_or_a_warning(cls):
    def density(mean, kappa, value):
        return cls(mean, kappa).log_prob(value)

    arguments = directions(4, 3), torch.arange(4.0, dtype=torch.float64), directions(4, 3, seed=1)
    compiled = torch.compile(density, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(*arguments), density(*arguments))


def test_wrong_dimensions_are_refused():
    with pytest.raises(ValueError, match=r"^dimension must be .*got 1\.$"):
        HypersphericalUniform(1)
    with pytest.raises(TypeError, match=r"^dimension must be "):
        HypersphericalUniform(3.0)


def test_power_spherical_opposite_to_its_mean():
    direction = directions(5)
    assert float(PowerSpherical(direction, 2.0).log_prob(-direction)) == -math.inf
    assert math.isfinite(float(PowerSpherical(direction, 0.0).log_prob(-direction)))


def test_large_concentrations_do_not_round_the_density():
    """In float32, μ·x is 1 for angles below 2e-4, where the density for κ = 1e6 falls by 2 %."""
    e1, angle = torch.eye(3)[0], 2e-4
    value = torch.tensor([math.cos(angle), math.sin(angle), 0])
    distribution = VonMisesFisher(e1, 1e6)
    fall = float(distribution.log_prob(e1).double() - distribution.log_prob(value).double())
    assert fall == pytest.approx(1e6 * (1 - math.cos(angle)), rel=1e-4)


def test_names_of_the_package():
    assert sn.VonMisesFisher is VonMisesFisher
    assert sn.PowerSpherical is PowerSpherical
    assert sn.HypersphericalUniform is HypersphericalUniform


@pytest.mark.parametrize("dimension", [2, 3, 5, 16, 512, 4096])
def test_divergences_of_power_spherical_near_the_uniform_distribution(dimension):
    """They are positive, and their relative error is that of float64 where their differences would cancel."""
    direction = torch.eye(dimension, dtype=torch.float64)[0]
    threshold = (dimension - 1) / 4
    kappas = [*(10.0**exponent for exponent in range(-15, 4)), threshold * (1 - 1e-9), threshold * (1 + 1e-9)]
    power = PowerSpherical(direction, torch.tensor(kappas, dtype=torch.float64))
    uniform = HypersphericalUniform(dimension, dtype=torch.float64)
    divergences = zip(kl_divergence(power, uniform).tolist(), kl_divergence(uniform, power).tolist(), strict=True)
    with mpmath.workdps(60):
        half = mpmath.mpf(dimension - 1) / 2
        for kappa, (to_uniform, from_uniform) in zip(map(mpmath.mpf, kappas), divergences, strict=True):
            mode = mpmath.loggamma(2 * half + kappa) - mpmath.loggamma(half + kappa)
            mode -= mpmath.loggamma(2 * half) - mpmath.loggamma(half)
            expected = mode - kappa * (mpmath.digamma(2 * half + kappa) - mpmath.digamma(half + kappa))
            assert abs(to_uniform - expected) <= 1e-12 * expected, kappa
            expected = kappa * (mpmath.digamma(2 * half) - mpmath.digamma(half)) - mode
            assert abs(from_uniform - expected) <= 1e-12 * expected, kappa


def test_divergences_are_never_negative():
    direction = torch.eye(64, dtype=torch.float64)[0]
    kappas = torch.cat([torch.zeros(1), torch.logspace(-15, 6, 200)]).double().requires_grad_()
    for first, second in ((VonMisesFisher, VonMisesFisher), (PowerSpherical, VonMisesFisher)):
        divergence = kl_divergence(first(direction, kappas), second(direction, kappas))
        assert divergence.min() >= 0
        (gradient,) = torch.autograd.grad(divergence.sum(), kappas)
        assert gradient.isfinite().all()
