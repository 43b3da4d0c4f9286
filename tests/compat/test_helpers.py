"""Helpers, schedules, batches and distributions of RLlib's names, against closed forms."""

from __future__ import annotations

import math
import pickle
from types import SimpleNamespace
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch

from corral import PPOConfig
from corral.compat.rllib import helpers, numpy_helpers, schedules, space_helpers, torch_helpers
from corral.compat.rllib.batches import MultiAgentBatch, SampleBatch, concat_samples
from corral.compat.rllib.distributions import (
    TorchCategorical,
    TorchDiagGaussian,
    TorchMultiCategorical,
    TorchMultiDistribution,
    TorchSquashedGaussian,
)
from corral.compat.rllib.episode_summaries import collect_episodes, summarize_episodes
from corral.compat.rllib.layers import MLPEncoderConfig, MLPHeadConfig
from corral.errors import ConfigError


def test_override_refuses_what_overrides_nothing() -> None:
    class Base:
        def step(self) -> None: ...

    class Child(Base):
        @helpers.override(Base)
        def step(self) -> None: ...

    with pytest.raises(NameError, match="Did you mean 'step'"):
        helpers.override(Base)(_named("steps"))


def _named(name: str) -> Any:
    def function() -> None: ...

    function.__name__ = name
    return function


def test_check_compares_nested_values() -> None:
    x = {"a": [1, 2.0, np.array([1.0, 2.0])], "b": (None, "text", True), "c": torch.tensor([3.0])}
    y = {"a": [1, 2.0 + 1e-8, [1.0, 2.0]], "b": (None, "text", True), "c": np.array([3.0])}
    helpers.check(x, y)
    for wrong in ({**y, "a": [1, 2.1, [1.0, 2.0]]}, {**y, "d": 1}, {**y, "b": (None, "text", False)}):
        with pytest.raises(AssertionError):
            helpers.check(x, wrong)
    helpers.check(1.0, 1.05, rtol=0.1)
    helpers.check(1.0, 2.0, false=True)
    with pytest.raises(AssertionError, match="equals"):
        helpers.check(1, 1, false=True)


def test_from_config_makes_objects() -> None:
    assert vars(helpers.from_config(SimpleNamespace, {"a": 1}, b=2)) == {"a": 1, "b": 2}
    assert helpers.from_config({"type": "fractions.Fraction", "_args": [1, 2]}) == 0.5
    assert helpers.from_config(schedules.Schedule, made := schedules.ConstantSchedule(1.0)) is made
    with pytest.raises(ConfigError, match="cannot be imported"):
        helpers.from_config({"type": "no_module.Name"})


def test_dicts_are_merged_flattened_and_updated() -> None:
    nested = {"a": {"b": 1, "c": 2}, "d": 3}
    assert helpers.flatten_dict(nested) == {"a/b": 1, "a/c": 2, "d": 3}
    assert helpers.unflatten_dict(helpers.flatten_dict(nested)) == nested
    assert helpers.merge_dicts(nested, {"a": {"b": 5}}) == {"a": {"b": 5, "c": 2}, "d": 3}
    assert nested["d"] == 3 and nested["a"] == {"b": 1, "c": 2}
    with pytest.raises(ConfigError, match="Did you mean 'd'"):
        helpers.deep_update(nested, {"dd": 1})
    assert helpers.deep_update(nested, {"a": {"x": 1}}, allow_new_subkey_list=["a"])["a"] == {"b": 1, "c": 2, "x": 1}
    assert helpers.flatten_dict({"a/x": [{"b": 1}, (2,)]}, ".") == {"a/x.0.b": 1, "a/x.1.0": 2}
    helpers.merge_dicts(nested, {})["a"]["b"] = 7
    assert nested["a"]["b"] == 1
    typed = {"type": "A", "lr": 1}
    assert helpers.deep_update({"a": {"b": 1}}, {"a": typed}, True, None, ["a"])["a"] == {"b": 1, **typed}
    assert helpers.deep_update({"a": {"type": "B", "b": 1}}, {"a": typed}, True, None, ["a"])["a"] == typed
    assert helpers.force_list(None) == [] and helpers.force_tuple(3) == (3,)
    assert helpers.LambdaDefaultDict(lambda key: key * 2)["ab"] == "abab"


