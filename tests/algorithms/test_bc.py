"""Behaviour cloning: the loss, what it learns from, and all that surrounds it."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any, ClassVar

import gymnasium as gym
import numpy as np
import pytest
import torch

from at_least import all_of
from corral import Algorithm, BCConfig, Callback, FrameStack, NormalizeObservations, PPOConfig
from corral.algorithms.bc import bc_loss
from corral.algorithms.offline import OfflineAlgorithm
from corral.core.tree import leaves, map_tree
from corral.errors import ConfigError, DataError, SampleError, StopCriterionError
from corral.modules.module import ActorCritic
from corral.modules.spec import ModuleSpec
from corral.tools.cli.train import train

OBS = gym.spaces.Box(-1, 1, (3,), np.float32)
TWO = gym.spaces.Discrete(2)


def cloning(data: Any, observation_space: Any = OBS, action_space: Any = TWO, **training: Any) -> BCConfig:
    config = BCConfig().environment(observation_space=observation_space, action_space=action_space)
    config.offline_data(input_=data).debugging(seed=1).rl_module(model_config={"fcnet_hiddens": [32]})
    return config.training(
        **{"lr": 1e-2, "num_updates_per_iteration": 300, "train_batch_size_per_learner": 64, **training}
    )


def recorded(obs: Any, actions: Any, length: int = 10) -> dict[str, Any]:
    """Steps in episodes of one length that terminate."""
    size = len(
        actions
        if not isinstance(actions, (dict, tuple))
        else next(iter(actions.values() if isinstance(actions, dict) else actions))
    )
    terminated = np.arange(1, size + 1) % length == 0
    return {"obs": obs, "actions": actions, "rewards": np.zeros(size), "terminated": terminated}


def draw_obs(size: int = 2000, seed: int = 0) -> Any:
    return np.random.default_rng(seed).uniform(-1, 1, (size, 3)).astype(np.float32)


def test_the_loss_is_the_negative_log_likelihood_minus_the_bonus() -> None:
    spec = ModuleSpec(ActorCritic, OBS, gym.spaces.Discrete(4), {})
    module, obs, actions = spec.build(), torch.from_numpy(draw_obs(20)), torch.arange(20) % 4
    outputs: dict[str, torch.Tensor] = {}
    loss, reported = bc_loss(module, {"obs": obs, "actions": actions}, {"entropy_coeff": 0.3}, outputs=outputs)
    probs = module.policy(obs).softmax(-1)
    expected = -probs[torch.arange(20), actions].log().mean()
    entropy = -(probs * probs.log()).sum(-1).mean()
    torch.testing.assert_close(reported["policy_loss"], expected.detach())
    torch.testing.assert_close(loss, expected - 0.3 * entropy)
    assert outputs["dist_inputs"].shape == (20, 4) and outputs["logp"].shape == (20,)


def test_two_actions_of_one_observation_get_their_shares() -> None:
    """The likelihood is largest where the policy has the frequencies of the data: three of four times action 1."""
    data = recorded(np.zeros((400, 3), np.float32), np.array([1, 1, 0, 1] * 100))
    with cloning(data, lr=3e-3).build() as algorithm:
        result = [algorithm.train() for _ in range(2)][-1]
        logits = algorithm.get_module().policy(torch.zeros(1, 3))
    assert logits.softmax(-1)[0, 1].item() == pytest.approx(0.75, abs=0.05)
    assert result["learners"]["default_policy"]["policy_loss"] == pytest.approx(0.562, abs=0.02)  # H(0.75) in nats


RULES: dict[str, tuple[Any, Any]] = {
    "discrete": (gym.spaces.Discrete(3, start=4), lambda obs: 4 + (obs[:, 0] > 0) + (obs[:, 1] > 0)),
    "several": (
        gym.spaces.MultiDiscrete([2, 3]),
        lambda obs: np.stack([obs[:, 0] > 0, 1 + (obs[:, 1] > 0)], 1).astype(int),
    ),
    "binary": (gym.spaces.MultiBinary(2), lambda obs: (obs[:, :2] > 0).astype(np.int8)),
    "box": (gym.spaces.Box(np.float32(-3), np.float32(5), (2,)), lambda obs: (3 * obs[:, :2] + 1).astype(np.float32)),
    "parts": (
        gym.spaces.Dict({"move": gym.spaces.Box(-2, 2, (1,), np.float32), "fire": gym.spaces.Discrete(2)}),
        lambda obs: {"move": obs[:, :1] * 1.5, "fire": (obs[:, 1] > 0).astype(int)},
    ),
}


@pytest.mark.parametrize("kind", RULES)
def test_a_rule_is_cloned_in_every_kind_of_action(kind: str) -> None:
    space, rule = RULES[kind]
    obs = draw_obs()
    fresh = draw_obs(500, seed=1)

    def is_right(wanted: Any, got: Any) -> bool:
        if np.asarray(wanted).dtype.kind == "f":
            return bool(np.abs(got - wanted).mean() < 0.15)
        return bool((got == wanted).mean() > 0.95)

    with cloning(recorded(obs, rule(obs)), action_space=space, num_updates_per_iteration=100).build() as algorithm:
        for _ in range(9):
            algorithm.train()
            chosen = algorithm.compute_actions(fresh, explore=False)
            if all_of(leaves(map_tree(is_right, rule(fresh), chosen))):
                return
    pytest.fail("the rule was not cloned in 900 updates")


MASKED = gym.spaces.Dict({"obs": OBS, "action_mask": gym.spaces.Box(0, 1, (2,), np.int8)})


def test_nested_observations_and_masks_are_learned_from() -> None:
    """Where the mask leaves one action, the rule is the mask's, and the likelihood 1."""
    obs = draw_obs(600)
    mask = np.ones((600, 2), np.int8)
    mask[::2, 0] = 0  # action 1 is the only one
    actions = np.where(mask[:, 0] == 0, 1, obs[:, 0] > 0)
    data = recorded({"obs": obs, "action_mask": mask}, actions)
    with cloning(data, observation_space=MASKED).build() as algorithm:
        algorithm.train()
        got = algorithm.compute_actions({"obs": obs, "action_mask": mask}, explore=False)
        alone = algorithm.get_module().policy({"obs": torch.zeros(1, 3), "action_mask": torch.tensor([[0, 1]])})
    assert (got == actions).mean() > 0.95 and (got[::2] == 1).all()
    assert alone.softmax(-1)[0, 1] == 1


