"""What a notebook shows, run by Jupyter's own kernel."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import nbformat
import pytest
from nbclient import NotebookClient

pytestmark = pytest.mark.xdist_group("jupyter")  # the notebook runs once

CONFIG = """
from corral import Below, PPOConfig
from corral.testing import CountingEnv

config = PPOConfig().environment(CountingEnv).env_runners(num_envs_per_env_runner=2).debugging(seed=0)
config.training(train_batch_size_per_learner=32, minibatch_size=16, num_epochs=1)
"""
TRAIN = """
algo = config.build()
stop = {"training_iteration": 3, "learners/default_policy/entropy": Below(-9), "mine": lambda result: False}
result = algo.fit(stop=stop, run_dir="run")
algo.stop()
"""


@pytest.fixture(scope="module")
def cells(tmp_path_factory: pytest.TempPathFactory) -> list[list[Any]]:
    """Return the outputs of each cell of a notebook after it has run."""
    sources = [CONFIG + "config", TRAIN, "result", "algo.get_module()"]
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(source) for source in sources])  # type: ignore[no-untyped-call]
    folder: Path = tmp_path_factory.mktemp("notebook")
    NotebookClient(notebook, timeout=120, resources={"metadata": {"path": str(folder)}}).execute()
    return [cell.outputs for cell in notebook.cells]


def html(outputs: list[Any]) -> str:
    (shown,) = [output for output in outputs if output.output_type in ("display_data", "execute_result")]
    text: str = shown.data["text/html"]
    return text


def test_one_panel_changes_in_place_while_it_trains(cells: list[list[Any]]) -> None:
    panel = html(cells[1])  # one output: every later panel replaced it
    for part in ("iteration", "3 of 3", "ends below -9", "mine", "not yet"):
        assert part in panel
    assert [output for output in cells[1] if output.output_type == "error"] == []


@pytest.mark.parametrize(
    ("cell", "part"), [(0, "train_batch_size_per_learner"), (2, "training_iteration"), (3, "ActorCritic")]
)
def test_the_last_value_of_a_cell_is_shown_as_tables(cells: list[list[Any]], cell: int, part: str) -> None:
    shown = html(cells[cell])
    assert "<table" in shown
    assert re.search(rf">\s*{part}", shown)
