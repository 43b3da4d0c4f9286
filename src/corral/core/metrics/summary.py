"""A result as a short text."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from corral.core.metrics.result import flat_result

WIDTH, HEIGHT = 80, 24
"""Columns and lines that a summary fits in."""

# What has a line of its own at the top.
_TOP = (
    "episode_return_mean episode_return_min episode_return_max episode_len_mean episode_len_min episode_len_max "
    "num_env_steps_sampled"
).split()


def summary(result: Mapping[str, Any]) -> str:
    """Return the main numbers of a result as text of at most 24 lines of at most 80 characters, for `print`.

    Numbers that do not exist yet are left out. The learners' numbers and what callbacks logged fill the lines that are
    left; a last line says how many more numbers there are.

    Args:
        result: Result of `Algorithm.train()` or `fit()`.
    """
    lines = [line[:WIDTH] for line in _top_lines(result)]
    rows = _rows([(path, value) for path, value in flat_result(result).items() if _is_listed(path, value)])
    left = HEIGHT - 1 - len(lines)
    lines += rows[:left]
    num_more = len(rows) - left
    return "\n".join([*lines, f"... and {num_more} more lines of numbers"] if num_more > 0 else lines)


def _top_lines(result: Mapping[str, Any]) -> Iterator[str]:
    episodes, timers = result.get("env_runners", {}), result.get("timers", {})
    first = [f"iteration {result['training_iteration']:,}", f"{result['num_env_steps_sampled_lifetime']:,} env steps"]
    if "time_total_s" in result:
        first.append(f"{result['time_total_s']:,.1f} s")
    if timers.get("iteration_s"):
        first.append(f"{episodes.get('num_env_steps_sampled', 0) / timers['iteration_s']:,.0f} env steps/s")
    yield ", ".join(first)
    for title, group in (("episodes", episodes), ("evaluation", result.get("evaluation", {}).get("env_runners", {}))):
        for what, name in (("return", "episode_return"), ("length", "episode_len")):
            mean, low, high = (group.get(f"{name}_{how}", float("nan")) for how in ("mean", "min", "max"))
            if mean == mean:
                yield f"{title}: mean {what} {mean:,.2f} ({low:,.2f} .. {high:,.2f}){_interval(group, name)}"
    shares = {name.removesuffix("_share"): share for name, share in timers.items() if name.endswith("_share")}
    largest = sorted((name for name in shares if shares[name] >= 0.005), key=lambda name: -shares[name])
    if largest:
        yield "time: " + ", ".join(f"{name} {shares[name]:.0%}" for name in largest[:5])


def _interval(group: Mapping[str, Any], name: str) -> str:
    """Return the 95% interval of a mean as text, if the group has one."""
    low, high = (group.get(f"{name}_interval_{end}", float("nan")) for end in ("low", "high"))
    return f", 95%: {low:,.2f} .. {high:,.2f}" if low == low else ""


def _is_listed(path: str, value: Any) -> bool:
    group, _, name = path.partition("/")
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool) and value == value
    if not is_number or not name or group in ("timers", "bottleneck", "runner_group", "evaluation"):
        return False
    # Of the rest of the library's own numbers, zeros say nothing.
    return name not in _TOP and not (group in ("fault_tolerance", "env_runners") and value == 0)


def show_number(value: float, num_digits: int = 6) -> str:
    """Return a number for people: all digits before the point, and after it as many as make up `num_digits`."""
    is_large = abs(value) >= 10 ** (num_digits - 1)
    has_all = (is_large or float(value).is_integer()) and abs(value) < 1e15
    return f"{value:,.0f}" if has_all else f"{value:,.{num_digits}g}"


def _rows(numbers: list[tuple[str, float]]) -> list[str]:
    """Return the numbers in two columns, the learners' numbers first."""
    numbers = sorted(numbers, key=lambda entry: not entry[0].startswith("learners/"))
    half = WIDTH // 2 - 1
    cells = [_cell(path, value, half) for path, value in numbers]
    return [f"{left}  {right}".rstrip() for left, right in zip(cells[::2], [*cells[1::2], ""], strict=False)]


def _cell(path: str, value: float, width: int) -> str:
    shown = f"{value:,}" if isinstance(value, int) else f"{value:.5g}"
    name = path.removeprefix("learners/default_policy/").removeprefix("env_runners/")
    space = width - len(shown) - 1
    name = name if len(name) <= space else f"{name[: space - 3]}..."
    return f"{name:<{space}} {shown}"
