"""The sample files of other programs: they are of the versions that we pin, or of newer ones."""

from __future__ import annotations

import json
import re
import shutil
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from packaging.version import Version

from corral import BCConfig
from corral.runs.loggers.named import names_of
from make_foreign_samples import PARTS, TESTS, VERSIONS

ROOT = TESTS.parent
PINS = (
    "requirements/base.txt",
    "requirements/dev.txt",
    "requirements/samples.txt",
    "benchmarks/requirements-rivals.txt",
)


def pins_of(package: str) -> list[Version]:
    """Return the versions that the files of requirements pin, without the older Gymnasium of the rivals."""
    found = []
    for file in PINS:
        text = (ROOT / file).read_text(encoding="utf-8")
        found += [Version(pin) for pin in re.findall(rf"(?mi)^{package}(?:\[.*\])?==(.*)$", text)]
    return found


@pytest.mark.parametrize("folder", PARTS)
def test_samples_are_not_older_than_the_pins(folder: str) -> None:
    written = json.loads(VERSIONS.read_text(encoding="utf-8"))[folder]
    assert written.keys() == set(PARTS[folder])
    assert [path for path in (TESTS / folder).rglob("*") if path.is_file()]
    for package, version in written.items():
        pins = pins_of(package)
        assert pins, f"{package} has no pin"
        assert Version(version) >= max(pins), f"tests/{folder} is of {package} {version}: run `make samples`"


@pytest.mark.parametrize("data_format", ["arrow", "hdf5"])
def test_a_minari_dataset_is_learned_from(data_format: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("minari")
    if data_format == "hdf5" and find_spec("h5py") is None:
        pytest.skip("h5py is not installed")
    monkeypatch.setenv("MINARI_DATASETS_PATH", str(TESTS / "offline" / "minari_samples"))
    config = BCConfig().offline_data(input_=f"minari:cartpole/{data_format}-v0").debugging(seed=0)
    with config.training(train_batch_size_per_learner=16).build() as algo:
        result: dict[str, Any] = algo.train()
    assert np.isfinite(result["learners"]["default_policy"]["total_loss"])


def test_a_run_with_events_of_another_program_has_the_logger_of_tensorboard(tmp_path: Path) -> None:
    shutil.copytree(TESTS / "loggers" / "tensorboard_sample", tmp_path / "run")
    assert "tensorboard" in names_of(tmp_path / "run")
