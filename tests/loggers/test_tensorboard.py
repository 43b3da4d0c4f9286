"""TensorBoard's event files, read back with TensorBoard's own reader."""

from __future__ import annotations

import csv
import io
import json
import math
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image, ImageSequence
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData

from corral import PPOConfig, make_multi_agent
from corral.errors import ConfigError
from corral.runs.loggers import CSVLogger, TensorBoardLogger, default_loggers
from corral.testing import CountingEnv

Array = np.ndarray[Any, Any]
rng = np.random.default_rng(0)


def read(run_dir: Path) -> Any:
    """Load the event file of a run, all of it."""
    kinds = ("scalars", "images", "histograms", "tensors")
    events = EventAccumulator(str(run_dir), size_guidance=dict.fromkeys(kinds, 0))
    events.Reload()
    return events


def write(run_dir: Path, *values: dict[str, Any], logger: TensorBoardLogger | None = None) -> Any:
    """Log a result for each dict, 10 env steps apart, and read the run back."""
    logger = TensorBoardLogger() if logger is None else logger
    logger.open(run_dir, {})
    for index, value in enumerate(values):
        logger.log_result({**value, "num_env_steps_sampled_lifetime": 10 * (index + 1), "config": {"lr": 1}})
    logger.close()
    return read(run_dir)


def points(events: Any, tag: str) -> list[tuple[int, float]]:
    return [(event.step, event.value) for event in events.Scalars(tag)]


def image_of(event: Any) -> Image.Image:
    return Image.open(io.BytesIO(event.encoded_image_string))


def texts(events: Any, tag: str) -> list[tuple[int, str]]:
    return [(event.step, event.tensor_proto.string_val[0].decode()) for event in events.Tensors(f"{tag}/text_summary")]


def test_numbers_stand_under_their_path_at_their_step(tmp_path: Path) -> None:
    events = write(tmp_path, {"env_runners": {"a": {"b": 1.5}}, "done": False}, {"env_runners": {"a": {"b": 2}}})
    assert points(events, "env_runners/a/b") == [(10, 1.5), (20, 2.0)]
    assert points(events, "done") == [(10, 0.0)]
    assert points(events, "num_env_steps_sampled_lifetime") == [(10, 10.0), (20, 20.0)]
    assert not [tag for tag in events.Tags()["scalars"] if tag.startswith("config")]


def test_what_is_not_finite_is_no_point(tmp_path: Path) -> None:
    events = write(tmp_path, {"a": math.nan, "b": math.nan}, {"a": math.inf}, {"a": 3.0}, {"a": None})
    assert points(events, "a") == [(30, 3.0)]
    assert "b" not in events.Tags()["scalars"]


def test_each_result_is_kept_at_once(tmp_path: Path) -> None:
    logger = TensorBoardLogger()
    logger.open(tmp_path, {})
    noise = rng.integers(0, 256, (256, 256, 3), np.uint8)  # large enough that the file is late if nobody waits for it
    for step in (10, 20):
        logger.log_result({"noise": noise, "a": step / 10, "num_env_steps_sampled_lifetime": step})
        assert points(read(tmp_path), "a")[-1] == (step, step / 10)  # before the file is closed
    logger.close()


@pytest.mark.parametrize("num_channels", [3, 4])
def test_an_image_reads_back_pixel_by_pixel(tmp_path: Path, num_channels: int) -> None:
    wide = rng.integers(0, 256, (12, 40, num_channels), np.uint8)
    image = wide[:, ::2]  # not contiguous, as a slice of a rendering is
    events = write(tmp_path, {}, {"heat": {"map": image}})
    (event,) = events.Images("heat/map")
    assert (event.step, event.height, event.width) == (20, 12, 20)
    np.testing.assert_array_equal(np.asarray(image_of(event)), image)


def moving_square(num_frames: int = 6) -> Array:
    """Return a video of a square that moves over stripes, each frame with colours of its own."""
    video = np.zeros((num_frames, 24, 32, 3), np.uint8)
    for index, frame in enumerate(video):
        frame[:, :, 2] = np.arange(32) * 8
        frame[4:8, 4 * index : 4 * index + 4] = (250, 10 * index, 0)
    return video


