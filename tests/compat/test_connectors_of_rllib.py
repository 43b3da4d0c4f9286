"""Connectors of users' own, between env and module and in learners, against loops by hand."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch

import corral
from corral.compat.rllib.algorithm import DQNConfig, PPOConfig
from corral.compat.rllib.connectors import (
    ConnectorV2,
    FlattenObservations,
    FrameStackingEnvToModule,
    MeanStdFilter,
    PrevActionsPrevRewards,
)
from corral.compat.rllib.default_connectors import (
    AddColumnsFromEpisodesToTrainBatch,
    AddNextObservationsFromEpisodesToTrainBatch,
    AddObservationsFromEpisodesToBatch,
    ComputeReturnsToGo,
    NumpyToTensor,
)
from corral.compat.rllib.episodes import SingleAgentEpisode
from corral.compat.rllib.learner import PPOTorchLearner
from corral.compat.rllib.learner_connectors import _check_unchanged, _Chunk, _in_order
from corral.compat.rllib.modules import MultiRLModuleSpec, RLModuleSpec, SelfSupervisedLossAPI, TorchRLModule
from corral.compat.rllib.pipelines import EnvToModulePipeline, LearnerConnectorPipeline, env_to_module_pipeline
from corral.errors import ConfigError, EnvError


class Line(gym.Env[Any, Any]):
    """Counts its steps: the observation is the number, the reward is 1, and an episode has 5 steps."""

    observation_space = gym.spaces.Box(0.0, 10.0, (1,), np.float32)
    action_space = gym.spaces.Discrete(2)
    actions: Any = None

    def __init__(self, config: Any = None) -> None:
        self.t = 0

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self.t, self.actions = 0, []
        return self._obs(), {}

    def step(self, action: Any) -> Any:
        self.t += 1
        self.actions.append(int(action))
        return self._obs(), 1.0, self.t == 5, False, {"taken": int(action)}

    def _obs(self) -> Any:
        return np.array([self.t], np.float32)


def small(env: Any = Line, **training: Any) -> PPOConfig:
    config = PPOConfig().environment(env).env_runners(num_env_runners=0, num_envs_per_env_runner=2)
    return config.training(**{"train_batch_size": 40, "minibatch_size": 40, "num_epochs": 1, **training}).debugging(
        seed=0
    )


class Numbered(ConnectorV2):
    """Adds the number of observations so far to each, adds 1 to rewards, and reports the number."""

    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **settings)
        self.count = 0

    def recompute_output_observation_space(self, input_observation_space: Any, input_action_space: Any) -> Any:
        return gym.spaces.Box(-np.inf, np.inf, (input_observation_space.shape[0] + 1,), np.float32)

    def __call__(self, *, batch: Any, episodes: Any, metrics: Any = None, **kwargs: Any) -> Any:
        for episode in self.single_agent_episode_iterator(episodes):
            obs = np.append(episode.get_observations(-1), np.float32(self.count))
            episode.set_observations(new_data=obs, at_indices=-1)
            if len(episode):
                episode.set_rewards(new_data=episode.get_rewards(-1) + 1.0, at_indices=-1)
            self.count += 1
        if metrics is not None:
            metrics.log_value("seen", self.count, reduce="max")
        return batch

    def get_state(self, components: Any = None, **settings: Any) -> dict[str, Any]:
        return {"count": self.count}

    def set_state(self, state: Any) -> None:
        self.count = state["count"]


# Between env and module.


def test_a_connector_changes_observations_rewards_and_the_space_and_reports_numbers() -> None:
    with small().env_runners(env_to_module_connector=lambda env, spaces, device: Numbered()).build() as algo:
        episodes = algo.env_runner.sample(num_episodes=2)
        counts = np.concatenate([each.get_observations()[:, 1] for each in episodes])
        for episode in episodes:
            assert episode.get_observations()[:, 0].tolist() == [0, 1, 2, 3, 4, 5]
            assert episode.get_rewards().tolist() == [2.0] * 5 and episode.get_return() == 10.0
        assert len(set(counts)) == len(counts)  # one connector for both sub-envs
        result = algo.train()
        assert result["env_runners"]["episode_return_mean"] == 10.0
        assert result["env_runners"]["seen"] > 40
        assert algo.get_module().observation_space.shape == (2,)


def test_rewards_and_flags_of_later_steps_are_checked_before_connectors_see_them() -> None:
    class Late(Line):
        def step(self, action: Any) -> Any:
            obs, reward, *rest = super().step(action)
            return (obs, "1.5" if self.t == 3 else reward, *rest)

    with small(Late).env_runners(env_to_module_connector=lambda env, spaces, device: Numbered()).build() as algo:
        with pytest.raises(EnvError, match=r"sub-env 0, step 2: .*reward from step\(\) must be one number, got str"):
            algo.train()


def test_the_function_of_connectors_gets_the_env_and_the_spaces() -> None:
    given = []

    def connect(env: Any, spaces: Any, device: Any) -> list[Any]:
        given.append((env.single_observation_space, env.unwrapped, spaces["__env_single__"], str(device)))
        return [Numbered()]

    with small().env_runners(env_to_module_connector=connect).build():
        pass
    space, env, singles, device = given[-1]
    assert space == Line.observation_space and isinstance(env, Line)
    assert singles == (Line.observation_space, Line.action_space) and device == "cpu"


def test_built_in_connectors_work_before_a_connector_of_the_users() -> None:
    def connect(env: Any) -> list[Any]:
        return [FrameStackingEnvToModule(num_frames=2), FlattenObservations(), MeanStdFilter(), Numbered()]

    with small().env_runners(env_to_module_connector=connect).build() as algo:
        first = algo.env_runner.sample(num_episodes=2)[0].get_observations()
        assert first.shape == (6, 3) and first[0, :2].tolist() == [0.0, 0.0]
        filter_ = algo.env_runner.connectors[0]["MeanStdFilter"][0]
        ((_, statistics),) = filter_.get_state()["statistics"]
        known = statistics["NormalizeObservations"]
        assert known["count"] >= 12 and 0 < known["mean/"][0] < known["mean/"][1]  # the older frame is smaller
        algo.train()


def test_connectors_look_back_over_the_start_of_a_sample() -> None:
    lengths: list[tuple[int, int, int]] = []
    filled: list[list[float]] = []

    class LooksBack(ConnectorV2):
        def __call__(self, *, batch: Any, episodes: Any, **kwargs: Any) -> Any:
            (episode,) = episodes
            before = episode.get_rewards(slice(-2, None)) if len(episode) else []
            lengths.append((len(episode), len(episode.get_observations(slice(-2, None))), len(before)))
            filled.append([float(obs[0]) for obs in episode.get_observations(slice(-3, None), fill=-7.0)])
            return batch

    config = small().env_runners(env_to_module_connector=lambda env: LooksBack(), num_envs_per_env_runner=1)
    with config.env_runners(rollout_fragment_length=3).build() as algo:
        lengths.clear()
        filled.clear()
        algo.env_runner.sample(num_timesteps=3)
        algo.env_runner.sample(num_timesteps=1)
    # The second sample begins with a new chunk, which knows the step before it.
    assert lengths == [(0, 1, 0), (1, 2, 1), (2, 2, 2), (3, 2, 2), (1, 2, 2)]
    assert filled == [[-7, -7, 0], [-7, 0, 1], [0, 1, 2], [1, 2, 3], [2, 3, 4]]


def test_the_state_of_connectors_is_in_checkpoints(tmp_path: Path) -> None:
    config = small(learner_connector=lambda o, a: Counts()).env_runners(env_to_module_connector=lambda env: Numbered())
    with config.copy(copy_frozen=False).build() as algo:
        algo.train()
        path = algo.save_to_path(tmp_path / "saved")
        count = algo.env_runner.connectors[0][0].count
        seen = algo.native.learner_connectors.pipeline["Counts"][0].seen
    assert count > 40 and sum(seen.values()) == 40
    with config.copy(copy_frozen=False).build() as algo:
        algo.restore_from_path(path)
        assert algo.env_runner.connectors[0][0].count == count
        assert algo.native.learner_connectors.pipeline["Counts"][0].seen == seen


def test_evaluation_runners_get_the_state_of_connectors() -> None:
    config = small().env_runners(env_to_module_connector=lambda env: Numbered())
    config.evaluation(evaluation_interval=1, evaluation_duration=1, evaluation_config={"explore": False})
    with config.build() as algo:
        result = algo.train()
        assert result["evaluation"]["env_runners"]["seen"] > result["env_runners"]["seen"] > 40


class Average(Numbered):
    """Merges by sum."""

    def merge_states(self, states: Any) -> dict[str, Any]:
        self.count += sum(state["count"] for state in states)
        return self.get_state()


@pytest.mark.slow
def test_runners_merge_the_states_of_connectors() -> None:
    config = small().env_runners(env_to_module_connector=lambda env: Average(), num_env_runners=2)
    with config.build() as algo:
        algo.train()
        counts = algo.env_runner_group.foreach_env_runner(lambda runner: runner.connectors[0][0].count)
    assert counts[0] == counts[1] > 40


def test_a_filter_before_other_connectors_knows_the_observation_that_it_changes() -> None:
    space = gym.spaces.Box(-9, 9, (1,), np.float32)
    connector, seen = MeanStdFilter(space, gym.spaces.Discrete(2)), []
    episode = SingleAgentEpisode(observation_space=space, action_space=gym.spaces.Discrete(2))
    episode.add_env_reset(np.array([1], np.float32), {})
    for number in (0, 2):
        connector(rl_module=None, batch={}, episodes=[episode])
        seen.append(float(episode.get_observations(-1)[0]))
        episode.add_env_step(np.array([number], np.float32), 1, 0.0, {})
    assert seen == pytest.approx([0.0, -1.0], abs=1e-3)  # of 1, and of 0 after 1: mean and deviation are 0.5


def test_merged_statistics_count_each_observation_once() -> None:
    def see(runner: MeanStdFilter, number: float) -> None:
        episode = SingleAgentEpisode(observation_space=space, action_space=Line.action_space)
        episode.add_env_reset(np.array([number], np.float32), {})
        runner(batch={}, episodes=[episode])
        seen.append(number)

    space, seen = gym.spaces.Box(-100.0, 100.0, (1,), np.float32), list[float]()
    first, second, driver = (MeanStdFilter(space, Line.action_space) for _ in range(3))
    for number in range(4):
        see(first, number)
        see(second, 10.0 * number)
        merged = driver.merge_states([runner.get_state() for runner in (first, second)])
        for runner in (first, second):
            runner.set_state(merged)
        if number == 2:
            first = MeanStdFilter(space, Line.action_space)  # the runner was restarted
    ((_, statistics),) = merged["statistics"]
    known = statistics["NormalizeObservations"]
    assert known["count"] == len(seen) == 8
    np.testing.assert_allclose(known["mean/"], np.mean(seen))
    np.testing.assert_allclose(known["m2/"], 8 * np.var(seen))


def test_a_module_with_memory_learns_behind_a_connector() -> None:
    config = small().env_runners(env_to_module_connector=lambda env: Numbered())
    with config.rl_module(model_config={"use_lstm": True, "max_seq_len": 4}).build() as algo:
        assert np.isfinite(algo.train()["learners"]["default_policy"]["total_loss"])


def test_an_off_policy_algorithm_learns_behind_connectors() -> None:
    config = (
        DQNConfig().environment(Line).env_runners(env_to_module_connector=lambda env: Numbered(), num_env_runners=0)
    )
    config.training(num_steps_sampled_before_learning_starts=10, learner_connector=lambda o, a: Counts())
    with config.reporting(min_sample_timesteps_per_iteration=40).build() as algo:
        assert algo.train()["env_runners"]["episode_return_mean"] == 10.0
        assert sum(algo.native.learner_connectors.pipeline["Counts"][0].seen.values()) >= 40


class QuarterMore(ConnectorV2):
    def __call__(self, *, batch: Any, episodes: Any, **kwargs: Any) -> Any:
        for episode in self.single_agent_episode_iterator(episodes):
            rewards = np.asarray(episode.get_rewards(), np.float32)
            assert set(rewards) <= {0.5}
            self.add_n_batch_items(batch, "rewards", rewards + 0.25, len(rewards), episode)
        return batch


def test_a_bonus_of_a_learner_connector_comes_on_top_of_clipped_rewards_in_a_replay() -> None:
    """The rewards of the env, which are 1, are clipped to 0.5; the bonus is not, though 0.75 is above the limit."""
    config = DQNConfig().environment(Line, clip_rewards=0.5).env_runners(num_env_runners=0)
    config.training(num_steps_sampled_before_learning_starts=10, learner_connector=lambda o, a: QuarterMore())
    with config.reporting(min_sample_timesteps_per_iteration=40).build() as algo:
        algo.train()
        batch = algo.native._draw("default_policy")
    assert set(batch["rewards"][batch["num_steps"] == 1].tolist()) == {0.75}


class Flipped(ConnectorV2):
    def __call__(self, *, batch: Any, **kwargs: Any) -> Any:
        self.foreach_batch_item_change_in_place(batch, "actions", lambda action, *ids: 1 - action)
        return batch


def test_a_connector_from_module_to_env_changes_what_the_env_gets() -> None:
    config = small().env_runners(module_to_env_connector=lambda env, spaces: [Flipped()])
    with config.build() as algo:
        native = algo.env_runner._native
        rollout = native.sample(num_timesteps=10)
        taken = [env.unwrapped.actions for env in native.env.envs]
    for i, actions in enumerate(taken):
        assert (1 - rollout.actions[-len(actions) :, i]).tolist() == actions


def test_box_actions_are_in_the_units_of_the_module() -> None:
    class Half(ConnectorV2):
        def __call__(self, *, batch: Any, **kwargs: Any) -> Any:
            assert np.all(np.abs(next(iter(batch["actions"].values()))[0]) <= 1.0)
            self.foreach_batch_item_change_in_place(batch, "actions", lambda action, *ids: np.full(1, 0.5))
            return batch

    seen = []

    class Watched(gym.Wrapper[Any, Any, Any, Any]):
        def step(self, action: Any) -> Any:
            seen.append(float(action[0]))
            return super().step(action)

    config = small(lambda _: Watched(gym.make("Pendulum-v1")))
    with config.env_runners(module_to_env_connector=lambda env: Half()).build() as algo:
        algo.env_runner.sample(num_timesteps=4)
    assert seen[-4:] == [1.0] * 4  # half of the bound of 2


@pytest.mark.parametrize(
    ("normalize", "clip", "given", "expected"),
    [(True, False, 0.5, 1.0), (True, False, 3.0, 2.0), (False, True, 3.0, 2.0), (False, False, 3.0, 3.0)],
)
def test_box_actions_of_connectors_get_to_the_env_as_the_settings_say(
    normalize: bool, clip: bool, given: float, expected: float
) -> None:
    class Sets(ConnectorV2):
        def __call__(self, *, batch: Any, **kwargs: Any) -> Any:
            self.foreach_batch_item_change_in_place(batch, "actions", lambda action, *ids: np.full(1, given))
            return batch

    seen = []

    class Watched(gym.Env[Any, Any]):
        observation_space = Line.observation_space
        action_space = gym.spaces.Box(-2.0, 2.0, (1,), np.float32)

        def __init__(self, config: Any) -> None: ...

        def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
            return np.zeros(1, np.float32), {}

        def step(self, action: Any) -> Any:
            seen.append(float(action[0]))
            return np.zeros(1, np.float32), 0.0, False, False, {}

    config = small(Watched).environment(normalize_actions=normalize, clip_actions=clip)
    with config.env_runners(module_to_env_connector=lambda env: Sets()).build() as algo:
        algo.env_runner.sample(num_timesteps=4)
    assert seen[-4:] == [expected] * 4


class FromFive(Line):
    action_space = gym.spaces.Discrete(2, start=5)


def test_discrete_actions_of_connectors_start_at_zero_and_actions_of_the_env_at_its_start() -> None:
    seen: set[int] = set()

    class Watches(ConnectorV2):
        def __call__(self, *, batch: Any, **kwargs: Any) -> Any:
            self.foreach_batch_item_change_in_place(batch, "actions", lambda action, *ids: seen.add(action) or 1)
            return batch

    with small(FromFive).env_runners(module_to_env_connector=lambda env: Watches()).build() as algo:
        algo.env_runner.sample(num_timesteps=16)
        taken = {action for env in algo.env_runner.env.envs for action in env.unwrapped.actions}
    assert seen == {0, 1} and taken == {6}


class ForEnv(ConnectorV2):
    """Gives the env 100 and the number of the call, and leaves the action of the episode."""

    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **settings)
        self.count = 0

    def __call__(self, *, batch: Any, **kwargs: Any) -> Any:
        self.count += 1
        batch["actions_for_env"] = {key: [self.count + 100] for key in batch["actions"]}
        return batch

    def get_state(self, components: Any = None, **settings: Any) -> dict[str, Any]:
        return {"count": self.count}

    def set_state(self, state: Any) -> None:
        self.count = state["count"]


def test_actions_for_the_env_go_there_as_they_are_and_their_connector_is_restored(tmp_path: Path) -> None:
    config = small().env_runners(module_to_env_connector=lambda env: ForEnv(), num_envs_per_env_runner=1)
    with config.copy(copy_frozen=False).build() as algo:
        episodes = algo.env_runner.sample(num_timesteps=3)
        count = algo.env_runner.connectors[1][0].count
        assert algo.env_runner.env.envs[0].unwrapped.actions == [count + 98, count + 99, count + 100]
        assert set(episodes[0].get_actions()) <= {0, 1}
        path = algo.save_to_path(tmp_path / "saved")
    with config.copy(copy_frozen=False).build() as algo:
        algo.restore_from_path(path)
        assert algo.env_runner.connectors[1][0].count == count >= 3


# In learners.


class Counts(ConnectorV2):
    """Adds 1 / count of the observation to each reward."""

    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **settings)
        self.seen: Counter[float] = Counter()

    def __call__(self, *, batch: Any, episodes: Any, **kwargs: Any) -> Any:
        for episode in self.single_agent_episode_iterator(episodes, agents_that_stepped_only=False):
            for i, (obs, reward) in enumerate(
                zip(episode.get_observations(slice(None, -1)), episode.get_rewards(), strict=True)
            ):
                self.seen[float(obs[0])] += 1
                episode.set_rewards(new_data=reward + 1 / self.seen[float(obs[0])], at_indices=i)
        return batch

    def get_state(self, components: Any = None, **settings: Any) -> dict[str, Any]:
        return {"seen": dict(self.seen)}

    def set_state(self, state: Any) -> None:
        self.seen = Counter(state["seen"])


def test_changed_rewards_reach_the_returns_but_not_the_metrics() -> None:
    seen: list[Any] = []
    config = small(learner_connector=lambda observation_space, action_space: Counts(), gamma=0.0)
    sampled: list[Any] = []
    config.callbacks(
        on_learn_on_batch=lambda train_batch, **kwargs: seen.append(dict(train_batch)),
        on_sample_end=lambda samples, **kwargs: sampled.extend(samples),
    )
    with config.build() as algo:
        result = algo.train()
    assert result["env_runners"]["episode_return_mean"] == 5.0
    assert {reward for episode in sampled for reward in episode.get_rewards()} == {1.0}  # what the env gave
    (batch,) = seen
    bonuses: dict[float, list[float]] = {}
    for obs, reward, target in zip(batch["obs"][:, 0], batch["rewards"], batch["value_targets"], strict=True):
        assert target == pytest.approx(reward, abs=1e-5)  # without discount the target is the reward
        bonuses.setdefault(float(obs), []).append(float(reward) - 1)
    for found in bonuses.values():
        assert sorted(found, reverse=True) == pytest.approx([1 / (n + 1) for n in range(len(found))])


def test_a_learner_connector_sees_what_the_module_sees() -> None:
    seen: list[Any] = []

    class Watches(ConnectorV2):
        def __call__(self, *, batch: Any, episodes: Any, rl_module: Any, **kwargs: Any) -> Any:
            seen.extend((episode.get_observations().copy(), len(rl_module)) for episode in episodes)
            return batch

    config = small(learner_connector=lambda *args, **settings: Watches())
    with config.env_runners(env_to_module_connector=lambda env: MeanStdFilter()).build() as algo:
        algo.train()
        first = max(float(np.abs(obs).max()) for obs, _ in seen)
        seen.clear()
        algo.train()
    assert first == 5.0 and 0 < max(float(np.abs(obs).max()) for obs, _ in seen) < 3  # normalised from the second on
    assert seen[0][1] == 1


class WithReturns(PPOTorchLearner):
    batches: list[Any] = []  # noqa: RUF012  # shared on purpose

    def build(self) -> None:
        super().build()
        self._learner_connector.prepend(ComputeReturnsToGo(gamma=0.5))
        self._learner_connector.insert_after(
            AddObservationsFromEpisodesToBatch, AddNextObservationsFromEpisodesToTrainBatch()
        )
        self._learner_connector.insert_after(NumpyToTensor, TensorBonus())

    def compute_loss_for_module(self, *, module_id: str, config: Any, batch: Any, fwd_out: Any) -> Any:
        self.batches.append({name: column.numpy().copy() for name, column in batch.items()})
        return super().compute_loss_for_module(module_id=module_id, config=config, batch=batch, fwd_out=fwd_out)


class TensorBonus(ConnectorV2):
    """Adds twice the observation to the rewards, when all columns are tensors."""

    def __call__(self, *, batch: Any, **kwargs: Any) -> Any:
        part = batch["default_policy"]
        part["rewards"] += 2.0 * part["obs"][:, 0]
        part["doubled"] = 2.0 * part["obs"]
        return batch


def test_columns_of_connectors_reach_the_loss() -> None:
    WithReturns.batches.clear()
    with small(learner_class=WithReturns, gamma=0.0).build() as algo:
        algo.train()
    (batch,) = WithReturns.batches
    time = batch["obs"][:, 0]
    # To the end of an episode of 5 steps with rewards 1; chunks at the end of the sample are shorter.
    whole = {t: sum(0.5**k for k in range(5 - int(t))) for t in range(5)}
    lengths = np.log2(1 / (2 - batch["returns_to_go"])) + 1
    assert np.allclose(lengths, np.round(lengths)) and (lengths <= 5 - time).all()
    assert any(np.isclose(batch["returns_to_go"][time == 0], whole[0]))
    assert np.array_equal(batch["new_obs"][:, 0], time + 1)
    assert np.array_equal(batch["doubled"][:, 0], 2 * time)
    assert np.allclose(batch["value_targets"], 1 + 2 * time, atol=1e-5)


class Predictor(TorchRLModule, SelfSupervisedLossAPI):
    """Predicts the next observation; its error is the bonus."""

    def setup(self) -> None:
        self.net = torch.nn.Linear(1, 1)

    def _forward_train(self, batch: dict[str, Any], **settings: Any) -> dict[str, Any]:
        return {"error": (self.net(batch["obs"]) - batch["new_obs"]).square().mean(-1)}

    def compute_self_supervised_loss(self, *, learner: Any, module_id: str, fwd_out: Any, **settings: Any) -> Any:
        loss = fwd_out["error"].mean()
        learner.metrics.log_dict({"error": loss}, key=module_id, window=1)
        return loss


class Bonus(ConnectorV2):
    def __call__(self, *, batch: Any, rl_module: Any, **kwargs: Any) -> Any:
        part = batch["default_policy"]
        with torch.no_grad():
            part["rewards"] += rl_module["predictor"].forward_train(part)["error"]
        batch["predictor"] = part
        return batch


class Curious(PPOTorchLearner):
    def build(self) -> None:
        super().build()
        assert len(self.module) == 2 and "predictor" in self.module
        self._learner_connector.insert_after(
            AddObservationsFromEpisodesToBatch, AddNextObservationsFromEpisodesToTrainBatch()
        )
        self._learner_connector.insert_after(NumpyToTensor, Bonus())


def test_a_module_of_learners_only_learns_from_what_connectors_pass_it(tmp_path: Path) -> None:
    rewards: list[Any] = []
    spec = RLModuleSpec(Predictor, Line.observation_space, Line.action_space, learner_only=True)
    config = small(learner_class=Curious).rl_module(
        rl_module_spec=MultiRLModuleSpec(rl_module_specs={"default_policy": RLModuleSpec(), "predictor": spec}),
        algorithm_config_overrides_per_module={"predictor": PPOConfig.overrides(lr=0.05)},
    )
    config.callbacks(on_learn_on_batch=lambda train_batch, **kw: rewards.append(train_batch["rewards"].mean()))
    with config.copy(copy_frozen=False).build() as algo:
        results = [algo.train() for _ in range(60)]
        path = algo.save_to_path(tmp_path / "saved")
        algo.train()
        weight = algo.native.learner_connectors.learner_only.modules["predictor"].net.weight.item()
    errors = [result["learners"]["predictor"]["error"] for result in results]
    assert errors[-1] < 0.1 * errors[0]
    assert (
        rewards[0] == pytest.approx(1 + errors[0], rel=1e-3) and results[-1]["env_runners"]["episode_return_mean"] == 5
    )
    with config.copy(copy_frozen=False).build() as algo:
        algo.restore_from_path(path)
        algo.train()  # continues exactly, which takes the optimizer and the order of the rows
        assert algo.native.learner_connectors.learner_only.modules["predictor"].net.weight.item() == weight


class Recorded(Predictor):
    """Keeps the rows of its minibatches, and its weights after each step."""

    minibatches: list[Any] = []  # noqa: RUF012  # shared on purpose

    def compute_self_supervised_loss(self, *, batch: Any, **settings: Any) -> Any:
        weights = [parameter.detach().clone() for parameter in self.net.parameters()]
        self.minibatches.append((batch["obs"].clone(), batch["new_obs"].clone(), weights))
        return super().compute_self_supervised_loss(batch=batch, **settings)


@pytest.mark.parametrize("grad_clip", [None, 0.02])
def test_a_module_of_learners_only_takes_the_steps_of_adam_on_shuffled_minibatches(grad_clip: float | None) -> None:
    Recorded.minibatches.clear()
    spec = RLModuleSpec(Recorded, Line.observation_space, Line.action_space, learner_only=True)
    settings = {"minibatch_size": 16, "num_epochs": 3, "grad_clip": grad_clip, "grad_clip_by": "value"}
    config = small(learner_class=Curious, **settings).rl_module(
        rl_module_spec=MultiRLModuleSpec(rl_module_specs={"default_policy": RLModuleSpec(), "predictor": spec}),
        algorithm_config_overrides_per_module={"predictor": PPOConfig.overrides(lr=0.05)},
    )
    with config.build() as algo:
        algo.train()
    assert [len(obs) for obs, *_ in Recorded.minibatches] == [16] * 6  # 2 of 40 rows in each of 3 epochs
    orders = [tuple(obs[:, 0].tolist()) for obs, *_ in Recorded.minibatches]
    assert len(set(orders)) == 6 and all(order != tuple(sorted(order)) for order in orders)
    net = torch.nn.Linear(1, 1)
    optimizer = torch.optim.Adam(net.parameters(), lr=0.05)
    with torch.no_grad():
        for parameter, value in zip(net.parameters(), Recorded.minibatches[0][2], strict=True):
            parameter.copy_(value)
    for obs, new_obs, weights in Recorded.minibatches:
        torch.testing.assert_close([parameter.detach() for parameter in net.parameters()], weights)
        optimizer.zero_grad()
        (net(obs) - new_obs).square().mean().backward()
        torch.nn.utils.clip_grad_value_(net.parameters(), grad_clip or float("inf"))
        optimizer.step()


class HalfAfterTheFirst(ConnectorV2):
    def __call__(self, *, batch: Any, episodes: Any, **kwargs: Any) -> Any:
        for i, episode in enumerate(self.single_agent_episode_iterator(episodes)):
            self.add_n_batch_items(batch, "bonus", [0.5 if i else 0] * len(episode), len(episode), episode)
        return batch


def test_a_column_of_integers_in_one_episode_and_floats_in_others_holds_floats() -> None:
    seen: list[Any] = []
    config = small(learner_connector=lambda o, a: HalfAfterTheFirst())
    config.callbacks(on_learn_on_batch=lambda train_batch, **kw: seen.append(np.array(train_batch["bonus"])))
    with config.build() as algo:
        algo.train()
    assert seen[0].dtype == np.float32 and np.unique(seen[0], return_counts=True)[1].tolist() == [5, 35]


def test_returns_to_go_are_the_discounted_sums_by_hand() -> None:
    episode = SingleAgentEpisode(
        observations=[0, 1, 2, 3], actions=[0, 0, 1], rewards=[1.0, 2.0, 4.0], len_lookback_buffer=0
    )
    batch = ComputeReturnsToGo(gamma=0.5)(rl_module=None, batch={}, episodes=[episode])
    (column,) = batch["returns_to_go"][(episode.id_,)]
    assert column.tolist() == [3.0, 4.0, 4.0]


# Several agents.


class OfAgents(ConnectorV2):
    """Adds the agent's number to its observations and rewards."""

    def recompute_output_observation_space(self, input_observation_space: Any, input_action_space: Any) -> Any:
        return gym.spaces.Dict(
            {agent: gym.spaces.Box(-np.inf, np.inf, (2,), np.float32) for agent in input_observation_space.spaces}
        )

    def __call__(self, *, batch: Any, episodes: Any, **kwargs: Any) -> Any:
        for episode in self.single_agent_episode_iterator(episodes):
            number = np.float32(int(episode.agent_id) + 1)
            assert episode.module_id == f"p{episode.agent_id}"
            episode.set_observations(new_data=np.append(episode.get_observations(-1), number), at_indices=-1)
            if len(episode):
                episode.set_rewards(new_data=episode.get_rewards(-1) * number, at_indices=-1)
        return batch


