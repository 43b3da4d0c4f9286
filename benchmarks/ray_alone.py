"""Measures the start of Ray without Corral and prints it as a JSON line (see `runner_groups.py`)."""

import logging
from time import perf_counter

import measuring
import ray_runtime
from measuring import Fields, Options


def start(options: Options) -> Fields:
    """Seconds of `ray.init`, and until two actors that do nothing have answered."""
    del options
    import ray

    class Nothing:
        def ping(self) -> bool:
            return True

    begin = perf_counter()
    ray.init(include_dashboard=False, logging_level=logging.ERROR)  # as the Ray engine does
    initialised = perf_counter()
    actors = [ray.remote(num_cpus=1)(Nothing).remote() for _ in range(2)]
    assert ray.get([actor.ping.remote() for actor in actors]) == [True, True]
    return {"init_s": initialised - begin, "two_actors_s": perf_counter() - begin}


if __name__ == "__main__":
    ray_runtime.silence()
    measuring.run_measure("ray", {"start": start}, finish=ray_runtime.stop)
