"""Compares PPO on envs of tensors with BenchMARL (VMAS's balance) and with TorchRL (cart-pole): env steps per CPU second.

    python -m venv .venv-tensors
    .venv-tensors/bin/pip install torch==2.13.0
    .venv-tensors/bin/pip install --requirement benchmarks/requirements-tensor-envs.txt --editable .
    .venv-tensors/bin/pip install --no-deps benchmarl==1.5.2
    .venv-tensors/bin/python benchmarks/bench_tensor_envs.py

Prints a table per env. Within a pair the systems run one after the other, each in a process of its own with one thread,
and pairs swap who is first. The ratio is the median of the ratios within the pairs; the rates are medians. Rates count
the CPU seconds of whole iterations, sampling and learning, after `--warmup` iterations. With `--curves` the table shows
the mean returns of an agent by iteration, with one seed per pair.

    .venv-tensors/bin/python benchmarks/bench_tensor_envs.py --only balance --curves --hidden 64 --iterations 20 --pairs 2
"""

import argparse
import statistics
import sys
from pathlib import Path
from typing import Any

import machine
from processes import run_script
from statistics_of_pairs import ratio_of_pairs

HERE = Path(__file__).resolve().parent
TIMEOUT_SECONDS = 1800.0
# The first of each env is Corral on tensors; all others are compared with it.
SYSTEMS = {
    "balance": ("corral:balance:tensors", "corral:balance:arrays", "benchmarl:balance:plain", "benchmarl:balance:tanh"),
    "cart_pole": ("corral:cart_pole:tensors", "corral:cart_pole:arrays", "torchrl:cart_pole:plain"),
}
NAMES = {
    "tensors": "Corral",
    "arrays": "Corral, on arrays because a callback listens",
    "benchmarl:balance:plain": "BenchMARL, IPPO",
    "benchmarl:balance:tanh": "BenchMARL, IPPO with its default TanhNormal",
    "torchrl:cart_pole:plain": "TorchRL, ClipPPOLoss",
}
PACKAGES = ("torch", "tensordict", "torchrl", "benchmarl", "vmas", "numpy")
PARTS = ("env_step", "inference", "storage", "returns", "learning")
# Passed on to `tensor_envs_side.py`.
SIZES = {"num_envs": 1024, "hidden": 256, "rows": 32, "minibatch": 4096, "epochs": 4, "iterations": 3, "warmup": 1}


def main() -> int:
    """Take all measurements and print the tables; return 1 if one failed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--python", default=sys.executable, help="an interpreter with Corral and the rivals")
    parser.add_argument("--torchrl-python", help="another one for TorchRL alone, such as one with a newer version")
    parser.add_argument("--only", default="balance,cart_pole", help="envs, or systems such as corral:balance:tensors")
    parser.add_argument("--pairs", type=int, default=3)
    parser.add_argument("--curves", action="store_true", help="show the returns by iteration")
    for name, default in SIZES.items():
        parser.add_argument("--" + name.replace("_", "-"), type=int, default=default)
    options = parser.parse_args()
    only = options.only.split(",")
    is_whole = True
    print(f"Commit {machine.measured_commit(HERE.parent)}. {machine.describe(options.python, options.python)['CPU']}.")
    for python in filter(None, (options.python, options.torchrl_python)):
        print(machine._versions(python, *PACKAGES))
    for env, systems in SYSTEMS.items():
        chosen = [system for system in systems if env in only or system in only]
        found: dict[str, list[dict[str, Any] | None]] = {system: [] for system in chosen}
        for pair in range(options.pairs if chosen else 0):
            for system in chosen if pair % 2 == 0 else reversed(chosen):
                line = measure(system, pair, options)
                is_whole &= line is not None
                found[system].append(line)
        if chosen:
            print(render(env, options, found), flush=True)
    return 0 if is_whole else 1


def measure(system: str, seed: int, options: argparse.Namespace) -> dict[str, Any] | None:
    """Return what one process measured, or `None`."""
    is_other = system.startswith("torchrl") and options.torchrl_python
    command = [options.torchrl_python if is_other else options.python, str(HERE / "tensor_envs_side.py"), system]
    for name in SIZES:
        command += ["--" + name.replace("_", "-"), str(getattr(options, name))]
    outcome = run_script([*command, "--seed", str(seed)], TIMEOUT_SECONDS, HERE.parent)
    if outcome.line is None:
        print(f"{system}: {outcome.error}", file=sys.stderr)
    else:
        print(f"{system} seed {seed}: {outcome.line['env_steps_per_s']:,.0f}", file=sys.stderr, flush=True)
    return outcome.line


def render(env: str, options: argparse.Namespace, found: dict[str, list[dict[str, Any] | None]]) -> str:
    """Return the table of an env: rates, ratios of Corral on tensors to each system, and the shares of Corral's time."""
    sizes = ", ".join(f"{name} {getattr(options, name)}" for name in SIZES)
    lines = [f"\n## PPO, {env}\n", f"{sizes}; {options.pairs} pairs, one thread.\n"]
    lines += ["| System | Env steps per CPU second | Corral is times as fast |", "| --- | ---: | ---: |"]
    first = next(iter(found))
    for system, measured in found.items():
        rates = [line["env_steps_per_s"] for line in measured if line is not None]
        pairs = zip(found[first], measured, strict=True)
        ratio = ratio_of_pairs([a["env_steps_per_s"] / b["env_steps_per_s"] for a, b in pairs if a and b])
        shown = "" if ratio is None or system == first else f"{ratio.median:.2f} ({ratio.low:.2f} to {ratio.high:.2f})"
        name = NAMES.get(system) or NAMES[system.rpartition(":")[2]]
        lines.append(f"| {name} | {statistics.median(rates):,.0f} | {shown} |" if rates else f"| {name} | failed | |")
    for system, measured in found.items():
        if system.startswith("corral") and any(measured):
            lines.append(f"\n{NAMES[system.rpartition(':')[2]]}, shares of CPU time: {shares(measured)}.")
    if options.curves:
        for system, measured in found.items():
            for seed, line in enumerate(measured):
                returns = " ".join("-" if x is None else f"{x:.1f}" for x in line["returns"]) if line else "failed"
                lines.append(f"\n{system}, seed {seed}: {returns}")
    return "\n".join(lines)


def shares(measured: list[dict[str, Any] | None]) -> str:
    """Return the shares of the parts of an iteration, over all measurements."""
    timers = [line["timers"] for line in measured if line is not None]
    whole = sum(timer["iteration"] for timer in timers)
    found = {part: sum(timer[part] for timer in timers) / whole for part in PARTS}
    return ", ".join(
        f"{part} {100 * share:.0f}%" for part, share in {**found, "other": 1 - sum(found.values())}.items()
    )


if __name__ == "__main__":
    sys.exit(main())
