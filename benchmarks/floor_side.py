"""Takes one measurement of a floor in this process and prints it as a JSON line (see `run.py`)."""

from importlib import import_module

import measuring
from measuring import Fields, Measure, Options


def _floor(module: str, name: str) -> Measure:
    """Return a measure of a module, which is imported when the number of threads is set."""

    def measure(options: Options) -> Fields:
        fields: Fields = getattr(import_module(module), name)(options)
        return fields

    return measure


if __name__ == "__main__":
    measuring.run_measure(
        "floor",
        {
            "ppo": _floor("floors", "ppo_narrow"),
            "ppo_wide": _floor("floors", "ppo_wide"),
            "ppo_images": _floor("floors", "ppo_images"),
            "dqn": _floor("floors_of_replay", "dqn"),
            "sac": _floor("floors_of_replay", "sac"),
            "td3": _floor("floors_of_replay", "td3"),
        },
    )