class AgentColumn(ConnectorV2):
    def __call__(self, *, batch: Any, episodes: Any, **kwargs: Any) -> Any:
        for episode in self.single_agent_episode_iterator(episodes, agents_that_stepped_only=False):
            numbers = [float(episode.agent_id)] * len(episode)
            self.add_n_batch_items(batch, "agent_number", numbers, len(episode), episode)
            episode.set_rewards(new_data=episode.get_rewards() + 10.0)
        return batch


def test_connectors_of_several_agents() -> None:
    seen: dict[str, Any] = {}
    config = small(corral.make_multi_agent(lambda config: Line()), gamma=0.0)
    config.environment(env_config={"num_agents": 2})
    config.multi_agent(policies={"p0", "p1"}, policy_mapping_fn=lambda agent, *args, **kw: f"p{agent}")
    config.env_runners(
        env_to_module_connector=lambda env, spaces, device: [OfAgents()], module_to_env_connector=lambda env: Flipped()
    )
    config.training(learner_connector=lambda o, a: AgentColumn())
    config.callbacks(on_learn_on_batch=lambda train_batch, **kw: seen.update({str(len(seen)): dict(train_batch)}))
    with config.build() as algo:
        result = algo.train()
    assert result["env_runners"]["episode_return_mean"] == 15.0  # 5 steps of 1 and of 2
    assert len(seen) == 2
    for batch in seen.values():
        (number,) = set(batch["obs"][:, 1])
        assert set(batch["agent_number"]) == {number - 1} and set(batch["rewards"]) == {number + 10}
        assert np.allclose(batch["value_targets"], number + 10, atol=1e-5)


