"""What one iteration costs, in counts: what is off is not entered. No clock is involved."""

from __future__ import annotations

import pytest

import costs

# A count that falls by more than this fraction becomes the new one, so that it cannot rise again unnoticed.
SLACK = 0.03


# TD3 walks the path of SAC, and both take half a minute.
@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=pytest.mark.slow) if case == "td3" else case for case in costs.CASES]
)
def test_an_iteration_enters_no_more_than_it_did(case: str) -> None:
    held, found = costs.read_costs()[case], costs.measure(case)
    rises = {name: (was, now) for name, was, now in zip(found._fields, held, found, strict=True) if now > was}
    assert not rises, (
        f"{case}: {rises} (before, now) rose: what is off must not be entered. `python benchmarks/costs.py --list "
        f"{case}` lists the functions, in the commit before too."
    )
    falls = {
        name: (was, now) for name, was, now in zip(found._fields, held, found, strict=True) if now < was * (1 - SLACK)
    }
    assert not falls, (
        f"{case}: {falls} (before, now) fell: run `python benchmarks/costs.py --write`, which lowers the numbers in "
        "benchmarks/costs.json and docs/design.md."
    )


def test_the_design_shows_these_costs() -> None:
    assert costs.costs_table(costs.read_costs()) in costs.DESIGN.read_text(encoding="utf-8")


def test_every_case_has_its_costs() -> None:
    assert costs.read_costs().keys() == costs.CASES.keys()
