"""Turns the raw results into the Markdown report: pure functions over what `results.json` holds."""

import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from cases import CASES, MAIN, NAMES, RIVALS, SCRIPTS, Case
from machine import UNKNOWN
from statistics_of_pairs import Ratio, ratio_of_pairs, times_faster

MET, MISSED, FAILED, NOT_MEASURED = "met", "missed", "failed", "not measured"
KEPT, FELL = "kept", "fell"


@dataclass(frozen=True)
class Run:
    """One run of one system.

    Attributes:
        pair: The number of the pair, which is also the seed.
        system: Whose run it is.
        value: In the unit of the case, or None if the run failed.
        censored: The value is the cap, because the run did not reach its target.
        detail: The JSON line of the script.
        error: What went wrong, or None.
        busy_before: The share of the machine in use just before the run, if known.
    """

    pair: int
    system: str
    value: float | None
    censored: bool
    detail: dict[str, Any]
    error: str | None
    busy_before: float | None = None


@dataclass(frozen=True)
class CaseResult:
    """All runs of a case, and the circumstances.

    Attributes:
        date: When it was measured.
        commit: What was measured, as `machine.measured_commit` says it.
        command: What was typed.
        quick: It was a trial of the machinery and not a measurement.
        machine: What it ran on.
        runs: The runs in the order in which they ran.
    """

    date: str
    commit: str
    command: str
    quick: bool
    machine: dict[str, str]
    runs: list[Run]


@dataclass(frozen=True)
class Row:
    """One line of a case's table."""

    system: str
    median: str
    ratio: str
    budget: str
    verdict: str


def to_json(results: dict[str, CaseResult]) -> dict[str, Any]:
    """Returns the results as plain data."""
    return {name: asdict(result) for name, result in results.items()}


def from_json(data: dict[str, Any]) -> dict[str, CaseResult]:
    """Returns the results that `to_json` made plain."""
    return {
        name: CaseResult(**{**entry, "runs": [Run(**run) for run in entry["runs"]]}) for name, entry in data.items()
    }


def pair_ratios(case: Case, runs: Sequence[Run], system: str) -> list[float]:
    """Returns how many times as fast as `system` Corral is, for each pair in which both have a value.

    A rival that stopped at the cap counts as the cap, which understates the ratio. Corral stopped at the cap
    counts as a ratio of zero.
    """
    ours = {run.pair: run for run in runs if run.system == "corral"}
    theirs = {run.pair: run for run in runs if run.system == system}
    ratios = []
    for pair in sorted(ours.keys() & theirs.keys()):
        own_value, their_value = ours[pair].value, theirs[pair].value
        if own_value is None or their_value is None:
            continue
        ratio = 0.0 if ours[pair].censored else times_faster(own_value, their_value, case.higher_is_better)
        ratios.append(ratio)
    return ratios


def rows(case: Case, runs: Sequence[Run]) -> list[Row]:
    """Returns the table of a case, Corral first."""
    return [_row(case, runs, system) for system in case.systems]


def render(results: dict[str, CaseResult]) -> str:
    """Returns the whole report."""
    measured = [case for case in CASES if case.name in results]
    parts = ["# Benchmarks", "", *_INTRODUCTION, ""]
    if any(results[case.name].quick for case in measured):
        parts += ["**Quick runs are marked below: they try the machinery and are no measurements.**", ""]
    parts += ["## Budgets", "", *_budget_table(results), ""]
    if measured:
        machine = results[measured[-1].name].machine
        parts += ["## Machine", "", "| | |", "|---|---|"]
        parts += [f"| {key} | {value} |" for key, value in machine.items()]
        parts += [""]
        for case in measured:
            parts += _section(case, results[case.name], machine)
    return "\n".join(parts).rstrip() + "\n"


_INTRODUCTION = (
    "Every run is a fresh process that measures one thing. The systems of a measure run one after the "
    "other, in an order that rotates from pair to pair; ratios are taken within a pair, and the table "
    "quotes their median with a 95% bootstrap interval. Seconds are CPU seconds where a row says so, and else wall "
    "seconds. A ratio above 1 says that Corral is faster, for "
    "rates and for durations alike. A budget is met when the median reaches it. Every single run is in the "
    "JSON file next to this page, from which `python benchmarks/run.py --render-only` rebuilds it.",
    "",
    "To measure: install Corral with PyTorch and Ray in one environment, and PyTorch 2.13.0 and then "
    "`benchmarks/requirements-rivals.txt` in another, leave the machine otherwise idle, and run `python "
    "benchmarks/run.py --rivals-python PATH` from the root of the repository with Corral's interpreter, "
    "where PATH is the interpreter of the other environment. `make bench-quick` does so for the main measures, with "
    "two pairs each, before an issue is closed. Each row names the commit that it was measured at. The table of "
    "budgets has the main measures, and others that were measured at a known commit.",
    "",
    "The floor of a case is the leanest loop in PyTorch and NumPy that does the same maths with the same settings and "
    "nothing else (`benchmarks/floors.py`); Corral has to reach 0.9 of its speed, and of the bare loop's when it only "
    "samples. A ratio to RLlib or Stable-Baselines3 has no budget of its own, but may not fall: it fell if its whole "
    "interval is more than 5% below the ratio that `benchmarks/cases.py` records.",
)


