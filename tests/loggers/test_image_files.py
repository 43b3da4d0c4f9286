"""Images and videos of results as files, read back with Pillow."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image, ImageSequence

from corral import PPOConfig
from corral.errors import ConfigError
from corral.runs.loggers import ImageLogger, Logger
from corral.testing import CountingEnv

rng = np.random.default_rng(0)
IMAGES = [rng.integers(0, 256, (5, 7, 3), np.uint8) for _ in range(3)]


def write(run_dir: Path, *values: dict[str, Any], logger: Logger | None = None) -> list[str]:
    """Log a result for each dict, 10 env steps apart, and return the files."""
    logger = ImageLogger() if logger is None else logger
    logger.open(run_dir, {})
    for index, value in enumerate(values):
        logger.log_result({**value, "num_env_steps_sampled_lifetime": 10 * (index + 1)})
    logger.close()
    return files(run_dir)


def files(run_dir: Path) -> list[str]:
    return sorted(path.relative_to(run_dir).as_posix() for path in run_dir.rglob("*") if path.is_file())


def pixels(path: Path) -> np.ndarray[Any, Any]:
    return np.asarray(Image.open(path))


def test_an_image_is_a_file_under_its_path_and_step(tmp_path: Path) -> None:
    clear = rng.integers(0, 256, (4, 4, 4), np.uint8)
    found = write(tmp_path, {"a": {"b": IMAGES[0]}, "loss": 1.0, "text": "x"}, {"a": {"b": IMAGES[1]}, "c": clear})
    assert found == ["images/a/b/000000000010.png", "images/a/b/000000000020.png", "images/c/000000000020.png"]
    for name, image in zip(found, (IMAGES[0], IMAGES[1], clear), strict=True):
        np.testing.assert_array_equal(pixels(tmp_path / name), image)


def test_a_video_is_a_gif_of_its_frames(tmp_path: Path) -> None:
    frames = np.repeat(np.array([0, 90, 250], np.uint8), 6 * 8 * 3).reshape(3, 6, 8, 3)
    (name,) = write(tmp_path, {"video": frames}, logger=ImageLogger(video_fps=10))
    with Image.open(tmp_path / name) as gif:
        assert gif.info["duration"] == 100
        shown = [np.asarray(frame.convert("RGB")) for frame in ImageSequence.Iterator(gif)]
    np.testing.assert_array_equal(np.stack(shown), frames)


def test_the_latest_images_of_a_series_are_files(tmp_path: Path) -> None:
    found = write(tmp_path, {"seen": IMAGES}, logger=ImageLogger(max_images=2))
    assert found == ["images/seen/0/000000000010.png", "images/seen/1/000000000010.png"]
    np.testing.assert_array_equal(pixels(tmp_path / found[0]), IMAGES[1])


def test_a_name_does_not_leave_the_directory(tmp_path: Path) -> None:
    run_dir = tmp_path / "deep" / "run"
    write(run_dir, {"../../..": IMAGES[0], "/etc": {"a:b": IMAGES[1]}})
    assert files(tmp_path) == [
        "deep/run/images/%2E%2E/%2E%2E/%2E%2E/000000000010.png",
        "deep/run/images/etc/a%3Ab/000000000010.png",
    ]


def test_a_run_that_continues_writes_the_images_of_later_steps_again(tmp_path: Path) -> None:
    def show(result: dict[str, Any]) -> None:
        result["shown"] = np.full((4, 4, 3), result["training_iteration"], np.uint8)

    config = PPOConfig().environment(CountingEnv).callbacks(on_train_result=show).debugging(seed=0)
    config.training(train_batch_size_per_learner=32, minibatch_size=16, num_epochs=1)
    run_dir = tmp_path / "run"
    with config.build() as algo:
        algo.fit(stop={"training_iteration": 2}, run_dir=run_dir, loggers=["images"], progress=False)
    names = [f"images/shown/{32 * iteration:012}.png" for iteration in (1, 2, 3)]
    shown = run_dir / "images" / "shown"
    assert [name for name in files(run_dir) if name.startswith("images")] == names[:2]
    for name in ("000000000096.png", "000000000128.png", "mine.png"):  # a killed run went beyond its last checkpoint
        (shown / name).write_bytes((shown / "000000000064.png").read_bytes())
    with config.build() as algo:  # the loggers are the ones that the run had
        algo.fit(stop={"training_iteration": 3}, resume=run_dir, progress=False)
    assert [name for name in files(run_dir) if name.startswith("images")] == [*names, "images/shown/mine.png"]
    assert pixels(run_dir / names[2]).max() == 3


@pytest.mark.parametrize(("setting", "value"), [("video_fps", 0.0), ("max_images", 0)])
def test_settings_out_of_range_are_refused(setting: str, value: float) -> None:
    with pytest.raises(ConfigError, match=f"ImageLogger: {setting}={value}"):
        ImageLogger(**{setting: value})  # type: ignore[arg-type]
