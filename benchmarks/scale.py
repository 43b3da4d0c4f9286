"""Measures what 10 to 10,000 runners cost the process that drives them, with recorded runners in virtual time.

    python benchmarks/scale.py                      measures, and writes scale.json, SCALE.md and docs/engines.md
    python benchmarks/scale.py --sizes 10 100       measures some sizes, and writes nothing
    python benchmarks/scale.py --list async 1000    lists the functions of one case by their calls per runner
    python benchmarks/scale.py --render             writes the pages again, from scale.json

The driver is the real one: the algorithm, its groups of runners and their handles. `recorded_engine.py` has the
runners.
"""

from __future__ import annotations

import argparse
import gc
import json
import logging
import sys
import tempfile
import time
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import corral
import machine
from code_entered import count_calls
from corral import IMPALAConfig, PPOConfig
from corral.core.metrics.timers import Timers
from corral.testing import CountingEnv
from recorded_engine import Faults, RecordedEngine

HERE = Path(__file__).resolve().parent
SRC = Path(corral.__file__).parent
RESULTS, PAGE, DOC = HERE / "scale.json", HERE / "SCALE.md", HERE.parent / "docs" / "engines.md"
BEGIN, END = "<!-- scale: written by benchmarks/scale.py -->\n", "<!-- end of scale -->\n"
SIZES = (10, 100, 1_000, 10_000)
STEPS = 16  # env steps of a fragment, in which two episodes end
FAULTS = Faults(failing=0.01, hanging=0.001, slow=0.01)
STRAGGLERS = Faults(slow=FAULTS.slow)
WORKER_TIMEOUT_S = 30.0
NUM_WARM, NUM_MEASURED = 1, 2
CASES = {
    "sync": "synchronous sampling (PPO)",
    "async": "asynchronous sampling (IMPALA)",
    "evaluation": "an evaluation round of two episodes per runner",
    "metrics": "merging the metrics of a round",
    "checkpoint": "a checkpoint with the states of all runners",
}
"""What is measured, and what the table calls it; runners that evaluate are no training runners."""


HOW = """\
One real runner answers each kind of call once, and thousands of recorded runners replay its answers in virtual time,
in the process of the real driver. One in a hundred runners is ten times slower than the others. A number per runner is
what each runner beyond the first ten adds to an iteration: calls of Corral's Python functions, without lambdas and
comprehensions, and CPU time, with the time of the engine that replays. Learning is counted apart. In the runs with
faults, one in a hundred calls raises, and one in a thousand is never answered. Every env step that a runner was asked
for was sampled, is in flight, is counted as lost, or was not taken, because its call failed before.
"""


class LearningApart(Timers):
    """Timers that measure the CPU seconds of learning, and let nobody count calls meanwhile.

    Attributes:
        learning_s: CPU seconds of learning so far.
    """

    def __init__(self) -> None:
        """Begin at zero."""
        super().__init__()
        self.learning_s = 0.0

    def time(self, part: str) -> Any:
        """Return a context manager for a part of an iteration."""
        return self._apart() if part in ("returns", "learning") else super().time(part)

    @contextmanager
    def _apart(self) -> Iterator[None]:
        start, profile = time.process_time(), sys.getprofile()
        sys.setprofile(None)
        try:
            yield
        finally:
            sys.setprofile(profile)
            self.learning_s += time.process_time() - start


