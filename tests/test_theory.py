"""The constants, error and bounds of `mxnorm_pass.theory` against independent computations."""

import math
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import integrate, stats
from torch._subclasses.fake_tensor import FakeTensorMode

from mxnorm_pass import theory

# dist, B, c(p=1), c(p=2), v(p=1), v(p=2); the digits given are the ones that are known.
TABLE = [
    ("gaussian", 16, 0.4814162543, 0.4688342449, 0.23322, 0.23972),
    ("gaussian", 32, 0.4260614642, 0.4185051047, 0.19089, 0.19723),
    ("gaussian", 64, 0.3851915771, 0.3803107036, 0.16073, 0.16641),
    ("laplace", 32, 0.3484576165, 0.3325440115, 0.31305, 0.34648),
    ("student_t5", 32, 0.3561712808, 0.3309427927, 0.39784, 0.65565),
]
HALF_UNIT = 0.5000001  # of the last digit given; a little more, for the rounding of the literals

# Unit-RMS |x| by scipy: survival function, density, and a sampler of x.
SCIPY = {
    "gaussian": stats.norm(),
    "laplace": stats.laplace(scale=math.sqrt(0.5)),
    "student_t5": stats.t(5, scale=math.sqrt(0.6)),
}
BREAKS = (0.0, 0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 64.0, 1e3, 1e4, 1e6, 1e8)


def scipy_moment(p: float, block: int, dist: str) -> float:
    """E[m^p] from the density of the maximum, B F^(B-1) f: not the formula under test."""
    rv = SCIPY[dist]

    def integrand(t: float) -> float:
        return t**p * block * np.exp((block - 1) * np.log1p(-2.0 * rv.sf(t))) * 2.0 * rv.pdf(t)

    return sum(
        integrate.quad(integrand, lo, hi, epsabs=1e-13, epsrel=1e-12, limit=400)[0]
        for lo, hi in pairwise(BREAKS)
    )


def rows(dist: str, n: int, d: int, seed: int) -> np.ndarray:
    return SCIPY[dist].rvs(size=(n, d), random_state=np.random.default_rng(seed))


def ratio(x: np.ndarray, p: float, block: int, c: float) -> np.ndarray:
    """rms_hat / rms of each row, written out with numpy."""
    m = np.abs(x).reshape(x.shape[0], -1, block).max(-1)
    return c * (m**p).mean(-1) ** (1.0 / p) / np.sqrt((x * x).mean(-1))


# --- the constant ---------------------------------------------------------------------------------


@pytest.mark.parametrize(("dist", "block", "c1", "c2", "v1", "v2"), TABLE)
def test_table(dist, block, c1, c2, v1, v2):
    assert theory.correction(1, block, dist) == pytest.approx(c1, abs=HALF_UNIT * 1e-10)
    assert theory.correction(2, block, dist) == pytest.approx(c2, abs=HALF_UNIT * 1e-10)
    assert theory.log_sd(1, block, dist) == pytest.approx(v1, abs=HALF_UNIT * 1e-5)
    assert theory.log_sd(2, block, dist) == pytest.approx(v2, abs=HALF_UNIT * 1e-5)


@pytest.mark.parametrize("dist", theory.DISTRIBUTIONS)
@pytest.mark.parametrize("p", [1, 2, 3, 4])
def test_correction_against_scipy_quadrature(dist, p):
    rng = np.random.default_rng(100 * p + len(dist))
    for block in (1, 2, *(int(b) for b in rng.integers(3, 600, size=4))):
        want = scipy_moment(p, block, dist) ** (-1.0 / p)
        # scipy stops at t = 1e8, where a t5 tail still holds (p=4) 2e-8 of the moment.
        rel = 1e-7 if dist == "student_t5" and p == 4 else 1e-10
        assert theory.correction(p, block, dist) == pytest.approx(want, rel=rel), block


