"""Scripts as `python -m corral.compat.rllib` runs them, each in a process of its own: the finder is global."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import warm

Run = Callable[..., "subprocess.CompletedProcess[str]"]

# On the path of an interpreter, this makes Ray look as if it were not installed, also in the processes that it starts.
HIDE_RAY = """
import sys
from importlib.machinery import PathFinder

class WithoutRay:
    find_spec = staticmethod(
        lambda name, path=None, target=None: None
        if name.partition(".")[0] == "ray"
        else PathFinder.find_spec(name, path, target)
    )

sys.meta_path[sys.meta_path.index(PathFinder)] = WithoutRay
"""


def run_script(
    tmp_path: Path,
    script: str | list[str],
    *arguments: str,
    with_ray: bool = True,
    directory: Path | None = None,
    code: int | None = 0,
    timeout_s: float = 120,
) -> subprocess.CompletedProcess[str]:
    """Run a script text, or a list of arguments, in a process of its own, and check the exit code."""
    if isinstance(script, str):
        (tmp_path / "script.py").write_text(script)
        script = [str(tmp_path / "script.py"), *arguments]
    environment = {**os.environ, "RAY_USAGE_STATS_ENABLED": "0"}
    environment.pop("PYTHONUNBUFFERED", None)  # with it, the lines of several processes are mixed
    command = [sys.executable, "-m", "corral.compat.rllib", *script]
    if not with_ray:
        hidden = tmp_path / "without_ray"
        hidden.mkdir(exist_ok=True)
        (hidden / "sitecustomize.py").write_text(HIDE_RAY)
        environment["PYTHONPATH"] = os.pathsep.join([str(hidden), environment.get("PYTHONPATH", "")])
    before = "" if with_ray else HIDE_RAY
    done = warm.run(command, before=before, cwd=directory or tmp_path, env=environment, timeout=timeout_s)
    assert code is None or done.returncode == code, done.stdout + done.stderr
    return done


def shrink(**defaults: object) -> str:
    """Return lines before a snippet that make the defaults of RLlib smaller, so that the snippet runs quickly."""
    small = {"PPO": {"num_epochs": 1, "num_env_runners": 0, "train_batch_size": 600, **defaults}}
    small["DQN"] = {"min_sample_timesteps_per_iteration": 100}
    return f"""
from corral.compat.rllib import settings

for name, smaller in {small!r}.items():
    settings.DEFAULTS[name].update(smaller)
"""