def test_a_video_reads_back_frame_by_frame(tmp_path: Path) -> None:
    video = moving_square()
    (event,) = write(tmp_path, {"clip": video}, logger=TensorBoardLogger(video_fps=5)).Images("clip")
    gif = image_of(event)
    frames = [np.asarray(frame.convert("RGB")) for frame in ImageSequence.Iterator(gif)]
    np.testing.assert_array_equal(np.stack(frames), video)
    assert (event.step, event.height, event.width) == (10, 24, 32)
    assert (gif.format, gif.info["duration"], gif.info["loop"]) == ("GIF", 200, 0)


def test_a_video_of_one_frame_and_one_of_many_colours(tmp_path: Path) -> None:
    noise = rng.integers(0, 256, (2, 64, 64, 3), np.uint8)
    events = write(tmp_path, {"one": moving_square(1), "noise": noise})
    np.testing.assert_array_equal(np.asarray(image_of(events.Images("one")[0]).convert("RGB")), moving_square(1)[0])
    decoded = [np.asarray(f.convert("RGB"), float) for f in ImageSequence.Iterator(image_of(events.Images("noise")[0]))]
    assert np.abs(np.stack(decoded) - noise).mean() < 25  # 256 colours for 4,096; noise against noise has 85


def test_a_series_of_images_is_an_image_each_and_only_the_latest(tmp_path: Path) -> None:
    images = [np.full((2, 3, 3), value, np.uint8) for value in range(4)]
    videos = [moving_square(2), moving_square(3)]
    events = write(tmp_path, {"views": images, "clips": videos}, logger=TensorBoardLogger(max_images=3))
    assert events.Tags()["images"] == ["views/0", "views/1", "views/2", "clips/0", "clips/1"]
    values = [np.asarray(image_of(events.Images(f"views/{index}")[0]))[0, 0, 0] for index in range(3)]
    assert values == [1, 2, 3]
    assert getattr(image_of(events.Images("clips/1")[0]), "n_frames", 1) == 3


def counts_within(histogram: Any, low: float, high: float) -> float:
    """Count what is in bins that end above `low` and up to `high`."""
    pairs = zip(histogram.bucket_limit, histogram.bucket, strict=True)
    return sum(count for limit, count in pairs if low < limit <= high)


@pytest.mark.parametrize(
    "value", [np.array([[0.0, 1.0], [1.0, 4.0]]), [0.0, 1, np.int64(1), 4], [np.zeros(1), np.array([1, 1, 4])]]
)
def test_arrays_and_series_of_numbers_are_histograms(tmp_path: Path, value: Any) -> None:
    (event,) = write(tmp_path, {"spread": value}).Histograms("spread")
    histogram = event.histogram_value
    assert event.step == 10
    assert (histogram.num, histogram.min, histogram.max, histogram.sum) == (4, 0, 4, 6)
    assert [counts_within(histogram, low, low + 1) for low in (-1, 0, 1, 2, 3)] == [0, 1, 2, 0, 1]


def test_a_histogram_tells_large_numbers_apart(tmp_path: Path) -> None:
    (event,) = write(tmp_path, {"len": [195.0, 196.0, 205.0, 205.0]}).Histograms("len")
    assert counts_within(event.histogram_value, 190, 196.2) == 2
    assert counts_within(event.histogram_value, 204, 206) == 2


@pytest.mark.parametrize(
    "values",
    [
        [7.0, 7.0, 7.0],
        [0.0],
        [0.3, 0.1 + 0.2],  # one unit in the last place apart
        [1e308, -1e308, 0.0],
        [5e-324, 0.0],
        [True, False],
        [2**62, -(2**62)],
    ],
)
def test_histograms_of_odd_numbers_count_them_all(tmp_path: Path, values: list[float]) -> None:
    (event,) = write(tmp_path, {"odd": values}).Histograms("odd")
    assert sum(event.histogram_value.bucket) == event.histogram_value.num == len(values)


def test_what_is_not_finite_is_left_out_of_a_histogram(tmp_path: Path) -> None:
    none = {"empty": np.zeros(0), "nan": [math.nan], "nothing": []}
    events = write(tmp_path, {"some": np.array([math.nan, 1.0, -math.inf, 2.0]), **none})
    assert events.Tags()["histograms"] == ["some"]
    assert events.Histograms("some")[0].histogram_value.num == 2


