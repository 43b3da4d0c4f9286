"""A place that cannot be written: an error that says so, and the checkpoint that was there is still whole."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import forging
import pytest
from forging import data, number_of, write

from corral import PPOConfig, SingleAgentEpisode
from corral.core.metrics.logger import MetricsError
from corral.runs.checkpoint import read_checkpoint
from corral.testing import CountingEnv

# How large a file can become, so that each of the files is the one that does not fit.
FULL = """
import json, resource, sys
sys.path.insert(0, sys.argv[1])
from pathlib import Path
import numpy as np
from forging import write
sys.dont_write_bytecode = True  # Python would cut it
for limit in (0, 10, 40, 60, 100, 200, 400, 5000):
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))
    try:
        write(Path("checkpoint"), 2, arrays={"obs": np.full(10_000, 2, np.int32)})
    except OSError as error:
        print(json.dumps([error.errno, error.__notes__]))
"""

READ_ONLY = """
import json, os, sys
sys.path.insert(0, sys.argv[1])
from pathlib import Path
from forging import number_of, write
from corral.runs.checkpoint import find_checkpoint, read_checkpoint
if os.getuid() == 0:
    os.setuid(65534)  # root may write everywhere
try:
    write(Path("checkpoint"), 2)
except OSError as error:
    print(json.dumps([error.errno, error.__notes__]))
assert number_of(read_checkpoint(find_checkpoint(Path("checkpoint")))) == 1
"""


def run(code: str, directory: Path) -> list[Any]:
    """Run a program, and return the lines that it prints."""
    command = [sys.executable, "-c", code, str(Path(forging.__file__).parent)]
    done = subprocess.run(command, cwd=directory, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def test_a_full_disk_leaves_the_old_checkpoint(tmp_path: Path) -> None:
    path = tmp_path / "checkpoint"
    write(path)
    before = sorted(path.iterdir())
    told = run(FULL, tmp_path)
    assert len(told) == 8
    for number, notes in told:
        assert number == 27 and notes == [  # EFBIG
            f"The checkpoint {path} was not written; a checkpoint that was there is unchanged."
        ]
    assert sorted(path.iterdir()) == before
    assert number_of(read_checkpoint(path)) == 1
    write(path, 3)  # there is room again
    assert number_of(read_checkpoint(path)) == 3 and data(path).is_dir()


def test_a_directory_that_cannot_be_written_is_read() -> None:
    with tempfile.TemporaryDirectory() as name:  # pytest's own directories are closed to other users
        directory = Path(name)
        directory.chmod(0o755)
        write(directory / "checkpoint")
        entries = [directory / "checkpoint", *(directory / "checkpoint").rglob("*")]
        for entry in entries:
            entry.chmod(0o555 if entry.is_dir() else 0o444)
        [(number, notes)] = run(READ_ONLY, directory)
        for entry in entries:
            entry.chmod(0o755 if entry.is_dir() else 0o644)
    assert number == 13 and len(notes) == 1  # EACCES


def test_a_place_that_does_not_exist_and_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(OSError) as caught:
        write(tmp_path / "file" / "checkpoint")
    assert f"{tmp_path / 'file' / 'checkpoint'} was not written" in caught.value.__notes__[0]
    with pytest.raises(OSError):
        write("/proc/checkpoint")


@pytest.mark.parametrize("num_env_runners", [0, 1])
def test_a_runner_whose_state_is_not_plain_costs_its_part_of_a_checkpoint(
    num_env_runners: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    class Own(SingleAgentEpisode):
        def get_state(self) -> dict[str, Any]:
            return {**super().get_state(), "own": object()}

    def ends(prev_episode_chunks: list[Any], **_: Any) -> None:  # so that states have chunks
        pass

    config = PPOConfig().environment(CountingEnv, env_config={"length": 99}).callbacks(on_episode_end=ends)
    config.env_runners(num_env_runners=num_env_runners, num_envs_per_env_runner=2, episode_class=Own)
    config.engine("local" if num_env_runners else "process").training(
        train_batch_size_per_learner=16, minibatch_size=None
    )
    with config.build() as algo:
        for _ in range(2):
            algo.train()
        path = algo.save(tmp_path / "checkpoint")
    assert f"no state of runner {num_env_runners}, so that a restored run continues as with a new one" in caplog.text
    with config.build() as algo:
        algo.restore_from_path(path)
        [logger] = algo.env_runner_group.foreach_env_runner(lambda runner: runner.metrics)
        with pytest.raises(MetricsError, match=r"choose another name"):  # a logger that was saved empty has its names
            logger.log_value("episode_return_mean", 1.0)
        restored = algo.train()["restored"]
    assert (restored["training_iteration"], restored["num_envs_restarted"]) == (2, 2)
