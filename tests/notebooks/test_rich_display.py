"""What a notebook shows of configs, results, episodes and modules: HTML with their numbers and pictures."""

from __future__ import annotations

import base64
import io
from html.parser import HTMLParser
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import yaml
from PIL import Image

from corral import MultiAgentEnv, PPOConfig, SingleAgentEpisode, make_multi_agent
from corral.callbacks import keep_frames
from corral.core.html import html_table, short_text
from corral.core.metrics.result_html import Result
from small import small

VOID = {"img"}


class Page(HTMLParser):
    """Reads HTML, and refuses tags that are not closed in order.

    Attributes:
        tables: Rows of cells of each table.
        images: Images, in order.
        titles: Titles of the parts that open at a click.
    """

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tables: list[list[list[str]]] = []
        self.images: list[Image.Image] = []
        self.titles: list[str] = []
        self._open: list[str] = []
        self.text = ""
        self.feed(text)
        self.close()
        assert self._open == []

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        if tag == "img":
            assert {name for name, _ in attrs} == {"src", "alt", "style"}
            kind, _, data = dict(attrs)["src"].partition(",")
            assert kind in ("data:image/png;base64", "data:image/gif;base64")
            self.images.append(Image.open(io.BytesIO(base64.b64decode(data))))
        if tag == "table":
            self.tables.append([])
        if tag == "tr":
            self.tables[-1].append([])
        if tag in ("td", "th"):
            self.tables[-1][-1].append("")
        if tag == "summary":
            self.titles.append("")
        if tag not in VOID:
            self._open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data
        if self._open and self._open[-1] in ("td", "th"):
            self.tables[-1][-1][-1] += data
        if self._open and self._open[-1] == "summary":
            self.titles[-1] += data


def page_of(value: Any) -> Page:
    return Page(value._repr_html_())


def small_config() -> PPOConfig:
    batch = {"train_batch_size_per_learner": 64, "minibatch_size": 32, "num_envs_per_env_runner": 1}
    return small("CartPole-v1", env_config={"render_mode": "rgb_array"}, model_config={}, **batch)


def test_a_config_shows_what_differs_from_the_defaults_and_all_settings_by_group() -> None:
    config = small_config().callbacks(on_episode_end=lambda episode: 1 < 2)
    page = page_of(config)
    changed, *groups = page.tables
    assert changed[0] == ["setting", "value", "default"]
    assert ["environment.env", "'CartPole-v1'", "None"] in changed
    assert ["training.minibatch_size", "32", "64"] in changed
    assert ["callbacks.callback_functions", "{'on_episode_end': [<lambda>]}", "{}"] in changed
    assert [row[0] for row in changed].count("training.lr") == 0
    names = PPOConfig.group_fields()
    assert page.titles == [f"{group} ({len(names[group])})" for group in names if names[group]]
    assert [row[0] for rows in groups for row in rows[1:]] == [name for group in names for name in names[group]]
    assert "All settings are the defaults." in page_of(PPOConfig()).text


def test_a_result_shows_its_summary_and_all_numbers_by_group() -> None:
    def log_images(metrics_logger: Any) -> None:
        metrics_logger.log_value("map", np.full((4, 6, 3), 200, np.uint8), reduce="item")

    with small_config().callbacks(on_sample_end=log_images).build() as algo:
        result = algo.train()
        evaluated = algo.evaluate()
    page = page_of(result)
    assert "iteration 1, 64 env steps" in page.text
    by_group = dict(zip([title.partition(" (")[0] for title in page.titles], page.tables, strict=True))
    assert ["num_env_steps_sampled", "64"] in by_group["env_runners"]
    assert ["training_iteration", "1"] in by_group["others"]
    entropy = result["learners"]["default_policy"]["entropy"]
    assert ["default_policy/entropy", f"{entropy:.6g}"] in by_group["learners"]
    assert ["training/gamma", "0.99"] in by_group["config"]
    [image] = page.images
    assert image.size == (6, 4)
    assert image.convert("RGB").getpixel((0, 0)) == (200, 200, 200)
    assert isinstance(evaluated, Result)
    assert page_of(evaluated).tables