class ByModule(PPOTorchLearner):
    """Adds columns to the batch of each module when all are tensors."""

    def build(self) -> None:
        super().build()
        self._learner_connector.insert_after(NumpyToTensor, Tenfold())


class Tenfold(ConnectorV2):
    def __call__(self, *, batch: Any, **kwargs: Any) -> Any:
        for part in batch.values():
            part["tenfold"] = 10 * part["obs"]
        return batch


def test_a_connector_of_learners_adds_columns_by_module() -> None:
    seen: list[Any] = []
    config = small(corral.make_multi_agent(lambda config: Line()), learner_class=ByModule)
    config.environment(env_config={"num_agents": 3})
    config.multi_agent(policies={"p0", "p1"}, policy_mapping_fn=lambda agent, *args, **kw: f"p{int(agent) % 2}")
    config.callbacks(on_learn_on_batch=lambda train_batch, **kw: seen.append(dict(train_batch)))
    with config.build() as algo:
        algo.train()
    sizes = sorted(len(batch["obs"]) for batch in seen)
    assert len(sizes) == 2 and sizes[1] == 2 * sizes[0]  # p0 plays two of the three agents
    for batch in seen:
        np.testing.assert_array_equal(batch["tenfold"], 10 * batch["obs"])


def test_the_chunks_of_an_episode_follow_each_other_as_in_batches() -> None:
    chunks = [
        _Chunk((key,), "p", None, lane=0, start=row, stop=row + 1)  # type: ignore[arg-type]
        for row, key in enumerate("abacb")
    ]
    assert [(chunk.key[0], chunk.start) for chunk in _in_order(chunks)] == [
        *(("a", 0), ("a", 2), ("b", 1), ("b", 4), ("c", 3)),
    ]


