"""Numbers with their uncertainty: pass@k, means clustered by problem, paired bootstrap, Student's t over runs.

| paper | name     | shape      | equation |
|-------|----------|------------|----------|
| n     | `n`      | () or (P,) | Eq. 54: samples drawn for a problem |
| c     | `c`      | () or (P,) | Eq. 54: how many of them are right |
| k     | `k`      | ()         | Eq. 54: samples a user may draw |
| d_s   | `a - b`  | (N,)       | App. H: paired improvements |

Departures from the paper:
1. Eq. 54 as printed is 1 as soon as c >= k, so pass@1 would be 1 with one right sample in a hundred. The unbiased
   estimator (Chen et al. 2021) is 1 when n - c < k; that one is here.
2. App. H's percentile bootstrap over N = 5 seeds covers about 84 %, not 95 %; `mean_interval`, Student's t, covers
   95 % of normal data and is to be printed beside it.
"""
import math
from typing import Sequence

import numpy as np


def _pass_at_k(n: int, c: int, k: int) -> float:
    if not (n == int(n) and c == int(c) and k == int(k)):
        raise ValueError(f"pass@k needs whole numbers, got n = {n}, c = {c}, k = {k}")
    n, c, k = int(n), int(c), int(k)
    if not 1 <= k <= n:
        raise ValueError(f"pass@k needs 1 <= k <= n, got k = {k} with n = {n} samples")
    if not 0 <= c <= n:
        raise ValueError(f"pass@k needs 0 <= c <= n, got c = {c} right of n = {n}")
    subsets = math.comb(n, k)
    return (subsets - math.comb(n - c, k)) / subsets   # Eq. 54, corrected; exact until the one division


def pass_at_k(n, c, k):
    """Chance that at least one of k samples, drawn without replacement from n of which c are right, is right (Eq. 54).

    Numbers give a float; arrays broadcast and give an array of float64. Raises ValueError unless 1 <= k <= n and
    0 <= c <= n, all of them whole."""
    if np.ndim(n) == np.ndim(c) == np.ndim(k) == 0:
        return _pass_at_k(n, c, k)
    return np.vectorize(_pass_at_k, otypes=[np.float64])(n, c, k)


def clustered_mean(values: Sequence[float], clusters: Sequence) -> tuple[float, float]:
    """(mean of all values, its standard error when values of one cluster (problem) may depend on one another).

    values (N,), clusters (N,) labels of C clusters. With e_i = x_i - mean, the variance of the mean is estimated by
    C/(C-1) * sum over clusters of (sum of its e_i)^2, over N^2: for clusters of one size the ordinary standard error
    of the cluster means. One cluster has no standard error: nan. Raises ValueError on empty input or other lengths."""
    values = np.asarray(values, dtype=np.float64)
    labels, index = np.unique(np.asarray(clusters), return_inverse=True)
    if values.ndim != 1 or values.size == 0 or index.shape != values.shape:
        raise ValueError(f"clustered_mean needs one cluster per value and at least one value, got shapes "
                         f"{values.shape} and {index.shape}")
    mean = values.mean()
    if len(labels) == 1:
        return float(mean), math.nan
    sums = np.bincount(index, weights=values - mean)   # (C,)
    variance = len(labels) / (len(labels) - 1) * (sums @ sums) / values.size**2
    return float(mean), math.sqrt(variance)


def paired_bootstrap(a: Sequence[float], b: Sequence[float], resamples: int = 10_000, seed: int = 0,
                     confidence: float = 0.95) -> tuple[float, float, float]:
    """(delta, low, high): mean of a - b and the percentile interval of its bootstrap over pairs (App. H).

    a, b (N,): the two scores of each problem (or seed), in one order. The paper's form is delta, + (high - delta),
    - (delta - low). Raises ValueError on empty input, unequal lengths or no resamples."""
    a, b = np.asarray(a, dtype=np.float64), np.asarray(b, dtype=np.float64)
    if a.ndim != 1 or a.shape != b.shape or a.size == 0 or resamples < 1:
        raise ValueError(f"paired_bootstrap needs two lists of one length and at least one resample, got shapes "
                         f"{a.shape} and {b.shape}, resamples = {resamples}")
    differences = a - b
    generator = np.random.default_rng(seed)
    means = np.array([differences[generator.integers(a.size, size=a.size)].mean() for _ in range(resamples)])
    tail = (1 - confidence) / 2
    low, high = np.quantile(means, [tail, 1 - tail])
    return float(differences.mean()), float(low), float(high)


def t_quantile(confidence: float, freedom: int) -> float:
    """The t with P(|T| <= t) = confidence for Student's T with a whole number of degrees of freedom.

    With tan(angle) = t / sqrt(freedom) that probability is a finite sum of powers of cos(angle) (Abramowitz & Stegun
    26.7.3-4), found by bisection: no scipy. Raises ValueError unless 0 < confidence < 1 and freedom >= 1."""
    if not 0 < confidence < 1 or freedom < 1:
        raise ValueError(f"t_quantile needs 0 < confidence < 1 and freedom >= 1, got {confidence} and {freedom}")

    def probability(angle: float) -> float:
        odd = freedom % 2
        term = math.sin(angle) * (math.cos(angle) if odd else 1.0)
        total = 0.0
        for j in range(odd + 1, freedom, 2):   # terms of powers cos^(j-1): from cos^1 (odd) or cos^0 (even)
            total += term
            term *= math.cos(angle)**2 * j / (j + 1)
        return 2 / math.pi * (angle + total) if odd else total

    low, high = 0.0, math.pi / 2
    for _ in range(100):
        middle = (low + high) / 2
        low, high = (middle, high) if probability(middle) < confidence else (low, middle)
    return math.tan(low) * math.sqrt(freedom)


def mean_interval(values: Sequence[float], confidence: float = 0.95) -> tuple[float, float, float]:
    """(mean, low, high) by Student's t, for a few independent runs: values (N,). One value has no interval: nan.

    Raises ValueError on empty input or a confidence outside (0, 1)."""
    values = np.asarray(values, dtype=np.float64)
    if values.ndim != 1 or values.size == 0:
        raise ValueError(f"mean_interval needs a list of at least one value, got shape {values.shape}")
    mean = float(values.mean())
    if values.size == 1:
        return mean, math.nan, math.nan
    half = t_quantile(confidence, values.size - 1) * float(values.std(ddof=1)) / math.sqrt(values.size)
    return mean, mean - half, mean + half
