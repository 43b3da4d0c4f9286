"""How the runs of a table are made, and how tables show the scores of several seeds.

Scores are interquartile means and probabilities of improvement with intervals, both of Agarwal et al. 2021
(arXiv:2108.13264); `corral.core.comparisons` computes them.
"""

import json
import math
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from typing import Any

from corral.core.comparisons import estimate_improvement, estimate_iqm
from processes import exit_on_signals, kill_scripts

Run = dict[str, Any]


def add_runs(
    train: Callable[..., Run], jobs: Iterable[tuple[Any, ...]], num_jobs: int, runs: list[Run], keep: Callable[[], None]
) -> bool:
    """Train all jobs, `num_jobs` of them at a time, and return whether one failed.

    An interrupt (Ctrl-C, SIGTERM, SIGHUP) kills the trainings that have not ended; the others are kept.

    Args:
        train: Runs one job, whose parts are the arguments, by `run_script`, and returns its fields; with `error` if the
            job failed.
        jobs: What to run, in this order.
        num_jobs: Number of jobs at a time.
        runs: Receives what was run, without what failed.
        keep: Called after each addition to `runs`, to write it to files.
    """
    exit_on_signals()
    failed = False
    with ThreadPoolExecutor(num_jobs) as pool:
        pending = [pool.submit(train, *job) for job in jobs]
        try:
            for future in as_completed(pending):
                run = future.result()
                print(json.dumps(run), file=sys.stderr, flush=True)
                if "error" in run:
                    failed = True
                else:
                    runs.append(run)
                    keep()
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            while not all(future.done() for future in pending):
                kill_scripts()
                time.sleep(0.05)  # a training that was about to start is in the next look
            raise
    return failed


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
