"""Powers, logarithms, cosines and sines with the same bits on every machine (docs/numerics.md, section 5).

The libraries' own differ in the last bit with the processor: numpy and libm choose among variants at run time. Here
stand decimal arithmetic, which is exact to its precision, and binary64 operations that IEEE 754 rounds correctly.
"""

from __future__ import annotations

import math
from decimal import Context, Decimal

import numpy as np

__all__ = ["cos_sin", "log", "powers"]

_DECIMAL = Context(prec=40)

_HALF_PI = (1.5707963267341256, 6.077100506303966e-11, 2.0222662487959506e-21)
"""pi / 2 in parts; the first two have 33 bits, so that their products with whole numbers below 2^20 are exact."""
_SERIES = np.array(
    [[(-1) ** n / math.factorial(2 * n), (-1) ** n / math.factorial(2 * n + 1)] for n in range(9, 0, -1)]
)
"""Taylor coefficients of the cosine and the sine divided by its argument, highest power first: binary64 [9, 2]."""


def powers(base: float, exponents: np.ndarray) -> np.ndarray:
    """base ** exponents, each rounded once to binary64; base is positive, exponents are binary64 [n]."""
    return np.array([float(_DECIMAL.power(Decimal(base), Decimal(float(e)))) for e in exponents])


def log(x: float) -> float:
    """The natural logarithm, rounded once to binary64; x is positive."""
    return float(Decimal(x).ln(_DECIMAL))


def cos_sin(theta: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Cosines and sines of angles below 10^6, binary64, within 2 units of the last place where they are not near 0."""
    quarters = np.rint(theta * (2 / math.pi))
    r = theta
    for part in _HALF_PI:
        r = r - quarters * part
    z = r * r
    both = np.zeros((2, *theta.shape))
    for row in _SERIES.reshape(9, 2, *[1] * theta.ndim):
        both = both * z + row
    cos, sin = 1.0 + z * both[0], r + (r * z) * both[1]
    quadrant = quarters.astype(np.int64) & 3
    is_odd = quadrant & 1 == 1
    cos, sin = np.where(is_odd, sin, cos), np.where(is_odd, cos, sin)
    return np.where((quadrant == 1) | (quadrant == 2), -cos, cos), np.where(quadrant >= 2, -sin, sin)
