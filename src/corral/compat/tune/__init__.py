"""Ray Tune: algorithms as trainables. Needs Ray: `pip install 'corral[ray]'`."""

from __future__ import annotations

from corral.errors import MissingPackageError

try:
    import ray.tune as _ray_tune
except ModuleNotFoundError as error:
    raise MissingPackageError(
        f"corral.compat.tune needs Ray Tune, and {error.name!r} is not installed: pip install 'corral[ray]'."
    ) from error

from corral.compat.tune.param_space import configured
from corral.compat.tune.resources import resources
from corral.compat.tune.trainable import AlgorithmTrainable, register, reportable, trainable

__all__ = ["AlgorithmTrainable", "configured", "register", "reportable", "resources", "trainable"]

del _ray_tune