def test_arrays() -> None:
    assert numpy_helpers.softmax(np.log([1.0, 3.0])).tolist() == pytest.approx([0.25, 0.75])
    assert numpy_helpers.softmax([0.0, 100.0]).tolist() == pytest.approx([1e-6, 1.0])
    assert numpy_helpers.one_hot(np.array([0, 2])).tolist() == [[1, 0, 0], [0, 0, 1]]
    assert numpy_helpers.one_hot(np.array([-1]), 3).tolist() == [[0, 0, 1]]
    with pytest.raises(AssertionError, match="-4"):
        numpy_helpers.one_hot(np.array([-4]), 3)
    found = numpy_helpers.convert_to_numpy({"a": torch.tensor([1.0]), "b": [torch.tensor(2)], "c": np.zeros(2)})
    assert (found["a"].tolist(), found["b"], found["c"].dtype) == ([1.0], [2], np.float32)
    spaces = {"a": gym.spaces.Discrete(2), "b": gym.spaces.Box(-1, 1, (2, 1))}
    inputs = {"a": np.array([1, 0]), "b": np.arange(4.0).reshape(2, 2, 1)}
    expected = [[0, 1, 0, 1], [1, 0, 2, 3]]
    assert numpy_helpers.flatten_inputs_to_1d_tensor(inputs, spaces).tolist() == expected
    tensors = torch_helpers.convert_to_torch_tensor(inputs)
    assert torch_helpers.flatten_inputs_to_1d_tensor(tensors, spaces).tolist() == expected


def test_parts_of_dicts_are_joined_in_the_order_of_their_keys() -> None:
    box, discrete = gym.spaces.Box(-9, 9, (1,)), gym.spaces.Discrete(2)
    inputs = {"b": np.array([[5.0]]), "a": np.array([1])}
    for spaces in ({"a": discrete, "b": box}, gym.spaces.Dict([("b", box), ("a", discrete)])):
        assert numpy_helpers.flatten_inputs_to_1d_tensor(inputs, spaces).tolist() == [[0, 1, 5]]
        tensors = torch_helpers.convert_to_torch_tensor(inputs)
        assert torch_helpers.flatten_inputs_to_1d_tensor(tensors, spaces).tolist() == [[0, 1, 5]]
    assert numpy_helpers.flatten_inputs_to_1d_tensor(inputs).tolist() == [[1, 5]]
    assert space_helpers.flatten_to_single_ndarray(inputs).tolist() == [1, 5]
    assert space_helpers.flatten_to_single_ndarray(np.ones((1, 2))).shape == (1, 2)


def test_dummy_batches_are_filled_where_integers_are_one_hot() -> None:
    space = gym.spaces.Dict({"a": gym.spaces.Discrete(2), "b": gym.spaces.MultiDiscrete([2, 1])})
    found = space_helpers.get_dummy_batch_for_space(space, 1, one_hot_discrete=True)
    assert (found["a"].tolist(), found["b"].tolist()) == ([[0, 0]], [[0, 0, 0]])
    assert space_helpers.get_dummy_batch_for_space(space, 0, fill_value="random")["a"].shape == ()


def test_tensors() -> None:
    tensors = torch_helpers.convert_to_torch_tensor({"a": np.ones(2), "b": [1, 2], "c": None, "d": np.array(["x"])})
    assert (tensors["a"].dtype, tensors["b"].tolist(), tensors["c"]) == (torch.float32, [1, 2], None)
    target = torch.tensor([1.0, 2.0, 3.0])
    assert torch_helpers.explained_variance(target, target).item() == pytest.approx(1.0)
    assert torch_helpers.explained_variance(target, -9 * target).item() == -1.0
    gradients: dict[Any, Any] = {"a": torch.tensor([3.0]), "b": torch.tensor([4.0]), "c": None}
    assert torch_helpers.clip_gradients(gradients, grad_clip=1.0, grad_clip_by="global_norm") == pytest.approx(5.0)
    assert [gradients["a"].item(), gradients["b"].item()] == pytest.approx([0.6, 0.8])
    assert torch_helpers.two_hot(torch.tensor([0.25]), 3, -1.0, 1.0).tolist() == [[0.0, 0.75, 0.25]]
    assert torch_helpers.sequence_mask(torch.tensor([1, 2])).tolist() == [[True, False], [True, True]]
    given = [(1.0, None), (np.ones(1), None), (1.0, np.float64), (1, torch.int32)]
    found = [helpers.get_variable(value, torch_tensor=True, dtype=dtype).dtype for value, dtype in given]
    assert found == [torch.float32, torch.float64, torch.float64, torch.int32]
    x = torch.tensor([-3.0, 0.5])
    torch.testing.assert_close(torch_helpers.inverse_symlog(torch_helpers.symlog(x)), x)