def test_a_group_of_any_name_is_shown_and_a_result_is_written_as_other_dicts() -> None:
    page = Page(Result({"others": {"x": 1}, "alone": 2, "training_iteration": 3})._repr_html_())
    assert page.tables == [[["x", "1"]], [["alone", "2"], ["training_iteration", "3"]]]
    assert yaml.safe_load(yaml.safe_dump(Result({"a": {"b": 1}}))) == {"a": {"b": 1}}


def test_fit_returns_a_result_that_is_shown(tmp_path: Any) -> None:
    with small_config().build() as algo:
        result = algo.fit(stop={"training_iteration": 1}, run_dir=tmp_path / "run", progress=False)
        again = algo.fit(stop={"training_iteration": 1}, run_dir=tmp_path / "again", progress=False)
    assert "iteration 1, 64 env steps" in page_of(result).text
    assert "iteration 1, 64 env steps" in page_of(again).text


def test_a_video_is_an_animated_picture() -> None:
    frames = np.zeros((3, 8, 8, 3), np.uint8)
    frames[1] = 255
    [video] = page_of(Result(evaluation={"videos": [frames]})).images
    assert (video.format, video.n_frames) == ("GIF", 3)


def test_a_long_video_and_a_large_image_are_thinned_out() -> None:
    frames = np.repeat(np.arange(250, dtype=np.uint8), 900 * 8 * 3).reshape(250, 8, 900, 3)
    [video, image] = page_of(Result(video=frames, image=np.zeros((1300, 20, 3), np.uint8))).images
    assert (video.n_frames, video.size, image.size) == (84, (450, 4), (7, 434))
    assert video.info["duration"] == 150  # three frames of 50 ms
    video.seek(83)
    assert np.asarray(video.convert("RGB")).max() == 249


def test_eight_pictures_of_a_result_are_shown_the_first_ones_of_a_series() -> None:
    series = [np.full((4, 4, 3), level, np.uint8) for level in range(5)]
    page = page_of(Result(seen=series, also=series))
    assert [int(np.asarray(image).max()) for image in page.images] == [0, 1, 2, 3, 4, 0, 1, 2]
    assert "and 2 more images and videos" in page.text


def test_an_episode_shows_first_and_last_steps_and_frames_that_the_env_rendered() -> None:
    with small_config().callbacks(on_episode_step=keep_frames).build() as algo:
        rollout = algo.env_runner.sample(num_timesteps=64, random_actions=True)
        episode = max(rollout.episodes(), key=len)
    assert len(episode) > 14
    page = page_of(episode)
    about, steps = page.tables
    assert ["return", short_text(episode.get_return())] in about
    assert steps[0] == ["t", "observation", "action", "reward"]
    times = [row[0] for row in steps[1:]]
    first = [str(episode.t_started + i) for i in range(8)]
    assert times == [*first, "...", *(str(episode.t - 3 + i) for i in range(4))]
    assert steps[1][2:] == [str(episode.get_actions(0)), "1"]
    assert steps[-1][2:] == ["", ""]  # no action follows the last observation
    frames = episode.get_temporary_timestep_data("frames")
    assert len(frames) == len(episode)
    assert len(page.images) == 6
    for image, frame in ((page.images[0], frames[0]), (page.images[-1], frames[-1])):
        assert np.array_equal(np.asarray(image), frame)


def test_frames_need_an_env_that_renders_images() -> None:
    config = small_config().environment(env_config={}).callbacks(on_episode_step=keep_frames)
    with config.build() as algo, pytest.raises(Exception, match="render_mode is None: give it env_config="):
        algo.train()


