"""Named actors where processes begin and end: forks, scripts, killed and interrupted clients, sub-envs."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from multiprocessing.connection import Client
from pathlib import Path
from typing import Any

import gymnasium as gym
import pytest
from forms import register_by_value

from corral import PPOConfig, coordination
from corral.engines import make_engine
from corral.engines.actors import Remote
from corral.errors import CoordinationError

register_by_value(sys.modules[__name__])


class Counter:
    """Counts; `hold` keeps a call under way until a file is there."""

    def __init__(self) -> None:
        self.count = 0

    def inc(self, n: int = 1) -> int:
        self.count += n
        return self.count

    def hold(self, started: str, release: str) -> int:
        Path(started).touch()
        wait_until(Path(release).exists)
        return self.inc(100)


def num_threads() -> int:
    return sum(thread.name == "corral-coordination" for thread in threading.enumerate())


def wait_until(condition: Callable[[], Any], timeout_s: float = 30.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_a_killed_client_costs_nobody_else_anything(name: str, tmp_path: Path) -> None:
    counter = coordination.create(name, Counter)
    started, release = tmp_path / "started", tmp_path / "release"
    threads_before = num_threads()
    worker = make_engine("process").start(dict)
    worker.call(lambda _: counter.call("hold", str(started), str(release)))
    wait_until(started.exists)
    os.kill(worker.pid, signal.SIGKILL)
    wait_until(lambda: not worker.alive())
    release.touch()
    assert counter.call("inc") == 101  # the call that was under way continued to its end
    survivor = make_engine("process").start(dict)
    assert survivor.call(lambda _: counter.call("inc")).result(30) == 102
    survivor.kill()
    wait_until(lambda: num_threads() <= threads_before)


def test_a_client_that_stops_while_it_connects_holds_up_nobody(name: str) -> None:
    counter = coordination.create(name, Counter)
    location = coordination.environment()[coordination.ENVIRONMENT_VARIABLE]
    address = "\0" + location.split("@")[1]
    with socket.socket(socket.AF_UNIX) as silent:
        silent.connect(address)  # and never says a word
        assert Remote(location).call(name, "inc", (), {}) == 1
    with pytest.raises(Exception, match=r"digest|authentication"):
        Client(address, authkey=b"a guess")
    assert counter.call("inc") == 2


def test_an_interrupted_call_s_answer_is_not_taken_for_the_next_one_s(name: str, tmp_path: Path) -> None:
    class Interrupt(Exception):
        pass

    def interrupt(*_: Any) -> None:
        raise Interrupt

    coordination.create(name, Counter)
    remote = Remote(coordination.environment()[coordination.ENVIRONMENT_VARIABLE])
    started, release = tmp_path / "started", tmp_path / "release"
    before = signal.signal(signal.SIGUSR1, interrupt)
    main = threading.get_ident()

    def interrupt_when_started() -> None:
        wait_until(started.exists)
        signal.pthread_kill(main, signal.SIGUSR1)

    thread = threading.Thread(target=interrupt_when_started)
    thread.start()
    try:
        with pytest.raises(Interrupt):
            remote.call(name, "hold", (str(started), str(release)), {})
    finally:
        signal.signal(signal.SIGUSR1, before)
        release.touch()
        thread.join()
    wait_until(lambda: coordination.get(name).call("inc", 0) == 100)
    assert remote.call(name, "inc", (), {}) == 101


def test_an_address_where_nobody_is_says_so(name: str) -> None:
    for location in ("00:@corral-nobody", "nonsense"):
        with pytest.raises(CoordinationError, match=rf"cannot be reached.*{coordination.ENVIRONMENT_VARIABLE}"):
            Remote(location).call(name, "inc", (), {})


def test_threads_of_a_client_do_not_wait_for_each_other(name: str, tmp_path: Path) -> None:
    coordination.create(name, Counter)
    coordination.create(f"{name}-2", Counter)
    remote = Remote(coordination.environment()[coordination.ENVIRONMENT_VARIABLE])
    started, release = tmp_path / "started", tmp_path / "release"
    holding = threading.Thread(target=remote.call, args=(name, "hold", (str(started), str(release)), {}))
    holding.start()
    wait_until(started.exists)
    assert remote.call(f"{name}-2", "inc", (), {}) == 1
    release.touch()
    holding.join()
    assert remote.call(name, "inc", (), {}) == 101


def counted_cart_pole(config: dict[str, Any]) -> gym.Env[Any, Any]:
    class CountedEnv(gym.Wrapper[Any, Any, Any, Any]):
        def step(self, action: Any) -> Any:
            coordination.get(config["counter"]).call("inc")
            return self.env.step(action)

    return CountedEnv(gym.make("CartPole-v1"))


@pytest.mark.parametrize("vectorization", [pytest.param("sync", marks=pytest.mark.slow), "async"])
@pytest.mark.parametrize(
    ("engine", "num_env_runners"), [("local", 0), ("local", 2), pytest.param("process", 2, marks=pytest.mark.slow)]
)
def test_sub_envs_reach_what_the_driver_makes_after_they_have_started(
    engine: str, num_env_runners: int, vectorization: str, name: str
) -> None:
    config = (
        PPOConfig()
        .environment(counted_cart_pole, env_config={"counter": name}, disable_env_checking=True)
        .env_runners(
            num_env_runners=num_env_runners,
            num_envs_per_env_runner=2,
            vectorization=vectorization,
            rollout_fragment_length=16 // max(1, num_env_runners),
        )
        .training(train_batch_size_per_learner=32, minibatch_size=None, num_epochs=1)
        .engine(engine)
    )
    with config.build() as algo:
        counter = coordination.create(name, Counter)
        result = algo.train()
    assert coordination.ENVIRONMENT_VARIABLE not in os.environ
    assert counter.call("inc", 0) == result["num_env_steps_sampled_lifetime"] >= 32


SCRIPT = """
import multiprocessing, os, subprocess, sys
from corral import coordination