def test_closed_forms():
    # One element per block: c = E|x|^p ^ (-1/p).
    assert theory.correction(1, 1) == pytest.approx(math.sqrt(math.pi / 2), rel=1e-13)
    assert theory.correction(4, 1) == pytest.approx(3 ** (-1 / 4), rel=1e-13)
    assert theory.correction(4, 1, "student_t5") == pytest.approx(9 ** (-1 / 4), rel=1e-12)
    for dist in theory.DISTRIBUTIONS:
        assert theory.correction(2, 1, dist) == pytest.approx(1.0, rel=1e-13)
    # The mean of the maximum of B exponentials is a harmonic number, however large B is.
    for block in (1, 32, 100_000):
        harmonic = sum(1.0 / i for i in range(1, block + 1)) / math.sqrt(2)
        assert theory.correction(1, block, "laplace") == pytest.approx(1 / harmonic, rel=1e-12)
    # A maximum of two Gaussians: E max(|x|,|y|)^2 = 1 + 2/pi.
    assert theory.correction(2, 2) == pytest.approx((1 + 2 / math.pi) ** -0.5, rel=1e-13)


def test_extreme_arguments_stay_finite_and_ordered():
    cs = [theory.correction(2, 10**k) for k in range(0, 13)]
    assert cs == sorted(cs, reverse=True)
    # max of B Gaussians ~ sqrt(2 log B): at 1e12 the leading order is within 5%.
    assert cs[-1] == pytest.approx((2 * math.log(1e12)) ** -0.5, rel=0.05)
    # A power mean grows with p, so c falls; at p = 300, E[m^p] itself is beyond float64.
    cs = [theory.correction(p, 32) for p in (1, 1.5, 2, 4, 30, 300)]
    assert cs == sorted(cs, reverse=True)
    assert cs[-1] > 0.05


def test_near_the_last_moment_of_a_heavy_tail():
    # The moment of order 5 of t(5) does not exist; below it E|x|^q is a ratio of gammas.
    for q in (1.0, 4.0, 4.9, 4.99):
        moment = 3 ** (q / 2) * math.gamma((q + 1) / 2) * math.gamma((5 - q) / 2)
        moment /= math.sqrt(math.pi) * math.gamma(2.5)
        c = theory.correction(q, 1, "student_t5")
        assert c == pytest.approx(moment ** (-1 / q), rel=1e-12)


def test_inverse_correction_is_the_other_convention():
    assert theory.inverse_correction(2, 32) == pytest.approx(2.389, abs=5e-4)
    x = rows("gaussian", 1, 4096, seed=3)
    m = np.abs(x).reshape(-1, 32).max(-1)
    rms_hat = theory.correction(2, 32) * (m**2).mean() ** 0.5
    rho = theory.inverse_correction(2, 32) * (m**2).mean() ** -0.5
    assert rho == pytest.approx(1 / rms_hat, rel=1e-14)


def test_available_while_a_compiler_traces():
    theory.correction.cache_clear()
    theory._log_moment.cache_clear()
    torch.set_default_device("meta")
    try:
        with FakeTensorMode():
            c = theory.correction(2, 32)
    finally:
        torch.set_default_device(None)
    assert c == pytest.approx(0.4185051047, abs=1e-10)


def test_default_dtype_does_not_matter():
    theory.correction.cache_clear()
    theory._log_moment.cache_clear()
    torch.set_default_dtype(torch.float16)
    try:
        c = theory.correction(1, 16)
    finally:
        torch.set_default_dtype(torch.float32)
    assert c == pytest.approx(0.4814162543, abs=1e-10)


# --- the error ------------------------------------------------------------------------------------


@pytest.mark.parametrize(("d", "percent"), [(768, 3.11), (2048, 1.91), (4096, 1.35), (8192, 0.95)])
def test_error_sd_figures(d, percent):
    assert 100 * theory.error_sd(2, 32, d) == pytest.approx(percent, abs=HALF_UNIT * 1e-2)


def test_error_sd_is_zero_when_the_estimate_is_exact():
    # Blocks of one element and p = 2: the estimate is the RMS. Both formulas end in 0.5 - 0.5.
    for dist in theory.DISTRIBUTIONS:
        assert theory.error_sd(2, 1, 4096, dist) == pytest.approx(0.0, abs=1e-7)


@pytest.mark.parametrize("p", [1, 2, 3])
@pytest.mark.parametrize("block", [1, 16, 64])
def test_general_error_formula_gives_the_gaussian_one(p, block):
    # Independence of length and direction says E[m^p |x|^2] = (B + p) E[m^p]: checks the integral
    # that the formula for other distributions rests on.
    assert theory._moment_with_energy(float(p), block, "gaussian") == pytest.approx(
        block + p, rel=1e-12
    )


