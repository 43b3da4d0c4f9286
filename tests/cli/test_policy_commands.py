"""`corral evaluate` and `corral play` on runs and checkpoints."""

from __future__ import annotations

import contextlib
import json
import signal
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest

from corral import (
    HeuristicModule,
    MultiAgentEnv,
    PPOConfig,
    evaluate_policy,
    load_policy,
)
from corral.errors import ConfigError
from corral.runs.checkpoint import read_checkpoint, write_checkpoint
from corral.testing import CountingEnv, FaultyEnv
from corral.tools.cli.main import main


def halved(env: Any) -> Any:
    return gym.wrappers.TransformReward(env, lambda reward: reward / 2)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run directory with a checkpoint of a `CountingEnv` with episodes of 4 steps and half the rewards."""
    run = tmp_path_factory.mktemp("runs") / "run"
    config = PPOConfig().environment(CountingEnv, env_config={"episode_length": 4}, wrappers=[halved])
    with config.build() as algorithm:
        algorithm.save(run / "checkpoints" / "iteration-000000")
    return run


def test_evaluate_prints_numbers_for_people(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["evaluate", str(run), "--episodes", "5"]) == 0
    lines = dict(line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines())
    assert lines["episodes"] == "5"
    assert lines["shortest,"].endswith("4, 4 env steps")
    assert lines["95%"] == "interval        5.00 to 5.00 (bootstrap)"
    assert "iteration-000000 (iteration 0)" in lines["checkpoint"]


def test_evaluate_prints_json_with_each_episode(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--episodes", "5", "--json", "--env-config", "episode_length=2", "--env-config", "ends=truncated"]
    assert main(["evaluate", str(run), *arguments]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["episode_returns"] == [1.5] * 5
    assert found["episode_lens"] == [2] * 5
    assert found["episode_return_interval_low"] == found["episode_return_interval_high"] == 1.5
    assert found["checkpoint"] == str(run / "checkpoints" / "iteration-000000")


def test_the_fault_tolerance_of_the_run_holds_for_its_episodes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = PPOConfig().environment(FaultyEnv, env_config={"episode_length": 3, "at_step": 5})
    with config.fault_tolerance(restart_failed_sub_environments=True, env_step_timeout_s=60.0).build() as algorithm:
        path = algorithm.save(tmp_path / "saved")
    assert main(["evaluate", str(path), "--episodes", "16", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["episode_lens"] == [3] * 16
    assert main(["export", str(path), "-o", str(tmp_path / "policy.pt2"), "--episodes", "16"]) == 0


class Swallowing(CountingEnv):
    """Swallows every exception, as some foreign code does, when a signal arrives in it."""

    def step(self, action: Any) -> Any:
        with contextlib.suppress(BaseException):
            signal.raise_signal(signal.SIGINT)
        return super().step(action)


def test_a_signal_inside_an_env_ends_an_evaluation(tmp_path: Path) -> None:
    with PPOConfig().environment(Swallowing).build() as algorithm:
        path = algorithm.save(tmp_path / "saved")
    assert main(["evaluate", str(path), "--episodes", "1"]) == 130


def test_a_signal_ends_a_command_that_prints_wherever_it_arrives(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = "import signal\nfrom pathlib import Path\nsignal.raise_signal(signal.SIGINT)\nPath('later').touch()\n"
    (tmp_path / "interrupted.py").write_text(text)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    assert main(["config", "interrupted:MyConfig"]) == 130
    assert not (tmp_path / "later").exists()


def test_evaluate_explores_where_it_is_asked_to(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with PPOConfig().environment("CartPole-v1").debugging(seed=0).build() as algorithm:
        algorithm.save(tmp_path / "saved")
    found = []
    for more in ([], ["--explore"]):
        assert main(["evaluate", str(tmp_path / "saved"), "--episodes", "5", "--seed", "3", "--json", *more]) == 0
        found.append(json.loads(capsys.readouterr().out)["episode_returns"])
    greedy = evaluate_policy(load_policy(tmp_path / "saved"), "CartPole-v1", episodes=5, seed=3)
    assert found[0] == list(greedy.episode_returns) != found[1]


def test_evaluate_gives_what_python_gives(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with PPOConfig().environment("CartPole-v1").debugging(seed=0).build() as algorithm:
        path = algorithm.save(tmp_path / "checkpoint")
    assert main(["evaluate", str(path), "--episodes", "6", "--seed", "3", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    expected = evaluate_policy(load_policy(path), "CartPole-v1", episodes=6, seed=3)
    assert found["episode_returns"] == list(expected.episode_returns)
    assert main(["evaluate", str(path), "--seeds", "3", "9", "4", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["seeds"] == [3, 9, 4]
    expected = evaluate_policy(load_policy(path), "CartPole-v1", seeds=[3, 9, 4])
    assert found["episode_returns"] == list(expected.episode_returns)


def test_play_records_cartpole_without_a_display(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("pygame")
    monkeypatch.delenv("DISPLAY", raising=False)
    with PPOConfig().environment("CartPole-v1").debugging(seed=0).build() as algorithm:
        path = algorithm.save(tmp_path / "checkpoint")
    videos = tmp_path / "videos"
    assert main(["play", str(path), "--episodes", "1", "--record", str(videos), "--format", "gif"]) == 0
    assert [file.name for file in videos.iterdir()] == ["episode-000.gif"]
    assert str(videos / "episode-000.gif") in capsys.readouterr().out


def test_an_env_that_no_file_can_name_must_be_given(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    config = PPOConfig().environment(lambda config: CountingEnv(config), env_config={"episode_length": 2})
    with config.build() as algorithm:
        path = str(algorithm.save(tmp_path / "checkpoint"))
    assert main(["evaluate", path]) == 2
    assert "--env my_envs:MyEnv" in capsys.readouterr().err
    (tmp_path / "my_counting.py").write_text("from corral.testing import CountingEnv as Mine\n", encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    assert main(["evaluate", path, "--env", "my_counting:Mine", "--episodes", "2", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["episode_lens"] == [2, 2]


@pytest.mark.parametrize(
    ("arguments", "status", "message"),
    [
        (["evaluate", "nowhere"], 7, "nowhere"),
        (["evaluate", "RUN", "--env", "corral.testing:IdentityEnv"], 2, "observations of"),
        (["evaluate", "RUN", "--episodes", "0"], 2, "episodes=0"),
        (["evaluate", "RUN", "--episodes", "3", "--seeds", "1", "2"], 2, "2 seeds for episodes=3"),
        (["evaluate", "RUN", "--env-config", "episode_length"], 2, "NAME=VALUE"),
        (["evaluate", "RUN", "--env-config", "episode_length=100", "--max-episode-steps", "9"], 3, "not ended"),
        (["play", "RUN", "--record", "videos"], 3, "render_mode='rgb_array'"),
    ],
)
def test_mistakes_are_named(
    arguments: list[str],
    status: int,
    message: str,
    run: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main([str(run) if argument == "RUN" else argument for argument in arguments]) == status
    assert message in capsys.readouterr().err
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]


@pytest.mark.parametrize(
    ("environment", "message"),
    [
        ({"env": "os:system"}, "standard library"),
        ({"env": "CartPole-v1", "wrappers": ["builtins:exec"]}, "standard library"),
        ({"env": "CartPole-v1", "wrappers": 3}, "wrappers=3"),
        (["CartPole-v1"], "environment"),
    ],
)
def test_what_from_checkpoint_refuses_is_refused(
    environment: Any, message: str, run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = read_checkpoint(run / "checkpoints" / "iteration-000000")
    write_checkpoint(
        tmp_path / "changed",
        state=found.state,
        weights=found.weights,
        config={**found.config, "environment": environment},
        metadata={"training_iteration": 0},
        policies=found.policies,
    )
    assert main(["evaluate", str(tmp_path / "changed")]) in (2, 7)
    assert message in capsys.readouterr().err


class Pair(MultiAgentEnv):
    """Agents `left` and `right` act together for 3 steps, then `left` alone for 2; a reward is the action."""

    possible_agents = ("left", "right")
    observation_space = gym.spaces.Box(0, 9, (1,), np.float32)
    action_space = gym.spaces.Discrete(9)

    def __init__(self, config: Any) -> None:
        self.render_mode, self.t = config.get("render_mode"), 0

    def _obs(self, *agents: str) -> dict[Any, Any]:
        return {agent: np.full(1, self.t, np.float32) for agent in agents}

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        self.t = 0
        return self._obs("left", "right"), {}

    def step(self, action_dict: dict[Any, Any]) -> Any:
        self.t += 1
        rewards = {agent: float(action) for agent, action in action_dict.items()}
        ends = {"right": self.t == 3, "__all__": self.t == 5}
        return self._obs("left", "right") if self.t < 3 else self._obs("left"), rewards, ends, {}, {}

    def render(self) -> Any:
        return np.zeros((32, 32, 3), np.uint8)


class Threes(HeuristicModule):
    def choose_actions(self, obs: Any, rng: Any) -> Any:
        return np.full(len(obs), 3)


class Ages(HeuristicModule):
    def choose_actions(self, obs: Any, rng: Any) -> Any:
        return obs[:, 0].astype(np.int64)


def by_side(agent_id: Any, episode: Any) -> str:
    return "threes" if agent_id == "left" else "ages"


def pair_config(**settings: Any) -> PPOConfig:
    policies = {"threes": {"module_class": Threes}, "ages": {"module_class": Ages}, "other": {}}
    return PPOConfig().environment(Pair).multi_agent(**{"policies": policies, "policy_mapping_fn": by_side, **settings})


RETURN_OF_PAIR = 5 * 3 + (0 + 1 + 2)


def test_modules_of_several_agents_play_together(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pair_config().build() as algorithm:
        path = algorithm.save(tmp_path / "checkpoint")
    assert main(["evaluate", str(path), "--episodes", "5", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["episode_returns"] == [RETURN_OF_PAIR] * 5 and found["episode_lens"] == [5] * 5
    pytest.importorskip("PIL")
    videos = tmp_path / "videos"
    assert main(["play", str(path), "--episodes", "2", "--record", str(videos), "--format", "gif"]) == 0
    assert capsys.readouterr().out.count(f"return {RETURN_OF_PAIR:.2f}, 5 steps") == 2
    assert len(list(videos.iterdir())) == 2


def test_each_agent_is_mapped_once_in_each_episode() -> None:
    asked: list[Any] = []

    def in_turn(agent_id: Any, episode: Any) -> str:
        asked.append(agent_id)
        return ("threes", "ages")[len(asked) // 2 % 2]

    with pair_config(policy_mapping_fn=in_turn).build() as algorithm:
        asked.clear()
        found = evaluate_policy(algorithm, Pair, episodes=3, num_envs=1)
    assert asked == ["left", "right"] * 3 or asked == ["left", "right"] * 4  # the last reset may be seen too
    assert sorted(set(found.episode_returns)) == [RETURN_OF_PAIR, (0 + 1 + 2 + 3 + 4) + 3 * 3]


class Draws(HeuristicModule):
    def choose_actions(self, obs: Any, rng: Any) -> Any:
        return rng.integers(0, 4, len(obs))


class SameChoice(Pair):
    """Pair, whose episodes return in how many steps both agents chose the same action."""

    def step(self, action_dict: dict[Any, Any]) -> Any:
        obs, rewards, *rest = super().step(action_dict)
        return obs, dict.fromkeys(rewards, 0.5 * (len(set(action_dict.values())) < len(action_dict))), *rest


def test_modules_draw_numbers_of_their_own(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    policies = {name: {"module_class": Draws} for name in ("threes", "ages")}
    with pair_config(policies=policies).build() as algorithm:
        path = algorithm.save(tmp_path / "checkpoint")
    assert main(["evaluate", str(path), "--env", f"{__name__}:SameChoice", "--episodes", "8", "--json"]) == 0
    assert 0 < sum(json.loads(capsys.readouterr().out)["episode_returns"]) < 12  # a quarter of 24 steps, not all


def test_one_policy_and_several_agents_do_not_fit(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pair_config(policy_mapping_fn=lambda agent_id, episode: "threes").build() as algorithm:
        path = algorithm.save(tmp_path / "checkpoint")
        with pytest.raises(ConfigError, match=r"\['threes', 'ages', 'other'\].*env 'CountingEnv' has one agent"):
            evaluate_policy(algorithm, CountingEnv)
    for policy in (load_policy(path, module_id="threes"), lambda obs: 0):
        with pytest.raises(ConfigError, match=r"env 'Pair' has several agents, which one policy cannot play"):
            evaluate_policy(policy, Pair)
    assert main(["evaluate", str(path)]) == 2
    assert "no file can hold multi_agent.policy_mapping_fn" in capsys.readouterr().err


def test_a_format_without_a_recording_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["play", str(tmp_path), "--format", "gif"]) == 2
    assert "--format needs --record DIR" in capsys.readouterr().err
