"""Envs of tensors with several agents: modules learn on the device, with the numbers that they have on arrays."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from gymnasium import spaces
from torch import Tensor

from corral import Callback, NormalizeObservations, NormalizeRewards, PPOConfig
from corral.data.episodes.lane_rollout import LaneRollout
from corral.data.episodes.multi_agent_rollout import MultiAgentRollout
from corral.data.episodes.tensor_rollout import TensorRollout
from corral.envs.tensor_env import TensorVectorEnv
from corral.errors import EnvError
from corral.runners.requests import SampleRequest
from exact_runs import check_continuation
from host_transfers import count_host_transfers

N = 8
AGENTS = ("red", "blue", "goalkeeper")


class Team(TensorVectorEnv):
    """Three points on a line, which their agents push; the goalkeeper sees all of them."""

    def __init__(self, num_envs: int, device: Any = "cpu", length: int = 13, bad_step: int = -1) -> None:
        self.num_envs, self.device, self.length, self.bad_step = num_envs, torch.device(device), length, bad_step
        self.possible_agents = AGENTS
        widths = {"red": 2, "blue": 2, "goalkeeper": 3}
        self.single_observation_space = spaces.Dict(
            {agent: spaces.Box(-np.inf, np.inf, (width,), np.float32) for agent, width in widths.items()}
        )
        self.single_action_space = spaces.Dict({agent: spaces.Discrete(3) for agent in AGENTS})
        self.generator, self.num_steps = torch.Generator(self.device), 0

    def draw(self) -> Tensor:
        return torch.randn((self.num_envs, 3), generator=self.generator, device=self.device)

    def observe(self) -> dict[str, Tensor]:
        mean = self.places.mean(1)
        obs = {agent: torch.stack([self.places[:, i], mean], 1) for i, agent in enumerate(AGENTS[:2])}
        return {**obs, "goalkeeper": self.places.clone()}

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        if seed is not None:
            self.generator.manual_seed(seed)
        self.places, self.count = self.draw(), torch.zeros(self.num_envs, dtype=torch.int64, device=self.device)
        return self.observe(), {}

    def step(self, actions: Any) -> Any:
        push = torch.stack([actions[agent] for agent in AGENTS], 1) - 1
        self.num_steps += 1
        self.places, self.count = 0.95 * self.places + 0.3 * push + 0.05 * self.draw(), self.count + 1
        rewards = {agent: -self.places[:, i].abs() for i, agent in enumerate(AGENTS)}
        terminated = self.places.abs().amax(1) > 2.8
        truncated = self.count >= self.length
        final, over = self.observe(), terminated | truncated
        self.places = torch.where(over[:, None], self.draw(), self.places)
        self.count = torch.where(over, 0, self.count)
        obs = self.observe()
        if self.num_steps == self.bad_step:
            obs["blue"][3] = torch.nan
        return obs, rewards, terminated, truncated, {"final_obs": final}

    def get_state(self) -> dict[str, Any]:
        generator = self.generator.get_state().numpy()
        return {"places": self.places.numpy().copy(), "count": self.count.numpy().copy(), "generator": generator}

    def set_state(self, state: Mapping[str, Any]) -> None:
        self.places, self.count = torch.tensor(state["places"]), torch.tensor(state["count"])
        self.generator.set_state(torch.tensor(state["generator"]))


class Watched(Callback):
    """Notes the episodes as callbacks see them."""

    starts: ClassVar[list[Any]] = []
    ends: ClassVar[list[Any]] = []

    def on_episode_start(self, *, episode: Any, **arguments: Any) -> None:
        self.starts.append((sorted(episode.agent_episodes), len(episode)))

    def on_episode_end(self, *, episode: Any, **arguments: Any) -> None:
        lengths = {agent: len(part) for agent, part in episode.agent_episodes.items()}
        self.ends.append((len(episode), lengths, episode.get_return()))


def by_role(agent: str, episode: Any, **arguments: Any) -> str:
    return "keeper" if agent == "goalkeeper" else "field"


def by_episode(agent: str, episode: Any, **arguments: Any) -> str:
    assert episode.id_
    return by_role(agent, episode)


def make_config(*, arrays: bool = False, mapping: Any = by_role, **settings: Any) -> PPOConfig:
    config = PPOConfig().environment(Team).env_runners(num_envs_per_env_runner=N).debugging(seed=5)
    config.multi_agent(policies=["field", "keeper"], policy_mapping_fn=mapping)
    config.training(**{"train_batch_size_per_learner": 20 * N, "minibatch_size": 4 * N, "num_epochs": 2, **settings})
    return config.callbacks(Watched) if arrays else config


def numbers_of(result: Mapping[str, Any]) -> dict[str, float]:
    """Return the numbers of a result that do not depend on the clock."""
    runners = result["env_runners"]
    names = ("episode_return_mean", "episode_len_mean", "num_episodes", "num_agent_steps_sampled_lifetime")
    found = {name: runners[name] for name in names}
    for kind in ("agent_episode_return_mean", "module_episode_return_mean", "num_agent_steps_sampled_by_agent"):
        found |= {f"{kind}/{name}": value for name, value in runners[kind].items()}
    for module_id in ("field", "keeper"):
        learner = result["learners"][module_id]
        found |= {f"{module_id}/{name}": value for name, value in learner.items() if isinstance(value, float)}
    return found


NORMALIZED = [NormalizeObservations(), NormalizeRewards()]


@pytest.mark.parametrize("transforms", [[], NORMALIZED])
def test_modules_have_the_numbers_that_they_have_on_arrays(transforms: list[Any]) -> None:
    """With whole batches, because their rows come in another order: on arrays, lanes have a row more per episode."""
    results, weights = [], []
    for arrays in (False, True):
        algo = make_config(arrays=arrays, minibatch_size=None).env_runners(transforms=transforms).build()
        assert algo.env_runner_group.setting_of_arrays == ("callbacks" if arrays else "")
        results.append([])
        for _ in range(4):
            results[-1].append(numbers_of(algo.train()))
            algo.env_runner.sample(num_timesteps=5 * N, force_reset=True)  # what a reset cuts off counts nowhere
        weights.append(algo.learner_group.get_weights()["field"])
        algo.stop()
    for on_device, on_arrays in zip(*results, strict=True):
        assert on_device == pytest.approx(on_arrays, rel=1e-3, abs=1e-4, nan_ok=True)
    for name, array in weights[0].items():
        np.testing.assert_allclose(array, weights[1][name], atol=1e-4, err_msg=name)


def test_callbacks_see_whole_episodes_of_all_agents() -> None:
    Watched.starts.clear()
    Watched.ends.clear()
    algo = make_config(arrays=True).build()
    rollouts = [algo.sample(20 * N)[0] for _ in range(3)]
    statistics = [episode for rollout in rollouts for episode in rollout.episodes()]
    algo.stop()
    assert set(map(tuple, (names for names, _ in Watched.starts))) == {tuple(sorted(AGENTS))}
    assert {length for _, length in Watched.starts} == {0}
    assert len(Watched.ends) == sum(episode.is_terminated or episode.is_truncated for episode in statistics) > N
    for length, lengths, _ in Watched.ends:
        assert lengths == dict.fromkeys(AGENTS, length)
    assert max(length for length, _, _ in Watched.ends) == 13


@pytest.mark.parametrize("arrays", [False, True])
def test_each_agent_has_its_infos_of_each_step(arrays: bool) -> None:
    class Telling(Team):
        def step(self, actions: Any) -> Any:
            time = self.count + 1
            *found, infos = super().step(actions)
            return *found, infos | {"red": {"time": time}, "blue": {"time": -time}, "squared": time**2}

    with make_config(arrays=arrays).environment(Telling).build() as algo:
        rollout = algo.env_runner.collect(SampleRequest(num_timesteps=30 * N, with_infos=True))  # type: ignore[union-attr]
    episodes = [episode for episode in rollout.episodes() if episode.is_done]
    assert len(episodes) >= N
    for episode in episodes:
        infos, times = episode.get_infos(), range(1, len(episode) + 1)
        assert infos["red"] == [{}, *({"time": time} for time in times)]
        assert infos["blue"] == [{}, *({"time": -time} for time in times)]
        assert infos["goalkeeper"] == [{}] * (len(episode) + 1)
        assert infos["__common__"] == [{"squared": time**2} for time in times]


@pytest.mark.slow
def test_transfers_to_the_host_are_as_many_however_long_the_iteration() -> None:
    found = []
    for num_rows, num_epochs in ((8, 1), (32, 4)):
        algo = make_config(train_batch_size_per_learner=num_rows * N, minibatch_size=N, num_epochs=num_epochs).build()
        for _ in range(3):  # the first episodes end
            algo.train()
        with count_host_transfers() as transfers:
            algo.train()
        algo.stop()
        found.append(transfers)
    assert found[0] == found[1]


@pytest.mark.parametrize("transforms", [[], NORMALIZED])
@pytest.mark.parametrize("arrays", [False, True])
def test_a_restored_run_continues_exactly(arrays: bool, transforms: list[Any], tmp_path: Path) -> None:
    algo = make_config(arrays=arrays).env_runners(transforms=transforms).build()
    for _ in range(2):
        algo.train()
    check_continuation(algo, tmp_path / "saved")


def test_a_mapping_that_asks_for_the_episode_gets_arrays() -> None:
    algo = make_config(mapping=by_episode).build()
    assert algo.env_runner_group.setting_of_arrays == "multi_agent.policy_mapping_fn"
    assert np.isfinite(algo.train()["learners"]["field"]["total_loss"])
    algo.stop()


@pytest.mark.parametrize("transforms", [[], NORMALIZED])
def test_a_module_that_is_added_acts_from_the_next_sample_on(transforms: list[Any]) -> None:
    algo = make_config().env_runners(transforms=transforms).build()
    algo.train()

    def each_alone(agent: str, episode: Any, **arguments: Any) -> str:
        return {"goalkeeper": "keeper", "red": "field", "blue": "new"}[agent]

    algo.add_module("new", copy_from="field", policy_mapping_fn=each_alone)
    [rollout] = algo.sample(20 * N)
    assert isinstance(rollout, MultiAgentRollout) and rollout.is_on_device
    assert {module_id: set(part.lane_agents) for module_id, part in rollout.modules.items()} == {
        "field": {"red"},
        "keeper": {"goalkeeper"},
        "new": {"blue"},
    }
    assert np.isfinite(algo.train()["learners"]["new"]["total_loss"])
    algo.stop()


def test_a_mapping_that_asks_for_the_episode_later_resets_the_envs_and_samples_arrays_and_back() -> None:
    algo = make_config().build()
    algo.train()
    found = []
    for index, mapping in enumerate((by_episode, by_episode, by_role)):
        algo.add_module(f"module_{index}", copy_from="field", policy_mapping_fn=mapping)
        [rollout] = algo.sample(20 * N)
        found.append((rollout.continues, {type(part) for part in rollout.by_module().values()}))
        assert {*rollout.by_module()} == {"field", "keeper"}
        steps = {module_id: part.num_env_steps for module_id, part in rollout.by_module().items()}
        assert steps == {"field": 2 * rollout.num_env_steps, "keeper": rollout.num_env_steps}
    algo.stop()
    assert found == [(False, {LaneRollout}), (True, {LaneRollout}), (False, {TensorRollout})]


def test_a_value_that_is_not_finite_is_named_with_its_agent() -> None:
    algo = make_config().environment(env_config={"bad_step": 9}).build()
    with pytest.raises(EnvError, match=r"env 'Team', sub-env 3, step 8: agent 'blue': observation holds NaN"):
        algo.train()
    algo.stop()


def test_evaluation_plays_whole_episodes_on_the_device() -> None:
    config = make_config().evaluation(evaluation_interval=1, evaluation_duration=5, evaluation_num_env_runners=0)
    algo = config.build()
    found = algo.train()["evaluation"]["env_runners"]
    algo.stop()
    assert found["num_episodes"] == 5
    assert 0 < found["episode_len_mean"] <= 13
    assert found["episode_return_mean"] == pytest.approx(sum(found["agent_episode_return_mean"].values()))


def test_a_central_critic_sees_an_env_of_tensors_on_arrays() -> None:
    # The goalkeeper sees the places of all agents, also in final observations, which come with the next first ones.
    with make_config().multi_agent(critic_sees="all").build() as algo:
        assert algo.env_runner_group.setting_of_arrays == "multi_agent.critic_sees"
        assert np.isfinite(algo.train()["learners"]["keeper"]["vf_loss"])
        (rollout,) = algo.sample(15 * N)
        for part in rollout.by_module().values():
            seen, ends = part.columns["critic_obs"], part.done & part.valid
            for rows in (seen["observations"], {name: leaf[1:][ends] for name, leaf in seen["observations"].items()}):
                np.testing.assert_array_equal(rows["red"][..., 0], rows["goalkeeper"][..., 0])
                np.testing.assert_array_equal(rows["blue"][..., 0], rows["goalkeeper"][..., 1])
            assert ends.sum() >= N and seen["present"][:-1][part.valid].all() and seen["present"][1:][part.valid].all()
            own = np.array([seen["observations"][agent][:, lane] for lane, agent in enumerate(part.lane_agents)])
            np.testing.assert_array_equal(own.swapaxes(0, 1)[:-1][part.valid], part.obs[:-1][part.valid])