def make_config(case: str, num_runners: int) -> Any:
    """Return the config of a case: an iteration has one fragment of each runner, in two batches if asynchronous."""
    config: Any = IMPALAConfig() if case == "async" else PPOConfig()
    trained = 10 if case == "evaluation" else num_runners
    size = trained * STEPS
    if case == "async":
        config.training(train_batch_size_per_learner=size // 2)
        config.env_runners(rollout_fragment_length=STEPS).reporting(min_sample_timesteps_per_iteration=size)
    else:
        config.training(train_batch_size_per_learner=size, minibatch_size=size, num_epochs=1)
    if case == "evaluation":
        config.evaluation(evaluation_num_env_runners=num_runners, evaluation_duration=2 * num_runners)
    return (
        config.environment(CountingEnv, env_config={"episode_length": STEPS // 2})
        .env_runners(num_env_runners=trained, num_envs_per_env_runner=1)
        .engine("process")
        .rl_module(model_config={"fcnet_hiddens": [4]})
        .fault_tolerance(
            restart_failed_env_runners=True, max_num_env_runner_restarts=10**9, worker_timeout_s=WORKER_TIMEOUT_S
        )
        .debugging(seed=0)
    )


@contextmanager
def started(case: str, num_runners: int, faults: Faults, *, seed: int = 0) -> Iterator[tuple[Any, RecordedEngine]]:
    """Build the algorithm of a case on an engine of its own; in the block, time passes and faults happen."""
    with RecordedEngine(faults, seed).in_use() as engine, make_config(case, num_runners).build() as algo:
        algo.timers = LearningApart()
        with engine.going_wrong():
            yield algo, engine


def work_of(case: str, algo: Any, folder: Path) -> Callable[[], Any]:
    """Return what is measured, as a function; the last call of `prepare` was just before."""
    if case == "evaluation":
        return algo.evaluate  # type: ignore[no-any-return]
    if case == "metrics":
        return lambda: algo.env_runner_group.collect_metrics(algo.metrics, algo.timers)
    return (lambda: algo.save(folder / "checkpoint")) if case == "checkpoint" else algo.train


def prepare(case: str, algo: Any) -> None:
    """Do what precedes the work of a case."""
    if case == "metrics":
        algo.sample(algo.config.total_train_batch_size)


def count(case: str, algo: Any, engine: RecordedEngine, work: Callable[[], Any]) -> dict[str, int]:
    """Return calls of functions in one call of `work`, and how often it packs and sends weights."""
    prepare(case, algo)
    before = engine.counts.copy()
    return {
        "calls": count_calls(work, SRC).total(),
        "num_packed": engine.counts["put"] - before["put"],
        "num_weights_sent": engine.counts["set_weight_parts"] - before["set_weight_parts"],
    }


def measure(case: str, num_runners: int) -> dict[str, Any]:
    """Return what a case costs in all: calls of functions, CPU seconds, and how often weights were packed and sent."""
    with tempfile.TemporaryDirectory() as name, started(case, num_runners, STRAGGLERS) as (algo, engine):
        work, seconds, learning = work_of(case, algo, Path(name)), [], []
        for _ in range(NUM_WARM + NUM_MEASURED):
            prepare(case, algo)
            gc.collect()
            start, apart = time.process_time(), algo.timers.learning_s
            work()
            learning.append(algo.timers.learning_s - apart)
            seconds.append(time.process_time() - start - learning[-1])
        times = {"cpu_s": min(seconds[NUM_WARM:]), "learning_cpu_s": min(learning[NUM_WARM:])}
        return {**count(case, algo, engine, work), **times}


def count_only(case: str, num_runners: int, faults: Faults = STRAGGLERS) -> dict[str, int]:
    """Return the counts of a case after its first iteration; nothing is timed, and no garbage collected."""
    with tempfile.TemporaryDirectory() as name, started(case, num_runners, faults) as (algo, engine):
        work = work_of(case, algo, Path(name))
        for _ in range(NUM_WARM):
            prepare(case, algo)
            work()
        return count(case, algo, engine, work)


def list_calls(case: str, num_runners: int) -> None:
    """Print the functions of a case by their calls per runner."""
    with tempfile.TemporaryDirectory() as name, started(case, num_runners, STRAGGLERS) as (algo, _):
        work = work_of(case, algo, Path(name))
        for _ in range(NUM_WARM):
            prepare(case, algo)
            work()
        prepare(case, algo)
        for code, count in count_calls(work, SRC).most_common(60):
            print(f"{count / num_runners:9.2f} {Path(code.co_filename).relative_to(SRC)} {code.co_qualname}")


def measure_memory(num_runners: int) -> int:
    """Return the bytes that Python holds for an algorithm with runners, after an iteration."""
    tracemalloc.start()
    try:
        with started("sync", num_runners, Faults()) as (algo, _):
            algo.train()
            gc.collect()
            return tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()


def run_with_faults(case: str, num_runners: int, num_iterations: int = NUM_WARM + NUM_MEASURED) -> dict[str, Any]:
    """Train while calls fail and workers hang, and return the counters of the driver and of the engine.

    Every env step that was asked for is in one place: it was sampled and is counted, it is in flight, it was lost with
    an exception or a worker and is counted, or it was never taken.
    """
    with started(case, num_runners, FAULTS) as (algo, engine):
        seconds = []
        for _ in range(num_iterations):
            start, apart = time.process_time(), algo.timers.learning_s
            result = algo.train()
            seconds.append(time.process_time() - start - (algo.timers.learning_s - apart))
        health, of_runners = result["fault_tolerance"], result["env_runners"]
        found = {
            "asked": engine.counts["env_steps_asked"],
            "sampled": result["num_env_steps_sampled_lifetime"],
            "in_flight": health["num_env_steps_in_flight"],
            "lost": health["num_env_steps_lost"],
            "not_taken": engine.counts["env_steps_not_taken"],
            "sampled_by_runners": int(of_runners["num_env_steps_sampled_lifetime"]),
            "episodes": int(of_runners["num_episodes_lifetime"]),
            "failures": health["num_env_runner_failures"],
            "restarts": health["num_remote_worker_restarts"],
            "hung": engine.counts["hung"],
            "failed": engine.counts["failed"],
            "cpu_s": min(seconds[NUM_WARM:]),
        }
    assert counts_are_exact(found), found
    return found


def counts_are_exact(found: dict[str, Any]) -> bool:
    """Return whether every env step of a run with faults is counted once; see `run_with_faults`."""
    places = ("sampled", "in_flight", "lost", "not_taken")
    return found["asked"] == sum(found[place] for place in places) and found["sampled"] == found["sampled_by_runners"]


def measure_all(sizes: list[int]) -> dict[str, Any]:
    """Measure all cases with all numbers of runners."""
    found: dict[str, Any] = {"cases": {}, "memory": {}, "faults": {}}
    for size in sizes:
        for case in CASES:
            found["cases"].setdefault(case, {})[str(size)] = cost = measure(case, size)
            print(f"{case:10} {size:6} {cost}", flush=True)
        found["memory"][str(size)] = measure_memory(size)
        for case in ("sync", "async"):
            found["faults"].setdefault(case, {})[str(size)] = counts = run_with_faults(case, size)
            print(f"faults     {size:6} {case} {counts}", flush=True)
    return found


# The page.


def per_runner(costs: dict[str, Any], size: str) -> float:
    """Return what each runner beyond the fewest adds."""
    fewest = min(costs, key=int)
    return float(costs[size] - costs[fewest]) / (int(size) - int(fewest))


def render(report: dict[str, Any]) -> str:
    """Return the tables."""
    sizes = sorted(report["memory"], key=int)[1:]
    titles = [f"{int(size):,} runners" for size in sizes]
    rows = []
    for case, title in CASES.items():
        costs = report["cases"][case]
        calls, cpu_s = ({size: cost[name] for size, cost in costs.items()} for name in ("calls", "cpu_s"))
        cells = [f"{per_runner(calls, size):.1f}, {1e3 * per_runner(cpu_s, size):.3f} ms" for size in sizes]
        rows.append([title, *cells])
    memory = [f"{per_runner(report['memory'], size) / 1024:.1f} KiB" for size in sizes]
    rows.append(["memory of the driver", *memory])
    for case, name in (("sync", "PPO"), ("async", "IMPALA")):
        costs = {size: cost["learning_cpu_s"] for size, cost in report["cases"][case].items()}
        cells = [f"{1e3 * per_runner(costs, size):.3f} ms" for size in sizes]
        rows.append([f"for comparison: learning from {STEPS} env steps, {name}", *cells])
    synced = report["cases"]["sync"]
    packed = [f"{synced[size]['num_packed']} for {synced[size]['num_weights_sent']:,} runners" for size in sizes]
    rows.append(["times that weights are packed", *packed])
    tables = [_table(["per runner: calls, CPU time of the driver", *titles], rows)]
    rows = []
    for case, counts in report["faults"].items():
        last = counts[sizes[-1]]
        values = ("asked", "sampled", "in_flight", "lost", "not_taken", "failures", "restarts")
        rows.append([CASES[case], *(f"{last[value]:,}" for value in values)])
    names = ["asked", "sampled", "in flight", "lost", "not taken", "failures", "restarts"]
    tables.append(_table([f"{int(sizes[-1]):,} runners with faults: env steps", *names], rows))
    return "\n".join(tables)


def _table(head: list[str], rows: list[list[str]]) -> str:
    return "".join(f"| {' | '.join(row)} |\n" for row in (head, ["---"] * len(head), *rows))


def write(report: dict[str, Any]) -> None:
    """Write the results, the page and the tables of docs/engines.md."""
    RESULTS.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    written = f"Written by `{report['command']}` at commit {report['commit']}."
    PAGE.write_text(f"# Scale, measured\n\n{written}\n\n{HOW}\n\n{render(report)}", encoding="utf-8")
    before, _, rest = DOC.read_text(encoding="utf-8").partition(BEGIN)
    DOC.write_text(f"{before}{BEGIN}\n{render(report)}\n{END}{rest.partition(END)[2]}", encoding="utf-8")


def main() -> None:
    """Measures, and writes the page, or lists the functions of one case."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", type=int, nargs="+")
    parser.add_argument("--render", action="store_true")
    parser.add_argument("--list", nargs=2, metavar=("CASE", "RUNNERS"))
    arguments = parser.parse_args()
    logging.getLogger("corral").setLevel(logging.CRITICAL)  # a line per fault
    if arguments.list:
        list_calls(arguments.list[0], int(arguments.list[1]))
        return
    if arguments.render:
        write(json.loads(RESULTS.read_text(encoding="utf-8")))
        return
    commit = machine.measured_commit(HERE.parent)
    report = {"command": "python benchmarks/scale.py", "commit": commit, **measure_all(arguments.sizes or [*SIZES])}
    print(render(report))
    if not arguments.sizes:
        write(report)


if __name__ == "__main__":
    main()