@pytest.mark.parametrize("dist", theory.DISTRIBUTIONS)
def test_kurtosis_against_scipy(dist):
    # One-element blocks and p = 1: R = c |x| averaged over x's RMS, whose error needs E[x^4] only.
    k = float(SCIPY[dist].stats(moments="k")) + 3.0
    mean_abs = scipy_moment(1, 1, dist)
    r = scipy_moment(3, 1, dist) / mean_abs - 1.0
    want = (1.0 / mean_abs**2 - 1.0 + (k - 1.0) / 4.0 - r) / 64
    assert theory.error_sd(1, 1, 64, dist) ** 2 == pytest.approx(want, rel=1e-6)


@pytest.mark.parametrize("dist", theory.DISTRIBUTIONS)
def test_moment_with_energy_against_scipy(dist):
    rv, block, p = SCIPY[dist], 24, 1.0
    knots = np.concatenate([np.linspace(0, 40, 40_001), np.geomspace(40.01, 1e7, 40_000)])
    f = 2.0 * rv.pdf(knots)
    cdf = 1.0 - 2.0 * rv.sf(knots)
    inside = integrate.cumulative_simpson(knots**2 * f, x=knots, initial=0.0)
    own = integrate.simpson(knots ** (p + 2) * block * cdf ** (block - 1) * f, x=knots)
    others = integrate.simpson(knots**p * inside * block * cdf ** (block - 2) * f, x=knots)
    want = (own + (block - 1) * others) / scipy_moment(p, block, dist)
    assert theory._moment_with_energy(p, block, dist) == pytest.approx(want, rel=1e-6)


@pytest.mark.parametrize(
    ("dist", "p"), [("gaussian", 1), ("gaussian", 2), ("laplace", 1), ("laplace", 2)]
)
def test_monte_carlo(dist, p):
    """Mean and spread of rms_hat and of rms_hat/rms on 4,000 rows of 64 blocks."""
    n, d, block = 4000, 2048, 32
    x = rows(dist, n, d, seed=7 * p + len(dist))
    r = ratio(x, p, block, theory.correction(p, block, dist))
    sd = theory.error_sd(p, block, d, dist)
    # The mean is known to 4 sd/sqrt(n), beside the O(sd^2) bias of a root of a mean over finitely
    # many blocks; an sd from n samples scatters by sd/sqrt(2n), 1.1%, and the delta method is off
    # by another order 1/K: 6%.
    assert np.log(r).mean() == pytest.approx(0.0, abs=4 * sd / math.sqrt(n) + 2 * sd**2)
    assert np.log(r).std() == pytest.approx(sd, rel=0.06)
    # rms_hat alone scatters more: by v / sqrt(K).
    alone = np.log(r * np.sqrt((x * x).mean(-1))).std()
    assert alone == pytest.approx(theory.log_sd(p, block, dist) / 8.0, rel=0.06)


def test_gaussian_constant_off_distribution():
    # What a Gaussian constant does on heavier tails: +26% on Laplace rows, +26.5% on t(5).
    c = theory.correction(2, 32)
    assert c / theory.correction(2, 32, "laplace") == pytest.approx(1.26, abs=0.005)
    assert c / theory.correction(2, 32, "student_t5") == pytest.approx(1.265, abs=0.0005)


# --- the bounds -----------------------------------------------------------------------------------


def test_bound_figures():
    lo, hi = theory.ratio_bounds(2, 32, 128)
    assert (lo, hi) == (pytest.approx(0.4185, abs=5e-5), pytest.approx(2.367, abs=5e-4))
    lo, hi = theory.ratio_bounds(1, 32, 128)
    c = 0.4260614642
    assert (lo, hi) == (pytest.approx(c / 128**0.5), pytest.approx(c * 32**0.5))
    assert theory.output_bound(2, 32, 128) == pytest.approx(27.0, abs=0.05)
    assert theory.output_bound(1, 32, 128) == pytest.approx(300, abs=0.5)
    assert theory.output_bound(2, 16, 256) == pytest.approx(34.13, abs=0.005)


