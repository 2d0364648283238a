"""Numbers behind the estimate: its constant, its error, its bounds.

MXNorm (arXiv 2603.13180) replaces the RMS of a row by an estimate made of the block maxima that a
microscaling cast computes anyway. For a row ``x`` of ``D`` elements in ``K = D / B`` blocks of
``B``, with ``m_k = max |x|`` over block ``k`` (raw: before gain and scale rounding)::

    rms_hat = c(p, B) * (mean_k m_k^p)^(1/p)          "c", what `correction` returns
    rho~    = C(p, B) * (mean_k m_k^p)^(-1/p)         "C" = 1/c, `inverse_correction` (eps = 0)

Both conventions are in use for "the correction"; this package computes with ``c`` throughout.

All constants suppose iid elements of unit RMS (the estimate is homogeneous in the row, so the
scale does not matter) and are exact for ``K -> infinity``. The method is the paper's; the
formulas in this module are derived, and checked against independent quadrature and simulation by
the tests. All numbers are dimensionless.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

__all__ = [
    "DISTRIBUTIONS",
    "computed_bound",
    "constant_bounds",
    "correction",
    "error_sd",
    "inverse_correction",
    "log_sd",
    "output_bound",
    "ratio_bounds",
]

_SQRT2 = math.sqrt(2.0)
_LOG2 = math.log(2.0)


@dataclass(frozen=True)
class _Distribution:
    """A symmetric unit-RMS distribution, described by functions of ``u = log t``, ``t >= 0``.

    Everything is taken at ``log t`` and returned as a logarithm where it may be tiny: heavy tails
    reach values of t whose powers no float64 can hold.
    """

    log_sf: Callable[[Tensor], Tensor]  # log P(|x| > t)
    log_pdf: Callable[[Tensor], Tensor]  # log density of |x| at t
    second_moment: Callable[[Tensor], Tensor]  # E[x^2; |x| <= t], 1 at infinity
    kurtosis: float  # E[x^4]
    moments_below: float  # E|x|^q is finite for q < moments_below


# --- Gaussian: |x| is half-normal -----------------------------------------------------------------


def _gaussian_log_sf(u: Tensor) -> Tensor:
    log_tail: Tensor = torch.special.log_ndtr(-torch.exp(u))
    return _LOG2 + log_tail


def _gaussian_log_pdf(u: Tensor) -> Tensor:
    return 0.5 * math.log(2.0 / math.pi) - 0.5 * torch.exp(2.0 * u)


def _gaussian_second_moment(u: Tensor) -> Tensor:
    # By parts: int_0^t s^2 f = F(t) - t f(t).
    return torch.erf(torch.exp(u) / _SQRT2) - torch.exp(u + _gaussian_log_pdf(u))


# --- Laplace: |x| is exponential with rate sqrt(2), the rate that makes E[x^2] = 1 ----------------


def _laplace_log_sf(u: Tensor) -> Tensor:
    return -_SQRT2 * torch.exp(u)


def _laplace_log_pdf(u: Tensor) -> Tensor:
    return 0.5 * _LOG2 - _SQRT2 * torch.exp(u)


def _laplace_second_moment(u: Tensor) -> Tensor:
    a = _SQRT2 * torch.exp(u)
    return 1.0 - torch.exp(-a) * (1.0 + a + 0.5 * a * a)


# --- Student t, 5 degrees of freedom, times sqrt(3/5) for unit RMS --------------------------------
# With t = sqrt(3) cot(phi), phi in (0, pi/2), the density of phi is 16/(3 pi) sin^4(phi), so that
# every integral over the tail t..infinity is an elementary one over 0..phi.


def _t5_log_sin2(u: Tensor) -> Tensor:
    # sin^2(phi) = 1 / (1 + t^2/3), without ever forming t^2.
    return torch.nn.functional.logsigmoid(math.log(3.0) - 2.0 * u)


def _t5_phi(u: Tensor) -> Tensor:
    return torch.atan(math.sqrt(3.0) * torch.exp(-u))


def _t5_log_sf(u: Tensor) -> Tensor:
    phi = _t5_phi(u)
    # 16/(3 pi) int_0^phi sin^4 = (2 phi - (4/3) sin 2phi + (1/6) sin 4phi) / pi: the closed form,
    # which cancels to nothing (phi^5) in the far tail ...
    closed = (2.0 * phi - (4.0 / 3.0) * torch.sin(2.0 * phi) + torch.sin(4.0 * phi) / 6.0) / math.pi
    # ... where with z = sin^2(phi) the series of the incomplete beta function I_z(5/2, 1/2),
    # 16/(15 pi) z^(5/2) (1 + sum_n (1/2)_n/n! * (5/2)/(5/2+n) * z^n), takes over.
    log_z = _t5_log_sin2(u)
    z = torch.exp(log_z)
    series = torch.ones_like(z)
    coefficient, power = 1.0, torch.ones_like(z)
    for n in range(1, 32):  # where it is used, z <= 1/4: the next term is below 2^-64
        coefficient *= (n - 0.5) / n
        power = power * z
        series = series + coefficient * 2.5 / (2.5 + n) * power
    tail = math.log(16.0 / (15.0 * math.pi)) + 2.5 * log_z + torch.log(series)
    return torch.where(log_z < math.log(0.25), tail, torch.log(closed.clamp(min=1e-300)))


def _t5_log_pdf(u: Tensor) -> Tensor:
    # f(t) = 16/(3 pi) sin^4(phi) |dphi/dt|, |dphi/dt| = sin^2(phi) / sqrt(3).
    return math.log(16.0 / (3.0 * math.pi * math.sqrt(3.0))) + 3.0 * _t5_log_sin2(u)


def _t5_second_moment(u: Tensor) -> Tensor:
    # (16/pi) int_phi^(pi/2) sin^2 cos^2 dphi.
    phi = _t5_phi(u)
    return 1.0 - 2.0 * phi / math.pi + torch.sin(4.0 * phi) / (2.0 * math.pi)


_TABLE: dict[str, _Distribution] = {
    "gaussian": _Distribution(
        _gaussian_log_sf, _gaussian_log_pdf, _gaussian_second_moment, 3.0, math.inf
    ),
    "laplace": _Distribution(
        _laplace_log_sf, _laplace_log_pdf, _laplace_second_moment, 6.0, math.inf
    ),
    "student_t5": _Distribution(_t5_log_sf, _t5_log_pdf, _t5_second_moment, 9.0, 5.0),
}

DISTRIBUTIONS: tuple[str, ...] = tuple(_TABLE)
"""Names that every ``dist`` argument accepts."""


# --- arguments ------------------------------------------------------------------------------------


def _check_p(p: float) -> None:
    if isinstance(p, bool) or not isinstance(p, (int, float)) or not 1.0 <= p < math.inf:
        raise ValueError(f"p must be a finite number >= 1 (1 and 2 are used), got {p!r}")


def _check_count(name: str, value: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError(f"{name} must be an integer >= 1, got {value!r}")


def _distribution(dist: str, moment: float) -> _Distribution:
    if dist not in _TABLE:
        raise ValueError(f"dist must be one of {', '.join(DISTRIBUTIONS)}; got {dist!r}")
    found = _TABLE[dist]
    if moment >= found.moments_below:
        raise ValueError(
            f"{dist} has finite moments only below order {found.moments_below:g}, "
            f"this quantity needs order {moment:g}: allowed is a smaller p or another dist"
        )
    return found


# --- quadrature -----------------------------------------------------------------------------------

_NODES = 4096


def _log_integral(log_integrand: Callable[[Tensor], Tensor], decay: float) -> float:
    """Log of the integral of ``exp(log_integrand(log t))`` over ``t`` in (0, infinity).

    The exp-sinh rule: with ``t = exp(pi/2 sinh w)`` the integrand falls off doubly exponentially
    at both ends, where the trapezoidal rule converges exponentially. ``decay`` is the least power
    of t by which ``t * integrand`` vanishes at either end: it sets how far out the nodes go.
    """
    # Terms below exp(-60) are lost in the rounding of the sum.
    reach = math.asinh(60.0 / min(1.0, decay) / (math.pi / 2.0))
    # A compiler asks for these numbers in the middle of tracing, where tensors would be fake.
    with _disable_current_modes():
        w = torch.linspace(-reach, reach, _NODES, dtype=torch.float64, device="cpu")
        u = (math.pi / 2.0) * torch.sinh(w)
        # dt = t * pi/2 cosh(w) dw
        log_jacobian = u + torch.log((math.pi / 2.0) * torch.cosh(w))
        log_sum = float(torch.logsumexp(log_integrand(u) + log_jacobian, dim=0))
    return log_sum + math.log(2.0 * reach / (_NODES - 1))


def _log_max_tail(dist: _Distribution, block_size: int, u: Tensor) -> Tensor:
    """``log P(m > t) = log(1 - F(t)^B)``, to full relative accuracy in the tail."""
    log_sf = dist.log_sf(u)
    log_cdf_b = block_size * torch.log1p(-torch.exp(log_sf).clamp(max=1.0))
    # Where B * P(|x| > t) vanishes beside 1, 1 - F^B is just that product.
    first_order = math.log(block_size) + log_sf
    return torch.where(first_order < -40.0, first_order, torch.log(-torch.expm1(log_cdf_b)))


@lru_cache(maxsize=1024, typed=True)
def _log_moment(order: float, block_size: int, dist: str) -> float:
    """``log E[m^order]``; a logarithm, because high orders overflow."""
    d = _distribution(dist, order)

    def integrand(u: Tensor) -> Tensor:
        return math.log(order) + (order - 1.0) * u + _log_max_tail(d, block_size, u)

    return _log_integral(integrand, min(order, d.moments_below - order))


@lru_cache(maxsize=1024, typed=True)
def _moment_with_energy(p: float, block_size: int, dist: str) -> float:
    """``E[m^p * sum_block x^2] / E[m^p]``.

    Given that the maximum of a block is t, the other B-1 elements are iid below t::

        E[m^p sum x^2] = E[m^(p+2)] + (B-1) int t^p E[x^2; |x|<=t] B F^(B-2) f(t) dt
    """
    d = _distribution(dist, p + 2.0)
    b = block_size
    log_p = _log_moment(p, b, dist)
    own = math.exp(_log_moment(p + 2.0, b, dist) - log_p)

    def integrand(u: Tensor) -> Tensor:
        # Near t = 0 the second moment is a difference that rounds to zero or below; as log it must
        # stay a number, and the factor t^p there makes its value immaterial.
        inside = torch.log(d.second_moment(u).clamp(min=1e-300))
        below = torch.log1p(-torch.exp(d.log_sf(u)).clamp(max=1.0 - 2.0**-53))
        return p * u + inside + (b - 2) * below + d.log_pdf(u)

    log_others = _log_integral(integrand, min(p, d.moments_below - p))
    return own + b * (b - 1) * math.exp(log_others - log_p)


# --- the public functions -------------------------------------------------------------------------


@lru_cache(maxsize=1024, typed=True)
def correction(p: float, block_size: int, dist: str = "gaussian") -> float:
    """The constant ``c(p, B)`` of ``rms_hat = c * (mean_k m_k^p)^(1/p)``.

    ``c = E[m^p]^(-1/p)`` for ``m`` the largest ``|x|`` of ``B`` iid elements of unit RMS, with::

        E[m^p] = int_0^inf p t^(p-1) (1 - F(t)^B) dt,    F the CDF of |x|

    It makes ``rms_hat`` right for rows of many blocks; derived from the estimator of
    arXiv 2603.13180.

    Args:
        p: exponent of the power mean over blocks, any number >= 1.
        block_size: ``B``, elements per block, any integer >= 1.
        dist: distribution of the elements, one of `DISTRIBUTIONS`. ``"student_t5"`` has moments
            below order 5 only, so it wants ``p < 5``.

    Returns:
        ``c``, at most 1 for ``p >= 2``; accurate to about 1e-12.

    Raises:
        ValueError: for an argument outside these ranges.
    """
    _check_p(p)
    _check_count("block_size", block_size)
    return math.exp(-_log_moment(float(p), block_size, dist) / p)


def inverse_correction(p: float, block_size: int, dist: str = "gaussian") -> float:
    """``C = 1/c``, for those who write ``rho~ = C * (mean_k m_k^p)^(-1/p)``.

    2.389 for ``p=2, B=32`` on Gaussian rows.

    Args:
        p: as in `correction`.
        block_size: as in `correction`.
        dist: as in `correction`.
    """
    return 1.0 / correction(p, block_size, dist)


@lru_cache(maxsize=1024, typed=True)
def log_sd(p: float, block_size: int, dist: str = "gaussian") -> float:
    """Spread ``v`` of the estimate: ``sd(log rms_hat) = v / sqrt(K)`` for rows of ``K`` blocks.

    By the delta method on the mean over ``K`` independent blocks (derived)::

        v = sd(m^p) / (p E[m^p])

    This is the scatter of ``rms_hat`` about the RMS of the *distribution*; against the RMS of the
    row itself, which scatters along with it, see `error_sd`.

    Args:
        p: exponent of the power mean, any number >= 1 (``"student_t5"``: ``p < 2.5``).
        block_size: ``B``, elements per block.
        dist: one of `DISTRIBUTIONS`.
    """
    _check_p(p)
    _check_count("block_size", block_size)
    p = float(p)
    _distribution(dist, 2.0 * p)
    log_ratio = _log_moment(2.0 * p, block_size, dist) - 2.0 * _log_moment(p, block_size, dist)
    return math.sqrt(max(0.0, math.expm1(log_ratio))) / p


@lru_cache(maxsize=1024, typed=True)
def error_sd(p: float, block_size: int, d: int, dist: str = "gaussian") -> float:
    """Relative error (standard deviation) of ``rms_hat`` against the exact RMS of the row.

    With ``K = D/B`` and ``v`` of `log_sd`, for Gaussian rows::

        sd(log(rms_hat / rms)) = sqrt(v^2 / K - 1 / (2 D))

    Derivation: the direction of a Gaussian row is independent of its length, and
    ``R = rms_hat / rms`` depends on the direction alone. So ``log rms_hat = log R + log rms`` is a
    sum of independent terms, their variances add, and ``Var(log rms) = 1/(2D)`` to first order.

    Other distributions have no such independence; to the same order, with kurtosis ``k = E[x^4]``
    and ``r = E[m^p sum_block x^2] / (B E[m^p]) - 1``::

        Var(log R) = v^2 / K + (k - 1) / (4 D) - r / (p K)

    (for Gaussian elements ``k = 3`` and ``r = p / B`` give the formula above back). The constant
    bias of using one distribution's ``c`` on another is not part of it: that is the ratio of their
    `correction`.

    Args:
        p: exponent of the power mean, any number >= 1 (``"student_t5"``: ``p < 2.5``).
        block_size: ``B``, elements per block.
        d: ``D``, elements per row, a multiple of ``block_size``.
        dist: one of `DISTRIBUTIONS`.

    Returns:
        The standard deviation as a fraction: 0.0135 is 1.35%.

    Raises:
        ValueError: for an argument outside these ranges.
    """
    v = log_sd(p, block_size, dist)
    _check_count("d", d)
    if d % block_size:
        raise ValueError(f"d must be a multiple of block_size {block_size}, got {d}")
    k_blocks = d // block_size
    if dist == "gaussian":
        variance = v * v / k_blocks - 0.5 / d
    else:
        p = float(p)
        kurtosis = _distribution(dist, p + 2.0).kurtosis
        r = _moment_with_energy(p, block_size, dist) / block_size - 1.0
        variance = v * v / k_blocks + (kurtosis - 1.0) / (4.0 * d) - r / (p * k_blocks)
    # p = 2 with blocks of one element is the exact RMS: zero, up to rounding of either sign.
    return math.sqrt(max(0.0, variance))


def ratio_bounds(
    p: float, block_size: int, k_blocks: int, dist: str = "gaussian"
) -> tuple[float, float]:
    """Least and greatest ``rms_hat / rms`` that any row other than zero can have (eps = 0).

    Derived; with ``e = K^(1/2 - 1/p)``::

        lo = c * min(1, e)          hi = c * sqrt(B) * max(1, e)

    For ``p = 2`` that is ``[c, c sqrt(B)]``, for ``p = 1`` it is ``[c / sqrt(K), c sqrt(B)]``.
    Reason: ``mean_block x^2`` lies between ``m^2 / B`` (a lone spike) and ``m^2`` (all elements
    alike), and a power mean over K blocks of given quadratic mean lies between the quadratic mean
    itself (blocks alike) and ``e`` times it (one block holds all). Both ends are attained.

    Args:
        p: exponent of the power mean, any number >= 1.
        block_size: ``B``, elements per block.
        k_blocks: ``K``, blocks per row.
        dist: distribution whose `correction` the estimate uses.
    """
    c = correction(p, block_size, dist)
    _check_count("k_blocks", k_blocks)
    e = math.pow(k_blocks, 0.5 - 1.0 / p)
    return c * min(1.0, e), c * math.sqrt(block_size) * max(1.0, e)


def constant_bounds(p: float, block_size: int, k_blocks: int) -> tuple[float, float]:
    """Least and greatest constant that is right for some row: ``c = rms / M`` with the power mean
    ``M = (mean_k m_k^p)^(1/p)``.

    From `ratio_bounds`: ``[1 / (sqrt(B) max(1, e)), 1 / min(1, e)]`` with ``e = K^(1/2 - 1/p)``.
    For ``p = 2`` that is ``[1 / sqrt(B), 1]``, for ``p = 1`` it is ``[1 / sqrt(B), sqrt(K)]``. A
    median over rows cannot leave it either.

    Args:
        p: exponent of the power mean, any number >= 1.
        block_size: ``B``, elements per block.
        k_blocks: ``K``, blocks per row.
    """
    _check_p(p)
    _check_count("block_size", block_size)
    _check_count("k_blocks", k_blocks)
    e = math.pow(k_blocks, 0.5 - 1.0 / p)
    return 1.0 / (math.sqrt(block_size) * max(1.0, e)), 1.0 / min(1.0, e)


def output_bound(p: float, block_size: int, k_blocks: int, dist: str = "gaussian") -> float:
    """Greatest ``|x_i| * rho~`` that any row can give: ``K^(1/p) / c``, before the gain.

    Derived: ``|x_i|^p <= m_k^p <= sum_k m_k^p = K (rms_hat / c)^p``, attained by a lone spike (an
    eps > 0 only lowers it). Exact RMSNorm has ``sqrt(D)``. With a gain applied to the normalised
    row, multiply by ``max |g|``.

    Args:
        p: exponent of the power mean, any number >= 1.
        block_size: ``B``, elements per block.
        k_blocks: ``K``, blocks per row.
        dist: distribution whose `correction` the estimate uses.
    """
    c = correction(p, block_size, dist)
    _check_count("k_blocks", k_blocks)
    return math.pow(k_blocks, 1.0 / p) / c


def computed_bound(rms: str, c: float, k: int, block_size: int, *, bf16: int = 0) -> float:
    """Greatest ``|x_i * rstd|`` before the gain, roundings included; NVFP4's static maximum.

    Derived, with ``K_b = k / block_size`` blocks::

        p1, p2:   |x_i| <= m_k <= rms_hat * K_b^(1/p) / c        (see `output_bound`)
        exact:    |x_i| <= rms * k^(1/2)

    and an eps inside the root only lowers ``x_i / rms``. Two factors cover the arithmetic:
    ``1 + 2^-8``, half a unit in the last place, for each rounding to bfloat16, and ``1 + 2^-16``
    for float32: 256 roundings, where the sum over the blocks, the root and the product make some
    20.

    Two things lie outside: rows of such small values that their squares are subnormal in float32
    (below 1e-19, and only with an eps of zero), and NaN or Inf.

    Args:
        rms: ``p1``, ``p2`` or ``exact``, as in the op.
        c: the constant of the estimate, whatever it was fitted to; ignored by ``exact``.
        k: elements per row.
        block_size: elements per block.
        bf16: how many times the value is rounded to bfloat16 before it is cast.

    Raises:
        ValueError: for another ``rms``, or a count below one.
    """
    _check_count("k", k)
    _check_count("block_size", block_size)
    blocks = k / block_size
    bounds = {"p1": blocks / c, "p2": math.sqrt(blocks) / c, "exact": math.sqrt(k)}
    if rms not in bounds:
        raise ValueError(f"rms must be one of {', '.join(bounds)}; got {rms!r}")
    return bounds[rms] * (1.0 + 2.0**-16) * (1.0 + 2.0**-8) ** bf16