def test_a_recorded_action_that_its_mask_forbids_is_refused() -> None:
    """Otherwise the loss is 1e8, and no policy can lower it."""
    mask = np.ones((600, 2), np.int8)
    mask[7, 1] = 0
    data = recorded({"obs": draw_obs(600), "action_mask": mask}, np.ones(600, np.int64))
    with pytest.raises(DataError, match=r"row 7, column 'actions' is 1, which the mask of its observation forbids"):
        cloning(data, observation_space=MASKED).build()


def memory_data(num_episodes: int, seed: int) -> dict[str, Any]:
    """The action of every step is the sign that the first observation of the episode had; the others are zeros."""
    rng = np.random.default_rng(seed)
    signs = rng.integers(0, 2, num_episodes)
    obs = np.zeros((num_episodes, 6, 3), np.float32)
    obs[:, 0, 0] = 2 * signs - 1
    return recorded(obs.reshape(-1, 3), np.repeat(signs, 6), 6)


@pytest.mark.slow
def test_memory_clones_what_only_memory_can_know() -> None:
    config = cloning(memory_data(100, 0), train_batch_size_per_learner=96)
    forgetful = config.copy()
    config.rl_module(model_config={"use_lstm": True, "lstm_cell_size": 16, "max_seq_len": 6, "fcnet_hiddens": [16]})

    def loss(algorithm: Algorithm) -> float:
        return [algorithm.train() for _ in range(2)][-1]["learners"]["default_policy"]["policy_loss"]

    # Without memory only the first of six steps shows the sign. Sequences that begin with it have 6 of 21 steps.
    with forgetful.build() as algorithm:
        assert loss(algorithm) == pytest.approx(5 / 6 * np.log(2), abs=0.04)
    with config.copy(burn_in_len=5).build() as algorithm:
        assert loss(algorithm) < 0.1  # all sequences are unrolled from the first step on
    with config.build() as algorithm:
        assert loss(algorithm) == pytest.approx(15 / 21 * np.log(2), abs=0.04)
        right = 0
        for sign in (-1.0, 1.0):
            state = map_tree(lambda leaf: leaf[0], algorithm.acting_policy().initial_states(1))
            for t in range(6):
                obs = np.array([sign if t == 0 else 0, 0, 0], np.float32)
                action, state = algorithm.compute_single_action(obs, state, explore=False)
                right += action == (sign > 0)
    assert right == 12


