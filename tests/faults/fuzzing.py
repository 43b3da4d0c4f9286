"""Damages files at random, reads them, and prints each outcome that is neither a value nor one of Corral's errors.

Run as a script with a target, a seed and a number of cases. The case that is being read is in a file, so that a crash
of the process names it too: `python fuzzing.py TARGET SEED 1 --from CASE` repeats it.
"""

from __future__ import annotations

import argparse
import json
import random
import resource
import signal
import sys
import tempfile
import traceback
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

TESTS = Path(__file__).parents[1]
sys.path[:0] = [str(TESTS), str(TESTS / "checkpoint")]

import forging  # noqa: E402
import numpy as np  # noqa: E402

import offline.test_sources as offline  # noqa: E402
from corral.algorithms.registry import config_from_dict  # noqa: E402
from corral.algorithms.stopping import StopCriteria, criteria_from_file  # noqa: E402
from corral.data.offline.sources import open_source  # noqa: E402
from corral.errors import CorralError  # noqa: E402
from corral.runs.checkpoint import read_checkpoint  # noqa: E402
from corral.tools.cli.experiment import read_experiment  # noqa: E402

LIMIT_S = 20
MAX_BYTES = 6 << 30
HARMFUL = ("os.system", "os.exec", "os.posix_spawn", "subprocess.Popen", "socket.connect", "shutil.rmtree", "os.rename")
"""What reading does to a machine only if a file made it run code."""

TOKENS = [
    b"\x00" * 8,
    b"\xff" * 8,
    b"-1",
    b"1e999",
    b"NaN",
    b"null",
    b"[" * 2000,
    b"{" * 2000,
    b"&a [*a]",
    b"!!python/x",
]
EXPERIMENT = """algo: PPO
environment: {env: CartPole-v1, env_config: {a: [1, 2], b: {c: null}}}
training: {lr: [[0, 1.0e-3], [1000, 1e-4]], minibatch_size: 64, gamma: 0.99}
rl_module:
  model_config: &model {fcnet_hiddens: [64, 64], fcnet_activation: relu}
evaluation: {evaluation_interval: 5, evaluation_config: {explore: false}}
exploration: {exploration_config: {type: StochasticSampling}}
fault_tolerance: {env_step_timeout_s: 3}
checkpointing: {num_checkpoints_kept: 3}
reporting: {loggers: [csv, json]}
debugging: {seed: 3, log_level: INFO}
engine: {engine_name: local}
stop: {num_env_steps: 1_000, env_runners/episode_return_mean: {below: -3}}
"""


def mutated(content: bytes, rng: random.Random) -> bytes:
    """Return bytes with one to four changes: bits, cuts, repeated and foreign parts."""
    found = bytearray(content)
    for _ in range(rng.choice((1, 1, 2, 4))):
        at, size = rng.randrange(len(found) + 1), min(len(found), rng.choice((1, 1, 2, 8, 64)))
        kind = rng.randrange(6)
        if kind == 0 and at < len(found):
            found[at] ^= 1 << rng.randrange(8)
        elif kind == 1:
            del found[at:]
        elif kind == 2:
            del found[at : at + size]
        elif kind == 3:
            found[at:at] = found[max(0, at - size) : at]
        elif kind == 4:
            found[at : at + size] = rng.randbytes(size)
        else:
            found[at:at] = rng.choice(TOKENS)
    return bytes(found)


def checkpoint_target(folder: Path) -> Callable[[random.Random], object]:
    """Return a function that damages a checkpoint, of which half of the files have the digests of the damage."""
    path = folder / "checkpoint"
    forging.write(path)
    names = ["metadata.json", *forging.FILES]
    contents = {
        name: (path / name if name == "metadata.json" else forging.data(path) / name).read_bytes() for name in names
    }

    def read(rng: random.Random) -> object:
        for name in names:
            (path / name if name == "metadata.json" else forging.data(path) / name).write_bytes(contents[name])
        name = rng.choice(names)
        damaged = mutated(contents[name], rng)
        if name == "metadata.json":
            (path / name).write_bytes(damaged)
        elif rng.random() < 0.2:
            (forging.data(path) / name).write_bytes(damaged)
        else:
            forging.forge(path, name, damaged)
        return read_checkpoint(path)

    return read


