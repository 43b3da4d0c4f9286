"""Checkpoints that earlier versions wrote are loaded, act as they did, and train on."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from make_samples import LEARNS_FROM_DATA, RECORDED, SAMPLES, behaviour

from corral import Algorithm
from corral.algorithms.registry import ALGORITHMS
from corral.runs.checkpoint import FORMAT_VERSION, read_checkpoint


def test_there_is_a_sample_of_each_algorithm() -> None:
    versions = [f"version-{version}" for version in range(1, FORMAT_VERSION + 1)]
    assert sorted(path.name for path in SAMPLES.iterdir()) == versions
    for algo in ALGORITHMS:
        assert (SAMPLES / versions[-1] / algo / "metadata.json").is_file()


@pytest.mark.filterwarnings("ignore:corral.testing.envs is corral.testing now:DeprecationWarning")
@pytest.mark.parametrize(
    "sample", sorted(SAMPLES.glob("version-*/*.json")), ids=lambda path: f"{path.parent.name}-{path.stem}"
)
def test_a_sample_is_loaded_acts_as_before_and_trains_on(sample: Path) -> None:
    did = json.loads(sample.read_text(encoding="utf-8"))
    path = sample.with_suffix("")
    before = sorted(sample.parent.rglob("*"))
    assert f"version-{read_checkpoint(path).metadata['format_version']}" == sample.parent.name
    data = {"input_": RECORDED} if sample.stem in LEARNS_FROM_DATA else {}
    with Algorithm.from_checkpoint(path, **data) as algo:
        does = behaviour(algo)
        assert np.allclose(does["actions"], did["actions"], rtol=1e-5, atol=1e-6)
        assert {**does, "actions": did["actions"]} == did
        steps = did["num_env_steps_sampled_lifetime"]
        result = algo.train()
        assert result["training_iteration"] == did["training_iteration"] + 1
        assert result["num_env_steps_sampled_lifetime"] > steps
    assert sorted(sample.parent.rglob("*")) == before  # loading leaves nothing behind
