"""SimBa and SimbaV2: their layers against slow references, their constraints, and what they add to a run."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces
from numpy.typing import NDArray
from torch import Tensor, nn

from corral import NormalizeObservations, NormalizeRewards, load_policy
from corral.algorithms.registry import config_class
from corral.errors import ConfigError
from corral.learners.learner import Learner
from corral.learners.settings import LearningSpec, UpdateSettings
from corral.modules.inference import Inference
from corral.modules.module import ActorCritic, Module
from corral.modules.q_module import QModule
from corral.modules.residual_blocks import SphereHead, UnitLinear
from corral.modules.sac_module import SACModule
from corral.modules.td3_module import TD3Module
from corral.modules.tqc_module import TQCModule
from exact_runs import Drift

OBS = spaces.Box(-np.inf, np.inf, (5,), np.float32)
BOX, FOUR = spaces.Box(-1, 1, (3,), np.float32), spaces.Discrete(4)
SMALL = {"fcnet_hiddens": [8, 8]}
ARCHITECTURES = ("simba", "simba_v2")
MODULES: dict[str, tuple[type[Module], Any, dict[str, Any]]] = {
    "PPO-Box": (ActorCritic, BOX, {}),
    "PPO-Discrete": (ActorCritic, FOUR, {}),
    "DQN": (QModule, FOUR, {}),
    "DQN-dueling": (QModule, FOUR, {"dueling": True}),
    "DQN-noisy": (QModule, FOUR, {"dueling": True, "noisy": True}),
    "SAC-Box": (SACModule, BOX, {}),
    "SAC-Discrete": (SACModule, FOUR, {}),
    "TD3": (TD3Module, BOX, {}),
    "TQC": (TQCModule, BOX, {}),
}


def make_module(name: str, architecture: str, **model: Any) -> Any:
    torch.manual_seed(0)
    cls, action_space, settings = MODULES[name]
    module = cls(OBS, action_space, {"architecture": architecture, **SMALL, **settings, **model})
    with torch.no_grad():  # away from the first values, of which many are 0 or 1
        for parameter in module.parameters():
            parameter.add_(0.1 * torch.randn(parameter.shape))
        for layer in module.modules():
            if isinstance(layer, UnitLinear):
                layer.constrain()
    return module.eval()


def observations(num_rows: int = 6) -> NDArray[np.float32]:
    return 3 * np.random.default_rng(0).standard_normal((num_rows, 5)).astype(np.float32)


# The papers' formulas, one observation after another, in float64.


def array(tensor: Tensor) -> NDArray[np.float64]:
    found: NDArray[np.float64] = tensor.detach().numpy().astype(np.float64)
    return found


def unit(x: NDArray[np.float64]) -> NDArray[np.float64]:
    found: NDArray[np.float64] = x / math.sqrt(sum(x**2))
    return found


def slow_simba(layers: Any, x: NDArray[np.float64]) -> NDArray[np.float64]:
    embedding, *blocks, last = layers

    def norm(layer: nn.LayerNorm, x: NDArray[np.float64]) -> NDArray[np.float64]:
        return (x - x.mean()) / math.sqrt(x.var() + 1e-5) * array(layer.weight) + array(layer.bias)

    def apply(layer: nn.Linear, x: NDArray[np.float64]) -> NDArray[np.float64]:
        return array(layer.weight) @ x + array(layer.bias)

    x = apply(embedding, x)
    for block in blocks:
        x = x + apply(block.contract, np.maximum(apply(block.expand, norm(block.norm, x)), 0))
    return norm(last, x)


def slow_simba_v2(layers: Any, x: NDArray[np.float64]) -> NDArray[np.float64]:
    embedding, *blocks = layers
    width, num_blocks = len(embedding.linear.weight), len(blocks)
    x = unit(np.append(x, 3.0))
    x = unit(array(embedding.scaler.scaler) * (array(embedding.linear.weight) @ x))  # init / scale is 1
    for block in blocks:
        hidden = np.maximum(array(block.scaler.scaler) * (array(block.expand.weight) @ x), 0) + 1e-8
        aim = unit(array(block.contract.weight) @ hidden)
        alpha = array(block.step.scaler) * (1 / (num_blocks + 1)) / (1 / math.sqrt(width))
        x = unit(x + alpha * (aim - x))
    return x


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_the_layers_compute_the_formulas_of_the_paper(architecture: str) -> None:
    module = make_module("PPO-Box", architecture)
    obs = observations()
    with torch.no_grad():
        found = module.policy_encoder(torch.from_numpy(obs)).numpy()
    slow = slow_simba if architecture == "simba" else slow_simba_v2
    expected = [slow(module.policy_encoder.mlp, row.astype(np.float64)) for row in obs]
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)
    if architecture == "simba_v2":
        np.testing.assert_allclose(np.linalg.norm(found, axis=1), 1, rtol=1e-5)


def test_the_norm_of_an_input_of_simba_v2_has_an_effect() -> None:
    module = make_module("PPO-Box", "simba_v2")
    obs = torch.from_numpy(observations(1))
    assert not torch.allclose(module.policy(obs), module.policy(2 * obs))


def test_numbers_that_simba_v2_learns_begin_as_the_paper_says() -> None:
    module: Any = SACModule(OBS, BOX, {"architecture": "simba_v2"})
    (embedding, block), head = module.actor.encoder.mlp, module.actor.head[0]
    np.testing.assert_allclose(array(embedding.scaler.values()), math.sqrt(2 / 128), rtol=1e-6)
    np.testing.assert_allclose(array(block.scaler.values()), math.sqrt(2 / 128) / 2, rtol=1e-6)
    np.testing.assert_allclose(array(block.step.values()), 1 / 2, rtol=1e-6)
    np.testing.assert_allclose(array(block.step.scaler), 1 / math.sqrt(128), rtol=1e-6)
    assert isinstance(head, SphereHead) and (head.scaler.values() == 1).all() and (head.bias == 0).all()
    assert [len(critic.mlp) for critic in module.q] == [3, 3]  # an embedding and two blocks of width 512
    assert module.q[0].mlp[2].contract.weight.shape == (512, 2048)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("name", MODULES)
def test_runners_compute_the_policy_in_numpy(name: str, architecture: str) -> None:
    module = make_module(name, architecture)
    inference = Inference(module)
    assert inference.backend == "numpy"
    if module.is_noisy:
        inference.begin_sample(True, np.random.default_rng(1))
    for num_rows in (1, 6):
        obs = observations(num_rows)
        before = obs.copy()
        with torch.inference_mode():
            expected = module.policy(torch.from_numpy(obs)).numpy()
        np.testing.assert_allclose(inference(obs), expected, rtol=1e-4, atol=1e-5)
        np.testing.assert_array_equal(obs, before)
    weights = {key: value.numpy() + 0.01 for key, value in module.acting_weights().items()}
    inference.load_weights(weights)
    with torch.inference_mode():
        again = module.policy(torch.from_numpy(obs)).numpy()
    assert not np.allclose(again, expected, atol=1e-4)
    np.testing.assert_allclose(inference(obs), again, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("cls", [ActorCritic, QModule])
def test_masks_hold_for_blocks_in_numpy(cls: Any, architecture: str) -> None:
    space = spaces.Dict({"action_mask": spaces.Box(0, 1, (4,), np.int8), "observations": OBS})
    module = cls(space, FOUR, {"architecture": architecture, **SMALL}).eval()
    inference = Inference(module)
    assert inference.backend == "numpy"
    mask = np.array([[1, 0, 0, 1], [0, 1, 1, 0]], np.int8)
    obs = {"action_mask": mask, "observations": observations(2)}
    with torch.inference_mode():
        expected = module.policy({name: torch.from_numpy(leaf) for name, leaf in obs.items()}).numpy()
    found = inference(obs)
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)
    assert ((found < -1e6) == (mask == 0)).all()


def test_wide_blocks_and_other_layers_are_for_torch() -> None:
    assert Inference(make_module("SAC-Box", "simba", fcnet_hiddens=[256])).backend == "torch"
    bounded = make_module("SAC-Box", "simba", log_std_bounds=[-5, 2])
    obs = observations()
    with torch.inference_mode():
        expected = bounded.policy(torch.from_numpy(obs)).numpy()
    np.testing.assert_allclose(Inference(bounded)(obs), expected, rtol=1e-5)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_noise_of_the_weights_changes_the_policy_of_each_row(architecture: str) -> None:
    inference = Inference(make_module("DQN", architecture))
    inference.begin_sample(True, np.random.default_rng(0))
    obs = np.repeat(observations(1), 3, 0)
    plain = inference(obs)
    inference.perturb(0.5, np.ones(3, bool), np.random.default_rng(1))
    noisy = inference(obs)
    assert len({row.tobytes() for row in noisy}) == 3 and not np.allclose(noisy, plain)
    np.testing.assert_allclose(inference(obs, perturbed=False), plain, rtol=1e-6)


def test_weights_of_simba_v2_stay_on_the_sphere_while_they_learn() -> None:
    module = make_module("PPO-Box", "simba_v2")

    def loss(module: Any, batch: Any, coefficients: Any) -> Any:
        return (module.value(batch["obs"]) - batch["rewards"]).square().mean(), {}

    learner = Learner({"one": module}, {"one": LearningSpec(loss)})
    before = {name: value.clone() for name, value in module.state_dict().items()}
    batch = {"obs": observations(), "rewards": np.ones(6, np.float32)}
    for _ in range(3):
        learner.update({"one": batch}, {"one": UpdateSettings(lr=0.05)})
        layers = [(name, part) for name, part in module.named_modules() if isinstance(part, UnitLinear)]
        assert len(layers) == 2 * (1 + 2 * 2 + 2)
        for name, layer in layers:
            np.testing.assert_allclose(array(layer.weight.norm(dim=1)), 1, rtol=1e-6)
            changes = (layer.weight - before[f"{name}.weight"]).abs().max()
            assert (changes > 1e-3) == ("value" in name)


def test_frozen_weights_of_simba_v2_stay_as_they_are_to_the_bit() -> None:
    module = make_module("PPO-Box", "simba_v2")
    module.policy_encoder.requires_grad_(False)
    with torch.no_grad():  # a norm that rounding would change
        module.policy_encoder.mlp[0].linear.weight.mul_(1 + 1e-5)
    before = {name: value.clone() for name, value in module.policy_encoder.state_dict().items()}

    def loss(module: Any, batch: Any, coefficients: Any) -> Any:
        return (module.value(batch["obs"]) - batch["rewards"]).square().mean(), {}

    learner = Learner({"one": module}, {"one": LearningSpec(loss)})
    batch = {"obs": observations(), "rewards": np.ones(6, np.float32)}
    learner.update({"one": batch}, {"one": UpdateSettings(lr=0.05)})
    for name, value in module.policy_encoder.state_dict().items():
        assert torch.equal(value, before[name])


@pytest.mark.parametrize("algo", ["SAC", "TQC", "TD3"])
@pytest.mark.parametrize("architecture", [None, *ARCHITECTURES])
def test_critics_may_have_other_widths_than_the_actor(algo: str, architecture: str | None) -> None:
    config: Any = config_class(algo)().environment("Pendulum-v1").debugging(seed=0)
    config.rl_module(model_config={"architecture": architecture, "fcnet_hiddens": [8], "critic_hiddens": [24, 24]})
    with config.build() as algorithm:
        module: Any = algorithm.get_module()
        assert {len(parameter) for parameter in module.actor.encoder.mlp.parameters()} <= {8, 4 * 8}
        widths = {parameter.shape[0] for layer in module.q[0].mlp for parameter in layer.parameters()}
        assert 24 in widths and 8 not in widths


def test_critics_of_sac_with_memory_may_have_other_widths() -> None:
    settings = {"fcnet_hiddens": [8], "critic_hiddens": [24], "use_gru": True, "gru_cell_size": 4}
    config: Any = config_class("SAC")().environment("Pendulum-v1").rl_module(model_config=settings)
    with config.build() as algorithm:
        module: Any = algorithm.get_module()
        assert module.q[0].mlp[0].weight.shape == (24, 4 + 1) and module.actor.head[0].weight.shape == (2, 8)


# What an architecture adds to a run.


def make_config(algo: str, architecture: str, **model: Any) -> Any:
    config: Any = config_class(algo)().environment(Drift, env_config={"box": algo not in ("PPO", "DQN")})
    config.rl_module(model_config={"architecture": architecture, "fcnet_hiddens": [8], **model}).debugging(seed=0)
    if algo == "PPO":
        return config.training(train_batch_size_per_learner=64, minibatch_size=32)
    config.training(num_steps_sampled_before_learning_starts=32, train_batch_size_per_learner=16)
    return config.reporting(min_sample_timesteps_per_iteration=64)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("algo", ["PPO", "DQN", "SAC", "TD3", "TQC", "DDPG"])
def test_every_algorithm_learns_with_it(algo: str, architecture: str, tmp_path: Path) -> None:
    with make_config(algo, architecture).build() as algorithm:
        before = {name: value.clone() for name, value in algorithm.get_module().state_dict().items()}
        algorithm.train()
        after = algorithm.get_module().state_dict()
        moved = [name for name in before if not torch.equal(before[name], after[name])]
        blocks = [name for name in before if ".contract.weight" in name and not name.startswith("target_")]
        assert blocks and set(blocks) <= set(moved)
        names = [type(each).__name__ for each in algorithm.get_pipeline().transforms]
        assert names == ["NormalizeObservations", "NormalizeRewards"][: 1 + (architecture == "simba_v2")]
        assert (tuple(getattr(algorithm.get_module(), "atoms", ())) != ()) == (
            algo == "DQN" or (architecture == "simba_v2" and algo in ("SAC", "TD3", "DDPG"))
        )
        algorithm.save(tmp_path)
        obs = np.array([0.5, -1.0, 0.2], np.float32)
        expected = algorithm.compute_single_action(obs, explore=False)
    np.testing.assert_allclose(load_policy(tmp_path)(obs), expected, rtol=1e-5)


def test_transforms_of_the_user_stay_as_they_are() -> None:
    given = [NormalizeRewards(clip=3.0), NormalizeObservations(clip=2.0)]
    with make_config("SAC", "simba_v2").env_runners(transforms=given).build() as algorithm:
        first, second = algorithm.get_pipeline().transforms
        assert (first.clip, first.max_return, second.clip) == (3.0, None, 2.0)


def test_observations_without_numbers_are_not_normalised() -> None:
    config = make_config("DQN", "simba").environment("FrozenLake-v1", env_config={})
    with config.build() as algorithm:
        assert algorithm.get_pipeline() is None
        algorithm.train()


def test_a_class_of_the_user_may_have_a_setting_of_this_name() -> None:
    class Own(Module):
        def __init__(self, *arguments: Any) -> None:
            super().__init__(*arguments)
            self.layer = nn.Linear(3, self.distribution.num_inputs + 1)

        def policy(self, obs: Any) -> Tensor:
            outputs: Tensor = self.layer(obs)[:, :-1]
            return outputs

        def value(self, obs: Any) -> Tensor:
            outputs: Tensor = self.layer(obs)[:, -1]
            return outputs

    config = make_config("PPO", "mine").rl_module(module_class=Own)
    with config.build() as algorithm:
        assert algorithm.get_pipeline() is None


@pytest.mark.parametrize(
    ("algo", "model", "problem"),
    [
        ("PPO", {"fcnet_hiddens": [8, 16]}, r"all blocks need the same width: not \[8, 16\], such as \[8, 8\]"),
        ("PPO", {"fcnet_hiddens": []}, "architecture='simba_v2' has no effect without blocks"),
        ("SAC", {"critic_hiddens": []}, "architecture='simba_v2' needs blocks: critic_hiddens is empty"),
        ("PPO", {"fcnet_kernel_initializer": "zeros"}, "fcnet_kernel_initializer gives rows of zeros"),
        ("PPO", {"use_lstm": True}, "architecture='simba_v2' has no recurrent layers"),
        ("SAC", {"use_gru": True}, "architecture='simba_v2' has no recurrent layers"),
        ("PPO", {"fcnet_activation": "relu"}, "fcnet_activation='relu' has no effect with architecture='simba_v2'"),
        ("DQN", {"head_hiddens": [8]}, r"head_hiddens=\(8,\) has no effect with architecture='simba_v2'"),
        ("DQN", {"fcnet_bias_initializer": "zeros"}, "fcnet_bias_initializer=.* has no effect with"),
        ("CrossQ", {}, "architecture='simba_v2' has no effect without SAC or another algorithm: CrossQ has its"),
    ],
)
def test_what_has_no_effect_is_refused(algo: str, model: dict[str, Any], problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        make_config(algo, "simba_v2", **model).build()


def test_a_typo_in_the_name_is_refused_with_the_names() -> None:
    with pytest.raises(ConfigError, match=r"architecture='simba2' must be .*simba_v2"):
        make_config("PPO", "simba2").build()