# Pipelines.


def test_pipelines_are_edited_by_name_and_class() -> None:
    pipeline = LearnerConnectorPipeline(connectors=[AddColumnsFromEpisodesToTrainBatch(), NumpyToTensor()])
    pipeline.append(Counts())
    pipeline.prepend(Flipped())
    before = pipeline.insert_before("NumpyToTensor", ComputeReturnsToGo(gamma=1.0))
    pipeline.insert_after(NumpyToTensor, AgentColumn())
    assert isinstance(before, NumpyToTensor)
    assert [type(each).__name__ for each in pipeline] == [
        *("Flipped", "AddColumnsFromEpisodesToTrainBatch", "ComputeReturnsToGo", "NumpyToTensor", "AgentColumn"),
        "Counts",
    ]
    pipeline.remove("Flipped")
    pipeline.remove("NotThere")
    assert len(pipeline) == 5 and pipeline["Counts"] == [pipeline[-1]] == pipeline[Counts]
    with pytest.raises(ValueError, match=r"no connector 'Nobody'; it has AddColumns"):
        pipeline.insert_after("Nobody", Flipped())


def test_a_pipeline_passes_spaces_and_states_on() -> None:
    pipeline = EnvToModulePipeline(Line.observation_space, Line.action_space, connectors=[Numbered(), Numbered()])
    assert pipeline.observation_space.shape == (3,)
    pipeline.connectors[0].count, pipeline.connectors[1].count = 1, 2
    state = pipeline.get_state()
    pipeline.connectors[0].count = pipeline.connectors[1].count = 0
    pipeline.set_state(state)
    assert [each.count for each in pipeline.connectors] == [1, 2]
    pipeline.remove(Numbered)
    assert pipeline.observation_space.shape == (2,)
    pipeline.set_state({"Numbered": {"count": 7}})
    assert pipeline.get_state() == {"Numbered": {"count": 7}}