def test_a_burn_in_is_unrolled_and_not_learned_from() -> None:
    config = cloning(memory_data(50, 0), train_batch_size_per_learner=40, burn_in_len=3)
    config.rl_module(model_config={"use_lstm": True, "lstm_cell_size": 8, "max_seq_len": 2, "fcnet_hiddens": [8]})
    seen = []

    def loss(module: Any, batch: Any, coefficients: Any, default_loss: Any) -> Any:
        seen.append({name: batch[name].clone() for name in ("learns", "sequence_starts", "actions")})
        value, reported, outputs = default_loss(module, batch, coefficients)
        assert outputs["logp"].shape == (int(batch["learns"].sum()),)
        return value, reported

    with config.training(loss=loss, num_updates_per_iteration=5).build() as algorithm:
        algorithm.train()
    batch = seen[-1]
    firsts = torch.cat([batch["sequence_starts"].nonzero()[:, 0], torch.tensor([len(batch["learns"])])])
    lengths = firsts.diff()
    assert len(lengths) == 20 and int(lengths.max()) == 5
    for start, stop in zip(firsts[:-1].tolist(), firsts[1:].tolist(), strict=True):
        learns = batch["learns"][start:stop].tolist()
        assert learns == sorted(learns) and 1 <= sum(learns) <= 2  # the burn-in comes first


def test_several_agents_clone_their_own_data() -> None:
    obs = draw_obs(1000)
    from corral.data.offline.episode_rows import rows_of_steps

    parts = [
        rows_of_steps(**recorded(obs, (obs[:, 0] > 0).astype(int)), module_id="plus"),
        rows_of_steps(**recorded(obs, (obs[:, 0] < 0).astype(int)), module_id="minus"),
        rows_of_steps(**recorded(obs, np.ones(1000, int)), module_id="unused"),
    ]
    spaces = {"observation_space": OBS, "action_space": gym.spaces.Discrete(2)}
    config = cloning(parts).environment(observation_space=None, action_space=None)
    config.multi_agent(policies={"plus": spaces, "minus": spaces})
    with config.build() as algorithm:
        result = algorithm.train()
        fresh = draw_obs(300, 1)
        plus, minus = (algorithm.compute_actions(fresh, explore=False, module_id=name) for name in ("plus", "minus"))
    assert (plus == (fresh[:, 0] > 0)).mean() > 0.95 and (minus == (fresh[:, 0] < 0)).mean() > 0.95
    assert set(result["learners"]) == {"plus", "minus", "__all_modules__"}
    with pytest.raises(DataError, match=r"holds episodes of the modules .'plus', 'minus', 'unused'.: name those"):
        cloning(parts).build()


