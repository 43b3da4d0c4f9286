"""Ray's runtime for a measuring script: quiet, started where a measure needs it, ended after it."""

import logging
import os
import sys
import warnings


def silence() -> None:
    """Turns off what Ray and its libraries would print or report; worker processes inherit this."""
    os.environ.update(
        PYTHONWARNINGS="ignore",
        RAY_USAGE_STATS_ENABLED="0",
        RAY_DEDUP_LOGS="1",
        RAY_DISABLE_IMPORT_WARNING="1",
        RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO="0",
        RAY_IGNORE_UNHANDLED_ERRORS="1",
        GLOG_minloglevel="3",
        TF_CPP_MIN_LOG_LEVEL="3",
        PYGAME_HIDE_SUPPORT_PROMPT="1",
    )
    os.environ.pop("RAY_ADDRESS", None)  # what is measured runs on this machine, and starts there
    warnings.simplefilter("ignore")
    logging.disable(logging.ERROR)


def start(num_cpus: int | None = None) -> None:
    """Starts Ray with its defaults, less the dashboard and the logs of its processes.

    Args:
        num_cpus: CPUs that Ray counts with, whatever the machine has; None is what it has.
    """
    import ray

    ray.init(include_dashboard=False, log_to_driver=False, logging_level=logging.ERROR, num_cpus=num_cpus)


def stop() -> None:
    """Stops Ray's daemons if this process has started them."""
    ray = sys.modules.get("ray")
    if ray is not None and ray.is_initialized():
        ray.shutdown()