def test_the_default_connectors_of_a_pipeline_make_the_batch_of_a_module() -> None:
    pipeline = env_to_module_pipeline(small(), spaces={"__env_single__": (Line.observation_space, Line.action_space)})
    episodes = [SingleAgentEpisode(observations=[np.full(1, float(i), np.float32)]) for i in range(3)]
    batch = pipeline(rl_module=None, batch={}, episodes=episodes, explore=False, shared_data={})
    assert batch["obs"].tolist() == [[0.0], [1.0], [2.0]]


def test_a_config_builds_its_pipelines() -> None:
    config = small("Pendulum-v1", learner_connector=lambda o, a: Counts())
    config.env_runners(env_to_module_connector=lambda env: Numbered(), module_to_env_connector=lambda env: Halved())
    env = gym.make("Pendulum-v1")
    assert config.build_env_to_module_connector(env)[0].observation_space.shape == (4,)
    names = [type(each).__name__ for each in config.build_learner_connector()]
    assert names[0] == "AddOneTsToEpisodesAndTruncate" and names[1] == "Counts"
    assert names[-1] == "GeneralAdvantageEstimation"
    to_env, episodes = config.build_module_to_env_connector(env), [SingleAgentEpisode() for _ in range(2)]
    batch = to_env(rl_module=None, batch={"actions": torch.ones(2, 1)}, episodes=episodes)
    assert [float(action[0]) for action in batch["actions"]] == [0.5, 0.5]
    assert [float(action[0]) for action in batch["actions_for_env"]] == [1.0, 1.0]
    with pytest.raises(ConfigError, match=r"not the connectors: use Algorithm.from_checkpoint"):
        EnvToModulePipeline.from_checkpoint("somewhere")


