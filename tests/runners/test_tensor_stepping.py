"""Envs of tensors: PPO learns from rollouts that stay on the device, with the numbers that it has on arrays."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces
from torch import Tensor

from corral import (
    Algorithm,
    Callback,
    ClipObservations,
    ClipRewards,
    FlattenObservations,
    FrameStack,
    NormalizeObservations,
    NormalizeRewards,
    PPOConfig,
    PQNConfig,
    TD3Config,
    Transform,
)
from corral.algorithms.ppo import PPO
from corral.core.devices import warn_of_missing_finals
from corral.data.episodes.rollout import Rollout
from corral.data.episodes.tensor_rollout import TensorRollout
from corral.envs.tensor_env import TensorVectorEnv
from corral.envs.torch_envs import TorchCartPole, TorchPendulum
from corral.errors import ConfigError, EnvError, LossError
from corral.exploration.epsilon import EpsilonGreedy, PerWorkerEpsilonGreedy
from corral.exploration.noise import GaussianNoise
from corral.runners.requests import SampleRequest
from exact_runs import check_continuation
from host_transfers import count_host_transfers

N = 16


class ShortCartPole(TorchCartPole):
    """Episodes end by both flags: by the fall of the pole, and after 25 steps."""

    def __init__(self, num_envs: int, device: Any = "cpu") -> None:
        super().__init__(num_envs, device, max_episode_steps=25)


class ShortPendulum(TorchPendulum):
    def __init__(self, num_envs: int, device: Any = "cpu") -> None:
        super().__init__(num_envs, device, max_episode_steps=30)


class Parts(ShortCartPole):
    """Gives the observations as a Dict, with the side on which the cart is."""

    def __init__(self, num_envs: int, device: Any = "cpu") -> None:
        super().__init__(num_envs, device)
        sides = spaces.Discrete(2, start=3)
        self.single_observation_space = spaces.Dict({"pole": self.single_observation_space, "side": sides})

    def parts(self, obs: Tensor) -> dict[str, Tensor]:
        return {"pole": obs, "side": 3 + (obs[:, 0] > 0).long()}

    def reset(self, **arguments: Any) -> Any:
        obs, infos = super().reset(**arguments)
        return self.parts(obs), infos

    def step(self, actions: Tensor) -> Any:
        obs, *rest, infos = super().step(actions)
        return self.parts(obs), *rest, {"final_obs": self.parts(infos["final_obs"])}


class WithoutFinals(ShortPendulum):
    """Does not tell the last observations of episodes."""

    def step(self, actions: Tensor) -> Any:
        return *super().step(actions)[:4], {}


class Watched(Callback):
    """Listens to an event of episodes, so that the env is stepped on arrays."""

    def on_episode_end(self, **arguments: Any) -> None:
        pass


def make_config(env: Any = ShortCartPole, *, arrays: bool = False, **settings: Any) -> PPOConfig:
    config = PPOConfig().environment(env).env_runners(num_envs_per_env_runner=N).debugging(seed=5)
    config.training(**{"train_batch_size_per_learner": 20 * N, "minibatch_size": 4 * N, "num_epochs": 3, **settings})
    return config.callbacks(Watched) if arrays else config


def numbers_of(result: Mapping[str, Any]) -> dict[str, float]:
    """Return the numbers of a result that do not depend on the clock."""
    runners, learner = result["env_runners"], result["learners"]["default_policy"]
    names = ("episode_return_mean", "episode_return_max", "episode_len_mean", "num_episodes")
    found = {name: runners[name] for name in names}
    return found | {name: value for name, value in learner.items() if isinstance(value, float)}


def weights_of(algo: Algorithm) -> Any:
    return {name: array.copy() for name, array in algo.learner_group.get_weights()["default_policy"].items()}


TRANSFORMS: dict[str, list[Any]] = {
    "normalised": [NormalizeObservations(), NormalizeRewards()],
    "clipped": [ClipObservations(-0.3, 0.4), ClipRewards("sign"), NormalizeRewards(clip=None, max_return=5.0)],
    "partly normalised": [NormalizeObservations(clip=1.0, center=False), ClipRewards(0.5)],
    "flattened": [FlattenObservations(), NormalizeObservations()],
}


@pytest.mark.parametrize(
    ("env", "transforms"),
    [
        *((ShortPendulum, name) for name in ("normalised", "clipped", "partly normalised")),
        *((env, "normalised") for env in (ShortCartPole, WithoutFinals)),
        (Parts, "flattened"),
    ],
)
def test_transforms_have_the_numbers_that_they_have_on_arrays(env: Any, transforms: str) -> None:
    results, statistics, weights = [], [], []
    for arrays in (False, True):
        algo = make_config(env, arrays=arrays).env_runners(transforms=TRANSFORMS[transforms]).build()
        assert algo.env_runner_group.setting_of_arrays == ("callbacks" if arrays else "")
        results.append([numbers_of(algo.train()) for _ in range(5)])
        statistics.append(algo.modules.get_transform_states().get("default_policy", {}))
        weights.append(weights_of(algo))
        algo.stop()
    assert statistics[0].keys() == statistics[1].keys()
    for name, state in statistics[0].items():
        assert state["count"] == 5 * 20 * N
        for key, array in state.items():
            np.testing.assert_allclose(array, statistics[1][name][key], rtol=1e-4, atol=1e-6, err_msg=f"{name} {key}")
    for on_device, on_arrays in zip(*results, strict=True):
        assert on_device == pytest.approx(on_arrays, rel=1e-3, abs=1e-4, nan_ok=True)
    for name, array in weights[0].items():
        np.testing.assert_allclose(array, weights[1][name], atol=1e-4, err_msg=name)


def check_numbers_of_arrays(make: Callable[[bool], Algorithm], num_iterations: int) -> None:
    """Compare the results and the weights of an algorithm that `make` returns, with tensors and with `arrays`."""
    results, weights, kinds = [], [], []
    for arrays in (False, True):
        algo = make(arrays)
        sampled: list[Rollout] = []
        sample = algo.sample
        algo.sample = lambda *args, sample=sample, sampled=sampled: sampled.extend(got := sample(*args)) or got
        results.append([numbers_of(algo.train()) for _ in range(num_iterations)])
        weights.append(weights_of(algo))
        kinds.append({type(rollout) for rollout in sampled})
        algo.stop()
    assert kinds == [{TensorRollout}, {Rollout}]
    assert sum(result["num_episodes"] for result in results[0]) > N
    for on_device, on_arrays in zip(*results, strict=True):
        assert on_device == pytest.approx(on_arrays, rel=1e-3, abs=1e-4, nan_ok=True)
    for name, array in weights[0].items():
        np.testing.assert_allclose(array, weights[1][name], atol=1e-4, err_msg=name)


@pytest.mark.parametrize("env", [ShortCartPole, ShortPendulum])
@pytest.mark.parametrize("settings", [{}, {"kl_target": 0.01, "kl_coeff": 0.2, "vf_clip_param": 0.5}])
def test_ppo_has_the_numbers_that_it_has_on_arrays(env: Any, settings: dict[str, Any]) -> None:
    check_numbers_of_arrays(lambda arrays: make_config(env, arrays=arrays, **settings).build(), 5)


@pytest.mark.parametrize("kind", ["EpsilonGreedy", "PerWorkerEpsilonGreedy"])
def test_pqn_has_the_numbers_that_it_has_on_arrays(kind: str) -> None:
    def make(arrays: bool) -> Algorithm:
        config = PQNConfig().environment(ShortCartPole).env_runners(num_envs_per_env_runner=N).debugging(seed=5)
        config.training(train_batch_size_per_learner=20 * N, minibatch_size=4 * N, num_epochs=2)
        config.exploration(exploration_config={"type": kind, "epsilon_timesteps": 80 * N})
        return (config.callbacks(Watched) if arrays else config).build()

    check_numbers_of_arrays(make, 4)


class Choices(ShortCartPole):
    """Takes two numbers, of which the first is the push."""

    def __init__(self, num_envs: int, device: Any = "cpu") -> None:
        super().__init__(num_envs, device)
        self.single_action_space = spaces.MultiDiscrete([2, 5])

    def advance(self, states: Tensor, actions: Tensor) -> Any:
        return super().advance(states, actions[:, 0])


@pytest.mark.parametrize("env", [ShortCartPole, Choices])
def test_a_device_draws_epsilon_greedy_actions_itself(env: Any) -> None:
    """With a generator of the device, as on a GPU: nothing goes to the host, and a share of epsilon is random."""
    num_rows, epsilon = 4000, 0.4
    config = PPOConfig().environment(env).env_runners(num_envs_per_env_runner=N).debugging(seed=5)
    with config.build() as algo:
        actor = algo.env_runner.stepping._groups["default_policy"].on_device
        actor._generator = torch.Generator().manual_seed(3)
        sizes = [2] if env is ShortCartPole else [2, 5]
        q_values = torch.linspace(0.0, 1.0, sum(sizes)).expand(num_rows, -1)  # the last action of each is the best
        exploration = EpsilonGreedy(
            env(1).single_action_space, epsilon_schedule=[[0, 1.0], [100, epsilon]], policy_config={}, model=None
        )
        with count_host_transfers() as transfers:
            actions = actor._choose_epsilon_greedily(exploration, q_values, 100)
        per_sub_env = PerWorkerEpsilonGreedy(
            env(1).single_action_space, num_envs=num_rows, policy_config={}, model=None
        )
        spread = actor._choose_epsilon_greedily(per_sub_env, q_values, 0).reshape(num_rows, -1)
    assert not transfers
    # The first quarter of the sub-envs explores most; their epsilons are 0.4 to 0.4 ** 2.75.
    is_best = (spread[:, -1] == sizes[-1] - 1).float().reshape(4, -1).mean(1)
    epsilons = torch.from_numpy(per_sub_env.epsilons(0, num_rows)).reshape(4, -1).mean(1)
    torch.testing.assert_close(is_best, (1 - epsilons * (1 - 1 / sizes[-1])).float(), atol=0.04, rtol=0)
    columns = actions.reshape(num_rows, -1).T
    for size, column in zip(sizes, columns, strict=True):
        counts = torch.bincount(column, minlength=size) / num_rows
        expected = torch.full((size,), epsilon / size)
        expected[-1] += 1 - epsilon
        torch.testing.assert_close(counts, expected, atol=0.03, rtol=0)
    if len(sizes) == 2:  # one draw decides for all numbers of an action
        both_best = ((columns[0] == 1) & (columns[1] == 4)).float().mean()
        assert float(both_best) == pytest.approx(1 - epsilon + epsilon / 10, abs=0.03)


@pytest.mark.slow_cases("transforms1")
@pytest.mark.parametrize("transforms", [[], TRANSFORMS["normalised"]])
def test_transfers_to_the_host_are_as_many_however_long_the_iteration(transforms: list[Any]) -> None:
    found = []
    for num_rows, num_epochs in ((8, 1), (16, 3)):
        config = make_config(train_batch_size_per_learner=num_rows * N, minibatch_size=N, num_epochs=num_epochs)
        algo = config.env_runners(transforms=transforms).build()
        for _ in range(3):  # the first episodes end
            algo.train()
        with count_host_transfers() as transfers:
            algo.train()
        algo.stop()
        found.append(transfers)
    assert found[0] == found[1]
    assert found[0].total() <= 10 + 2 * len(transforms)


def test_a_transfer_in_each_step_would_be_counted() -> None:
    class Asking(ShortCartPole):
        def step(self, actions: Tensor) -> Any:
            returned = super().step(actions)
            assert float(returned[1].sum()) > 0
            return returned

    found = []
    for num_rows in (8, 32):
        algo = make_config(Asking, train_batch_size_per_learner=num_rows * N).build()
        with count_host_transfers() as transfers:
            algo.train()
        algo.stop()
        found.append(transfers["__float__"])
    assert found == [8, 32]


@pytest.mark.parametrize("transforms", [[], TRANSFORMS["normalised"]])
@pytest.mark.parametrize("arrays", [False, True])
def test_a_restored_run_continues_exactly(arrays: bool, transforms: list[Any], tmp_path: Path) -> None:
    algo = make_config(arrays=arrays).env_runners(transforms=transforms).build()
    for _ in range(2):
        algo.train()
    check_continuation(algo, tmp_path / "saved")


class Doubled(Transform):
    """Of the user, who may have written it for arrays alone."""

    def transform_obs(self, obs: Any) -> Any:
        return 2 * np.asarray(obs)


class Line(TensorVectorEnv):
    """Counts its steps: the observation is the number of steps in the episode, and each third step ends it."""

    def __init__(self, num_envs: int, device: Any = "cpu", flag: str = "truncated", bad_step: int = -1) -> None:
        self.num_envs, self.device, self.flag, self.bad_step = num_envs, torch.device(device), flag, bad_step
        self.single_observation_space = spaces.Box(-np.inf, np.inf, (1,), np.float32)
        self.single_action_space = spaces.Discrete(2)
        self.length, self.num_steps = 3, 0

    def observe(self) -> Tensor:
        return torch.full((self.num_envs, 1), float(self.count))

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Tensor, dict[str, Any]]:
        self.count = self.num_steps = 0
        return self.observe(), {}

    def infos(self) -> dict[str, Any]:
        return {"final_obs": self.observe()}

    def step(self, actions: Tensor) -> Any:
        self.count += 1
        self.num_steps += 1
        infos, ends = self.infos(), self.count == self.length
        if ends:
            self.count = 0
        flags = {name: torch.full((self.num_envs,), ends and name == self.flag) for name in ("terminated", "truncated")}
        obs = self.observe()
        if self.num_steps == self.bad_step:
            obs[1] = torch.nan
        return obs, torch.ones(self.num_envs), flags["terminated"], flags["truncated"], infos


@pytest.mark.parametrize("flag", ["terminated", "truncated"])
def test_the_value_of_a_final_observation_is_that_of_the_observation_which_the_reset_replaced(flag: str) -> None:
    algo = make_config(Line, arrays=False).environment(env_config={"flag": flag}).build()
    [rollout] = algo.sample(7 * N)
    assert isinstance(rollout, TensorRollout)
    values, next_values = rollout.compute_values(lambda obs: obs[:, 0])
    algo.stop()
    assert values[:, 0].tolist() == [0, 1, 2, 0, 1, 2, 0]
    assert next_values[:, 0].tolist() == [1, 2, 3, 1, 2, 3, 1]  # 3 is the final observation


def test_an_env_without_final_observations_gets_the_value_before_the_last_step(
    caplog: pytest.LogCaptureFixture,
) -> None:
    class Silent(Line):
        def infos(self) -> dict[str, Any]:
            return {}

    warn_of_missing_finals.cache_clear()
    found = []
    for arrays in (False, True):
        algo = make_config(Silent, arrays=arrays).build()
        with caplog.at_level(logging.WARNING, "corral"):
            [rollout] = algo.sample(4 * N)
            _, next_values = rollout.compute_values(lambda obs: obs[:, 0])
        algo.stop()
        found.append(next_values[:, 0].tolist())
    assert found == [[1, 2, 2, 1]] * 2
    assert len([record for record in caplog.records if "final_obs" in record.message]) == 1


@pytest.mark.parametrize("arrays", [False, True])
@pytest.mark.parametrize("has_final", [False, True])
def test_infos_are_of_the_step_also_where_it_ends_an_episode(arrays: bool, has_final: bool) -> None:
    class Telling(Line):
        def infos(self) -> dict[str, Any]:
            told = {"count": self.observe()[:, 0]}
            of_reset = {"count": 0 * told["count"], "final_info": told}
            return super().infos() | (of_reset if has_final and self.count == self.length else told)

    with make_config(Telling, arrays=arrays).build() as algo:
        rollout = algo.env_runner.collect(SampleRequest(num_timesteps=7 * N, with_infos=True))  # type: ignore[union-attr]
    assert rollout.info_column("count")[:, 1].tolist() == [1, 2, 3, 1, 2, 3, 1]
    of_resets = [episode.get_infos(0).get("count") for episode in rollout.episodes() if episode.env_index == 1]
    assert of_resets == [None, *[0 if has_final else None] * 2]


def test_a_value_that_is_not_finite_is_named() -> None:
    algo = make_config(Line).environment(env_config={"bad_step": 9}).build()
    with pytest.raises(EnvError, match=r"env 'Line', sub-env 1, step 8: observation holds NaN"):
        for _ in range(3):
            algo.train()
    algo.stop()


class Odd(Line):
    """Gives one value in a wrong form, from the eighth step on."""

    def __init__(self, num_envs: int, device: Any = "cpu", form: str = "") -> None:
        super().__init__(num_envs, device)
        self.form = form

    def step(self, actions: Tensor) -> Any:
        obs, rewards, terminated, truncated, infos = super().step(actions)
        if self.num_steps > 7:
            final = infos["final_obs"]
            changes = {
                "column": final[:1],
                "wide": final.repeat(1, 2),
                "nan": final * torch.nan,
                "double": final.double(),
            }
            infos = {"final_obs": changes.get(self.form, final)}
            rewards = {"rewards": rewards[:, None], "number": rewards[0]}.get(self.form, rewards)
            truncated = truncated[:1] if self.form == "flags" else truncated
        return obs, rewards, terminated, truncated, infos


@pytest.mark.parametrize(
    ("form", "message"),
    [
        ("rewards", r"env 'Odd', step 7: .* rewards from step\(\) must be a tensor \[16\], got a tensor \[16, 1\]"),
        ("number", r"env 'Odd', step 7: .* rewards from step\(\) must be a tensor \[16\], got a tensor \[\]"),
        ("flags", r"env 'Odd', step 7: .* truncated from step\(\) must be a tensor \[16\], got a tensor \[1\]"),
        ("column", r"env 'Odd', step 7: .* final_obs must have shape \[16, 1\], got \[1, 1\]"),
        ("wide", r"env 'Odd', step 7: .* final_obs must have shape \[16, 1\], got \[16, 2\]"),
        ("nan", r"env 'Odd', sub-env 0, step 8: final_obs holds NaN or infinity"),
    ],
)
def test_what_would_be_spread_over_the_sub_envs_is_refused(form: str, message: str) -> None:
    algo = make_config(Odd).environment(env_config={"form": form}).build()
    with pytest.raises(EnvError, match=message):
        algo.train()
    algo.stop()


def test_final_observations_of_another_dtype_are_cast_as_observations_are() -> None:
    algo = make_config(Odd).environment(env_config={"form": "double"}).build()
    assert np.isfinite(algo.train()["learners"]["default_policy"]["total_loss"])
    algo.stop()


def test_an_env_may_write_into_its_actions() -> None:
    class Writing(Line):
        def __init__(self, num_envs: int, device: Any = "cpu") -> None:
            super().__init__(num_envs, device)
            self.single_action_space: Any = spaces.MultiDiscrete([5, 5])
            self.seen: list[Tensor] = []

        def step(self, actions: Tensor) -> Any:
            self.seen.append(actions.clone())
            actions.fill_(0)
            return super().step(actions)

    algo = make_config(Writing).build()
    env: Any = algo.env_runner.env
    env.env.seen.clear()
    [rollout] = algo.sample(4 * N)
    algo.stop()
    assert torch.equal(rollout.actions, torch.stack(env.env.seen))
    assert rollout.actions.any()


def test_a_copy_of_the_module_on_a_device_gets_every_weight_that_is_loaded() -> None:
    """Also weights with the version that the copy has already, as a restored run may bring them."""
    algo = make_config().build()
    stepping: Any = algo.env_runner.stepping
    actor = stepping._groups["default_policy"].on_device
    actor._module = copy.deepcopy(actor._module)  # as on a GPU
    algo.sample(N)
    weights = {name: array + 1 for name, array in weights_of(algo).items()}
    algo.env_runner.set_weights({"default_policy": weights}, algo.env_runner.weights_version)
    algo.sample(N)
    copied = actor._module.state_dict()
    algo.stop()
    acting = algo.env_runner.module.acting_weights()
    assert len(acting) >= 4
    for name in acting:
        np.testing.assert_allclose(copied[name].numpy(), weights[name], rtol=1e-6, err_msg=name)


def test_the_timestep_counts_the_env_steps_of_all_runners(monkeypatch: pytest.MonkeyPatch) -> None:
    scales, timesteps = GaussianNoise.scales, []

    def note(exploration: GaussianNoise, timestep: int, num_envs: int) -> Any:
        timesteps.append(timestep)
        return scales(exploration, timestep, num_envs)

    monkeypatch.setattr(GaussianNoise, "scales", note)
    config = TD3Config().environment(ShortPendulum).env_runners(num_env_runners=2, num_envs_per_env_runner=N)
    config.env_runners(rollout_fragment_length=4).engine("local").debugging(seed=0)
    config.exploration(exploration_config={"type": "GaussianNoise", "random_timesteps": 0})
    with config.build() as algo:
        timesteps.clear()
        algo.sample(8 * N)
    num_rows = len(timesteps) // 2  # of each runner
    assert num_rows >= 4
    assert timesteps == [2 * N * row for row in range(num_rows)] * 2


def test_a_factory_of_its_own_kind_is_called_as_before() -> None:
    def make(config: Any, num_envs: int = 3, device: str = "cpu") -> Any:
        assert config["size"] == 4
        return ShortCartPole(num_envs, device)

    algo = make_config(make).environment(env_config={"size": 4}).env_runners(num_envs_per_env_runner=3).build()
    assert algo.env_runner.num_envs == 3
    algo.stop()


def test_weights_stay_as_they_were_before_a_loss_that_is_not_finite() -> None:
    """The steps before it are taken, and neither it nor those after it, as on arrays."""

    def loss(module: Any, batch: Any, coefficients: Any, default: Any = None) -> Any:
        total = -module.distribution.logp(module.policy(batch["obs"]), batch["actions"]).mean()
        loss.calls += 1  # type: ignore[attr-defined]
        return total * (torch.nan if loss.calls == 7 else 1.0), {}  # type: ignore[attr-defined]

    found = []
    for arrays in (False, True):
        loss.calls = 0  # type: ignore[attr-defined]
        algo = make_config(arrays=arrays, loss=loss).build()
        with pytest.raises(LossError, match="is nan in epoch 1, minibatch 1"):
            algo.train()
        found.append(weights_of(algo))
        algo.stop()
    for name, array in found[0].items():
        assert np.isfinite(array).all()
        np.testing.assert_allclose(array, found[1][name], atol=1e-5, err_msg=name)


def test_evaluation_and_whole_episodes_play_on_the_device() -> None:
    config = make_config(Line).evaluation(evaluation_interval=1, evaluation_duration=5, evaluation_num_env_runners=0)
    config.env_runners(batch_mode="complete_episodes")
    algo = config.build()
    result = algo.train()
    algo.stop()
    assert result["evaluation"]["env_runners"]["episode_return_mean"] == 3
    assert result["evaluation"]["env_runners"]["num_episodes"] == 5
    assert result["env_runners"]["episode_len_mean"] == 3
    assert result["env_runners"]["num_env_steps_sampled"] == 21 * N


@pytest.mark.slow
def test_runners_in_other_processes_send_arrays() -> None:
    algo = make_config(ShortCartPole).env_runners(num_env_runners=1).build()
    [rollout] = algo.sample(20 * N)
    assert type(rollout) is Rollout
    assert np.isfinite(algo.train()["learners"]["default_policy"]["total_loss"])
    algo.stop()


@pytest.mark.parametrize(
    ("change", "setting"),
    [
        (lambda config: config.callbacks(Watched), "callbacks"),
        (lambda config: config.env_runners(transforms=[FrameStack(2)]), "env_runners.transforms"),
        (lambda config: config.env_runners(transforms=[Doubled()]), "env_runners.transforms"),
        (lambda config: config.rl_module(model_config={"use_lstm": True}), "rl_module"),
        (
            lambda config: config.exploration(
                exploration_config={"type": "StochasticSampling", "random_timesteps": 100}
            ),
            "exploration.exploration_config",
        ),
    ],
)
def test_what_needs_arrays_gets_them_and_is_named(change: Any, setting: str, caplog: pytest.LogCaptureFixture) -> None:
    config = make_config()
    change(config)
    with caplog.at_level(logging.INFO, "corral"):
        algo = config.build()
    assert algo.env_runner_group.setting_of_arrays == setting
    assert f"its steps are copied to the host because of {setting}" in caplog.text
    assert np.isfinite(algo.train()["learners"]["default_policy"]["total_loss"])
    algo.stop()


def test_an_algorithm_of_the_user_gets_arrays_unless_it_says_that_it_takes_tensors() -> None:
    class Mine(PPO):
        pass

    class Ready(PPO):
        LEARNS_TENSORS = True

    for cls, kind in ((Mine, Rollout), (Ready, TensorRollout)):
        algo = cls(make_config())
        [rollout] = algo.sample(N)
        algo.stop()
        assert type(rollout) is kind


def test_settings_of_the_env_reach_it_with_the_number_of_sub_envs() -> None:
    config = make_config().environment(TorchCartPole, env_config={"max_episode_steps": 7})
    algo = config.build()
    env: Any = algo.env_runner.env
    algo.stop()
    assert (env.env.num_envs, env.env.max_episode_steps) == (N, 7)


def test_a_factory_finds_the_number_of_sub_envs_in_its_config() -> None:
    algo = make_config(lambda env_config: ShortCartPole(env_config.num_envs)).build()
    assert algo.env_runner.num_envs == N
    algo.stop()
    with pytest.raises(ConfigError, match=r"num_envs_per_env_runner=16 contradicts .* of 3"):
        make_config(lambda env_config: ShortCartPole(3)).build()


def test_a_device_without_tensors_is_refused() -> None:
    class Arrays(Line):
        def observe(self) -> Any:
            return np.zeros((self.num_envs, 1), np.float32)

    with pytest.raises(EnvError, match="has an attribute device, so that it must give tensors"):
        make_config(Arrays).build()
