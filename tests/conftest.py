"""Fixtures that several rooms use."""

from __future__ import annotations

import contextlib
import gc
import importlib.util
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

# Tests run side by side, a core for each: torch's threads would only wait for each other, half as long again as the
# tests themselves take. It is read when torch is imported, here and in the processes that tests start.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# Ray's processes are nice by default, and would get little CPU time next to the other tests.
os.environ.setdefault("RAY_worker_niceness", "0")


def _absent(error: BaseException | None) -> str | None:
    """Return the name of a package that an error is about and that is not installed here, or `None`."""
    while error is not None:
        if isinstance(error, ModuleNotFoundError) and error.name:
            package = error.name.partition(".")[0]
            with contextlib.suppress(ModuleNotFoundError):
                return None if importlib.util.find_spec(package) else package
        error = error.__cause__ or error.__context__
    return None


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Any:
    """Keep what is imported and collected away from the garbage collector, which else visits it again and again."""
    gc.disable()
    result = yield
    gc.freeze()
    gc.enable()
    return result


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(collector: Any) -> Any:
    """Skip a file that imports a package which is not installed.

    Each worker begins with another folder, so that each test file is compiled by one of them, and read by the others.
    """
    report = yield
    if (worker := getattr(collector.config, "workerinput", None)) and collector.path == Path(__file__).parent:
        first = len(report.result) * int(worker["workerid"].removeprefix("gw")) // worker["workercount"]
        report.result = [*report.result[first:], *report.result[:first]]
    if report.failed and (found := re.search(r"ModuleNotFoundError: No module named '(\w+)", str(report.longrepr))):
        if found[1] != "corral" and _absent(ModuleNotFoundError(name=found[1])):
            report.outcome, report.longrepr = "skipped", (str(collector.path), 0, f"Skipped: no package {found[1]}")
    return report


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: Any, call: Any) -> Any:
    """Skip a test that fails because a package is not installed, in fixtures too."""
    report = yield
    if report.failed and (package := _absent(call.excinfo.value)):
        report.outcome, report.longrepr = "skipped", (str(item.path), 0, f"Skipped: no package {package}")
    return report


@pytest.fixture(autouse=True)
def _sigint() -> Iterator[None]:
    """Restore the handler of Ctrl-C after each test: Ray Tune leaves its own in the process."""
    before = signal.getsignal(signal.SIGINT)
    yield
    if signal.getsignal(signal.SIGINT) is not before:
        signal.signal(signal.SIGINT, before)


@pytest.fixture(scope="session", autouse=True)
def warm_workers() -> Iterator[None]:
    """Fork workers of the process engine from a process that has torch; tests of the engine start new interpreters."""
    import warm
    from corral.engines import process

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(process, "subprocess", SimpleNamespace(**{**vars(subprocess), "Popen": warm.Worker}))
        yield


@pytest.fixture(scope="session", autouse=True)
def quick_disk() -> Iterator[None]:
    """Do not wait until files are on the disk: a run writes dozens, and no test cuts the power."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda descriptor: None)
        yield


@pytest.fixture(scope="module", autouse=True)
def quick_collections() -> Iterator[None]:
    """Keep what a file imported away from the garbage collector, too, and collect what its tests left behind.

    JAX, Ray and the exporters come with half a million objects, and to visit them takes longer than most tests.
    """
    yield
    gc.collect()
    gc.freeze()


@pytest.fixture
def new_interpreters(monkeypatch: pytest.MonkeyPatch) -> None:
    """Start workers of the process engine as users do."""
    monkeypatch.setattr("corral.engines.process.subprocess", subprocess)


@pytest.fixture(scope="session")
def ray_runtime() -> Iterator[Any]:
    """Ray with 4 logical CPUs in this process.

    What uses it is marked `xdist_group("ray")`, so that one process runs all of it and there is one runtime.
    """
    ray = pytest.importorskip("ray")
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("OMP_NUM_THREADS", raising=False)  # so that Ray decides how many threads its workers have
        ray.init(
            address="local",  # another program's cluster on this machine is not joined
            num_cpus=4,
            include_dashboard=False,
            object_store_memory=256 * 2**20,
            logging_level="ERROR",
            log_to_driver=False,
        )
    yield ray
    ray.shutdown()


@pytest.fixture
def make_runner() -> Iterator[Any]:
    """Make runners of a `CountingEnv`, or of what `env` says; other settings go by their plain names.

    They are closed when the test ends.
    """
    from corral import PPOConfig  # torch is imported after the environment variables above are set
    from corral.runners.runner import EnvRunner
    from corral.testing import CountingEnv

    runners: list[EnvRunner] = []

    def make(env: Any = CountingEnv, *, num_envs: int | None = 1, worker_index: int = 0, **settings: Any) -> EnvRunner:
        events = {name: settings.pop(name) for name in [*settings] if name.startswith("on_")}
        classes = {"callbacks_class": settings.pop("callbacks_class")} if "callbacks_class" in settings else {}
        # The check at start would use up the first episode of sub-env 0.
        settings = {"seed": 0, "disable_env_checking": env is CountingEnv, **settings}
        config = PPOConfig().copy(env=env, num_envs_per_env_runner=num_envs, **settings)
        runner = EnvRunner(config.callbacks(**classes, **events).freeze(), worker_index)
        runners.append(runner)
        return runner

    yield make
    for runner in runners:
        runner.stop()


@pytest.fixture(autouse=True)
def ray_stays_unseen(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Hide a runtime from tests that are not about Ray: the engine of `"auto"` is not to depend on the tests before."""
    groups = [mark.args[0] for mark in request.node.iter_markers("xdist_group")]
    ray = sys.modules.get("ray")
    if ray is None or "ray" in groups:
        return
    is_initialized = ray.is_initialized

    def is_seen() -> bool:  # by Ray itself: its registry of envs would start a second runtime, which Ray refuses
        return bool(sys._getframe(1).f_globals["__name__"].startswith("ray.") and is_initialized())

    monkeypatch.setattr("ray.is_initialized", is_seen)


@pytest.hookimpl(wrapper=True)
def pytest_collection_modifyitems(items: list[Any]) -> Any:
    """Leave to `make slow` what is `slow_on_ray` and `slow_cases`, and let `xdist_group` work.

    What starts on Ray takes seconds to start. And xdist 3.8 writes a test's group into an attribute that pytest 9.2
    does not read. All workers have one order again.
    """
    if items and hasattr(items[0].config, "workerinput"):
        items.sort(key=lambda item: str(item.path))
    for item in items:
        on_ray = any(mark.args == ("ray",) for mark in item.iter_markers("xdist_group"))
        if on_ray and item.get_closest_marker("slow_on_ray"):
            item.add_marker(pytest.mark.slow)
        case = item.callspec.id if hasattr(item, "callspec") else ""
        if any(text in case for mark in item.iter_markers("slow_cases") for text in mark.args):
            item.add_marker(pytest.mark.slow)
    result = yield
    for item in items:
        grouped = vars(item).get("_nodeid")
        if grouped is not None and hasattr(item, "_id"):
            item._id = type(item._id).parse(grouped)
    return result
