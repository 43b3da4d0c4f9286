"""The examples in examples/callbacks/ do what they say."""

from __future__ import annotations

import io
import json
import math
import re
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import ormsgpack
import pytest
from PIL import Image
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

import example_files
from at_least import at_least
from corral import Callback, DQNConfig, PPOConfig
from corral.errors import CorralError
from small import small

EXAMPLES = example_files.EXAMPLES / "callbacks"


def load(name: str) -> ModuleType:
    return example_files.load(f"callbacks/{name}.py")


def test_every_example_has_a_test() -> None:
    tested = set(re.findall(r'load\("(\w+)"\)', Path(__file__).read_text(encoding="utf-8")))
    assert {path.stem for path in EXAMPLES.glob("*.py")} == tested


def returns_of(config: PPOConfig) -> list[float]:
    """Return the returns of the episodes of the first iteration, in the order of their ends."""
    returns: list[float] = []
    quiet = config.copy().callbacks(None, on_episode_end=lambda episode: returns.append(episode.get_return()))
    with quiet.build() as algo:
        result = algo.train()
    assert np.mean(returns[-100:]) == pytest.approx(result["env_runners"]["episode_return_mean"])
    return returns


def test_episode_return_lambda(capsys: pytest.CaptureFixture[str]) -> None:
    example = load("episode_return_lambda")
    example.config.debugging(seed=0)
    example.main()
    lines = capsys.readouterr().out.splitlines()
    assert lines == [f"Episode done. R={value}" for value in returns_of(example.config)]


def test_episode_return_class(capsys: pytest.CaptureFixture[str]) -> None:
    example = load("episode_return_class")
    example.config.debugging(seed=0)
    example.main()
    lines = capsys.readouterr().out.splitlines()
    returns = returns_of(example.config)
    assert lines == [
        f"Episode done. R={value} Global SUM={total}" for value, total in zip(returns, np.cumsum(returns), strict=True)
    ]


def test_chained(capsys: pytest.CaptureFixture[str]) -> None:
    load("chained").main(num_iterations=2)
    lines = capsys.readouterr().out.splitlines()
    assert lines == ["debug subclass", "Callback subclass", "lambda 1", "lambda 2"] * 2


@pytest.mark.slow
def test_acrobot_angle_both_ways_against_the_env_s_own_state() -> None:
    example = load("acrobot_angle")

    class FromTheState(Callback):
        """Reads the angle where the env keeps it, and averages it apart from everything."""

        def __init__(self) -> None:
            self.angles: dict[int, list[float]] = {}
            self.means: list[float] = []

        def on_episode_step(self, *, env: Any, env_index: int, **kwargs: Any) -> None:
            theta1 = env.envs[env_index].unwrapped.state[0]
            self.angles.setdefault(env_index, []).append(math.degrees(theta1))

        def on_episode_end(self, *, env_index: int, **kwargs: Any) -> None:
            self.means.append(float(np.mean(self.angles.pop(env_index))))

    reference = FromTheState()
    config = PPOConfig().environment("Acrobot-v1").callbacks(reference).debugging(seed=0)
    with config.build() as algo:
        expected = []
        for _ in range(5):
            algo.train()
            expected.append(np.mean(reference.means[-50:]) if reference.means else math.nan)
    assert len(reference.means) >= 16
    in_custom_data = example.main(example.AngleInCustomData, num_iterations=5)
    in_temporary_data = example.main(example.AngleInTemporaryData, num_iterations=5)
    np.testing.assert_allclose(in_custom_data, expected, rtol=1e-4)
    assert np.array_equal(in_custom_data, in_temporary_data, equal_nan=True)


def test_heat_map_is_the_visited_cells_in_tensorboard(tmp_path: Path) -> None:
    example = load("heat_map")
    example.main(num_iterations=2, run_dir=tmp_path)
    accumulator = EventAccumulator(str(tmp_path), size_guidance={"images": 0})
    accumulator.Reload()
    events = accumulator.Images("env_runners/visited_cells")
    assert len(events) == 2
    pixels = np.asarray(Image.open(io.BytesIO(events[-1].encoded_image_string)))
    assert pixels.shape == (128, 128, 3)
    cells = pixels[:: example.PIXELS, :: example.PIXELS].sum(-1)
    assert np.array_equal(np.kron(cells, np.ones((16, 16), cells.dtype)), pixels.sum(-1))  # one colour a cell
    assert cells[0, 0] == cells.max() == 3 * 255  # the start is where it is most often
    # Nobody acts in a hole or at the goal: an episode ends there.
    holes = ["SFFFFFFF", "FFFFFFFF", "FFFHFFFF", "FFFFFHFF", "FFFHFFFF", "FHHFFFHF", "FHFFHFHF", "FFFHFFFG"]
    assert all(
        cells[y, x] == 0 for y, row in at_least(1, enumerate(holes)) for x, kind in enumerate(row) if kind in "HG"
    )
    assert (cells > 0).sum() > 20


def test_evaluation_runners_are_told_apart() -> None:
    training, evaluation = load("evaluation_runners").main(num_iterations=2)
    assert set(training) == set(evaluation) == {"return"}
    assert training["return"] > 0 and evaluation["return"] > 0


@pytest.mark.slow
@pytest.mark.parametrize("backdate", [True, False])
def test_backdated_rewards_are_learned_from(backdate: bool) -> None:
    last = load("backdated_rewards").main(backdate=backdate, num_iterations=15)[-1]
    # By chance 7, at best 14: paid late, the reward says nothing about the action it is paid after. What is learned
    # from it is noise, which moves the return either way.
    assert last > 13 if backdate else last < 10


