"""Compares what steps Pong and HalfCheetah: ale-py, EnvPool, and Gymnasium's envs one by one and in processes.

    python benchmarks/vector_envs.py --sb3-python .venv-bench/bin/python

Prints the rows of one table per measure, next to Stable-Baselines3 with the same nets and settings. Both interpreters
need benchmarks/requirements-envs.txt. Each number is the median of the rounds; in a round all systems take turns, each
in a process of its own.
"""

import argparse
import os
import statistics
import sys
from pathlib import Path

from processes import exit_on_signals, run_script
from vector_envs_side import CORRAL

HERE = Path(__file__).resolve().parent
TIMEOUT_SECONDS = 300.0
NAMES = {
    "ale_py": "ale-py's vector env",
    "envpool": "EnvPool",
    "sync": "one by one",
    "async": "in processes",
}
SB3_FORMS = {"sync": "DummyVecEnv", "async": "SubprocVecEnv"}
TABLES = (("sampling", "pong"), ("sampling", "half_cheetah"), ("ppo", "pong"))


def main() -> int:
    """Take all measurements and print the tables; return 1 if one failed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--corral-python", default=sys.executable, help="an interpreter with Corral")
    parser.add_argument("--sb3-python", default=sys.executable, help="an interpreter with Stable-Baselines3")
    parser.add_argument("--num-envs", type=int, default=8)
    parser.add_argument("--seconds", type=float, default=5.0, help="wall time of one measurement")
    parser.add_argument("--threads", type=int, default=1, help="of the numeric libraries, the same for both")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument(
        "--only", default=",".join(f"{kind}:{env}" for kind, env in TABLES), help="of sampling:pong, ..."
    )
    options = parser.parse_args()
    exit_on_signals()
    pythons = {"corral": options.corral_python, "sb3": options.sb3_python}
    is_whole = True
    for kind, env in (table.split(":") for table in options.only.split(",")):
        systems = [("corral", form) for form in CORRAL[env]] + [("sb3", form) for form in SB3_FORMS]
        rates: dict[tuple[str, str], list[float]] = {system: [] for system in systems}
        for _ in range(options.rounds):
            for system, form in systems:
                command = [pythons[system], str(HERE / "vector_envs_side.py"), f"{system}:{kind}:{env}:{form}", kind]
                command += ["--num-envs", str(options.num_envs), "--seconds", str(options.seconds)]
                command += ["--threads", str(options.threads)]
                outcome = run_script(command, TIMEOUT_SECONDS, HERE.parent)
                if outcome.line is None:
                    print(f"{system} {kind} {env} {form}: {outcome.error}", file=sys.stderr)
                    is_whole = False
                else:
                    rates[system, form].append(outcome.line["env_steps_per_s"])
        print(render(kind, env, options.num_envs, {key: value for key, value in rates.items() if value}), flush=True)
    return 0 if is_whole else 1


def render(kind: str, env: str, num_envs: int, rates: dict[tuple[str, str], list[float]]) -> str:
    """Return a table with the rates in env steps per second and their ratio to the faster form of Stable-Baselines3."""
    medians = {key: statistics.median(values) for key, values in rates.items()}
    best = max((rate for (system, _), rate in medians.items() if system == "sb3"), default=float("nan"))
    title = f"{'PPO' if kind == 'ppo' else 'Sampling'}, {env}, {num_envs} sub-envs, {os.cpu_count()} CPUs"
    lines = [f"## {title}", "", "| System | Env steps/s | of the faster SB3 |", "| --- | ---: | ---: |"]
    for (system, form), rate in medians.items():
        name = f"Corral, {NAMES[form]}" if system == "corral" else f"Stable-Baselines3, {SB3_FORMS[form]}"
        lines.append(f"| {name} | {rate:,.0f} | {rate / best:.2f} |")
    return "\n".join([*lines, ""])


if __name__ == "__main__":
    sys.exit(main())