def two_modules(**settings: Any) -> BCConfig:
    from corral.data.offline.episode_rows import rows_of_steps

    obs = draw_obs(200)
    parts = [
        rows_of_steps(**recorded(obs, (obs[:, 0] > 0).astype(int)), module_id=module_id)
        for module_id in ("one", "two", "three")
    ]
    config = cloning(parts, num_updates_per_iteration=3).environment(observation_space=None, action_space=None)
    spaces = {"observation_space": OBS, "action_space": TWO}
    return config.multi_agent(policies={"one": spaces, "two": spaces}, **settings)


def weights(algorithm: Algorithm, module_id: str) -> Any:
    return {name: value.clone() for name, value in algorithm.get_module(module_id).state_dict().items()}


def changes(algorithm: Algorithm, module_id: str) -> bool:
    """Whether an iteration changes the weights of a module."""
    before = weights(algorithm, module_id)
    algorithm.train()
    return any(not torch.equal(value, before[name]) for name, value in weights(algorithm, module_id).items())


def test_a_new_module_without_data_changes_nothing(tmp_path: Path) -> None:
    spaces = {"observation_space": OBS, "action_space": TWO}
    with two_modules().build() as algorithm:
        with pytest.raises(DataError, match="holds no episodes of module 'four'"):
            algorithm.add_module("four", **spaces)
        assert algorithm.module_ids == ["one", "two"]
        algorithm.train()
        algorithm.save(tmp_path / "checkpoint")
        algorithm.add_module("three", **spaces)
        assert changes(algorithm, "three")


def test_removed_modules_leave_no_batches_for_validation() -> None:
    config = two_modules().offline_data(validation_fraction=0.3)
    with config.build() as algorithm:
        assert isinstance(algorithm, OfflineAlgorithm)
        algorithm.train()
        algorithm.remove_module("two")
        assert algorithm.data.keys() == algorithm.recorded._validation.keys() == {"one"}
        algorithm.add_module("two", copy_from="one")
        assert np.isfinite(algorithm.train()["learners"]["two"]["validation_loss"])


@pytest.mark.parametrize("kind", ["function", "list"])
def test_modules_learn_only_while_they_are_chosen(kind: str) -> None:
    chosen = {"one"}
    choice: Any = (lambda module_id, *batch: module_id in chosen) if kind == "function" else ["one"]
    with two_modules(policies_to_train=choice).build() as algorithm:
        assert changes(algorithm, "one") and not changes(algorithm, "two")
        chosen.clear()
        chosen.add("two")
        if kind == "list":
            spaces = {"observation_space": OBS, "action_space": TWO}
            algorithm.add_module("three", **spaces, policies_to_train=["two", "three"])
        assert changes(algorithm, "two") and not changes(algorithm, "one")


@pytest.mark.parametrize("num_updates", [5, None])
def test_an_iteration_in_which_no_module_learns_draws_nothing(num_updates: int | None) -> None:
    config = two_modules(policies_to_train=lambda module_id, *batch: False)
    with config.training(num_updates_per_iteration=num_updates).build() as algorithm:
        assert not changes(algorithm, "one") and algorithm.num_env_steps_sampled_lifetime == 0


@pytest.mark.slow_cases("2")
@pytest.mark.parametrize("num_learners", [0, 2])
def test_schedules_count_the_steps_that_were_learned_from(num_learners: int, tmp_path: Path) -> None:
    """Two updates of 50 steps per learner in each iteration; the rate is the one of the last update."""
    num = max(1, num_learners)
    config = cloning(rule_data(), num_updates_per_iteration=2, train_batch_size_per_learner=50)
    config.training(lr=[[0, 1.0], [400 * num, 0.0]], entropy_coeff=[[0, 0.0], [400 * num, 4.0]])
    with config.learners(num_learners=num_learners).build() as algorithm:
        assert isinstance(algorithm, OfflineAlgorithm)
        rates = []
        for _ in range(2):
            algorithm.train()
            rates.append(algorithm._settings("default_policy").lr)
        path = algorithm.save(tmp_path / "checkpoint")
    assert rates == pytest.approx([0.75, 0.5])
    with Algorithm.from_checkpoint(path, input_=rule_data(), num_learners=0) as restored:
        assert isinstance(restored, OfflineAlgorithm)
        settings = restored._settings("default_policy")
        assert settings.lr == pytest.approx(0.5)
        assert settings.coefficients["entropy_coeff"] == pytest.approx(2.0)


