"""The examples in examples/coordination/ do what they say, in every form."""

from __future__ import annotations

import re
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
from forms import Form

import example_files

pytestmark = pytest.mark.slow_on_ray

EXAMPLES = example_files.EXAMPLES / "coordination"


def load(name: str) -> ModuleType:
    return example_files.load(f"coordination/{name}.py")


def test_every_example_has_a_test() -> None:
    tested = set(re.findall(r'load\("(\w+)"\)', Path(__file__).read_text(encoding="utf-8")))
    assert {path.stem for path in EXAMPLES.glob("*.py")} == tested


def test_every_example_is_on_the_page() -> None:
    page = (EXAMPLES.parents[1] / "docs" / "coordination.md").read_text(encoding="utf-8")
    assert set(re.findall(r"^\| `(\w+)\.py` \|", page, flags=re.MULTILINE)) == {p.stem for p in EXAMPLES.glob("*.py")}


@pytest.mark.slow_cases("process")
def test_counter(form: Form, capsys: pytest.CaptureFixture[str]) -> None:
    counts = load("counter").main(engine=form, num_env_runners=2, num_iterations=2)
    for counted, sampled in counts:
        # Each runner checks its env with one step. What a slow runner has not handed in yet is counted already.
        assert sampled + 2 <= counted <= sampled + 2 + 512
    assert [sampled >= 512 * iteration for iteration, (_, sampled) in enumerate(counts, 1)] == [True, True]
    assert capsys.readouterr().out.splitlines() == [f"{c} steps counted, {s} sampled" for c, s in counts]


@pytest.mark.slow
def test_running_average(form: Form) -> None:
    results = load("running_average").main(engine=form, num_env_runners=2, num_iterations=2)
    for result in results:
        statistics, sampled = result["observations"], result["num_env_steps_sampled_lifetime"]
        # Episodes have one observation more than steps, unfinished ones come later. Half would be one runner alone.
        assert 0.6 * sampled < statistics["count"] < 1.5 * sampled
        assert np.abs(statistics["mean"]).max() < 0.5
        assert (statistics["variance"] > 1e-4).all()
    assert results[1]["observations"]["count"] > results[0]["observations"]["count"]


def test_a_running_average_covers_all_rows() -> None:
    rows = np.random.default_rng(0).normal(3.0, 2.0, (1000, 4)) * [1, 10, 0.1, 100]
    average = load("running_average").RunningAverage(4)
    for part in np.split(rows, [1, 7, 500]):
        average.add(part)
    count, mean, variance = average.get()
    assert count == 1000
    np.testing.assert_allclose(mean, rows.mean(axis=0))
    np.testing.assert_allclose(variance, rows.var(axis=0))


@pytest.mark.slow
def test_central_hyperparameter(form: Form) -> None:
    weights, arrived = load("central_hyperparameter").main(engine=form, num_env_runners=2, num_iterations=6)
    used, chosen = zip(*weights, strict=True)
    assert used == pytest.approx((1.0, *chosen[:-1]))
    assert chosen == pytest.approx([0.9, 0.8, 0.7, 0.6, 0.5, 0.4], abs=0.05)  # by steps, some more than asked for
    assert arrived > 0.8
