"""Compares PPO on envs of tensors with BenchMARL (VMAS's balance) and TorchRL (cart-pole), in steps per CPU second.

    python -m venv .venv-tensors
    .venv-tensors/bin/pip install torch==2.13.0
    .venv-tensors/bin/pip install --requirement benchmarks/requirements-tensor-envs.txt --editable .
    .venv-tensors/bin/pip install --no-deps benchmarl==1.5.2
    .venv-tensors/bin/python benchmarks/bench_tensor_envs.py

Prints a table per env. Each system runs in a process of its own with one thread, and the processes take turns of one
iteration each, sampling and learning, while the others wait. A rate is the median over the turns of env steps per CPU
second, and the ratio is the median of the ratios within the turns; the turns of the warm-up do not count. With
`--curves` it also shows the mean returns of an agent by batch:

    .venv-tensors/bin/python benchmarks/bench_tensor_envs.py --only balance --curves --hidden 64 --turns 20

What is not equal: TorchRL's env of VMAS reports the time limit as a termination, so that BenchMARL values no state
beyond it, and Corral does. BenchMARL has an Adam and a limit of the gradients' norm for the policy and another one
for the critic, and Corral one for both. BenchMARL's minibatches hold whole env steps, and Corral's hold steps of
agents. The standard deviation of actions is a softplus of the net's output in BenchMARL, and an exponential in
Corral. The last layers start with other weights. An iteration of the rivals is a training and the collection of the
next batch.
"""

import argparse
import contextlib
import json
import statistics
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import machine
from processes import exit_on_signals, kill_session
from statistics_of_pairs import ratio_of_pairs

HERE = Path(__file__).resolve().parent
# The first of each env is Corral on tensors; all others are compared with it.
SYSTEMS = {
    "balance": (
        *("corral:balance:tensors", "corral:balance:arrays"),
        *("benchmarl:balance:plain", "benchmarl:balance:tanh", "floor:balance:work"),
    ),
    "cart_pole": (
        *("corral:cart_pole:tensors", "corral:cart_pole:arrays"),
        *("torchrl:cart_pole:plain", "floor:cart_pole:work"),
    ),
}
NAMES = {
    "tensors": "Corral",
    "arrays": "Corral, on arrays because a callback listens",
    "benchmarl:balance:plain": "BenchMARL, IPPO",
    "benchmarl:balance:tanh": "BenchMARL, IPPO with its default TanhNormal",
    "torchrl:cart_pole:plain": "TorchRL, ClipPPOLoss",
    "work": "only the env's steps and the passes through the nets",
}
PACKAGES = ("torch", "tensordict", "torchrl", "benchmarl", "vmas", "numpy")
PARTS = ("env_step", "inference", "storage", "returns", "learning")
# Passed on to `tensor_envs_side.py`.
SIZES = {"num_envs": 1024, "hidden": 256, "rows": 32, "minibatch": 4096, "epochs": 4}
Turn = dict[str, Any]
"""What a system wrote after an iteration; see `tensor_envs_side.take_turns`."""


