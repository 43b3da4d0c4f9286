"""The first episodes of a round are recorded: whole files in the run directory, small copies in the result."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest

from corral import PPOConfig
from corral.core.result_values import classify
from corral.envs.videos import PREVIEW_FRAMES, PREVIEW_SIZE, VideoWriter
from corral.errors import ConfigError
from corral.runs.loggers import ImageLogger, TensorBoardLogger
from small import small as small_run

av = pytest.importorskip("av")


class Grey(gym.Env[Any, Any]):
    """Shows 25 times the number of its step. The `level` is the number of steps of an episode, which is its return."""

    observation_space = gym.spaces.Box(0, 10, (1,), np.float32)
    action_space = gym.spaces.Discrete(2)
    metadata = {"render_modes": ["rgb_array"], "render_fps": 25}  # noqa: RUF012

    def __init__(self, render_mode: str | None = None, fails_at: int = -1) -> None:
        self.render_mode, self.task, self.t, self._fails_at = render_mode, 4, 0, fails_at
        self._num_resets = 0

    def get_task(self) -> int:
        return self.task

    def set_task(self, task: int) -> None:
        self.task = task

    def reset(self, **arguments: Any) -> Any:
        self.t, self._num_resets = 0, self._num_resets + 1
        return np.zeros(1, np.float32), {}

    def step(self, action: Any) -> Any:
        self.t += 1
        if self.t == 2 and self._num_resets == self._fails_at:
            raise OSError("fault")
        return np.full(1, self.t, np.float32), 1.0, self.t == self.task, False, {}

    def render(self) -> Any:
        return np.full((33, 48, 3), 25 * self.t, np.uint8)


def small(env: Any = Grey, **evaluation: Any) -> PPOConfig:
    settings = {"evaluation_interval": 2, "evaluation_num_videos": 3, "engine_name": "local", **evaluation}
    return small_run(env, train_batch_size_per_learner=16, **settings)


def greys(file: Any) -> list[int]:
    """Return the grey value of each frame of a file."""
    with av.open(str(file)) as container:
        assert container.streams.video[0].average_rate == 25
        return [round(float(frame.to_ndarray(format="rgb24").mean())) for frame in container.decode(video=0)]


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"evaluation_num_env_runners": 2},
        {"evaluation_parallel_to_training": True},
        {"evaluation_config": {"vectorization": "async"}},
    ],
    ids=["embedded", "two runners", "parallel", "async"],
)
def test_the_first_episodes_of_each_round_are_files_of_the_run(settings: dict[str, Any], tmp_path: Path) -> None:
    results = []
    config = small(evaluation_tasks=[3, 5, 4], evaluation_duration=6, **settings)
    with config.callbacks(on_train_result=lambda result: results.append(result)).build() as algo:
        algo.fit(stop={"training_iteration": 3}, run_dir=tmp_path / "run", progress=False)
    files = sorted((tmp_path / "run" / "videos").iterdir())
    assert [file.name for file in files] == [f"iteration-000002-episode-{i}.mp4" for i in range(3)]
    for file, num_steps in zip(files, (3, 5, 4), strict=True):
        np.testing.assert_allclose(greys(file), 25 * np.arange(num_steps + 1), atol=4)
    before, fresh, after = (result["evaluation"] for result in results)
    assert "videos" not in before
    assert "videos" not in after
    assert [video.shape for video in fresh["videos"]] == [(4, 33, 48, 3), (6, 33, 48, 3), (5, 33, 48, 3)]
    assert fresh["videos"][0][:, 0, 0, 0].tolist() == [0, 25, 50, 75]
    assert classify(fresh["videos"])[:2] == ("video", True)  # which loggers show that can


def test_tensorboard_shows_the_videos(tmp_path: Path) -> None:
    event_accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    with small(evaluation_interval=1, evaluation_num_videos=1).build() as algo:
        algo.fit(
            stop={"training_iteration": 1},
            run_dir=tmp_path / "run",
            loggers=[TensorBoardLogger(), ImageLogger()],
            progress=False,
        )
    assert not (tmp_path / "run" / "images").exists()  # they are in videos/ already
    events = event_accumulator.EventAccumulator(str(tmp_path / "run"))
    events.Reload()
    (image,) = events.Images("evaluation/videos/0")
    assert image.encoded_image_string.startswith(b"GIF")


def test_videos_without_a_run_directory_are_in_the_result_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with small(evaluation_num_videos=2, evaluation_interval=None).build() as algo:
        assert len(algo.evaluate()["videos"]) == 2
    assert not list(tmp_path.iterdir())


def test_a_broken_episode_is_recorded_again() -> None:
    config = small(evaluation_tasks=[3, 4, 5, 2], evaluation_duration=4, evaluation_interval=None)
    config.environment(env_config={"fails_at": 1}).fault_tolerance(restart_failed_sub_environments=True)
    config.evaluation(evaluation_config={"env_config": {"fails_at": 2}}, evaluation_num_videos=4)
    with config.build() as algo:  # in each sub-env the second episode fails, and its successor plays it again
        found = algo.evaluate()
    assert found["env_runners"]["episode_lens"] == [3, 4, 5, 2]
    assert [len(video) for video in found["videos"]] == [4, 5, 6, 3]


class Deaf(Grey):
    """Takes no render mode."""

    def __init__(self) -> None:
        super().__init__()


class Ignorant(Grey):
    """Does nothing with the render mode in its config."""

    def __init__(self, config: Any) -> None:
        super().__init__()


@pytest.mark.parametrize("env", [Deaf, Ignorant])
def test_an_env_without_a_render_mode_is_refused_at_build(env: Any) -> None:
    with pytest.raises(ConfigError, match=rf"evaluation_num_videos=3.*'{env.__name__}' must take render_mode"):
        small(env).build().stop()


def test_what_cannot_be_recorded_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match=r"evaluation_num_videos.*timesteps"):
        small(evaluation_duration_unit="timesteps").validate()
    find = importlib.util.find_spec
    monkeypatch.setattr(
        "corral.runners.evaluation.config.find_spec", lambda name: None if name == "av" else find(name), raising=True
    )
    with pytest.raises(ConfigError, match=r"evaluation_num_videos needs av: run `pip install 'corral\[play\]'`"):
        small().validate()


class Wide:
    """An env that renders wide images with a bright left half."""

    metadata: dict[str, Any] = {}  # noqa: RUF012

    def render(self) -> Any:
        image = np.zeros((31, 400, 3), np.uint8)
        image[:, :200] = 200
        return image


def test_the_small_copy_is_small_whatever_the_episode() -> None:
    recording = VideoWriter(Wide())  # type: ignore[arg-type]
    for _ in range(3 * PREVIEW_FRAMES):
        recording.add()
    video = recording.finish()
    num_frames, height, width, _ = video.preview.shape
    assert PREVIEW_FRAMES / 2 <= num_frames <= PREVIEW_FRAMES
    assert (height, width) == (31 // 3, 400 // 3)
    assert max(height, width) <= PREVIEW_SIZE
    assert (video.preview[0, :, : width // 2 - 1] == 200).all()
    assert (video.preview[0, :, width // 2 + 1 :] == 0).all()
