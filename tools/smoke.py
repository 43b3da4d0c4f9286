"""Tries an installed Corral as a user would, without the clone: `make wheel` runs it in clean environments."""

from __future__ import annotations

import importlib.metadata
import subprocess
import sys
import tempfile
from pathlib import Path


def run(*arguments: str, cwd: Path) -> str:
    """Run the installed command, and return what it prints.

    Raises:
        RuntimeError: It failed.
    """
    command = [str(Path(sys.executable).with_name("corral")), *arguments]
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{' '.join(arguments)}: exit status {done.returncode}\n{done.stdout}{done.stderr}")
    return done.stdout


def main() -> int:
    """Train, continue, evaluate, and load a policy, with what the wheel installed; return 0."""
    import corral

    home = Path(corral.__file__).parent
    if "site-packages" not in home.parts:
        raise RuntimeError(f"corral is imported from {home}, and not from an installed wheel.")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        print(run("--version", cwd=folder).strip())
        run("train", "--tuned", "CartPole-v1", "--stop", "num_env_steps=512", "--run-dir", "run", cwd=folder)
        run("train", "--resume", "run", "--stop", "num_env_steps=1024", cwd=folder)
        print(run("evaluate", "run", "--episodes", "5", cwd=folder))
        workers = ["--set", "env_runners.num_env_runners=2", "--stop", "num_env_steps=2000"]
        run("train", "--algo", "DQN", "--env", "CartPole-v1", *workers, cwd=folder)
        policy = corral.load_policy(folder / "run")
        print("action", policy([0.0, 0.0, 0.0, 0.0]))
        assert "LunarLander-v3" in run("list", "tuned", cwd=folder)
        assert "lambda_" in run("config", "PPO", cwd=folder)
        run("report", "run", "-o", "report.html", cwd=folder)
        run("plot", "run", "-o", "curves.svg", cwd=folder)
    for package in ("torch", "numpy", "gymnasium", "pydantic", "plotly", "matplotlib", "tensorboard"):
        print(package, importlib.metadata.version(package))
    return 0


if __name__ == "__main__":
    sys.exit(main())