class Halved(ConnectorV2):
    def __call__(self, *, batch: Any, **kwargs: Any) -> Any:
        self.foreach_batch_item_change_in_place(batch, "actions", lambda action, *ids: action * 0.5)
        return batch


def test_helpers_for_batches() -> None:
    episodes = [
        SingleAgentEpisode(f"e{i}", observations=[0, 1, 2], actions=[0, 1], rewards=[0.0, 1.0], len_lookback_buffer=0)
        for i in range(2)
    ]
    batch: dict[str, Any] = {}
    for episode in episodes:
        ConnectorV2.add_n_batch_items(batch, "a", [1, 2], 2, episode)
        ConnectorV2.add_n_batch_items(batch, "b", np.array([3, 4]), 2, episode)
        ConnectorV2.add_batch_item(batch, "c", 5)
    assert batch["a"] == {("e0",): [1, 2], ("e1",): [1, 2]} and batch["c"] == [5, 5]
    ConnectorV2.foreach_batch_item_change_in_place(batch, "a", lambda item, episode_id, *ids: f"{episode_id}{item}")
    assert batch["a"][("e1",)] == ["e11", "e12"]
    pairs = list(ConnectorV2.single_agent_episode_iterator(episodes, zip_with_batch_column=batch["a"]))
    assert [(episode.id_, item) for episode, item in pairs] == [("e0", "e01"), ("e1", "e11")]
    by_module = ConnectorV2.switch_batch_from_column_to_module_ids({"obs": {"m": [1]}, "actions": {"m": [2]}})
    assert by_module == {"m": {"obs": [1], "actions": [2]}}
    with pytest.raises(ValueError, match=r"'a': 1 items were given, and num_items=2"):
        ConnectorV2.add_n_batch_items(batch, "a", [1], 2)


