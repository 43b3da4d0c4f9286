"""Episodes that are shown and recorded hold what the env rendered."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from PIL import Image
from rendered import Brightening, Plain, WithBoth, deaf, with_config

from corral import Policy
from corral.errors import ConfigError, EnvError
from corral.modules.module import ActorCritic
from corral.tools.playing.play import play_episodes


@pytest.fixture
def policy() -> Policy:
    return Policy(ActorCritic(Brightening.observation_space, Brightening.action_space, {}))


def greys(file: Path) -> list[int]:
    """Return the grey value of each frame."""
    if file.suffix == ".gif":
        frames = []
        image: Any
        with Image.open(file) as image:
            assert image.info["duration"] == 1000 / 25
            for number in range(image.n_frames):
                image.seek(number)
                frames.append(np.asarray(image.convert("RGB")))
    else:
        av = pytest.importorskip("av")
        with av.open(str(file)) as container:
            assert container.streams.video[0].average_rate == 25
            frames = [frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)]
    return [round(float(frame.mean())) for frame in frames]


@pytest.mark.parametrize("file_format", ["mp4", "gif"])
def test_a_recording_shows_every_step_and_the_end(file_format: Any, policy: Policy, tmp_path: Path) -> None:
    if file_format == "mp4":
        pytest.importorskip("av")
    played = list(play_episodes(policy, Brightening, episodes=2, record=tmp_path / "new", file_format=file_format))
    assert [episode.file for episode in played] == [tmp_path / "new" / f"episode-00{i}.{file_format}" for i in (0, 1)]
    assert [episode.episode_len for episode in played] == [10, 10]
    assert all(episode.episode_return in range(30, 41) for episode in played)  # actions are 3 or 4
    for episode in played:
        assert episode.file is not None
        np.testing.assert_allclose(greys(episode.file), 20 * np.arange(11), atol=4)
    assert len(list((tmp_path / "new").iterdir())) == 2


def test_a_second_recording_keeps_the_first(policy: Policy, tmp_path: Path) -> None:
    for _ in range(2):
        files = [e.file for e in play_episodes(policy, Brightening, episodes=1, record=tmp_path, file_format="gif")]
    assert files == [tmp_path / "episode-001.gif"]
    assert (tmp_path / "episode-000.gif").exists()


def test_episodes_are_shown_with_wrappers(policy: Policy, capsys: pytest.CaptureFixture[str]) -> None:
    def limited(env: Any) -> Any:
        return gym.wrappers.TimeLimit(env, 2)

    played = list(play_episodes(policy, with_config, episodes=1, env_config={"num_steps": 9}, wrappers=[limited]))
    assert [(episode.episode_len, episode.file) for episode in played] == [(2, None)]
    assert capsys.readouterr().out.splitlines() == ["image 0", "image 1", "image 2"]


def test_nobody_acts_after_the_end_of_an_episode(policy: Policy, monkeypatch: pytest.MonkeyPatch) -> None:
    batch, num_calls = policy.batch, 0

    def counted(*args: Any, **settings: Any) -> Any:
        nonlocal num_calls
        num_calls += 1
        return batch(*args, **settings)

    monkeypatch.setattr(policy, "batch", counted)
    played = list(play_episodes(policy, with_config, episodes=3, env_config={"num_steps": 4}))
    assert num_calls == sum(episode.episode_len for episode in played) == 12


def test_an_env_takes_render_mode_next_to_its_settings(policy: Policy, tmp_path: Path) -> None:
    settings = {"num_steps": 3}
    played = play_episodes(policy, WithBoth, episodes=1, env_config=settings, record=tmp_path, file_format="gif")
    assert [len(greys(episode.file)) for episode in played if episode.file] == [4]


@pytest.mark.parametrize("env", [deaf, Plain])
def test_an_env_that_takes_no_render_mode_is_named(env: Any, policy: Policy, tmp_path: Path) -> None:
    with pytest.raises(EnvError, match=rf"'{env.__name__}' must take render_mode='rgb_array'"):
        list(play_episodes(policy, env, record=tmp_path))


class Tall(Brightening):
    """An env whose images are floats."""

    def render(self) -> Any:
        return np.zeros((4, 4, 3))


def test_what_cannot_be_played_is_named_and_leaves_no_file(
    policy: Policy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(EnvError, match=r"must return an image, uint8 \[H, W, 3\], and returned float64\[4, 4, 3\]"):
        list(play_episodes(policy, Tall, record=tmp_path, file_format="gif"))
    with pytest.raises(EnvError, match="not ended after 4 steps"):
        list(play_episodes(policy, Brightening, record=tmp_path, file_format="gif", max_episode_steps=4))
    with pytest.raises(ConfigError, match="observations of"):
        list(play_episodes(policy, "CartPole-v1", record=tmp_path, file_format="gif"))
    with pytest.raises(ConfigError, match="episodes=0"):
        list(play_episodes(policy, Brightening, episodes=0))
    monkeypatch.setitem(sys.modules, "av", None)
    with pytest.raises(ConfigError, match=r"recording mp4 needs av: run `pip install 'corral\[play\]'`"):
        list(play_episodes(policy, Brightening, record=tmp_path))
    assert list(tmp_path.iterdir()) == []


def test_a_directory_that_cannot_be_made_is_named(policy: Policy, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for record in (tmp_path / "file", tmp_path / "file" / "inside"):
        with pytest.raises(ConfigError, match=f"record='{record}' cannot be made a directory: "):
            list(play_episodes(policy, Brightening, record=record, file_format="gif"))


class NothingToDrawOn(Brightening):
    """Fails as MuJoCo does on a machine without a display."""

    def render(self) -> Any:
        raise RuntimeError("an OpenGL platform library has not been loaded into this process")


def test_without_a_display_the_error_says_what_to_set(policy: Policy, tmp_path: Path) -> None:
    with pytest.raises(EnvError, match=r"step 0: raised in render\(\): .*nothing to draw on .*MUJOCO_GL=egl"):
        list(play_episodes(policy, NothingToDrawOn, episodes=1, record=tmp_path, file_format="gif"))
    assert not list(tmp_path.iterdir())