class InTraining(ActorCritic):
    """Notes whether it is in training mode."""

    modes: ClassVar[list[bool]] = []

    def policy(self, obs: Any, *args: Any, **kwargs: Any) -> Any:
        self.modes.append(self.training)
        return super().policy(obs, *args, **kwargs)


def test_validation_is_in_evaluation_mode() -> None:
    config = cloning(rule_data(), num_updates_per_iteration=2).offline_data(validation_fraction=0.3)
    with config.rl_module(module_class=InTraining).build() as algorithm:
        InTraining.modes.clear()
        algorithm.train()
        assert InTraining.modes == [True, True, False]
        algorithm.train()
        assert InTraining.modes[3:] == [True, True, False]
        assert algorithm.get_module().training


def test_all_observations_of_batches_are_transformed() -> None:
    seen: list[Any] = []

    class Keeping(Callback):
        def on_learn_on_batch(self, *, train_batch: Any, **kwargs: Any) -> None:
            seen.append({name: np.asarray(train_batch[name]) for name in ("obs", "next_obs")})

    obs = draw_obs(500) * np.float32(0.01) + np.float32(5)
    config = cloning(recorded(obs, (obs[:, 0] > 5).astype(int)), num_updates_per_iteration=1)
    config.environment(observation_space=gym.spaces.Box(-9, 9, (3,), np.float32), action_space=TWO)
    config.env_runners(transforms=[NormalizeObservations()])
    with config.training(train_batch_size_per_learner=400).callbacks(Keeping).build() as algorithm:
        algorithm.train()
    for name in ("obs", "next_obs"):
        assert abs(seen[0][name].mean()) < 0.2 and seen[0][name].std() == pytest.approx(1, abs=0.2)


def test_a_burn_in_never_comes_before_the_beginning_of_an_episode() -> None:
    """Any step is the first that is learned from, after as many steps as the burn-in and its episode have."""
    data = memory_data(30, 0)
    data["obs"][:, 1] = np.tile(np.arange(6), 30) / 10  # the step
    config = cloning(data, train_batch_size_per_learner=600, burn_in_len=2, num_updates_per_iteration=1)
    config.rl_module(model_config={"use_lstm": True, "lstm_cell_size": 4, "max_seq_len": 2, "fcnet_hiddens": [4]})
    with config.build() as algorithm:
        assert isinstance(algorithm, OfflineAlgorithm)
        batch = algorithm._draw("default_policy", algorithm.data["default_policy"].train)
    firsts = np.flatnonzero(batch["sequence_starts"])
    burns = np.add.reduceat(~batch["learns"], firsts, dtype=int)
    steps = np.rint(batch["obs"][firsts + burns, 1] * 10).astype(int)
    assert set(steps) == set(range(6)) and batch["learns"][firsts + burns].all()
    np.testing.assert_array_equal(burns, np.minimum(steps, 2))


def test_a_list_of_dicts_of_arrays_is_data() -> None:
    with cloning([rule_data(), rule_data()], num_updates_per_iteration=2).build() as algorithm:
        assert isinstance(algorithm, OfflineAlgorithm)
        assert algorithm.data["default_policy"].num_steps == 1000
        algorithm.train()


def rule_data() -> dict[str, Any]:
    obs = draw_obs(500)
    return recorded(obs, (obs[:, 0] > 0).astype(int))


@pytest.mark.parametrize("num_learners", [0, pytest.param(2, marks=pytest.mark.slow)])
def test_training_continues_exactly_with_the_position_in_the_data(num_learners: int, tmp_path: Path) -> None:
    config = cloning(rule_data(), num_updates_per_iteration=7).offline_data(validation_fraction=0.2)
    config.learners(num_learners=num_learners)
    with config.build() as algorithm:
        algorithm.train()
        path = algorithm.save(tmp_path / "checkpoint")
        expected = [algorithm.train()["learners"] for _ in range(2)]
    with Algorithm.from_checkpoint(path, input_=rule_data()) as restored:
        found = [restored.train()["learners"] for _ in range(2)]
    assert found == expected