def test_spaces() -> None:
    box = gym.spaces.Box(-2, 4, (1,))
    space = gym.spaces.Dict({"b": gym.spaces.Discrete(3), "a": gym.spaces.Tuple([box, gym.spaces.MultiBinary(2)])})
    assert space_helpers.flatten_space(space) == [box, gym.spaces.MultiBinary(2), gym.spaces.Discrete(3)]
    rows = [{"x": np.array([i]), "y": (i,)} for i in range(3)]
    joined = space_helpers.batch(rows)
    assert joined["x"].tolist() == [[0], [1], [2]] and joined["y"][0].tolist() == [0, 1, 2]
    assert [int(row["y"][0]) for row in space_helpers.unbatch(joined)] == [0, 1, 2]
    assert space_helpers.batch([np.ones((2, 1))] * 2, individual_items_already_have_batch_dim=True).shape == (4, 1)
    dummy = space_helpers.get_dummy_batch_for_space(space, 4, time_size=2, one_hot_discrete=True)
    assert (dummy["a"][0].shape, dummy["b"].shape) == ((4, 2, 1), (4, 2, 3))
    assert space_helpers.unsquash_action(np.array([0.5]), box).tolist() == [2.5]
    whole = gym.spaces.Box(-2, 4, (1,), np.int64)
    assert space_helpers.unsquash_action(np.array([3]), whole).tolist() == [1]
    assert space_helpers.normalize_action(np.array([2.5]), box).tolist() == [0.5]


def test_schedules() -> None:
    piecewise = schedules.PiecewiseSchedule([(0, 1.0), (10, 3.0), (20, 0.0)], outside_value=7.0)
    assert [piecewise(t) for t in (0, 5, 10, 15, 20)] == [1.0, 2.0, 3.0, 1.5, 7.0]
    assert schedules.LinearSchedule(schedule_timesteps=10, initial_p=1.0, final_p=0.0).value(4) == pytest.approx(0.6)
    polynomial = schedules.PolynomialSchedule(10, 0.5)
    assert [polynomial.value(t) for t in (0, 5, 10, 20)] == pytest.approx([1.0, 0.625, 0.5, 0.5])
    assert schedules.LinearSchedule(schedule_timesteps=10, initial_p=1.0, final_p=0.25).value(20) == 0.25
    assert schedules.ExponentialSchedule(10).value(20) == pytest.approx(0.01)
    scheduler = schedules.Scheduler([[0, 1.0], [10, 2.0]])
    assert (scheduler.get_current_value(), scheduler.update(5), scheduler.get_current_value()) == (1.0, 1.5, 1.5)


def test_batches() -> None:
    batch = SampleBatch({"obs": np.arange(4), "eps_id": [1, 1, 2, 2], "rewards": [1.0, 2.0, 3.0, 4.0]})
    assert (len(batch), batch.count, batch[SampleBatch.OBS].tolist()) == (4, 4, [0, 1, 2, 3])
    assert [part["rewards"].tolist() for part in batch.split_by_episode()] == [[1, 2], [3, 4]]
    assert batch[1:3]["rewards"].tolist() == [2, 3]
    assert [row["obs"] for row in batch.rows()] == [0, 1, 2, 3]
    copied = batch.copy()
    copied["obs"][0] = 9
    assert batch["obs"][0] == 0
    joined = concat_samples([batch, MultiAgentBatch({"default_policy": batch, "other": batch}, 4)])
    assert (joined.env_steps(), joined.agent_steps(), len(joined["default_policy"])) == (8, 12, 8)
    terminated = SampleBatch({"terminateds": [False, True, False], "obs": [1, 2, 3]})
    assert [len(part) for part in terminated.split_by_episode()] == [2, 1]
    terminated["eps_id"] = np.ones(3)
    assert [len(part) for part in terminated.split_by_episode("dones")] == [2, 1]


def test_slices_of_batches_keep_their_sequences() -> None:
    batch = SampleBatch({"state_in_0": np.array([1, 2, 3]), "obs": np.arange(7), "seq_lens": [2, 4, 1]})
    assert len(batch) == 7
    for steps, lengths, states in (
        (slice(1, 5), [1, 3], [1, 2]),
        (slice(2, None), [4, 1], [2, 3]),
        (slice(-1, None), [1], [3]),
    ):
        part = batch[steps]
        assert part["obs"].tolist() == list(range(7))[steps]
        assert (part["seq_lens"].tolist(), part["state_in_0"].tolist()) == (lengths, states)


def test_ended_episodes_are_collected_once_and_summarised() -> None:
    config = PPOConfig().environment("CartPole-v1").env_runners(num_envs_per_env_runner=2).debugging(seed=0)
    with config.build() as algo:
        rollout = algo.env_runner.sample(num_episodes=3)
        lengths = sorted(len(episode) for episode in rollout.episodes())
        episodes = collect_episodes(workers=algo.env_runner_group)
        assert sorted(episode.episode_length for episode in episodes) == lengths
        assert collect_episodes(algo.env_runner_group) == []
    summary = summarize_episodes(episodes)
    assert summary["episode_reward_mean"] == pytest.approx(sum(lengths) / 3)
    assert (summary["episode_reward_max"], summary["episodes_this_iter"]) == (lengths[-1], 3)
    assert math.isnan(summarize_episodes([])["episode_reward_mean"])


