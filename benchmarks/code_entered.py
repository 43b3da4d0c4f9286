"""Counts the files and functions that one `train()` of PPO enters: how much a reader meets on the way.

    python benchmarks/code_entered.py [--system corral|sb3|rllib] [--list]

Prints one JSON line: files, functions, lines of code in these functions, and Python calls. Only the code of the system
itself counts, on CartPole-v1 with 512 env steps and a default config, after one warm-up iteration. Only named functions
count: lambdas and comprehensions do not, so that all versions of Python agree. `costs.py` counts other cases of corral.
"""

from __future__ import annotations

import argparse
import ast
import importlib
import json
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import CodeType, FrameType
from typing import Any


def _corral() -> tuple[str, Callable[[], Any]]:
    from corral import PPOConfig

    config = PPOConfig().environment("CartPole-v1").env_runners(num_envs_per_env_runner=8)
    return "corral", config.training(train_batch_size_per_learner=512).build().train


def _sb3() -> tuple[str, Callable[[], Any]]:
    from stable_baselines3 import PPO

    model = PPO("MlpPolicy", "CartPole-v1", n_steps=512, device="cpu")
    return "stable_baselines3", lambda: model.learn(512, reset_num_timesteps=False)


def _rllib() -> tuple[str, Callable[[], Any]]:
    from ray.rllib.algorithms.ppo import PPOConfig

    config = PPOConfig().environment("CartPole-v1").env_runners(num_env_runners=0)
    return "ray.rllib", config.training(train_batch_size_per_learner=512).build_algo().train


SYSTEMS = {"corral": _corral, "sb3": _sb3, "rllib": _rllib}


def count_calls(train: Callable[[], Any], root: Path) -> Counter[CodeType]:
    """Returns how often each named function below a folder is called in one call of `train`."""
    calls: Counter[CodeType] = Counter()

    def note(frame: FrameType, event: str, _: Any) -> None:
        if event == "call":
            calls[frame.f_code] += 1

    sys.setprofile(note)
    try:
        train()
    finally:
        sys.setprofile(None)
    return Counter(
        {
            code: count
            for code, count in calls.items()
            if code.co_filename.startswith(str(root)) and not code.co_name.startswith("<")
        }
    )


def count_lines(codes: list[CodeType]) -> int:
    """Returns the lines of these functions, without blank lines, comments and docstrings."""
    total = 0
    for path in {code.co_filename for code in codes}:
        source = Path(path).read_text(encoding="utf-8")
        lines = source.splitlines()
        starts = {code.co_firstlineno for code in codes if code.co_filename == path}
        chosen: set[int] = set()
        for node in ast.walk(ast.parse(source)):
            if not isinstance(node, (ast.FunctionDef, ast.Lambda)):
                continue
            decorators = getattr(node, "decorator_list", [])
            if min([node.lineno, *(decorator.lineno for decorator in decorators)]) not in starts:
                continue
            assert node.end_lineno is not None
            chosen |= set(range(node.lineno, node.end_lineno + 1))
            if isinstance(node, ast.FunctionDef) and ast.get_docstring(node) is not None:
                first = node.body[0]
                assert first.end_lineno is not None
                chosen -= set(range(first.lineno, first.end_lineno + 1))
        total += sum(1 for number in chosen if lines[number - 1].strip() and lines[number - 1].strip()[0] != "#")
    return total


def main() -> None:
    """Counts, and prints one JSON line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--system", choices=SYSTEMS, default="corral")
    parser.add_argument("--list", action="store_true", help="also list the functions by file")
    arguments = parser.parse_args()
    name, train = SYSTEMS[arguments.system]()
    origin = importlib.import_module(name).__file__
    assert origin is not None
    root = Path(origin).parent
    train()
    calls = count_calls(train, root)
    by_file: dict[str, list[str]] = {}
    for code in calls:
        by_file.setdefault(str(Path(code.co_filename).relative_to(root)), []).append(code.co_qualname)
    if arguments.list:
        for path, names in sorted(by_file.items()):
            print(f"{path}: {len(names)}", *sorted(names), sep="\n    ")
    counts = {"files": len(by_file), "functions": len(calls), "lines": count_lines([*calls]), "calls": calls.total()}
    print(json.dumps({"system": arguments.system, **counts}))


if __name__ == "__main__":
    main()
