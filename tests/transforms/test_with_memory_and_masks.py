"""Transforms together with modules that have memory, and with action masks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces
from tests.exact_runs import Drift, limited

from at_least import all_of
from corral import (
    Algorithm,
    ClipRewards,
    DQNConfig,
    FlattenObservations,
    FrameStack,
    NormalizeObservations,
    Policy,
    PPOConfig,
    PrevActionsPrevRewards,
    SACConfig,
    evaluate_policy,
    load_policy,
    make_multi_agent,
)
from corral.algorithms.dqn import outputs_at_steps
from corral.algorithms.ppo import ppo_loss
from corral.algorithms.registry import config_class
from corral.core.tree import leaves, map_tree, named_leaves
from corral.errors import CheckpointError, ConfigError, ObservationError
from corral.modules.memory import module_inputs
from corral.modules.transforms.pipeline import Pipeline
from corral.testing import DoorCorridor

LSTM: dict[str, Any] = {"use_lstm": True, "lstm_cell_size": 8, "fcnet_hiddens": [8], "max_seq_len": 4}
GRU: dict[str, Any] = {"use_gru": True, "gru_cell_size": 8, "fcnet_hiddens": [8], "max_seq_len": 4}
PIPELINES = [
    [NormalizeObservations()],
    [FlattenObservations(), FrameStack(2), NormalizeObservations()],
    [PrevActionsPrevRewards(), NormalizeObservations()],
]


def masked_ppo(transforms: list[Any], model_config: dict[str, Any] = LSTM, **settings: Any) -> PPOConfig:
    config = PPOConfig().environment(DoorCorridor, env_config={"length": 3})  # raises at illegal actions
    config.rl_module(model_config=model_config).debugging(seed=0)
    config.env_runners(num_envs_per_env_runner=3, transforms=transforms)
    config.training(train_batch_size_per_learner=90, minibatch_size=30, num_epochs=2)
    copied: PPOConfig = config.copy(**settings)
    return copied


@pytest.mark.parametrize("mode", ["next_step", "same_step"])
@pytest.mark.parametrize("model_config", [LSTM, GRU], ids=["lstm", "gru"])
@pytest.mark.parametrize("transforms", PIPELINES, ids=["normalized", "stacked", "previous"])
def test_ratios_are_1_before_the_first_gradient_step(
    transforms: list[Any], model_config: dict[str, Any], mode: str
) -> None:
    with masked_ppo(transforms, model_config, autoreset_mode=mode).build() as algorithm:
        for _ in range(2):
            algorithm.train()
        assert algorithm.get_module().has_action_mask and algorithm.get_module().has_memory()
        rollouts = algorithm.sample(90)
        batch = algorithm._batch("default_policy", rollouts)
        tensors = {name: map_tree(lambda leaf: torch.from_numpy(leaf.copy()), batch[name]) for name in batch}
        outputs: dict[str, Any] = {}
        none = {"kl_coeff": 0.0, "entropy_coeff": 0.0, "clip_param": 0.2}
        settings: dict[str, Any] = {"vf_clip_param": None, "vf_loss_coeff": 0.5}
        ppo_loss(algorithm.get_module(), tensors, none, **settings, outputs=outputs)
        np.testing.assert_allclose(outputs["ratio"].detach().numpy(), 1.0, atol=1e-5)
        np.testing.assert_allclose(outputs["values"].detach().numpy(), batch["values"], atol=1e-5)


@pytest.mark.parametrize("mode", ["next_step", "same_step"])
def test_dqn_learns_from_stacks_with_masks(mode: str) -> None:
    config = DQNConfig().environment(DoorCorridor, env_config={"length": 3}).debugging(seed=0)
    config.env_runners(num_envs_per_env_runner=3, transforms=[FlattenObservations(), FrameStack(2)])
    config.env_runners(autoreset_mode=mode).rl_module(model_config={"fcnet_hiddens": [8]})
    config.training(num_steps_sampled_before_learning_starts=60, train_batch_size_per_learner=16, n_step=2)
    config.reporting(min_sample_timesteps_per_iteration=150)
    with config.build() as algorithm:
        assert np.isfinite(algorithm.train()["learners"]["default_policy"]["total_loss"])
        batch = algorithm.replay_buffers["default_policy"].sample(64)
        for name in ("obs", "next_obs"):
            assert batch[name]["observations"].shape[1] == 2 and batch[name]["action_mask"].ndim == 2
        legal = np.take_along_axis(batch["obs"]["action_mask"], batch["actions"][:, None].astype(int), 1)
        assert (legal == 1).all()
        for rollout in algorithm.sample(30):
            seen = rollout.valid_rows(map_tree(lambda column: column[:-1], rollout.module_obs))
            outputs = algorithm.learner_group.dist_inputs("default_policy", {"obs": seen})
            np.testing.assert_allclose(outputs, rollout.valid_rows(rollout.dist_inputs), rtol=1e-5, atol=1e-5)


@pytest.mark.slow_cases("c51")
@pytest.mark.parametrize(
    ("kind", "training"),
    [(DQNConfig, {}), (DQNConfig, {"num_atoms": 5, "dueling": True, "double_q": False}), (SACConfig, {})],
    ids=["dqn", "c51", "sac"],
)
@pytest.mark.parametrize("transforms", PIPELINES, ids=["normalized", "stacked", "previous"])
def test_sequences_of_a_replay_buffer_keep_to_masks_and_transforms(
    transforms: list[Any], kind: Any, training: dict[str, Any], tmp_path: Path
) -> None:
    config = kind().environment(DoorCorridor, env_config={"length": 3}).debugging(seed=0)  # raises at illegal actions
    config.env_runners(num_envs_per_env_runner=3, transforms=[*transforms, ClipRewards(0.5)])
    config.training(num_steps_sampled_before_learning_starts=60, train_batch_size_per_learner=16, n_step=2)
    config.training(burn_in_len=2, gamma=1.0, store_buffer_in_checkpoints=True, **training)
    config.rl_module(model_config={**LSTM, "fcnet_hiddens": [8, 8]}).reporting(min_sample_timesteps_per_iteration=90)
    with config.build() as algorithm:
        learned = algorithm.train()["learners"]["default_policy"]
        assert all_of(np.isfinite(value) and abs(value) < 1e6 for value in learned.values())
        path = algorithm.save(tmp_path / "saved")
        expected = algorithm.train()["learners"]["default_policy"]
        module: Any = algorithm.get_module()
        for rollout in algorithm.sample(30):  # with the stored states, the module gives what it gave
            columns = map_tree(lambda column: column[:-1], (rollout.module_obs, rollout.states))
            obs, states = map_tree(torch.from_numpy, rollout.valid_rows(columns))
            with torch.no_grad():
                outputs = module.policy(obs, states)[0].numpy()
            np.testing.assert_allclose(outputs, rollout.valid_rows(rollout.dist_inputs), rtol=1e-4, atol=1e-5)
        drawn = algorithm._draw("default_policy")
        assert np.abs(drawn["rewards"][drawn["learns"]]).max() <= 1.0 and drawn["num_steps"].max() == 2
        tensors = {name: map_tree(lambda leaf: torch.from_numpy(leaf.copy()), drawn[name]) for name in drawn}
        illegal = tensors["obs"]["action_mask"] == 0
        illegal &= ~illegal.all(-1, keepdim=True)  # after the last step of an episode nobody acts
        if kind is SACConfig:
            steps = module.at_steps({**tensors, "noise": tensors["rewards"], "next_noise": tensors["rewards"]})
            rows = tensors["learns"].nonzero().squeeze(1)
            for name, places in (("obs", rows), ("next_obs", rows + tensors["num_steps"][rows])):
                logits = module.policy(steps[name])
                assert ((logits < -1e6) == illegal[places]).all() and illegal[places].any()
        else:
            values = module.q_values(*module_inputs(tensors))
            assert ((values < -1e6) == illegal).all() and illegal.any()
            rows = tensors["learns"].nonzero().squeeze(1)
            steps = outputs_at_steps(module.logits, module, tensors, double_q=True)[0]
            places = rows + tensors["num_steps"][rows]
            assert torch.equal(steps["next_obs"]["action_mask"], tensors["obs"]["action_mask"][places])
    with Algorithm.from_checkpoint(path) as restored:
        assert restored.train()["learners"]["default_policy"] == expected


def test_previous_actions_go_next_to_any_mask() -> None:
    """A mask stays at the top of the Dict, whatever the key of the other part is."""
    mask, vector = spaces.Box(0, 1, (2,), np.int8), spaces.Box(-1.0, 1.0, (3,), np.float32)
    for key in ("observation", "observations", "state"):
        space = spaces.Dict({"action_mask": mask, key: vector})
        pipeline = Pipeline.build([PrevActionsPrevRewards()], space, spaces.Discrete(2))
        assert pipeline is not None
        assert set(pipeline.module_space) == {"action_mask", key, "prev_actions", "prev_rewards"}  # type: ignore[call-overload]
        rows = {"action_mask": np.ones((1, 2), np.int8), key: np.zeros((1, 3), np.float32)}
        stored, _ = pipeline.to_store(rows, ((),), np.ones(1, bool), np.zeros(1, np.int64), np.zeros(1))
        assert list(stored) == list(pipeline.module_space)  # type: ignore[call-overload]


def test_previous_actions_of_nested_spaces_are_rows_of_numbers() -> None:
    actions = spaces.Dict({"move": spaces.Box(-1, 1, (2,), np.float32), "push": spaces.Discrete(3)})
    pipeline = Pipeline.build([PrevActionsPrevRewards()], spaces.Box(-1.0, 1.0, (3,), np.float32), actions)
    assert pipeline is not None
    assert pipeline.module_space["prev_actions"].shape == (3,)  # type: ignore[index]


# Policies.


def make_policy(*transforms: Any, model_config: dict[str, Any] = LSTM) -> Policy:
    """Return a policy whose actions depend on its states: the weights are far from the initial ones."""
    config = PPOConfig().rl_module(model_config=model_config).env_runners(transforms=list(transforms))
    spec = config.module_spec(spaces.Box(-9.0, 9.0, (2,), np.float32), spaces.Box(-1, 1, (2,), np.float32))
    module = spec.build()
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(0.5 * torch.randn_like(parameter))
    assert spec.pipeline is not None
    state = {"count": np.array(9.0), "mean/": np.full((3, 2), 0.5), "m2/": np.full((3, 2), 40.0)}
    given = {name: state for name in spec.pipeline.state}
    assert all_of(part.keys() == state.keys() for part in spec.pipeline.state.values())
    return Policy(module, pipeline=spec.pipeline.with_state(given))


OBS = np.random.default_rng(0).normal(size=(6, 4, 2)).astype(np.float32)  # [T, B, ...]


def reference(policy: Policy, obs: Any) -> Any:
    """Return the actions `[T, ...]` of one episode: stacks by hand, normalised by hand, one step of the LSTM each."""
    state: Any = map_tree(lambda leaf: leaf[None], policy.module.initial_state())
    frames, actions = [obs[0]] * 3, []
    for row in obs:
        frames = [*frames[1:], row]
        seen = ((np.stack(frames)[None] - 0.5) / np.sqrt(40.0 / 9.0)).astype(np.float32)
        with torch.no_grad():
            inputs, state = policy.module.policy(torch.from_numpy(seen), state)  # type: ignore[call-arg, misc]
        actions.append(policy.module.distribution.to_env(policy.module.distribution.mode(inputs.numpy()))[0])
    return np.array(actions)


def test_a_policy_with_memory_and_stacks_remembers_both() -> None:
    policy = make_policy(FrameStack(3), NormalizeObservations())
    states = policy.initial_states(4)
    assert set(states) == {"module", "transforms"}
    expected = np.stack([reference(policy, OBS[:, i]) for i in range(4)], 1)
    for row, actions in zip(OBS, expected, strict=True):
        found, states = policy.act(row, states)
        np.testing.assert_allclose(found, actions, atol=1e-5)
        np.testing.assert_allclose(policy.batch(row), actions, atol=1e-5)
    begins = np.array([True, False, True, False])
    again, _ = policy.act(OBS[0], policy.continued(states, begins=begins))
    np.testing.assert_allclose(again[begins], expected[0][begins], atol=1e-5)
    assert np.abs(again - expected[0])[~begins].max() > 1e-3
    np.testing.assert_allclose(policy.batch(OBS[0], begins=begins), again, atol=1e-6)
    with pytest.raises(ObservationError, match=r"state of the transforms: .*'module'"):
        policy.act(OBS[0], policy.initial_states(4)["transforms"])
    with pytest.raises(ObservationError, match=r"state of the module: state/h is"):
        policy.act(OBS[0], {**states, "module": {"h": np.zeros(3)}})


@pytest.mark.slow_cases(".pt2")
@pytest.mark.parametrize("suffix", [".pt2", pytest.param(".onnx", marks=pytest.mark.slow)])
def test_exports_hold_statistics_and_take_states_of_the_module(suffix: str, tmp_path: Path) -> None:
    policy = make_policy(FrameStack(3), NormalizeObservations())
    file = policy.export(tmp_path / f"policy{suffix}")
    states: Any = policy.initial_states(4)["module"]
    stack = np.repeat(OBS[0][:, None], 3, 1)
    for row in OBS:
        stack = np.concatenate([stack[:, 1:], row[:, None]], 1)
        if suffix == ".pt2":
            program = torch.export.load(str(file)).module()
            outputs = program(torch.from_numpy(stack), map_tree(torch.as_tensor, states))
            actions, *after = [leaf.numpy() for leaf in outputs]
        else:
            session = pytest.importorskip("onnxruntime").InferenceSession(file)
            actions, *after = session.run(None, {"obs": stack, **dict(named_leaves(states, "state"))})
        states = dict(zip(states, after, strict=True))
        np.testing.assert_allclose(actions, policy.batch(row), atol=1e-5)


def drifting(transforms: list[Any], **settings: Any) -> PPOConfig:
    config = PPOConfig().environment(Drift, wrappers=[limited]).rl_module(model_config=LSTM).debugging(seed=0)
    config.env_runners(num_envs_per_env_runner=2, transforms=transforms)
    config.training(train_batch_size_per_learner=60, minibatch_size=None, num_epochs=1)
    copied: PPOConfig = config.copy(**settings)
    return copied


@pytest.mark.parametrize("transforms", [[FrameStack(3), NormalizeObservations()], [PrevActionsPrevRewards()]])
def test_the_algorithm_the_loaded_policy_and_the_runner_act_alike(transforms: list[Any], tmp_path: Path) -> None:
    with drifting(transforms, explore=False).build() as algorithm:
        algorithm.train()
        policy = load_policy(algorithm.save(tmp_path / "saved"))
        found = [
            evaluate_policy(one, Drift, wrappers=[limited], episodes=6, num_envs=2, seed=3)
            for one in (algorithm, policy)
        ]
        assert found[0] == found[1]
        (rollout,) = algorithm.sample(60)
        own = algorithm.acting_policy()
        assert rollout.pipeline is not None
        algorithm.modules.set_transform_states({"default_policy": rollout.pipeline.state})  # those before this rollout
        whole = [span for span in rollout.spans() if span[1] > 0 and span[2] - span[1] > 2]
        assert whole
        for lane, start, stop, _ in whole:
            states = own.initial_states(1)
            for t in range(start, stop):
                states = own.continued(states, rewards=rollout.rewards[t - 1 : t, lane])
                obs = rollout.obs[t : t + 1, lane]
                actions, states = algorithm.compute_actions(obs, state=states, explore=False)
                assert actions[0] == rollout.actions[t, lane]


def test_agents_have_states_and_stacks_of_their_own() -> None:
    config = drifting([FrameStack(3)], explore=False)
    config.environment(make_multi_agent(lambda _: limited(Drift({}))), env_config={"num_agents": 2}, wrappers=[])
    with config.multi_agent(policies=["main"]).build() as algorithm:
        algorithm.train()
        for part in algorithm.sample(60)[0].by_module().values():
            batch = algorithm._batch("main", [part])
            outputs = algorithm.learner_group.dist_inputs("main", batch)
            fresh = part.valid_rows(part.obs_rows[:-1], by_lane=True) > 0
            np.testing.assert_allclose(outputs[fresh], batch["dist_inputs"][fresh], atol=1e-5)
        found = evaluate_policy(algorithm, config.env, env_config={"num_agents": 2}, episodes=4, num_envs=2, seed=3)
        again = evaluate_policy(algorithm, config.env, env_config={"num_agents": 2}, episodes=4, num_envs=2, seed=3)
        assert found == again


# Settings.


def test_modules_start_with_the_statistics_of_the_weights_that_they_load(tmp_path: Path) -> None:
    config = drifting([NormalizeObservations()])
    with config.build() as algorithm:
        algorithm.train()
        saved = algorithm.save(tmp_path / "saved")
        expected = algorithm.modules.get_transform_states()
    with config.copy().rl_module(load_from=saved).build() as loaded:
        for one, other in zip(leaves(loaded.modules.get_transform_states()), leaves(expected), strict=True):
            np.testing.assert_array_equal(one, other)
        rollout = loaded.sample(60)[0]  # the runner has them from the first row on
        assert rollout.pipeline is not None
        for one, other in zip(leaves(rollout.pipeline.state), leaves(expected), strict=True):
            np.testing.assert_array_equal(one, other)


def test_weights_without_their_transforms_warn(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with drifting([NormalizeObservations()]).build() as algorithm:
        saved = algorithm.save(tmp_path / "saved")
        with pytest.raises(CheckpointError, match=r"the statistics of NormalizeObservations do not fit: .* is missing"):
            algorithm.modules.set_transform_states({"default_policy": {}})
        algorithm.load_module_weights(saved, "default_policy")
    assert not caplog.records
    with drifting([]).rl_module(load_from=saved).build() as plain:
        message = "were trained with the transforms NormalizeObservations, which this algorithm does not have"
        assert message in caplog.text
        caplog.clear()
        plain.load_module_weights(saved, "default_policy")
        assert message in caplog.text


@pytest.mark.parametrize("algo", ["TD3", "DDPG", "SAC", "TQC", "CrossQ", "CQL", "IQL", "DreamerV3"])
def test_a_policy_that_squashes_its_actions_refuses_the_units_of_the_env(algo: str) -> None:
    config: Any = config_class(algo)().environment(Drift, normalize_actions=False)
    if algo in ("CQL", "IQL"):
        config.offline_data(input_="no/such/data")
    with pytest.raises(ConfigError, match=f"normalize_actions=False: {algo} squashes"):
        config.validate()


def test_boxes_in_nested_actions_keep_the_units_of_the_env_on_request() -> None:
    actions = spaces.Dict({"move": spaces.Box(-5, 5, (1,), np.float32), "push": spaces.Discrete(3)})
    space, found = spaces.Box(-1.0, 1.0, (3,), np.float32), []
    for settings in ({}, {"normalize_actions": False}, {"normalize_actions": False, "clip_actions": True}):
        module = PPOConfig().environment(**settings).module_spec(space, actions).build()
        found.append(float(module.distribution.to_env(np.array([[9.0, 1.0]], np.float32))["move"][0, 0]))
    assert found == [5.0, 9.0, 5.0]