def _row(case: Case, runs: Sequence[Run], system: str) -> Row:
    """Returns one system's line."""
    own = [run for run in runs if run.system == system]
    median = _median_text(case, own)
    if system == "corral":
        shown_ratio = "1" if case.has_ratio else ""
        return Row(NAMES[system], median, shown_ratio, case.own_budget_text, _own_verdict(case, own))
    text, wanted = case.budget(system) or ("", None)
    if not own:  # it has joined the case since
        return Row(NAMES[system], NOT_MEASURED, "", text, "" if wanted is None else NOT_MEASURED)
    ratio = ratio_of_pairs(pair_ratios(case, runs, system)) if case.has_ratio else None
    return Row(
        NAMES[system],
        median,
        _ratio_text(ratio, any(run.censored for run in own)) if case.has_ratio else "",
        text,
        "" if wanted is None else _ratio_verdict(ratio, wanted, runs, is_rival=system in RIVALS),
    )


def _median_text(case: Case, runs: Sequence[Run]) -> str:
    """Returns the median of a system with its least and its most, and how many runs gave no value."""
    values = [run.value for run in runs if run.value is not None]
    if not values:
        return FAILED
    digits = case.digits
    text = f"{statistics.median(values):,.{digits}f} ({min(values):,.{digits}f} to {max(values):,.{digits}f})"
    capped = sum(run.censored for run in runs)
    if capped:
        text += f", {capped} of {len(runs)} stopped at the cap"
    if len(values) < len(runs):
        text += f", {len(runs) - len(values)} of {len(runs)} {FAILED}"
    return text


def _ratio_text(ratio: Ratio | None, censored: bool) -> str:
    """Returns a ratio with its interval."""
    if ratio is None:
        return "none"
    prefix = "at least " if censored else ""
    return f"{prefix}{ratio.median:.2f} [{ratio.low:.2f}, {ratio.high:.2f}]"


def _ratio_verdict(ratio: Ratio | None, budget: float, runs: Sequence[Run], *, is_rival: bool) -> str:
    """Says whether a ratio reaches its budget; a run of Corral's that failed cannot be left out of that.

    The ratio to a rival has fallen only if the whole interval is below: a recorded ratio is a measurement too.
    """
    if ratio is None or any(run.system == "corral" and run.value is None for run in runs):
        return FAILED
    if is_rival:
        return FELL if ratio.high < budget else KEPT
    return MET if ratio.median >= budget else MISSED


def _own_verdict(case: Case, runs: Sequence[Run]) -> str:
    """Says whether Corral's own value keeps to the case's limit or floor."""
    if not case.own_budget_text:
        return ""
    values = [run.value for run in runs if run.value is not None]
    if not values or len(values) < len(runs):
        return FAILED
    if case.limit_without_torch and any(run.detail.get("torch_imported") for run in runs):
        return f"{MISSED} (torch was imported)"
    return MET if case.keeps_own_budget(statistics.median(values)) else MISSED


def _budget_table(results: dict[str, CaseResult]) -> list[str]:
    """Returns the budgets with what was measured: of the main measures, and of others at a known commit."""
    lines = ["| Measure | Against | Measured | Budget | Verdict | Commit |", "|---|---|---|---|---|---|"]
    for case in CASES:
        result = results.get(case.name)
        is_known = result is not None and result.commit != UNKNOWN
        if not is_known and case.name not in MAIN:
            continue
        for row in rows(case, result.runs if result else []):
            if not row.budget:
                continue
            itself = row.system == NAMES["corral"]
            against = "itself" if itself else row.system
            shown = row.median if itself else row.ratio
            quick = " (quick run)" if result and result.quick else ""
            is_measured = result is not None and row.verdict != NOT_MEASURED
            measured, verdict = (shown, row.verdict + quick) if is_measured else ("", NOT_MEASURED)
            commit = result.commit if result is not None and is_measured and is_known else ""
            lines.append(f"| {case.title} | {against} | {measured} | {row.budget} | {verdict} | {commit} |")
    return lines


def _busy_text(runs: Sequence[Run]) -> str:
    """Says how idle the machine was before the runs."""
    shares = [run.busy_before for run in runs if run.busy_before is not None]
    if not shares:
        return "How idle the machine was is not known."
    return (
        f"Just before a run, other processes used {statistics.median(shares):.0%} of the machine "
        f"(median; at most {max(shares):.0%})."
    )


def _clock_text(runs: Sequence[Run]) -> str:
    """Says which seconds the scripts measured, where they do."""
    clocks = sorted({run.detail["clock"] for run in runs if "clock" in run.detail})
    return f", in {' and '.join(clocks)} seconds," if clocks else ""


def _section(case: Case, result: CaseResult, shown_machine: dict[str, str]) -> list[str]:
    """Returns the heading, the explanation, the table and the failures of a case."""
    pairs = len({run.pair for run in result.runs})
    arguments = " ".join(case.arguments("PAIR", result.quick))
    scripts = ", ".join(f"`{SCRIPTS[system]}`" for system in case.systems)
    commit = "" if result.commit == UNKNOWN else f" at commit {result.commit}"
    lines = [
        f"## {case.title}{' (quick run)' if result.quick else ''}",
        "",
        case.what,
        "",
        f"Measured {result.date} in {pairs} pairs{_clock_text(result.runs)}{commit} by "
        f"`{result.command}`, which runs {scripts} with `{arguments}`. {_busy_text(result.runs)}",
        "",
        f"| System | Median {case.unit} (least to most) | Corral's speed relative to it [95% interval] "
        "| Budget | Verdict |",
        "|---|---|---|---|---|",
    ]
    for row in rows(case, result.runs):
        lines.append(f"| {row.system} | {row.median} | {row.ratio} | {row.budget} | {row.verdict} |")
    if result.machine != shown_machine:
        differing = {key: value for key, value in result.machine.items() if shown_machine.get(key) != value}
        lines += [
            "",
            "On another machine: " + "; ".join(f"{key}: {value}" for key, value in differing.items()),
        ]
    for run in result.runs:
        if run.error is not None:
            lines += ["", f"{NAMES[run.system]} failed in pair {run.pair}:", "", "```text", run.error, "```"]
    return [*lines, ""]