# What is refused.


class AddsColumn(ConnectorV2):
    def __call__(self, *, batch: Any, episodes: Any, **kwargs: Any) -> Any:
        self.add_batch_item(batch, "extra", 1.0, episodes[0])
        return batch


class ChangesObservations(ConnectorV2):
    def __call__(self, *, batch: Any, episodes: Any, **kwargs: Any) -> Any:
        for episode in episodes:
            obs = episode.get_observations(slice(0, len(episode))) + 1
            self.add_n_batch_items(batch, "obs", obs, len(episode), episode)
        return batch


def test_what_corral_cannot_do_is_refused() -> None:
    with pytest.raises(EnvError, match=r"added the column 'extra' to the batch, and Corral's modules get observations"):
        small().env_runners(env_to_module_connector=lambda env: AddsColumn()).build()
    with small(learner_connector=lambda o, a: ChangesObservations()).build() as algo:
        with pytest.raises(ConfigError, match=r"changed the column 'obs', with which actions were chosen"):
            algo.train()
    with small(learner_connector=lambda o, a: AddsColumn()).build() as algo:
        with pytest.raises(ConfigError, match=r"the column 'extra' has 1 items for \d+ steps"):
            algo.train()
    with pytest.raises(ConfigError, match=r"put MeanStdFilter into env_to_module_connector"):
        small(learner_connector=lambda o, a: MeanStdFilter()).build()
    config = small().env_runners(add_default_connectors_to_env_to_module_pipeline=False)
    with pytest.raises(ConfigError, match=r"put AddObservationsFromEpisodesToBatch into env_to_module_connector"):
        config.env_runners(env_to_module_connector=lambda env: Numbered()).build()
    with pytest.raises(ConfigError, match=r"connectors of your own need sub-envs in the process of the runner"):
        small().env_runners(env_to_module_connector=lambda env: Numbered(), gym_env_vectorize_mode="async").build()


