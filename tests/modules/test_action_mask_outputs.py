"""Default modules give illegal actions no probability, and everything that is computed from their outputs follows."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces
from torch import Tensor, nn
from torch import distributions as td

from corral import Module, PPOConfig, RandomModule
from corral.algorithms.dqn import c51_loss, dqn_loss
from corral.core.action_masks import first_illegal, first_without_choice, has_mask
from corral.core.tree import map_tree
from corral.errors import ConfigError
from corral.exploration import RowDistribution
from corral.modules.heuristic import HeuristicModule
from corral.modules.inference import Inference
from corral.modules.module import ActorCritic
from corral.modules.q_module import QModule
from corral.modules.sac_module import SACModule
from corral.modules.spec import ModuleSpec, check_module
from corral.testing import DoorCorridor

N = 6
FLAT, FOUR = spaces.Box(-1, 1, (3,), np.float32), spaces.Discrete(4)
MULTI = spaces.MultiDiscrete([3, 4])
IMAGE = spaces.Box(0, 255, (8, 8, 1), np.uint8)


def masked(space: spaces.Space[Any], length: int = 4, dtype: Any = np.int8) -> spaces.Dict:
    return spaces.Dict(action_mask=spaces.Box(0, 1, (length,), dtype), observations=space)


def make(cls: type[Module], space: Any = FLAT, action_space: Any = FOUR, **settings: Any) -> Any:
    torch.manual_seed(0)
    length = int(sum(np.ravel(action_space.nvec if isinstance(action_space, spaces.MultiDiscrete) else action_space.n)))
    module = cls(masked(space, length), action_space, {"fcnet_hiddens": [8], "conv_features": 8, **settings})
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(torch.randn_like(parameter))
    return module


def obs_of(module: Module, rows: int = 50) -> dict[str, Any]:
    """Return observations whose masks allow one action at least, as arrays."""
    space = module.observation_space
    space.seed(0)
    obs = map_tree(lambda *leaves: np.stack(leaves), *(space.sample() for _ in range(rows)))
    obs["action_mask"][np.arange(rows), np.arange(rows) % 3] = 1
    obs["action_mask"][:, 3] = 1  # of the second entry of MultiDiscrete([3, 4])
    return obs  # type: ignore[no-any-return]


def tensors(obs: Any) -> Any:
    return map_tree(torch.from_numpy, obs)


def test_a_mask_is_recognised_by_its_key_its_length_and_the_kind_of_actions() -> None:
    assert has_mask(masked(FLAT), FOUR)
    assert has_mask(masked(FLAT, dtype=np.float32), FOUR)
    assert has_mask(spaces.Dict(observation=FLAT, action_mask=spaces.MultiBinary(7)), MULTI)
    assert has_mask(spaces.Dict(action_mask=spaces.MultiBinary(4), near=FLAT, far=IMAGE), FOUR)
    assert not has_mask(FLAT, FOUR)
    assert not has_mask(spaces.Dict(observations=FLAT), FOUR)
    assert not has_mask(masked(FLAT), spaces.Box(-1, 1, (4,)))
    assert not has_mask(masked(FLAT), spaces.MultiBinary(4))


@pytest.mark.parametrize(
    "mask",
    [spaces.Box(0, 1, (5,), np.int8), spaces.Box(-np.inf, np.inf, (4,)), spaces.Discrete(4), spaces.MultiBinary(3)],
)
def test_a_key_that_is_no_mask_of_the_actions_is_refused_unless_masks_are_off(mask: spaces.Space[Any]) -> None:
    space = spaces.Dict(action_mask=mask, observations=FLAT)
    with pytest.raises(
        ConfigError, match=r"'action_mask' of .* no mask of the actions Discrete\(4\).*action_masks=False"
    ):
        ActorCritic(space, FOUR, {})
    module = ActorCritic(space, FOUR, {"action_masks": False})
    assert not module.has_action_mask
    assert len(module.policy_encoder.parts) == 2  # the networks read it


@pytest.mark.parametrize("space", [FLAT, IMAGE], ids=["flat", "image"])
@pytest.mark.parametrize("cls", [ActorCritic, QModule, SACModule])
def test_runners_compute_the_masked_policy_as_learners_do(cls: type[Module], space: Any) -> None:
    module = make(cls, space)
    obs, inference = obs_of(module), Inference(module)
    assert inference.backend == ("numpy" if space is FLAT else "torch")
    with torch.no_grad():
        expected = module.policy(tensors(obs)).numpy()
    np.testing.assert_allclose(inference(obs), expected, rtol=1e-5, atol=1e-5)
    np.testing.assert_array_equal(expected < -1e8, obs["action_mask"] == 0)
    free = {**obs, "action_mask": np.ones_like(obs["action_mask"])}
    legal = obs["action_mask"] != 0
    np.testing.assert_allclose(inference(free)[legal], inference(obs)[legal], rtol=1e-5)  # the mask is no feature


@pytest.mark.parametrize("action_space", [FOUR, MULTI], ids=["discrete", "multi_discrete"])
def test_probabilities_are_the_ones_of_a_distribution_over_the_legal_actions(action_space: Any) -> None:
    module, other = (make(ActorCritic, FLAT, action_space) for _ in range(2))
    with torch.no_grad():
        other.policy_head.bias.normal_()
    obs = obs_of(module)
    sizes = [4] if action_space is FOUR else [3, 4]
    with torch.no_grad():
        logits, others = module.policy(tensors(obs)), other.policy(tensors(obs))
    noise = module.distribution.noise(np.random.default_rng(0), (len(logits),))
    actions = torch.from_numpy(module.distribution.sample(logits.numpy(), noise))
    logp, entropy, kl = [], [], []
    for row, mask in enumerate(obs["action_mask"]):
        values = [0.0, 0.0, 0.0]
        for k, part in enumerate(torch.from_numpy(mask).split(sizes)):
            legal = part.nonzero().squeeze(1)
            one, two = (td.Categorical(logits=x[row].split(sizes)[k][legal]) for x in (logits, others))
            taken = (legal == actions[row].reshape(-1)[k]).nonzero().squeeze()
            values[0] += one.log_prob(taken).item()
            values[1] += one.entropy().item()
            values[2] += td.kl_divergence(one, two).item()
        for found, value in zip((logp, entropy, kl), values, strict=True):
            found.append(value)
    distribution = module.distribution
    np.testing.assert_allclose(distribution.logp(logits, actions), logp, atol=1e-5)
    np.testing.assert_allclose(distribution.entropy(logits), entropy, atol=1e-5)
    np.testing.assert_allclose(distribution.kl(logits, others), kl, atol=1e-5)


@pytest.mark.parametrize(
    ("cls", "head"), [(ActorCritic, "policy_head"), (QModule, "q.head"), (SACModule, "actor.head.0")]
)
def test_outputs_of_illegal_actions_have_no_gradient(cls: type[Module], head: str) -> None:
    module = make(cls)
    obs = obs_of(module)
    obs["action_mask"][:, 2] = 0
    obs["action_mask"][:, 0] = 1
    outputs = module.policy(tensors(obs))
    distribution = module.distribution
    actions = torch.from_numpy(distribution.mode(outputs.detach().numpy()))
    total = distribution.logp(outputs, actions) + distribution.entropy(outputs)
    (total + distribution.kl(outputs, outputs.detach().roll(1, 0))).sum().backward()
    layer = module.get_submodule(head)
    assert layer.weight.grad.isfinite().all()
    assert not layer.weight.grad[2].any()
    assert layer.weight.grad[0].any()


def test_uniform_actions_are_uniform_over_the_legal_ones() -> None:
    module = make(ActorCritic, FLAT, MULTI)
    row = RowDistribution(module.distribution, np.random.default_rng(0))
    mask = np.array([1, 0, 1, 0, 1, 1, 1], np.bool_)
    row.inputs, row.legal = np.zeros((6000, 7), np.float32), np.tile(mask, (6000, 1))
    actions = row.random()
    first, second = np.bincount(actions[:, 0], minlength=3), np.bincount(actions[:, 1], minlength=4)
    np.testing.assert_allclose(first / 6000, [1 / 2, 0, 1 / 2], atol=0.02)
    np.testing.assert_allclose(second / 6000, [0, 1 / 3, 1 / 3, 1 / 3], atol=0.02)
    np.testing.assert_allclose(row.random_logp(actions), -math.log(6), rtol=1e-5)


def test_rows_without_a_choice_are_found_for_each_entry() -> None:
    legal = np.ones((4, 7), np.bool_)
    legal[1, :3] = legal[2, 3:] = False
    everybody = np.ones(4, np.bool_)
    assert first_without_choice(legal, MULTI, everybody) == 1
    assert first_without_choice(legal, MULTI, np.array([1, 0, 1, 1], np.bool_)) == 2
    assert first_without_choice(legal, MULTI, np.array([1, 0, 0, 1], np.bool_)) is None
    actions = np.array([[2, 3], [0, 0], [1, 2], [0, 0]])
    assert first_illegal(legal, MULTI, actions) is None  # rows without a choice do not count
    legal[3, 3] = False
    assert first_illegal(legal, MULTI, actions) == 3


class Stubborn(HeuristicModule):
    """Takes action 1, whatever the mask allows."""

    def choose_actions(self, obs: Any, rng: np.random.Generator) -> Any:
        return np.ones(len(obs["action_mask"]), np.int64)


def test_rules_see_the_mask_and_must_keep_to_it() -> None:
    rng = np.random.default_rng(0)
    module = RandomModule(masked(FLAT), FOUR, {})
    obs = obs_of(module, 200)
    actions = module.checked_actions(obs, rng)
    assert obs["action_mask"][np.arange(200), actions].all()
    assert set(actions) == {0, 1, 2, 3}
    obs["action_mask"][7, 1] = 0
    with pytest.raises(ConfigError, match=r"Stubborn.choose_actions returned the action 1, which action_mask does not"):
        Stubborn(masked(FLAT), FOUR, {}).checked_actions(obs, rng)


class Ignorant(Module):
    """A policy that does not look at the mask."""

    def __init__(self, observation_space: Any, action_space: Any, model_config: Any) -> None:
        super().__init__(observation_space, action_space, model_config)
        self.layer = nn.Linear(9, 20)

    def policy(self, obs: Any) -> Tensor:
        return self.layer(obs["observations"])  # type: ignore[no-any-return]

    def value(self, obs: Any) -> Tensor:
        return self.layer(obs["observations"])[:, 0]  # type: ignore[no-any-return]


class Aware(Ignorant):
    """A policy that looks at it."""

    def policy(self, obs: Any) -> Tensor:
        return self.mask_outputs(obs, super().policy(obs))


def test_a_custom_policy_that_ignores_the_mask_is_refused() -> None:
    config = PPOConfig().environment(DoorCorridor).rl_module(Ignorant)
    with pytest.raises(
        ConfigError, match=r"Ignorant.policy\(obs\) allows actions .* self.mask_outputs\(obs, dist_inputs"
    ):
        config.build()
    config.environment(action_masks=False).build().stop()
    config.environment(action_masks=True).rl_module(Aware).build().stop()
    spec = ModuleSpec(Aware, masked(spaces.Box(0, 1, (9,)), 20), spaces.Discrete(20), {})
    check_module(spec.build())


class Table(nn.Module):
    """Says the same values for every observation."""

    def __init__(self, values: Any) -> None:
        super().__init__()
        self.values = nn.Parameter(torch.tensor(values))

    def forward(self, obs: Any) -> Tensor:
        return self.values.expand(len(obs["action_mask"]), -1)


def q_batch(mask: list[int]) -> Any:
    obs = {"action_mask": torch.tensor([mask]), "observations": torch.zeros(1, 3)}
    return {
        "obs": obs,
        "next_obs": obs,
        "actions": torch.tensor([0]),
        "rewards": torch.tensor([1.0]),
        "terminated": torch.tensor([False]),
        "discounts": torch.tensor([0.5]),
        "weights": torch.tensor([1.0]),
    }


@pytest.mark.parametrize(("double_q", "target"), [(True, 1 + 0.5 * 30), (False, 1 + 0.5 * 40)])
def test_targets_of_dqn_are_values_of_legal_actions(double_q: bool, target: float) -> None:
    module = QModule(masked(FLAT), FOUR, {})
    module.q, module.target_q = Table([0.0, 9.0, 7.0, 3.0]), Table([0.0, 90.0, 30.0, 40.0])
    loss, reported = dqn_loss(module, q_batch([1, 0, 1, 1]), {}, double_q=double_q, huber=False)
    assert reported["td_error"].item() == pytest.approx(-target)
    loss.backward()  # type: ignore[no-untyped-call]
    assert module.q.values.grad is not None and module.q.values.grad.isfinite().all()


@pytest.mark.parametrize("double_q", [True, False])
@pytest.mark.parametrize(
    ("mask", "loss"),
    [
        # Action 0 has the return 0, and action 1 has the return 4, which becomes 0.5 * 4, between both atoms.
        ([1, 0], math.log(1 + math.exp(2))),
        ([1, 1], (math.log(1 + math.exp(2)) + math.log(1 + math.exp(-2))) / 2),
    ],
)
def test_targets_of_distributions_are_the_ones_of_legal_actions(double_q: bool, mask: list[int], loss: float) -> None:
    module = QModule(masked(FLAT, 2), spaces.Discrete(2), {"num_atoms": 2, "v_min": 0.0, "v_max": 4.0})
    module.q, module.target_q = Table([0.0, 2.0, -90.0, 90.0]), Table([90.0, -90.0, -90.0, 90.0])
    batch = {**q_batch(mask), "rewards": torch.tensor([0.0])}
    assert c51_loss(module, batch, {}, double_q=double_q)[0].item() == pytest.approx(loss)


def test_the_target_entropy_of_sac_is_the_one_of_the_legal_actions() -> None:
    module = SACModule(masked(FLAT), FOUR, {})
    mask = torch.tensor([[1, 0, 0, 0], [1, 1, 0, 0], [1, 1, 1, 1]])
    expected = (math.log(1) + math.log(2) + math.log(4)) / 3 / 2
    assert float(module.auto_target_entropy({"action_mask": mask})) == pytest.approx(expected)


@pytest.mark.parametrize("double_q", [True, False])
def test_a_truncated_step_takes_its_value_also_where_nobody_may_act(double_q: bool) -> None:
    module = QModule(masked(FLAT), FOUR, {})
    module.q, module.target_q = Table([0.0, 9.0, 7.0, 3.0]), Table([0.0, 90.0, 30.0, 40.0])
    batch = q_batch([1, 0, 1, 1])
    batch["next_obs"] = q_batch([0, 0, 0, 0])["obs"]
    _, reported = dqn_loss(module, batch, {}, double_q=double_q, huber=True)
    assert reported["td_error"].item() == pytest.approx(-(1 + 0.5 * 90))
    assert module.value(batch["next_obs"]).item() == 9