@pytest.mark.parametrize("p", [1, 1.5, 2, 3, 4])
@pytest.mark.parametrize("block", [4, 32])
@pytest.mark.parametrize("k", [1, 7, 64])
def test_bounds_are_attained(p, block, k):
    """Four adversarial rows: each bound is reached by one of them and passed by none."""
    flat = np.ones((k, block))
    one_block = np.zeros((k, block))
    one_block[0] = 1.0
    spikes = np.zeros((k, block))
    spikes[:, 0] = 1.0
    lone = np.zeros((k, block))
    lone[0, 0] = 1.0
    x = np.stack([flat, one_block, spikes, lone]).reshape(4, -1)
    c = theory.correction(p, block)
    r = ratio(x, p, block, c)
    lo, hi = theory.ratio_bounds(p, block, k)
    assert r.min() == pytest.approx(lo, rel=1e-12)
    assert r.max() == pytest.approx(hi, rel=1e-12)
    y = np.abs(x).max(-1) / (r * np.sqrt((x * x).mean(-1)))
    assert y.max() == pytest.approx(theory.output_bound(p, block, k), rel=1e-12)


@settings(deadline=None, max_examples=200)
@given(
    p=st.sampled_from([1, 1.5, 2, 4]),
    block=st.sampled_from([2, 16, 32]),
    k=st.integers(1, 12),
    seed=st.integers(0, 2**32 - 1),
    spread=st.floats(0.0, 12.0),
    keep=st.floats(0.05, 1.0),
)
def test_bounds_hold_for_any_row(p, block, k, seed, spread, keep):
    """Rows of every shape: magnitudes over ``spread`` orders, a share of ``keep`` of them set."""
    rng = np.random.default_rng(seed)
    x = 10.0 ** (spread * rng.uniform(-1, 0, size=(8, k * block)))
    x *= rng.choice([-1.0, 1.0], size=x.shape) * (rng.random(x.shape) < keep)
    x[:, rng.integers(k * block)] = 1.0  # never all zero
    r = ratio(x, p, block, theory.correction(p, block))
    lo, hi = theory.ratio_bounds(p, block, k)
    assert (r >= lo * (1 - 1e-12)).all()
    assert (r <= hi * (1 + 1e-12)).all()
    y = np.abs(x).max(-1) / (r * np.sqrt((x * x).mean(-1)))
    assert (y <= theory.output_bound(p, block, k) * (1 + 1e-12)).all()


def test_bounds_scale_with_the_constant_of_the_distribution():
    ratio_of_c = theory.correction(2, 32, "laplace") / theory.correction(2, 32)
    for a, b in zip(
        theory.ratio_bounds(2, 32, 8, "laplace"), theory.ratio_bounds(2, 32, 8), strict=True
    ):
        assert a / b == pytest.approx(ratio_of_c, rel=1e-14)
    got = theory.output_bound(2, 32, 8, "laplace") / theory.output_bound(2, 32, 8)
    assert got == pytest.approx(1 / ratio_of_c, rel=1e-14)


# --- bad arguments --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: theory.correction(0.5, 32), ["p must be", ">= 1", "0.5"]),
        (lambda: theory.correction(math.inf, 32), ["p must be", "finite"]),
        (lambda: theory.correction(math.nan, 32), ["p must be", "nan"]),
        (lambda: theory.correction(True, 32), ["p must be", "True"]),
        (lambda: theory.correction("2", 32), ["p must be", "'2'"]),
        (lambda: theory.correction(2, 0), ["block_size must be an integer >= 1", "0"]),
        (lambda: theory.correction(2, 32.0), ["block_size must be an integer >= 1", "32.0"]),
        (lambda: theory.correction(2, 32, "cauchy"), [*theory.DISTRIBUTIONS, "'cauchy'"]),
        (lambda: theory.correction(5, 32, "student_t5"), ["student_t5", "below order 5"]),
        (lambda: theory.log_sd(2.5, 32, "student_t5"), ["below order 5", "needs order 5"]),
        (lambda: theory.log_sd(0, 32), ["p must be", "got 0"]),
        (lambda: theory.log_sd(2, -1), ["block_size must be", "-1"]),
        (lambda: theory.error_sd(2, 32, 100), ["multiple of block_size 32", "100"]),
        (lambda: theory.error_sd(2, 32, 0), ["d must be an integer >= 1"]),
        (lambda: theory.ratio_bounds(2, 32, 0), ["k_blocks must be an integer >= 1"]),
        (lambda: theory.output_bound(2, 32, 1.5), ["k_blocks must be", "1.5"]),
    ],
)
def test_bad_arguments_name_what_is_allowed(call, words):
    theory.correction(1, 32)  # True == 1: a cache must not answer for it
    with pytest.raises(ValueError) as e:
        call()
    for word in words:
        assert word in str(e.value)