def test_a_change_of_one_part_of_the_observations_is_refused() -> None:
    before = {"a": np.zeros((3, 2)), "b": np.ones(3)}
    _check_unchanged("obs", before, {"a": np.zeros((3, 2)), "b": np.ones(3)})
    with pytest.raises(ConfigError, match=r"changed the column 'obs'"):
        _check_unchanged("obs", before, {"a": np.zeros((3, 2)), "b": np.ones(3) + 1})


def test_a_pipeline_of_the_users_own_that_adds_observations_is_served() -> None:
    def connect(env: Any, spaces: Any, device: Any) -> list[Any]:
        return [PrevActionsPrevRewards(), FlattenObservations(), AddObservationsFromEpisodesToBatch(), Scaled()]

    config = small().env_runners(
        env_to_module_connector=connect, add_default_connectors_to_env_to_module_pipeline=False
    )
    with config.build() as algo:
        obs = algo.env_runner.sample(num_episodes=1)[0].get_observations()
    assert obs.shape == (6, 4) and set(obs[1:, -1]) == {100.0} and set(obs[:, 0]) == {0, 100, 200, 300, 400, 500}


class Scaled(ConnectorV2):
    def __call__(self, *, batch: Any, **kwargs: Any) -> Any:
        self.foreach_batch_item_change_in_place(batch, "obs", lambda item, *ids: item * 100)
        return batch