def data_target(folder: Path) -> Callable[[random.Random], object]:
    """Return a function that damages recorded data: of Corral, and of RLlib as Parquet and as JSON."""
    offline.write(folder / "own.parquet", offline.random_steps(np.random.default_rng(3), 12))
    of_rllib = TESTS / "compat" / "data_of_rllib"
    files = [folder / "own.parquet", *of_rllib.rglob("*.parquet"), *of_rllib.rglob("*.json")]
    small = [file for file in files if file.stat().st_size < 1 << 20]
    contents = [(file.suffix, file.read_bytes()) for file in small]

    def read(rng: random.Random) -> object:
        suffix, content = rng.choice(contents[:1] * 3 + contents)
        path = folder / f"damaged{suffix}"
        path.write_bytes(mutated(content, rng))
        try:
            return [part.num_steps for part in open_source(path).parts()]
        finally:
            path.unlink()

    return read


def yaml_target(folder: Path) -> Callable[[random.Random], object]:
    """Return a function that damages a file of an experiment, and makes a config of it."""
    path = folder / "experiment.yaml"

    def read(rng: random.Random) -> object:
        path.write_bytes(mutated(EXPERIMENT.encode(), rng))
        settings = read_experiment(path)
        stop = settings.pop("stop", None) or {}
        config_from_dict(settings).validate()
        return StopCriteria(criteria_from_file(stop))

    return read


TARGETS = {"checkpoint": checkpoint_target, "data": data_target, "yaml": yaml_target}


class TooLongError(BaseException):
    """A read did not end within `LIMIT_S`; no reader may catch it."""


def raise_too_long(*_: Any) -> None:
    raise TooLongError


def watch_for_harm(done: list[str]) -> None:
    """Note events that a file must not cause in a list."""
    sys.addaudithook(lambda event, arguments: done.append(f"{event}{arguments!r:.200}") if event in HARMFUL else None)


def run(target: str, seed: int, cases: range, current: Path) -> None:
    """Read damaged files, and print a line of JSON for each wrong outcome, and one with the counts at the end."""
    counts, harm = Counter[str](), list[str]()
    with tempfile.TemporaryDirectory() as folder:
        read = TARGETS[target](Path(folder))
        watch_for_harm(harm)
        signal.signal(signal.SIGALRM, raise_too_long)
        for case in cases:
            current.write_text(f"{case}")
            harm.clear()
            wrong = None
            signal.alarm(LIMIT_S)
            try:
                read(random.Random(f"{seed}-{case}"))
                counts["read"] += 1
            except CorralError as error:
                counts["refused"] += 1
                if len(str(error)) > 4000:
                    wrong = f"a message of {len(str(error))} characters: {error!s:.300}"
            except (Exception, TooLongError):
                wrong = traceback.format_exc()[-1500:]
            finally:
                signal.alarm(0)
            if wrong or harm:
                print(json.dumps({"case": case, "wrong": wrong, "harm": [*harm]}), flush=True)
    print(json.dumps({"counts": counts}), flush=True)


def main() -> None:
    """Read the arguments, and run."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("target", choices=TARGETS)
    parser.add_argument("seed", type=int)
    parser.add_argument("number", type=int)
    parser.add_argument("--from", dest="first", type=int, default=0)
    parser.add_argument("--current", type=Path, default=Path("/dev/null"))
    options = parser.parse_args()
    resource.setrlimit(resource.RLIMIT_AS, (MAX_BYTES, MAX_BYTES))
    run(options.target, options.seed, range(options.first, options.first + options.number), options.current)


if __name__ == "__main__":
    main()