def main() -> int:
    """Take all measurements and print the tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--python", default=sys.executable, help="an interpreter with Corral and the rivals")
    parser.add_argument("--torchrl-python", help="another one for TorchRL alone, such as one with a newer version")
    parser.add_argument("--only", default="balance,cart_pole", help="envs, or systems such as corral:balance:tensors")
    parser.add_argument("--turns", type=int, default=6, help="iterations of each system that count")
    parser.add_argument("--warmup", type=int, default=2, help="iterations of each system that do not count")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--curves", action="store_true", help="show the returns by batch")
    for name, default in SIZES.items():
        parser.add_argument("--" + name.replace("_", "-"), type=int, default=default)
    options = parser.parse_args()
    exit_on_signals()
    only = options.only.split(",")
    print(f"Commit {machine.measured_commit(HERE.parent)}. {machine.describe(options.python, options.python)['CPU']}.")
    for python in filter(None, (options.python, options.torchrl_python)):
        print(machine.versions(python, *PACKAGES))
    for env, systems in SYSTEMS.items():
        if chosen := [system for system in systems if env in only or system in only]:
            print(render(env, options, take_turns(chosen, options)), flush=True)
    return 0


def take_turns(systems: Sequence[str], options: argparse.Namespace) -> dict[str, list[Turn]]:
    """Start all systems, let them take turns, and return what each wrote: when it was ready, and after each turn.

    Raises:
        RuntimeError: A system failed.
    """
    with contextlib.ExitStack() as stack:
        processes = {}
        for system in systems:
            processes[system] = process = start(system, options)
            stack.callback(end, process)
        # The rivals collect their first batch before the first turn: it is in the curves, and in no rate.
        found = {system: [read_line(system, process)] for system, process in processes.items()}
        for turn in range(options.warmup + options.turns):
            for system in systems if turn % 2 == 0 else reversed(systems):
                process = processes[system]
                assert process.stdin is not None
                process.stdin.write("\n")
                process.stdin.flush()
                found[system].append(read_line(system, process))
            rates = ", ".join(f"{system} {rate_of(turns[-1]):,.0f}" for system, turns in found.items())
            print(f"turn {turn}: {rates}", file=sys.stderr, flush=True)
    return found


def start(system: str, options: argparse.Namespace) -> "subprocess.Popen[str]":
    """Start the process of a system, in a session of its own."""
    is_other = system.startswith("torchrl") and options.torchrl_python
    command = [options.torchrl_python if is_other else options.python, str(HERE / "tensor_envs_side.py"), system]
    for name in SIZES:
        command += ["--" + name.replace("_", "-"), str(getattr(options, name))]
    command += ["--seed", str(options.seed), "--iterations", str(options.warmup + options.turns)]
    return subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=HERE.parent, start_new_session=True
    )


def end(process: "subprocess.Popen[str]") -> None:
    """End the process of a system, which waits for its next turn."""
    kill_session(process.pid)
    process.communicate()  # waits, and closes the pipes


def read_line(system: str, process: "subprocess.Popen[str]") -> Turn:
    """Wait for the next line of a system."""
    assert process.stdout is not None
    line = process.stdout.readline()
    if not line:
        raise RuntimeError(f"{system} ended with status {process.wait()} and no result: see its output above.")
    found: Turn = json.loads(line)
    return found


def rate_of(turn: Turn) -> float:
    """Return env steps per CPU second."""
    rate: float = turn["env_steps"] / turn["cpu_s"]
    return rate


def render(env: str, options: argparse.Namespace, found: Mapping[str, list[Turn]]) -> str:
    """Return the table of an env: rates, ratios of Corral on tensors to each system, and where Corral's time goes."""
    sizes = ", ".join(f"{name} {getattr(options, name)}" for name in SIZES)
    lines = [f"\n## PPO, {env}\n", f"{sizes}; seed {options.seed}, {options.turns} turns, one thread.\n"]
    lines += ["| System | Env steps per CPU second | Corral is times as fast |", "| --- | ---: | ---: |"]
    rates = {system: [rate_of(turn) for turn in turns[1 + options.warmup :]] for system, turns in found.items()}
    first = next(iter(rates))
    for system, own in rates.items():
        ratio = ratio_of_pairs([ours / theirs for ours, theirs in zip(rates[first], own, strict=True)])
        shown = "" if ratio is None or system == first else f"{ratio.median:.2f} ({ratio.low:.2f} to {ratio.high:.2f})"
        lines.append(f"| {name_of(system)} | {statistics.median(own):,.0f} | {shown} |")
    for system, turns in found.items():
        if system.startswith("corral"):
            lines.append(f"\n{name_of(system)}, shares of CPU time: {shares(turns[1 + options.warmup :])}.")
    if options.curves:
        for system, turns in found.items():
            batches = [turn for turn in turns if turn["env_steps"]]
            returns = " ".join("-" if turn["return"] is None else f"{turn['return']:.1f}" for turn in batches)
            lines.append(f"\n{name_of(system)}, returns: {returns}")
    return "\n".join(lines)


def name_of(system: str) -> str:
    """Return what tables call a system."""
    return NAMES.get(system) or NAMES[system.rpartition(":")[2]]


def shares(turns: Sequence[Turn]) -> str:
    """Return the shares of the parts of an iteration, over all turns."""
    whole = sum(turn["timers"]["iteration"] for turn in turns)
    found = {part: sum(turn["timers"][part] for turn in turns) / whole for part in PARTS}
    return ", ".join(
        f"{part} {100 * share:.0f}%" for part, share in {**found, "other": 1 - sum(found.values())}.items()
    )


if __name__ == "__main__":
    sys.exit(main())
