"""How tables show the scores of several seeds: interquartile means and probabilities of improvement with intervals.

Both are of Agarwal et al. 2021 (arXiv:2108.13264); `corral.core.comparisons` computes them.
"""

import math
from collections.abc import Sequence

from corral.core.comparisons import estimate_improvement, estimate_iqm


def show_iqm(values: Sequence[float], digits: int = 0) -> str:
    """Return the interquartile mean of values, with its 95% interval if there are enough of them for one."""
    found = estimate_iqm([values])
    value, low, high = (f"{number:,.{digits}f}" for number in found)
    return value if math.isnan(found.low) else f"{value} ({low} to {high})"


def judge(ours: Sequence[float], theirs: Sequence[float]) -> str:
    """Return a verdict and the probability that one of our runs scores higher than one of theirs.

    The verdict is `better` or `below` if the 95% interval of the probability is above or below a half, otherwise
    `as good`.
    """
    found = estimate_improvement([ours], [theirs])
    verdict = "better" if found.low > 0.5 else "below" if found.high < 0.5 else "as good"
    return f"{verdict}, {found.value:.2f}"