def test_other_data_is_said_when_a_run_continues(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with cloning(rule_data(), num_updates_per_iteration=2).build() as algorithm:
        algorithm.train()
        path = algorithm.save(tmp_path / "checkpoint")
    with pytest.raises(
        ConfigError, match=r"offline_data.input_: ArraysInMemory.obs, actions, rewards, terminated.*input_="
    ):
        Algorithm.from_checkpoint(path)
    other = rule_data()
    other["rewards"] = other["rewards"] + 1
    with caplog.at_level(logging.WARNING, "corral"), Algorithm.from_checkpoint(path, input_=other) as restored:
        restored.train()
    assert "has changed since the checkpoint: from 50 episodes, 500 steps" in caplog.text


@pytest.mark.slow
def test_two_learners_take_the_steps_of_one() -> None:
    weights = []
    for num_learners, size in ((0, 1), (2, 2)):
        config = cloning(rule_data(), num_updates_per_iteration=5, train_batch_size_per_learner=64 // size)
        config.learners(num_learners=num_learners)
        with config.training(optimizer="sgd").build() as algorithm:
            algorithm.train()
            weights.append(algorithm.learner_group.get_weights()["default_policy"])
    for name in weights[0]:
        np.testing.assert_allclose(weights[0][name], weights[1][name], atol=2e-5)


def test_the_validation_loss_is_of_episodes_that_are_not_learned_from() -> None:
    """Labels without any rule are learned by heart, and validation shows it."""
    rng = np.random.default_rng(0)
    data = recorded(draw_obs(60), rng.integers(0, 2, 60))
    config = cloning(data, num_updates_per_iteration=600).offline_data(validation_fraction=0.5)
    with config.rl_module(model_config={"fcnet_hiddens": [128]}).build() as algorithm:
        found = [algorithm.train()["learners"]["default_policy"] for _ in range(2)][-1]
        buffer = algorithm.data["default_policy"].validation
        held = buffer.get_steps()
        logits = algorithm.get_module().policy(torch.from_numpy(held["obs"]))
        expected = -logits.log_softmax(-1).gather(1, torch.from_numpy(held["actions"])[:, None]).mean().item()
    assert found["policy_loss"] < 0.5 < 0.7 < found["validation_loss"]
    # Of up to 10,000 steps, which are drawn once with replacement: here 30 of 30.
    assert found["validation_loss"] == pytest.approx(expected, rel=0.3)
    assert found["validation_policy_loss"] == pytest.approx(found["validation_loss"])


def test_spaces_come_from_the_env_the_config_or_the_data(tmp_path: Path) -> None:
    data = rule_data()
    with pytest.raises(ConfigError, match=r"the spaces of the module are not known.*environment.observation_space="):
        cloning(data, None, None).build()
    with pytest.raises(DataError, match=r"the arrays: the column 'obs' is float32.*needs float32"):
        cloning(data, None, None).environment("CartPole-v1").build()
    with pytest.raises(DataError, match=r"the arrays: row [0-9], column 'actions' is 0, which is not in Discrete"):
        cloning(data, action_space=gym.spaces.Discrete(2, start=1)).build()
    with PPOConfig().environment("CartPole-v1").build() as expert:
        expert.record(tmp_path, num_episodes=3)
    with cloning(str(tmp_path), None, None).build() as algorithm:
        assert algorithm.get_module().action_space == gym.spaces.Discrete(2)
        algorithm.train()


def test_an_env_is_only_played_in_evaluation(tmp_path: Path) -> None:
    with PPOConfig().environment("CartPole-v1").build() as expert:
        expert.record(tmp_path, num_episodes=10)
    config = cloning(tmp_path, None, None, num_updates_per_iteration=20).environment("CartPole-v1")
    with config.evaluation(evaluation_interval=2, evaluation_duration=3).build() as algorithm:
        results = [algorithm.train() for _ in range(2)]
        assert algorithm.evaluate()["env_runners"]["num_episodes"] == 3
        with pytest.raises(SampleError, match="learns from recorded data, and has no runners"):
            algorithm.sample(10)
    assert results[0].keys() == results[1].keys()
    assert results[1]["evaluation"]["env_runners"]["episode_return_mean"] > 5
    assert np.isnan(results[1]["env_runners"]["episode_return_mean"])
    assert results[1]["num_env_steps_sampled_lifetime"] == 2 * 20 * 64
    assert results[1]["learners"]["__all_modules__"]["num_env_steps_trained_lifetime"] == 2 * 20 * 64


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda config: config.offline_data(input_=None), "BC learns from recorded data, and none was given"),
        (
            lambda config: config.evaluation(evaluation_interval=1),
            "evaluation rounds play in an env, and none was given",
        ),
        (lambda config: config.offline_data(output="there"), "BC samples nothing that could be recorded"),
        (lambda config: config.training(burn_in_len=2), "burn_in_len=2 has no effect on a module without memory"),
    ],
)
def test_contradictions_are_refused(change: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        change(cloning(rule_data())).build()


@pytest.mark.parametrize("name", ["episode_return_mean", "env_runners/episode_len_mean"])
def test_stop_criteria_of_training_in_an_env_are_refused(name: str, tmp_path: Path) -> None:
    """They would never be met, and the run would not end."""
    with (
        cloning(rule_data()).build() as algorithm,
        pytest.raises(StopCriterionError, match="learns from recorded data"),
    ):
        algorithm.fit(stop={name: 5}, run_dir=tmp_path / "run")


def test_drawn_steps_count_as_env_steps(tmp_path: Path) -> None:
    """So schedules, stop criteria and the axes of curves do what they do elsewhere."""
    config = cloning(rule_data(), num_updates_per_iteration=10, lr=[[0, 1e-2], [6400, 2e-3]])
    with config.build() as algorithm:
        result = algorithm.fit(stop={"num_env_steps": 1900}, run_dir=tmp_path / "run", progress=False)
    assert result["training_iteration"] == 3 and result["num_env_steps_sampled_lifetime"] == 1920
    # The last of 10 updates began after 1,856 of 6,400 steps; results hold the mean of the iteration.
    rates = [1e-2 - 8e-3 * steps / 6400 for steps in range(1280, 1920, 64)]
    assert result["learners"]["default_policy"]["default_optimizer_learning_rate"] == pytest.approx(np.mean(rates))


def test_progress_counts_whole_steps(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with cloning(rule_data(), num_updates_per_iteration=20).build() as algorithm:
        algorithm.fit(stop={"training_iteration": 2}, run_dir=tmp_path / "run", progress="lines")
    assert "2 iterations, 2,560 steps learned," in capsys.readouterr().out


def test_a_run_without_rounds_shows_steps_and_keeps_its_last_checkpoints(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with cloning(rule_data(), num_updates_per_iteration=50).build() as algorithm:
        algorithm.fit(stop={"training_iteration": 3}, run_dir=tmp_path / "run", progress="last")
    assert "Done after 3 iterations, 9,600 steps learned, " in (shown := capsys.readouterr().out)
    assert "return" not in shown
    names = {path.name for path in (tmp_path / "run" / "checkpoints").iterdir()}
    assert "iteration-000003" in names and "best" not in names


def test_settings_of_sampling_have_no_effect_and_are_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    config = cloning(rule_data()).env_runners(num_env_runners=2, rollout_fragment_length=5)
    with caplog.at_level(logging.WARNING, "corral"), config.build() as algorithm:
        algorithm.train()
    for name in ("num_env_runners=2", "rollout_fragment_length=5"):
        assert f"{name} has no effect without an algorithm that samples" in caplog.text


def test_transforms_have_statistics_of_the_data_and_act_on_observations(tmp_path: Path) -> None:
    obs = draw_obs(600) * np.float32(0.01)
    data = recorded(obs, (obs[:, 0] > 0).astype(int))
    config = cloning(data, lr=3e-3).env_runners(transforms=[NormalizeObservations()])
    with config.build() as algorithm:
        state = algorithm.modules.get_transform_states()["default_policy"]["NormalizeObservations"]
        np.testing.assert_allclose(state["mean/"], obs.mean(0), atol=1e-5)
        algorithm.train()
        assert (algorithm.compute_actions(obs, explore=False) == data["actions"]).mean() > 0.95
    # The action is the sign of the observation before, which a stack of two shows.
    before = np.roll(obs[:, 0], 1) > 0
    data = recorded(obs, before.astype(int), length=600)
    with cloning(data, lr=1e-2).env_runners(transforms=[FrameStack(2)]).build() as algorithm:
        algorithm.train()
        stacks = np.stack([np.roll(obs, 1, 0), obs], 1)
        logits = algorithm.get_module().policy(torch.from_numpy(stacks * 100))
    assert (logits.argmax(-1).numpy() == before).mean() > 0.9


class Watching(Callback):
    columns: ClassVar[set[str]] = set()

    def on_learn_on_batch(self, *, train_batch: Any, **kwargs: Any) -> None:
        self.columns.update(train_batch)


def test_user_code_sees_whole_transitions() -> None:
    Watching.columns = set()
    with cloning(rule_data(), num_updates_per_iteration=1).callbacks(Watching).build() as algorithm:
        algorithm.train()
    assert Watching.columns >= {"obs", "next_obs", "actions", "rewards", "terminated", "truncated"}


def test_a_policy_continues_in_the_env_from_cloned_weights(tmp_path: Path) -> None:
    with cloning(rule_data(), num_updates_per_iteration=50).build() as algorithm:
        assert isinstance(algorithm, OfflineAlgorithm)
        algorithm.train()
        path = algorithm.save(tmp_path / "clone")
        expected = algorithm.compute_actions(draw_obs(50), explore=False)

    class Env(gym.Env[Any, Any]):
        observation_space, action_space = OBS, gym.spaces.Discrete(2)

        def __init__(self, config: Any = None) -> None:
            self.t = 0

        def reset(self, **kwargs: Any) -> Any:
            super().reset(**kwargs)
            self.t = 0
            return np.zeros(3, np.float32), {}

        def step(self, action: Any) -> Any:
            self.t += 1
            return np.zeros(3, np.float32), 0.0, self.t == 5, False, {}

    config = PPOConfig().environment(Env).rl_module(model_config={"fcnet_hiddens": [32]}, load_from=path)
    with config.build() as continued:
        assert (continued.compute_actions(draw_obs(50), explore=False) == expected).all()


def test_without_a_number_an_iteration_draws_as_many_steps_as_there_are() -> None:
    config = cloning(rule_data(), num_updates_per_iteration=None, train_batch_size_per_learner=60)
    for fraction, expected in ((0.0, 9), (0.5, 5)):  # of 500 and 250 steps
        with config.copy().offline_data(validation_fraction=fraction).build() as algorithm:
            for iteration in (1, 2):
                numbers = algorithm.train()["learners"]["__all_modules__"]
                assert algorithm.recorded.num_updates_per_iteration == expected
                assert numbers["num_env_steps_trained_lifetime"] == iteration * expected * 60


def test_what_to_do_next_names_the_env_that_a_run_lacks(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = cloning(rule_data(), num_updates_per_iteration=5)
    assert train(config, {"training_iteration": 1}, run_dir=tmp_path / "run") == 0
    assert f"Watch the policy:   corral play {tmp_path / 'run'} --env ENV\n" in capsys.readouterr().out