def test_a_text_is_written_when_it_changes(tmp_path: Path) -> None:
    parts = [{"bottleneck": {"part": part}} for part in ("learning", "learning", "inference", "learning")]
    events = write(tmp_path, *parts, {"words": ["a", "b"]})
    assert texts(events, "bottleneck/part") == [(10, "learning"), (30, "inference"), (40, "learning")]
    assert texts(events, "words") == [(50, "a\n\nb")]


def test_values_of_other_types_are_left_out(tmp_path: Path) -> None:
    events = write(tmp_path, {"path": Path("x"), "mixed": [1, "a"], "complex": np.ones(2, np.complex64), "none": None})
    found = events.Tags()
    assert (found["scalars"], found["images"], found["histograms"], found["tensors"]) == (
        ["num_env_steps_sampled_lifetime"],
        [],
        [],
        [],
    )


def test_a_run_writes_events_next_to_its_other_files(tmp_path: Path) -> None:
    image = rng.integers(0, 256, (4, 5, 3), np.uint8)

    def on_train_result(result: dict[str, Any]) -> None:
        result["mine"] = {"image": image, "series": [1.0, 2.0]}

    config = PPOConfig().environment(CountingEnv).env_runners(num_envs_per_env_runner=2).debugging(seed=0)
    config.training(train_batch_size_per_learner=32, minibatch_size=16, num_epochs=1)
    config.callbacks(on_train_result=on_train_result)
    with config.build() as algo:
        loggers = [*default_loggers(), TensorBoardLogger()]
        last = algo.fit(stop={"training_iteration": 3}, run_dir=tmp_path, loggers=loggers)
    events = read(tmp_path)
    assert points(events, "training_iteration") == [(32, 1), (64, 2), (96, 3)]
    loss = last["learners"]["default_policy"]["total_loss"]
    assert points(events, "learners/default_policy/total_loss")[-1] == (96, pytest.approx(loss))
    assert [event.step for event in events.Images("mine/image")] == [32, 64, 96]
    assert [event.step for event in events.Histograms("mine/series")] == [32, 64, 96]
    assert texts(events, "engine") == [(32, last["engine"])]
    files = {path.name for path in tmp_path.iterdir() if "tfevents" not in path.name}
    assert files == {"config.yaml", "run.log", "progress.csv", "result.jsonl", "checkpoints", ".lock"}


def test_the_tab_hparams_has_the_settings_of_each_run(tmp_path: Path) -> None:
    config = PPOConfig().environment(CountingEnv).training(lr=0.25, train_batch_size_per_learner=64, minibatch_size=64)
    config.rl_module(model_config={"fcnet_hiddens": [4, 4]})
    with config.build() as algo:
        algo.fit(stop={"training_iteration": 1}, run_dir=tmp_path, loggers=[TensorBoardLogger()])
    content = {
        name: HParamsPluginData.FromString(read(tmp_path).SummaryMetadata(f"_hparams_/{name}").plugin_data.content)
        for name in ("experiment", "session_start_info")
    }
    settings = content["session_start_info"].session_start_info.hparams
    assert settings["training.lr"].number_value == 0.25
    assert settings["rl_module.model_config.fcnet_hiddens"].string_value == "[4, 4]"
    assert settings["algo"].string_value == "PPO"
    numbers = [metric.name.tag for metric in content["experiment"].experiment.metric_infos]
    assert "env_runners/episode_return_mean" in numbers and {*settings} == {
        info.name for info in content["experiment"].experiment.hparam_infos
    }