def test_backdated_rewards_are_those_that_were_earned() -> None:
    example = load("backdated_rewards")
    checked: list[bool] = []

    def compare(episode: Any, original_batches: Any, postprocessed_batch: Any) -> None:
        matches = (episode.get_actions() == episode.get_observations(slice(0, -1))).astype(float)
        if episode.t_started == 0 and len(episode) > example.DELAY:
            checked.append(True)
            late = original_batches["default_agent"][1]["rewards"]
            assert late.tolist() == [0.0] * example.DELAY + matches[: -example.DELAY].tolist()
            assert postprocessed_batch["rewards"].tolist() == matches[: -example.DELAY].tolist() + [0.0] * example.DELAY

    config = PPOConfig().environment(example.LatePayments).training(num_epochs=1).debugging(seed=0)
    with config.callbacks(example.BackdateRewards, on_postprocess_trajectory=compare).build() as algo:
        algo.train()
    assert len(checked) > 50


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 1])
def test_curiosity_finds_what_is_far_away(seed: int) -> None:
    example = load("curiosity")
    curious = example.main(num_iterations=25, seed=seed)
    incurious = example.main(curious=False, num_iterations=25, seed=seed)
    # Staying at the start pays 40 x 0.01, the end of the corridor 1.
    assert max(result["episode_return_mean"] for result in curious) > 0.9
    assert incurious[-1]["episode_return_mean"] < 0.41
    # The reported return is the env's; what is new becomes known.
    assert curious[0]["curiosity_bonus_mean"] > 10 * curious[-1]["curiosity_bonus_mean"] > 0


@pytest.mark.parametrize("keep", ["custom_data", pytest.param("temporary", marks=pytest.mark.slow)])
def test_the_angle_as_users_of_rllib_write_it(keep: str) -> None:
    means: list[float] = []

    class LogAcrobotAngle(Callback):
        def on_episode_created(self, *, episode: Any, **kwargs: Any) -> None:
            episode.custom_data["theta1"] = []

        def on_episode_step(self, *, episode: Any, env: Any, **kwargs: Any) -> None:
            cos_theta1, sin_theta1 = env.envs[0].unwrapped.state[0], env.envs[0].unwrapped.state[1]
            deg_theta1 = math.degrees(math.atan2(sin_theta1, cos_theta1))
            if keep == "custom_data":
                episode.custom_data["theta1"].append(deg_theta1)
            else:
                episode.add_temporary_timestep_data("theta1", deg_theta1)

        def on_episode_end(self, *, episode: Any, metrics_logger: Any, **kwargs: Any) -> None:
            read: Callable[[str], list[float]] = episode.get_temporary_timestep_data
            theta1s = episode.custom_data["theta1"] if keep == "custom_data" else read("theta1")
            assert len(theta1s) == episode.t
            means.append(sum(theta1s) / len(theta1s))
            metrics_logger.log_value("theta1_mean", np.mean(theta1s), reduce="mean", window=50)

    config = PPOConfig().environment("Acrobot-v1").callbacks(callbacks_class=LogAcrobotAngle).debugging(seed=0)
    with config.training(train_batch_size_per_learner=8192, num_epochs=1).build() as algo:
        result = algo.train()
    assert len(means) > 10
    assert result["env_runners"]["theta1_mean"] == pytest.approx(np.mean(means[-50:]))


@pytest.mark.slow
def test_the_replay_buffer_is_on_disk_as_it_was_after_every_second_iteration(tmp_path: Path) -> None:
    example, path = load("replay_buffer"), tmp_path / "contents.msgpack"
    assert example.main(3, path) == [(1, 1000), (2, 2000), (3, 3000)]
    contents = ormsgpack.unpackb(path.read_bytes())
    assert sum(map(sum, contents["columns"]["valid"])) == 2000
    with DQNConfig().environment("CartPole-v1").debugging(seed=0).build() as algo:
        for _ in range(2):
            algo.train()
        ours = ormsgpack.packb(algo.local_replay_buffer.get_state(), option=ormsgpack.OPT_SERIALIZE_NUMPY)
    assert ormsgpack.unpackb(ours) == contents


class Webhook(BaseHTTPRequestHandler):
    """Keeps what it receives, like the incoming webhook of a chat."""

    texts: list[str]

    def do_POST(self) -> None:
        self.texts.append(json.loads(self.rfile.read(int(self.headers["Content-Length"])))["text"])
        self.send_response(200)
        self.end_headers()

    def log_message(self, *args: Any) -> None: ...


@pytest.fixture
def webhook() -> Iterator[tuple[str, list[str]]]:
    """Yield the URL of a webhook and the texts that it has received."""
    kind = type("Kept", (Webhook,), {"texts": []})
    with ThreadingHTTPServer(("127.0.0.1", 0), kind) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}/hook", kind.texts  # type: ignore[attr-defined]
        server.shutdown()
        thread.join()


def test_notify(
    webhook: tuple[str, list[str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    example, (url, texts) = load("notify"), webhook
    example.main(url, num_iterations=1)
    [ended] = texts
    assert re.fullmatch(
        r"The run in runs/PPO-CartPole-v1-\S+ ended after iteration 1: mean return [\d.]+, no faults\.", ended
    )

    config = small("CartPole-v1").callbacks(example.Notify(url), on_train_result=lambda: 1 / 0)
    with pytest.raises(CorralError), config.build() as algo:
        algo.train()
    assert "failed: CallbackError" in texts[1] and "ZeroDivisionError" in texts[1]

    example.main("http://127.0.0.1:9/hook", num_iterations=1)  # nothing listens there
    assert "Not sent: The run in runs/PPO" in capsys.readouterr().out