def test_not_provided_is_one_object() -> None:
    assert pickle.loads(pickle.dumps(helpers.NotProvided)) is helpers.NotProvided


def test_distributions() -> None:
    categorical = TorchCategorical.from_logits(torch.log(torch.tensor([[0.25, 0.75]])))
    assert categorical.logp(torch.tensor([1])).item() == pytest.approx(math.log(0.75))
    assert categorical.entropy().item() == pytest.approx(-0.25 * math.log(0.25) - 0.75 * math.log(0.75))
    assert categorical.to_deterministic().sample().tolist() == [1]
    gaussian = TorchDiagGaussian.from_logits(torch.zeros(1, 4))
    assert gaussian.logp(torch.zeros(1, 2)).item() == pytest.approx(-math.log(2 * math.pi))
    assert gaussian.kl(TorchDiagGaussian(torch.ones(1, 2), 1.0)).item() == pytest.approx(1.0)
    assert TorchDiagGaussian.required_input_dim(gym.spaces.Box(-1, 1, (3,))) == 6
    several = TorchMultiCategorical.from_logits(torch.zeros(2, 5), input_lens=[2, 3])
    assert several.sample().shape == (2, 2)
    assert several.entropy().tolist() == pytest.approx([math.log(6)] * 2)
    parts = {"a": TorchCategorical, "b": TorchDiagGaussian}
    nested = TorchMultiDistribution.from_logits(
        torch.zeros(3, 6), child_distribution_cls_struct=parts, input_lens=[2, 4]
    )
    action = nested.sample()
    apart = nested._parts["a"].logp(action["a"]) + nested._parts["b"].logp(action["b"])
    torch.testing.assert_close(nested.logp(action), apart)
    flat = torch.cat([action["a"][:, None].float(), action["b"]], dim=-1)
    torch.testing.assert_close(nested.logp(flat), apart)
    by_key = TorchMultiDistribution.from_logits(torch.ones(3, 6), parts, input_lens={"b": 4, "a": 2})
    assert by_key.sample()["b"].shape == (3, 2)
    turned = TorchMultiDistribution({"b": by_key._parts["b"], "a": by_key._parts["a"]})
    assert by_key.kl(turned).tolist() == [0.0] * 3


def test_the_density_of_the_squashed_gaussian_integrates_to_one() -> None:
    squashed = TorchSquashedGaussian.from_logits(torch.tensor([[0.3, -0.5]]), low=-2.0, high=4.0)
    places = torch.linspace(-2.0, 4.0, 20001)[1:-1, None]
    densities = squashed.logp(places).exp() * 2.0 / (4.0 - -2.0)  # `logp` is for the range from -1 to 1
    assert densities.sum().item() * 6.0 / 20000 == pytest.approx(1.0, abs=1e-3)
    action, logp = squashed.rsample_and_logp()
    torch.testing.assert_close(squashed.logp(action), logp, atol=1e-3, rtol=1e-3)
    assert -2.0 <= squashed.to_deterministic().sample().item() <= 4.0
    with pytest.raises(TypeError, match="no entropy in closed form"):
        squashed.entropy()


def test_configs_of_layers_build_perceptrons() -> None:
    head = MLPHeadConfig(
        input_dims=[4],
        hidden_layer_dims=[8, 6],
        hidden_layer_activation="tanh",
        hidden_layer_use_layernorm=True,
        hidden_layer_weights_initializer="constant_",
        hidden_layer_weights_initializer_config={"val": 0.5},
        output_layer_dim=2,
        output_layer_use_bias=False,
        output_layer_weights_initializer=torch.nn.init.zeros_,
    )
    layers = head.build(framework="torch")
    kinds = ["Linear", "LayerNorm", "Tanh"]
    assert [type(layer).__name__ for layer in layers] == [*kinds, *kinds, "Linear"]
    assert (layers[0].weight == 0.5).all() and (layers[3].weight == 0.5).all() and layers[-1].bias is None
    assert layers(torch.ones(3, 4)).tolist() == [[0.0, 0.0]] * 3 and head.output_dims == (2,)
    encoder = MLPEncoderConfig(input_dims=[4], hidden_layer_dims=[5])
    assert encoder.build()({"obs": torch.ones(3, 4)})["encoder_out"].shape == (3, 5) and encoder.output_dims == (5,)
    for refused, message in (
        (MLPHeadConfig(input_dims=[4], clip_log_std=True), "clip_log_std=True"),
        (MLPHeadConfig(input_dims=[3, 4]), "must be one size"),
    ):
        with pytest.raises(ConfigError, match=message):
            refused.build()