def test_all_files_have_the_numbers_of_modules_and_of_one_that_came_later(tmp_path: Path) -> None:
    def add(algorithm: Any, result: dict[str, Any]) -> None:
        if algorithm.training_iteration == 2:
            algorithm.add_module(
                "late", copy_from="0", policy_mapping_fn=lambda agent_id, episode: ["0", "late"][agent_id]
            )

    config = (
        PPOConfig()
        .environment(make_multi_agent(CountingEnv), env_config={"num_agents": 2})
        .callbacks(on_train_result=add)
    )
    config.multi_agent(policies={"0", "1"}).rl_module(model_config={"fcnet_hiddens": [4]}).debugging(seed=0)
    config.training(train_batch_size_per_learner=32, minibatch_size=16, num_epochs=1)
    with config.build() as algo:
        algo.fit(stop={"training_iteration": 4}, run_dir=tmp_path, loggers=[*default_loggers(), TensorBoardLogger()])
    events = read(tmp_path)
    lines = [json.loads(line) for line in (tmp_path / "result.jsonl").read_text().splitlines()]
    with (tmp_path / "progress.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == len(lines) == 4
    for name in ("0", "late"):
        path = f"learners/{name}/total_loss"
        shown = [
            (32 * (number + 1), line["learners"].get(name, {}).get("total_loss")) for number, line in enumerate(lines)
        ]
        kept = [(step, value) for step, value in shown if value is not None]
        assert kept[-1][0] == 128 and (kept[0][0] == 32) == (name == "0")
        assert points(events, path) == [(step, pytest.approx(value)) for step, value in kept]
        assert [float(row[path]) for row in rows if row[path] not in ("", "nan")] == [value for _, value in kept]
    of_agents = [line["env_runners"]["agent_episode_return_mean"] for line in lines]
    assert [set(means) for means in of_agents] == [{"0", "1"}] * 4
    in_rows = [float(row["env_runners/agent_episode_return_mean/1"]) for row in rows]
    assert in_rows[1:] == [means["1"] for means in of_agents[1:]]  # in the first iteration no episode ended


class Percent(TensorBoardLogger):
    """A logger that changes three kinds, and leaves the rest as it is."""

    def write_number(self, path: str, value: float, step: int) -> None:
        if path.endswith("_share"):
            super().write_number(path.replace("_share", "_percent"), 100 * value, step)

    def write_image(self, path: str, image: Array, step: int) -> None:
        super().write_image(path, image[::2, ::2], step)

    def write_text(self, path: str, value: str, step: int) -> None:
        self.writer.add_scalar(f"{path}/length", len(value), step)


def test_a_subclass_changes_what_is_written(tmp_path: Path) -> None:
    result = {"timers": {"learning_share": 0.25}, "other": 1.0, "view": np.ones((4, 6, 3), np.uint8), "text": "four"}
    events = write(tmp_path, {**result, "spread": [1.0, 2.0]}, logger=Percent())
    assert events.Tags()["scalars"] == ["text/length", "timers/learning_percent"]
    assert points(events, "timers/learning_percent") == [(10, 25.0)]
    assert points(events, "text/length") == [(10, 4.0)]
    assert image_of(events.Images("view")[0]).size == (3, 2)
    assert events.Tags()["histograms"] == ["spread"]


def test_a_run_that_continues_hides_the_points_of_later_steps(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    def write(*steps: int) -> None:
        for step in steps:
            logger.log_result({"num_env_steps_sampled_lifetime": step, "x": float(step)})
        logger.close()

    logger = TensorBoardLogger()
    logger.open(tmp_path, {})
    write(10, 20, 30)
    (first,) = tmp_path.glob("events.*")
    first.rename(tmp_path / f"events.out.tfevents.{int(time.time())}.~")  # the last name of this second
    logger.resume(tmp_path, {}, 2, 20)
    write(25)
    found = EventAccumulator(str(tmp_path))
    found.Reload()
    assert [point.step for point in found.Scalars("x")] == [10, 20, 25]


def test_a_logger_can_be_opened_again(tmp_path: Path) -> None:
    logger = TensorBoardLogger()
    for name in ("first", "second"):
        events = write(tmp_path / name, {"engine": "embedded", "a": 1}, logger=logger)
        assert texts(events, "engine") == [(10, "embedded")]  # new for this run, whatever the last one said
        assert points(events, "a") == [(10, 1.0)]


def test_a_logger_that_was_never_opened_can_be_closed() -> None:
    TensorBoardLogger().close()


@pytest.mark.parametrize("missing", ["tensorboard", "PIL"])
def test_a_missing_package_is_named_at_once(missing: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.startswith(("torch.utils.tensorboard", f"{missing}."))]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, missing, None)  # what Python does with a module that must not be imported
    with pytest.raises(ConfigError, match=r"pip install 'corral\[tensorboard\]'"):
        TensorBoardLogger()
    CSVLogger()  # the others need no more than before


@pytest.mark.parametrize("settings", [{"video_fps": 0}, {"video_fps": 1000}, {"max_images": 0}])
def test_settings_out_of_range_are_refused(settings: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(settings))):
        TensorBoardLogger(**settings)