def test_an_episode_of_images_shows_them() -> None:
    images = np.random.default_rng(0).integers(0, 255, (4, 5, 5, 3), np.uint8)
    space = gym.spaces.Box(0, 255, (5, 5, 3), np.uint8)
    episode = SingleAgentEpisode(
        observations=images,
        actions=[0, 1, 0],
        rewards=[0.5, 1.0, -1.0],
        observation_space=space,
        terminated=True,
        len_lookback_buffer=0,
    )
    page = page_of(episode)
    assert [np.asarray(image).tolist() for image in page.images] == images.tolist()
    assert page.tables[1][1] == ["0", "uint8[5, 5, 3]", "0", "0.5"]
    assert ["state", "terminated"] in page.tables[0]


def test_the_steps_of_a_later_part_of_an_episode_have_their_times() -> None:
    episode = SingleAgentEpisode(
        observations=[0.0, 1.0, 2.0], actions=[1, 1], rewards=[1.0, 1.0], len_lookback_buffer=0
    )
    page = page_of(episode.cut())
    assert [row[0] for row in page.tables[1][1:]] == ["2"]


def test_an_episode_without_steps_is_shown() -> None:
    assert ["env steps", "0"] in page_of(SingleAgentEpisode()).tables[0]


def test_nested_observations_have_their_names() -> None:
    obs = [{"a": np.array([1.0, 2.0]), "b": 3}, {"a": np.array([0.0, 1.0]), "b": 4}]
    page = page_of(SingleAgentEpisode(observations=obs, actions=[1], rewards=[1.0], len_lookback_buffer=0))
    assert page.tables[1][1][1] == "a: [1., 2.], b: 3"


def test_an_episode_of_several_agents_shows_its_agents() -> None:
    env: type[MultiAgentEnv] = make_multi_agent("CartPole-v1")
    config = (
        PPOConfig()
        .environment(env, env_config={"num_agents": 2})
        .multi_agent(policies=["left", "right"], policy_mapping_fn=lambda agent_id, *_: "left" if agent_id else "right")
        .env_runners(num_envs_per_env_runner=1)
    )
    with config.build() as algo:
        episode = next(iter(algo.env_runner.sample(num_episodes=1).episodes()))
    rows = {row[0]: row[1:] for row in page_of(episode).tables[1][1:]}
    assert {agent: row[0] for agent, row in rows.items()} == {"0": "right", "1": "left"}
    for agent_id, part in episode.agent_episodes.items():
        assert rows[str(agent_id)][1:3] == [str(part.t), short_text(part.get_return())]


def test_a_module_shows_its_layers_and_the_number_of_its_parameters() -> None:
    with small_config().build() as algo:
        module = algo.get_module()
    for parameter in module.policy_head.parameters():
        parameter.requires_grad_(False)
    about, layers = page_of(module).tables
    total = sum(parameter.numel() for parameter in module.parameters())
    assert ["parameters", f"{total:,}"] in about
    assert ["policy_head", "Linear", "weight [2, 64], bias [2]", "130", "frozen"] in layers
    assert sum(int(row[3].replace(",", "")) for row in layers[1:]) == total


def test_text_of_users_is_no_markup() -> None:
    result = Result({"training_iteration": 1, "num_env_steps_sampled_lifetime": 2, "<b>mine</b>": {"<i>x</i>": 1.0}})
    page = page_of(result)
    assert "<b>mine</b>" in page.text and [["<i>x</i>", "1"]] in page.tables
    not_closed = Result({"training_iteration": 1, "num_env_steps_sampled_lifetime": 2, "mine": {"<b>x": 1.0}})
    assert page_of(not_closed).text.count("<b>x") == 2  # in the summary and in the table
    assert page_of(Result({"a' onload='alert(1)": np.zeros((2, 2, 3), np.uint8)})).images
    page = Page(html_table([("a", 1)], ["<u>title</u>", ""]))
    assert "<u>title</u>" in page.text
    page = Page(html_table([("<b>name</b>", "a & b <script>")]))
    assert page.tables == [[["<b>name</b>", "a & b <script>"]]]
