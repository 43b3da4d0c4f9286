"""Stop criteria: numbers of the result at which a run ends."""

from __future__ import annotations

import math
from collections.abc import Mapping
from numbers import Real
from typing import Any

from corral.core.familiar_names import RESULTS, meaning_of
from corral.errors import StopCriterionError, nearest
from corral.metrics.result import flat_result

ALIASES = {"num_env_steps": "num_env_steps_sampled_lifetime", "time_s": "time_total_s"}
# A key that a callback logs may take a few iterations to appear for the first time.
LATE_KEY_ITERATIONS = 20


class StopCriteria:
    """Numbers to reach; the first criterion that is reached stops the run.

    A name is a path in the result (`env_runners/episode_return_mean`), a name at its top level (`training_iteration`),
    a name in `env_runners` (`episode_return_mean`), or a name in `ALIASES`.
    """

    def __init__(self, criteria: Mapping[str, float], late_keys: bool = False) -> None:
        """Check and store the criteria.

        Args:
            criteria: By name, the smallest value that stops the run.
            late_keys: Whether callbacks may log keys that are missing from the first results.

        Raises:
            StopCriterionError: There is no criterion, or a limit is not finite, so that the run would never end.
        """
        if not criteria:
            raise StopCriterionError("no stop criterion: give one such as episode_return_mean=450.")
        for name, limit in criteria.items():
            if not math.isfinite(limit):
                raise StopCriterionError(f"stop criterion {name!r}: {limit} is never reached; give a finite number.")
        self._criteria = dict(criteria)
        self._late_keys = late_keys

    def met(self, result: Mapping[str, Any]) -> str | None:
        """Return the first criterion that a result meets as text, or `None`.

        Raises:
            StopCriterionError: A name is not in the result.
        """
        flat = flat_result(result)
        met = None
        for name, limit in self._criteria.items():
            path = ALIASES.get(name, name)
            value = flat.get(path, flat.get(f"env_runners/{path}"))
            if value is None:
                if self._late_keys and result["training_iteration"] < LATE_KEY_ITERATIONS:
                    continue
                hint = meaning_of(name, RESULTS, flat) or nearest(name, [*flat, *ALIASES])
                raise StopCriterionError(f"stop criterion {name!r} does not appear in the result. {hint}")
            if not isinstance(value, Real):
                raise StopCriterionError(f"stop criterion {name!r} is {value!r} in the result, which is not a number.")
            if float(value) >= limit and met is None:
                met = f"{name}={value:g} reached {limit:g}"
        return met
