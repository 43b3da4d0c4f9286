"""Counts what one `train()` costs, without a clock: functions and files entered, and Python calls per env step.

    python benchmarks/costs.py                          measures all cases, and prints them next to costs.json
    python benchmarks/costs.py --write                  writes costs.json and the table of docs/design.md
    python benchmarks/costs.py --list CASE [--most 40]  lists the functions of one case by their number of calls

Only named functions of corral count, so that all versions of Python agree: lambdas and comprehensions do not. The
counts are the same in every run. `tests/test_costs.py` holds them at the numbers of costs.json.
"""

from __future__ import annotations

import argparse
import gc
import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import CodeType
from typing import Any, NamedTuple

import corral
from code_entered import count_calls
from corral import DQNConfig, PPOConfig, SACConfig, TD3Config

SRC = Path(corral.__file__).parent
COSTS = Path(__file__).with_name("costs.json")
DESIGN = Path(__file__).parents[1] / "docs" / "design.md"
BEGIN, END = "<!-- costs: written by benchmarks/costs.py -->\n", "<!-- end of costs -->\n"


class Cost(NamedTuple):
    """What one iteration costs.

    Attributes:
        functions: Named functions that it enters.
        files: Files of these functions.
        calls_per_step: Calls of these functions per env step.
    """

    functions: int
    files: int
    calls_per_step: float


def _ppo() -> Any:
    return (
        PPOConfig()
        .environment("CartPole-v1")
        .env_runners(num_envs_per_env_runner=8)
        .training(train_batch_size_per_learner=2048, minibatch_size=128, num_epochs=4)
    )


def _ppo_of_four_agents() -> Any:
    return (
        _ppo()
        .training(train_batch_size_per_learner=512)
        .environment(corral.make_multi_agent("CartPole-v1"), env_config={"num_agents": 4})
        .multi_agent(policies={"shared"})
    )


def _off_policy(config: Any) -> Any:
    """Return the config with small layers: their width changes no count."""
    config.training(num_steps_sampled_before_learning_starts=900).learners(num_threads=1)
    return config.rl_module(model_config={"fcnet_hiddens": [32, 32]})


CASES: dict[str, tuple[str, Callable[[], Any]]] = {
    "ppo": ("PPO, CartPole, 8 envs", _ppo),
    "ppo_process": (
        "PPO with a runner in another process, in the driver",
        lambda: _ppo().env_runners(num_env_runners=1).engine("process"),
    ),
    "ppo_four_agents": ("PPO, four agents", _ppo_of_four_agents),
    "ppo_memory": (
        "PPO with an LSTM",
        lambda: _ppo().training(train_batch_size_per_learner=512).rl_module(model_config={"use_lstm": True}),
    ),
    "dqn": (
        "DQN, CartPole, an update of 32 every 4 env steps",
        lambda: (
            _off_policy(DQNConfig().environment("CartPole-v1"))
            .rl_module(model_config={"fcnet_hiddens": [32, 32], "use_layernorm": False})
            .training(train_batch_size_per_learner=32, target_network_update_freq=500, tau=1.0, lr=1e-3)
        ),
    ),
    "sac": (
        "SAC, Pendulum, an update of 256 per env step",
        lambda: _off_policy(SACConfig().environment("Pendulum-v1")),
    ),
    "td3": (
        "TD3, Pendulum, an update of 256 per env step",
        lambda: _off_policy(TD3Config().environment("Pendulum-v1")),
    ),
}


def count_case(name: str) -> tuple[Counter[CodeType], int]:
    """Return how often one iteration of a case calls each named function, and its env steps.

    It is the second iteration: everything has learned before, and nothing is made for the first time.
    """
    with CASES[name][1]().debugging(seed=0).build() as algo:
        algo.train()
        before = algo.num_env_steps_sampled_lifetime
        gc.collect()  # what earlier runs of this process left behind would be ended, and counted, on the way
        gc.disable()
        try:
            calls = count_calls(algo.train, SRC)
        finally:
            gc.enable()
        return calls, algo.num_env_steps_sampled_lifetime - before


def measure(name: str) -> Cost:
    """Return the cost of a case."""
    calls, num_steps = count_case(name)
    return Cost(len(calls), len({code.co_filename for code in calls}), round(calls.total() / num_steps, 2))


def read_costs() -> dict[str, Cost]:
    """Return the costs of costs.json by case."""
    return {name: Cost(**cost) for name, cost in json.loads(COSTS.read_text()).items()}


def costs_table(costs: dict[str, Cost]) -> str:
    """Return the table of docs/design.md."""
    rows = [f"| {CASES[name][0]} | {c.functions} | {c.files} | {c.calls_per_step:g} |" for name, c in costs.items()]
    head = "| one `train()` of | functions | files | Python calls per env step |\n| --- | --- | --- | --- |\n"
    return head + "\n".join(rows) + "\n"


def write_costs(costs: dict[str, Cost]) -> None:
    """Write costs.json and the table of docs/design.md."""
    COSTS.write_text(json.dumps({name: cost._asdict() for name, cost in costs.items()}, indent=2) + "\n")
    before, _, rest = DESIGN.read_text(encoding="utf-8").partition(BEGIN)
    DESIGN.write_text(f"{before}{BEGIN}\n{costs_table(costs)}\n{END}{rest.partition(END)[2]}", encoding="utf-8")


def _list_case(name: str, most: int) -> None:
    calls, num_steps = count_case(name)
    for code, count in calls.most_common(most):
        print(f"{count / num_steps:9.3f} {Path(code.co_filename).relative_to(SRC)} {code.co_qualname}")


def main() -> None:
    """Measures all cases, or lists the functions of one."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--list", choices=CASES)
    parser.add_argument("--most", type=int, default=1000)
    arguments = parser.parse_args()
    if arguments.list:
        _list_case(arguments.list, arguments.most)
        return
    known, costs = read_costs() if COSTS.exists() else {}, {}
    for name in CASES:
        costs[name] = measure(name)
        print(f"{name:16} {tuple(costs[name])}  costs.json: {tuple(known.get(name, ()))}", flush=True)
    if arguments.write:
        write_costs(costs)


if __name__ == "__main__":
    main()