class Counter:
    def __init__(self):
        self.count = 0
    def inc(self, n):
        self.count += n
        return self.count

def child():
    coordination.create("from the child", Counter).call("inc", 5)
    coordination.get("counter").call("inc", 10)
    forked = os.fork()  # while it has a connection, which must not be shared
    for _ in range(100):
        coordination.get("counter").call("inc", 1)
        last = coordination.get("from the child").call("inc", 0)
        assert last == 5, last
    if not forked:
        os._exit(0)
    assert os.waitpid(forked, 0)[1] == 0

if __name__ == "__main__":
    counter = coordination.create("counter", Counter)
    if os.fork() == 0:
        counter.call("inc", 1)
        os._exit(0)
    os.wait()
    assert counter.call("inc", 0) == 1
    os.environ.update(coordination.environment())
    for method in ("spawn", "fork"):
        context = multiprocessing.get_context(method)
        process = context.Process(target=child)
        process.start()
        process.join()
        assert process.exitcode == 0
        assert coordination.get("from the child").call("inc", 0) == 5
        coordination.remove("from the child")
    code = "from corral import coordination; coordination.get('counter').call('inc', 1000)"
    subprocess.run([sys.executable, "-c", code])
    print(counter.call("inc", 0))
"""


def test_a_script_s_forks_and_children_reach_it_and_nothing_stays_behind(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SCRIPT, encoding="utf-8")
    scratch = tmp_path / "tmp"
    scratch.mkdir()
    done = subprocess.run(
        [sys.executable, "-X", "dev", "-W", "error", "script.py"],
        cwd=tmp_path,
        env={**os.environ, "TMPDIR": str(scratch)},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "1421\n", "")
    assert list(scratch.iterdir()) == []


def test_importing_coordination_is_light() -> None:
    code = "import sys, corral.coordination; print([n for n in ('torch', 'ray', 'gymnasium') if n in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


def test_the_driver_s_own_environment_stays_as_it_is(name: str) -> None:
    coordination.create(name, Counter)
    assert coordination.environment().keys() == {coordination.ENVIRONMENT_VARIABLE}
    assert coordination.ENVIRONMENT_VARIABLE not in os.environ
