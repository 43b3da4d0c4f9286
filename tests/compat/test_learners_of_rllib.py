"""Learner classes, algorithm classes and modules of several agents of scripts, as Corral runs them."""

from __future__ import annotations

import copy
from functools import partial
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from torch import nn

from corral.compat.rllib.algorithm import PPO, Algorithm, DQNConfig, PPOConfig, SACConfig
from corral.compat.rllib.carried_actions import CarriedActions
from corral.compat.rllib.config import AlgorithmConfig
from corral.compat.rllib.default_connectors import ComputeReturnsToGo
from corral.compat.rllib.default_modules import DefaultPPOTorchRLModule
from corral.compat.rllib.distributions import TorchCategorical
from corral.compat.rllib.learner import DQNTorchLearner, PPOTorchLearner, SACTorchLearner, TorchLearner
from corral.compat.rllib.model_config import DefaultModelConfig
from corral.compat.rllib.modules import (
    InferenceOnlyAPI,
    MultiRLModule,
    MultiRLModuleSpec,
    RLModuleSpec,
    SelfSupervisedLossAPI,
    TorchRLModule,
    ValueFunctionAPI,
)
from corral.compat.rllib.rollout_ops import synchronous_parallel_sample
from corral.envs.agent_copies import make_multi_agent
from corral.errors import CheckpointError, ConfigError, LossError

ID = "default_policy"
SEPARATE = DefaultModelConfig(fcnet_hiddens=[8], vf_share_layers=False)


def small(model: Any = SEPARATE, **training: Any) -> PPOConfig:
    config = PPOConfig().environment("CartPole-v1").env_runners(num_env_runners=0, num_envs_per_env_runner=2)
    settings = {"train_batch_size": 64, "minibatch_size": None, "num_epochs": 1, **training}
    return config.training(**settings).rl_module(model_config=model).debugging(seed=0)


# Learners.


class TwoOptimizers(PPOTorchLearner):
    def configure_optimizers_for_module(self, module_id: str, config: Any = None) -> None:
        module = self.module[module_id]
        for name, parts, lr in (
            ("pi", (module.encoder.actor_encoder, module.pi), config.lr),
            ("vf", (module.encoder.critic_encoder, module.vf), config.learner_config_dict["lr_vf"]),
        ):
            params = [parameter for part in parts for parameter in self.get_parameters(part)]
            self.register_optimizer(
                module_id=module_id,
                optimizer_name=name,
                optimizer=torch.optim.SGD(params, lr=1.0),
                params=params,
                lr_or_lr_schedule=lr,
            )


class ByHand(TwoOptimizers):
    """Takes the same steps through the methods of RLlib's learner."""

    calls: list[str] = []  # noqa: RUF012  # of this process

    def compute_gradients(self, loss_per_module: Any, **settings: Any) -> Any:
        self.calls.append("compute_gradients")
        assert loss_per_module.keys() == self.curr_kl_coeffs_per_module.keys()
        return super().compute_gradients(loss_per_module, **settings)

    def postprocess_gradients_for_module(self, *, module_id: str, config: Any, module_gradients_dict: Any) -> Any:
        self.calls.append(f"postprocess {module_id}")
        return super().postprocess_gradients_for_module(
            module_id=module_id, config=config, module_gradients_dict=module_gradients_dict
        )

    def before_gradient_based_update(self, *, timesteps: Any) -> None:
        self.calls.append("before")

    def after_gradient_based_update(self, *, timesteps: Any) -> None:
        self.calls.append(f"after {timesteps['num_env_steps_sampled_lifetime']}")
        self.metrics.log_value((ID, "steps"), timesteps["num_env_steps_sampled_lifetime"], window=1)


def weights_of(algo: Any) -> dict[str, Any]:
    return copy.deepcopy(algo.native.learner_group.get_weights()[ID])


def moved(config: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return how far one update moves each parameter, and what it reports."""
    with config.build() as algo:
        before = weights_of(algo)
        result = algo.train()["learners"][ID]
        after = weights_of(algo)
    return {name: after[name] - before[name] for name in before}, result


def test_two_optimizers_move_the_parts_of_a_module_as_two_learning_rates_say() -> None:
    plain = {"use_kl_loss": False, "grad_clip": None, "lr": 0.01}
    by, result = moved(small(learner_class=TwoOptimizers, learner_config_dict={"lr_vf": 0.03}, **plain))
    same, _ = moved(small(learner_class=TwoOptimizers, learner_config_dict={"lr_vf": 0.01}, **plain))
    for name in by:  # steps of SGD: proportional to the learning rate
        factor = 3 if name.startswith("value") else 1
        np.testing.assert_allclose(by[name], factor * same[name], rtol=1e-3, atol=1e-7)
        assert np.abs(by[name]).max() > 0
    assert (result["pi_learning_rate"], result["vf_learning_rate"]) == (0.01, 0.03)


@pytest.mark.parametrize("grad_clip", [None, 0.1])
def test_a_learner_that_takes_its_steps_by_hand_moves_as_corrals_steps_do(grad_clip: float | None) -> None:
    settings = {"learner_config_dict": {"lr_vf": 0.03}, "lr": 0.01, "grad_clip": grad_clip, "num_epochs": 2}
    ByHand.calls.clear()
    expected, reported = moved(small(learner_class=TwoOptimizers, **settings))
    found, result = moved(small(learner_class=ByHand, **settings))
    for name, delta in expected.items():
        np.testing.assert_allclose(found[name], delta, rtol=1e-4, atol=1e-8)
    for name in ("total_loss", "policy_loss", "vf_loss", "num_gradient_steps"):
        assert result[name] == pytest.approx(reported[name], rel=1e-4)
    step = ["compute_gradients", f"postprocess {ID}"]
    assert ByHand.calls == ["before", *step, *step, f"after {int(result['steps'])}"] and result["steps"] >= 64


def test_steps_by_hand_step_each_module_of_several_once() -> None:
    config = partial(small, lr=0.01, grad_clip=None, learner_config_dict={"lr_vf": 0.01})
    weights = []
    for cls in (TwoOptimizers, ByHand):
        several = config(learner_class=cls).environment(make_multi_agent("CartPole-v1"), env_config={"num_agents": 2})
        several.multi_agent(policies={"p0", "p1"}, policy_mapping_fn=lambda agent, *args, **kw: f"p{agent}")
        with several.build() as algo:
            before = copy.deepcopy(algo.native.learner_group.get_weights())
            algo.train()
            after = algo.native.learner_group.get_weights()
        weights.append({(i, name): after[i][name] - old for i in ("p0", "p1") for name, old in before[i].items()})
    for key, delta in weights[0].items():
        np.testing.assert_allclose(weights[1][key], delta, rtol=1e-4, atol=1e-8)


class OneMore(PPOTorchLearner):
    """Keeps RLlib's optimizer, and registers another one for a parameter of its own."""

    def configure_optimizers_for_module(self, module_id: str, config: Any = None) -> None:
        super().configure_optimizers_for_module(module_id, config)
        own = [nn.Parameter(torch.zeros(1))]
        self.register_optimizer(
            module_id=module_id, optimizer_name="own", optimizer=torch.optim.SGD(own), params=own, lr_or_lr_schedule=0.1
        )


def test_an_optimizer_that_is_registered_in_addition_leaves_the_steps_as_they_are() -> None:
    expected, _ = moved(small(lr=0.01))
    found, result = moved(small(lr=0.01, learner_class=OneMore))
    for name, delta in expected.items():
        assert np.abs(delta).max() > 0
        np.testing.assert_allclose(found[name], delta, rtol=1e-4, atol=1e-7)
    assert (result["default_optimizer_learning_rate"], result["own_learning_rate"]) == (0.01, 0.1)


class OneOptimizer(TorchLearner):
    def configure_optimizers(self) -> None:
        params = [parameter for module in self.module.values() for parameter in self.get_parameters(module)]
        self.register_optimizer(
            optimizer=torch.optim.SGD(params), params=params, lr_or_lr_schedule=[[0, 0.1], [64, 0.2]]
        )


def test_the_schedule_of_a_registered_optimizer_follows_the_env_steps() -> None:
    with small(learner_class=OneOptimizer).build() as algo:
        optimizer = algo.learner_group._learner.get_optimizer("__all_modules__")
        assert optimizer.param_groups[0]["lr"] == 0.1
        algo.train()
        assert optimizer.param_groups[0]["lr"] == pytest.approx(0.2)


def test_schedulers_of_a_list_step_one_after_another() -> None:
    classes = [
        partial(torch.optim.lr_scheduler.ConstantLR, factor=0.5, total_iters=2),
        partial(torch.optim.lr_scheduler.ExponentialLR, gamma=0.9),
    ]
    with small(lr=1.0).experimental(_torch_lr_scheduler_classes=classes).build() as algo:
        rates, shown = [], []
        for _ in range(3):
            result = algo.train()
            rates.append(algo.learner_group._learner.get_optimizer().param_groups[0]["lr"])
            shown.append(result["learners"]["default_policy"]["default_optimizer_learning_rate"])
    assert rates == pytest.approx([0.5 * 0.9, 0.9**2, 0.9**3])
    assert shown == rates  # RLlib reports the rate of the next iteration


def test_callbacks_see_the_learning_rate_after_the_step_of_the_scheduler() -> None:
    seen = []
    config = small(lr=1.0).callbacks(
        on_train_result=lambda result, **kwargs: seen.append(
            result["learners"]["default_policy"]["default_optimizer_learning_rate"]
        )
    )
    halving = partial(torch.optim.lr_scheduler.ExponentialLR, gamma=0.5)
    with config.experimental(_torch_lr_scheduler_classes=halving).build() as algo:
        algo.train()
        algo.train()
    assert seen == [0.5, 0.25]


class Whole(PPOTorchLearner):
    """A loss that is not the algorithm's, with the names that RLlib's losses use."""

    def compute_loss_for_module(self, *, module_id: str, config: Any, batch: Any, fwd_out: Any) -> Any:
        module = self.module[module_id].unwrapped()
        distribution = module.get_train_action_dist_cls().from_logits(fwd_out["action_dist_inputs"])
        ratio = torch.exp(distribution.logp(batch["actions"]) - batch["action_logp"])
        values = module.compute_values(batch, embeddings=fwd_out.get("embeddings"))
        loss = -(ratio * batch["advantages"]).mean() + (values - batch["value_targets"]).square().mean()
        assert self.curr_kl_coeffs_per_module[module_id] == pytest.approx(0.2)
        assert self.entropy_coeff_schedulers_per_module[module_id].get_current_value() == 0.0
        self.metrics.log_dict({"policy_loss": ratio.mean(), "twice": 2 * ratio.mean()}, key=module_id, window=1)
        self.metrics.log_value("all", 1.0, reduce="sum")
        return loss


def test_a_loss_of_its_own_reports_what_it_logs_and_nothing_of_the_algorithms_loss() -> None:
    with small(learner_class=Whole).build() as algo:
        result = algo.train()["learners"]
    assert result[ID]["policy_loss"] == pytest.approx(1.0, abs=1e-5)
    assert result[ID]["twice"] == pytest.approx(2.0, abs=1e-5)
    assert result["all"] == 1.0 and np.isnan(result[ID].get("vf_loss", np.nan))


class Diverging(ByHand):
    def compute_loss_for_module(self, *, module_id: str, **given: Any) -> Any:
        return super().compute_loss_for_module(module_id=module_id, **given) * float("nan")


def test_a_step_by_hand_that_is_not_finite_is_not_taken() -> None:
    with small(learner_class=Diverging, learner_config_dict={"lr_vf": 0.1}).build() as algo:
        before = weights_of(algo)
        with pytest.raises(LossError, match="total_loss is nan"):
            algo.train()
        for name, value in weights_of(algo).items():
            np.testing.assert_array_equal(value, before[name])


@pytest.mark.slow
def test_several_learners_step_registered_optimizers_together() -> None:
    config = small(learner_class=TwoOptimizers, learner_config_dict={"lr_vf": 0.1}, train_batch_size=128)
    with config.learners(num_learners=2).build() as algo:
        result = algo.train()["learners"][ID]
        rates = [each.get() for each in algo.learner_group.foreach_learner(rate_of)]
    assert rates == [0.1, 0.1] and result["vf_learning_rate"] == 0.1


def rate_of(learner: Any) -> float:
    return float(learner.get_optimizer(ID, "vf").param_groups[0]["lr"])


def test_steps_by_hand_in_several_learners_are_refused() -> None:
    with pytest.raises(ConfigError, match="ByHand steps all modules together"):
        small(learner_class=ByHand).learners(num_learners=2).build()


@pytest.mark.slow
def test_the_losses_of_sac_and_dqn_keep_their_groups() -> None:
    class Doubled(TorchLearner):
        def compute_loss_for_module(self, **given: Any) -> Any:
            return 2 * super().compute_loss_for_module(**given)

    config = DQNConfig().environment("CartPole-v1").env_runners(num_env_runners=0).debugging(seed=0)
    config.training(num_steps_sampled_before_learning_starts=32, train_batch_size=32)
    results = [config.copy(copy_frozen=False).training(**own).build_algo() for own in ({}, {"learner_class": Doubled})]
    losses = []
    for algo in results:
        with algo:
            while not (loss := algo.train()["learners"].get(ID, {}).get("total_loss")) or np.isnan(loss):
                pass
            losses.append(loss)
    assert losses[1] > 1.5 * losses[0]


# Modules.


class Supervised(TorchRLModule, ValueFunctionAPI, SelfSupervisedLossAPI):
    def setup(self) -> None:
        self.pi, self.vf = nn.Linear(4, 2), nn.Linear(4, 1)

    def _forward(self, batch: Any, **settings: Any) -> Any:
        return {"action_dist_inputs": self.pi(batch["obs"])}

    def compute_values(self, batch: Any, embeddings: Any = None) -> Any:
        return self.vf(batch["obs"]).squeeze(-1)

    def compute_self_supervised_loss(
        self, *, learner: Any, module_id: str, config: Any, batch: Any, fwd_out: Any
    ) -> Any:
        learner.metrics.log_value((module_id, "mine"), 5.0, window=1)
        return fwd_out["action_dist_inputs"].square().mean()


def test_a_module_may_bring_its_own_loss() -> None:
    with small({}).rl_module(rl_module_spec=RLModuleSpec(Supervised)).build() as algo:
        before = weights_of(algo)
        result = algo.train()["learners"][ID]
        after = weights_of(algo)
    assert result["mine"] == 5.0
    assert np.array_equal(before["rl_module.vf.weight"], after["rl_module.vf.weight"])  # its loss has no values
    assert not np.array_equal(before["rl_module.pi.weight"], after["rl_module.pi.weight"])


class Halved(DefaultPPOTorchRLModule):
    def _forward_exploration(self, batch: Any, **settings: Any) -> Any:
        outputs = super()._forward_exploration(batch, **settings)
        return {**outputs, "action_dist_inputs": outputs["action_dist_inputs"] * 0 + torch.tensor([0.0, 50.0])}


def test_a_class_from_the_default_module_acts_as_it_says() -> None:
    with small(model={}).rl_module(rl_module_spec=RLModuleSpec(Halved, model_config=SEPARATE)).build() as algo:
        module = algo.get_module()
        assert isinstance(module, Halved) and module.encoder.actor_encoder is not module.encoder.critic_encoder
        (episode,) = algo.env_runner.sample(num_episodes=1)[:1]
    assert (episode.get_actions() == 1).all()


@pytest.mark.parametrize(("settings", "shares"), [({}, False), ({"vf_share_layers": True}, True)])
def test_a_class_from_the_default_module_shares_layers_only_where_it_is_asked_to(settings: Any, shares: bool) -> None:
    spec = RLModuleSpec(Halved, model_config={"fcnet_hiddens": [8], **settings})
    with small(model={}).rl_module(rl_module_spec=spec).build() as algo:
        encoder = algo.get_module().encoder
    assert hasattr(encoder, "critic_encoder") != shares and hasattr(encoder, "encoder") == shares
    widths = [layer.out_features for layer in encoder.modules() if isinstance(layer, torch.nn.Linear)]
    assert widths == [8] * (1 if shares else 2)


class Chooses(Supervised):
    """Chooses the action 1 while it explores, and 0 otherwise."""

    def _forward_exploration(self, batch: Any, **settings: Any) -> Any:
        return {**self._forward(batch), "actions": torch.ones(len(batch["obs"]), dtype=torch.int64)}

    def _forward_inference(self, batch: Any, **settings: Any) -> Any:
        return {**self._forward(batch), "actions": torch.zeros(len(batch["obs"]), dtype=torch.int64)}


def test_the_actions_that_a_module_chooses_are_taken() -> None:
    with small({}).rl_module(rl_module_spec=RLModuleSpec(Chooses)).build() as algo:
        (episode,) = algo.env_runner.sample(num_episodes=1)[:1]
        assert (episode.get_actions() == 1).all()
        logits = algo.get_module().pi(torch.from_numpy(episode.get_observations()[:-1]))
        expected = TorchCategorical(logits=logits).logp(torch.ones(len(episode), dtype=torch.int64))
        np.testing.assert_allclose(
            episode.get_extra_model_outputs("action_logp"), expected.detach().numpy(), rtol=1e-4, atol=1e-5
        )
        obs = np.zeros(4, np.float32)
        assert [algo.compute_single_action(obs, explore=explore) for explore in (True, False)] == [1, 0]
        algo.train()


class PrefersOther(Supervised):
    """Prefers the action 1 while it explores, and 0 otherwise, by the inputs of the distribution."""

    def _forward_exploration(self, batch: Any, **settings: Any) -> Any:
        return {"action_dist_inputs": 0.0 * self._forward(batch)["action_dist_inputs"] + torch.tensor([0.0, 90.0])}

    def _forward_inference(self, batch: Any, **settings: Any) -> Any:
        return {"action_dist_inputs": 0.0 * self._forward(batch)["action_dist_inputs"] + torch.tensor([90.0, 0.0])}


def test_a_module_acts_by_forward_inference_without_exploration() -> None:
    obs = np.zeros(4, np.float32)
    with small({}).rl_module(rl_module_spec=RLModuleSpec(PrefersOther)).build() as algo:
        assert [algo.compute_single_action(obs, explore=explore) for explore in (True, False)] == [1, 0]
    with small({}).rl_module(rl_module_spec=RLModuleSpec(Supervised)).build() as algo:  # which needs one pass
        assert not isinstance(algo.native.get_module().distribution, CarriedActions)


class Hotter(TorchCategorical):
    """A distribution of its own, which the module names for inference only."""


class NamesOne(Supervised):
    def get_inference_action_dist_cls(self) -> Any:
        return Hotter


def test_exploration_and_losses_use_the_distribution_of_inference_if_a_module_names_no_other() -> None:
    module = NamesOne(gym.spaces.Box(-1, 1, (4,)), gym.spaces.Discrete(2), model_config={"size": 4})
    assert module.get_train_action_dist_cls() is module.get_exploration_action_dist_cls() is Hotter


def test_carried_actions_are_nested_like_the_space_for_their_likelihood() -> None:
    space = gym.spaces.Tuple([gym.spaces.Discrete(3), gym.spaces.Box(-1, 1, (2,))])

    class Sum:
        def __init__(self, logits: Any) -> None:
            self.logits = logits

        from_logits = classmethod(lambda cls, logits: cls(logits))

        def logp(self, actions: Any) -> Any:
            return self.logits[:, 0] + actions[0] + actions[1].sum(-1)

    carried = CarriedActions(space, Sum, 2)
    one, other = (torch.tensor([2]), torch.tensor([[0.5, 0.25]])), (torch.tensor([1]), torch.tensor([[0.0, 0.0]]))
    inputs = carried.carry(torch.tensor([[10.0, 0.0]]), one, other)
    actions = carried.sample(inputs.numpy(), np.zeros((1, 0), np.float32))
    assert carried.logp(inputs, torch.from_numpy(actions)).item() == 12.75
    assert carried.to_env(carried.mode(inputs.numpy()))[0].tolist() == [1]


# Modules of several agents.


class Encoder(TorchRLModule):
    def setup(self) -> None:
        self.net = nn.Linear(4, 3)

    def _forward(self, batch: Any, **settings: Any) -> Any:
        return {"features": torch.tanh(self.net(batch["obs"]))}


class Head(TorchRLModule):
    def setup(self) -> None:
        self.net = nn.Linear(3, 2)

    def _forward(self, batch: Any, **settings: Any) -> Any:
        return {"action_dist_inputs": self.net(batch["features"])}


class Drops(Head):
    def setup(self) -> None:
        self.net = nn.Dropout(0.5)  # type: ignore[assignment]


def test_a_module_that_is_asked_for_actions_drops_nothing() -> None:
    module, ones = Drops(), {"features": torch.ones(1, 64)}
    for forward in (module.forward_inference, module.forward_exploration):
        assert (forward(ones)["action_dist_inputs"] == 1).all() and module.training
    assert not (module.forward_train(ones)["action_dist_inputs"] == 1).all()


class HeadWithValues(Head, InferenceOnlyAPI):
    def setup(self) -> None:
        super().setup()
        self.values, self.values_of_more = nn.Linear(3, 1), nn.Linear(3, 1)

    def get_non_inference_attributes(self) -> list[str]:
        return ["values"]


def test_states_of_several_modules_are_chosen_by_id_and_for_inference() -> None:
    both = MultiRLModule({name: HeadWithValues(model_config={"x": 1}) for name in ("a", "b")})
    assert both.get_state("a").keys() == both.get_state(not_components=["b"]).keys() == {"a"}
    assert both.get_state().keys() == {"a", "b"}
    names = both.get_state()["a"].keys() - both.get_state(inference_only=True)["a"].keys()
    assert names == {"values.weight", "values.bias"}


class Joint(MultiRLModule):
    def setup(self) -> None:
        super().setup()
        self.encoder = self._rl_modules["encoder"]

    def _both(self, name: str, batch: Any) -> Any:
        return {
            module_id: getattr(self._rl_modules[module_id], name)({**part, **self.encoder._forward(part)})
            for module_id, part in batch.items()
        }

    def _forward_inference(self, batch: Any, **settings: Any) -> Any:
        return self._both("_forward_inference", batch)

    def _forward_exploration(self, batch: Any, **settings: Any) -> Any:
        return self._both("_forward_exploration", batch)

    def _forward_train(self, batch: Any, **settings: Any) -> Any:
        return self._both("_forward_train", batch)


class ReturnsLearner(TorchLearner):
    """The loss of REINFORCE, with returns that a connector computes."""

    def build(self) -> None:
        super().build()
        self._learner_connector.prepend(ComputeReturnsToGo(gamma=self.config.gamma))

    def compute_loss_for_module(self, *, module_id: str, config: Any, batch: Any, fwd_out: Any) -> Any:
        distribution = self.module[module_id].get_train_action_dist_cls().from_logits(fwd_out["action_dist_inputs"])
        return -(distribution.logp(batch["actions"]) * batch["returns_to_go"]).mean()


class SharedLearner(ReturnsLearner):
    steps: list[Any] = []  # noqa: RUF012  # of this process

    def configure_optimizers(self) -> None:
        params = [parameter for module in self.module.values() for parameter in module.parameters()]
        self.register_optimizer(
            optimizer_name="shared", optimizer=torch.optim.SGD(params), params=params, lr_or_lr_schedule=self.config.lr
        )

    def compute_losses(self, *, fwd_out: Any, batch: Any) -> Any:
        module = copy.deepcopy(self.module)
        self.steps.append((module, {name: dict(part) for name, part in batch.items()}))
        return super().compute_losses(fwd_out=fwd_out, batch=batch)


class ReinforceConfig(AlgorithmConfig):
    def __init__(self, algo_class: Any = None) -> None:
        super().__init__(algo_class or Reinforce)
        self.num_episodes = 4
        self.batch_mode = "complete_episodes"

    def training(self, *, num_episodes: Any = None, **settings: Any) -> Any:
        super().training(**settings)
        self.num_episodes = num_episodes or self.num_episodes
        return self

    def get_default_learner_class(self) -> Any:
        return ReturnsLearner

    def get_default_rl_module_spec(self) -> Any:
        return RLModuleSpec(Policy)


class Policy(TorchRLModule):
    def setup(self) -> None:
        self.net = nn.Sequential(nn.Linear(4, 32), nn.ReLU(), nn.Linear(32, 2))

    def _forward(self, batch: Any, **settings: Any) -> Any:
        return {"action_dist_inputs": self.net(batch["obs"])}


class Reinforce(Algorithm):
    @classmethod
    def get_default_config(cls) -> Any:
        return ReinforceConfig()

    def training_step(self) -> None:
        with self.metrics.log_time(("timers", "env_runner_sampling_timer")):
            sampled = self.env_runner_group.foreach_env_runner(
                partial(sample, self.config.num_episodes // (self.config.num_env_runners or 1)),
                local_env_runner=self.env_runner_group.num_remote_workers() <= 0,
            )
        self.metrics.aggregate([part[1] for part in sampled], key="env_runners")
        episodes = [episode for part in sampled for episode in part[0]]
        steps = self.metrics.peek(("env_runners", "num_env_steps_sampled_lifetime"))
        results = self.learner_group.update(episodes=episodes, timesteps={"num_env_steps_sampled_lifetime": steps})
        self.metrics.aggregate(results, key="learners")
        self.env_runner_group.sync_weights(from_worker_or_learner_group=self.learner_group, inference_only=True)
        self.metrics.log_value("num_episodes_of_step", len(episodes), window=1)


def sample(num_episodes: int, env_runner: Any) -> Any:
    return env_runner.sample(num_episodes=num_episodes), env_runner.get_metrics()


def reinforce(**training: Any) -> ReinforceConfig:
    config = ReinforceConfig().environment("CartPole-v1").env_runners(num_env_runners=0)
    found: ReinforceConfig = config.training(**{"lr": 0.01, "num_episodes": 4, **training}).debugging(seed=0)
    return found


def test_an_algorithm_class_samples_learns_and_reports_in_its_own_step() -> None:
    with reinforce().build() as algo:
        before = weights_of(algo)
        result = algo.train()
        assert (
            algo.native.env_runner.actors[ID]
            .module.rl_module.net[0]
            .weight.ne(torch.from_numpy(before["rl_module.net.0.weight"]))
            .any()
        )  # the runner has the new weights
        steps = result["num_env_steps_sampled_lifetime"]
        assert result["env_runners"]["num_episodes_lifetime"] == result["num_episodes_of_step"] == 4
        assert result["learners"][ID]["num_gradient_steps"] == 1
        assert result["learners"]["__all_modules__"]["num_module_steps_trained_lifetime"] == steps
        assert result["env_runners"]["num_env_steps_sampled_lifetime"] == steps > 0
        assert result["timers"]["env_runner_sampling_timer"] > 0
        assert algo.train()["num_env_steps_sampled_lifetime"] > steps


def test_the_gradient_of_an_own_algorithm_is_the_gradient_of_its_loss() -> None:
    class Plain(ReturnsLearner):
        def configure_optimizers_for_module(self, module_id: str, config: Any = None) -> None:
            params = self.get_parameters(self.module[module_id])
            self.register_optimizer(module_id=module_id, optimizer=torch.optim.SGD(params, lr=0.1), params=params)

    with reinforce(learner_class=Plain, gamma=0.9).build() as algo:
        expected = copy.deepcopy(algo.get_module())
        episodes = algo.env_runner.sample(num_episodes=3)
        algo.learner_group.update(episodes=episodes)
        losses = []
        for episode in episodes:
            logits = expected.net(torch.from_numpy(episode.get_observations()[:-1]))
            logp = TorchCategorical(logits=logits).logp(torch.from_numpy(episode.get_actions()))
            returns = [sum(0.9**k for k in range(len(episode) - t)) for t in range(len(episode))]
            losses.append(logp * torch.tensor(returns))
        (-torch.cat(losses).mean()).backward()
        for mine, its in zip(algo.get_module().parameters(), expected.parameters(), strict=True):
            torch.testing.assert_close(mine, its - 0.1 * its.grad, rtol=1e-4, atol=1e-6)


def test_statistics_of_transforms_are_refused_where_a_step_samples_itself() -> None:
    with pytest.raises(ConfigError, match=r"MeanStdFilter: its statistics are merged where Corral's algorithms sample"):
        reinforce().env_runners(observation_filter="MeanStdFilter").build()


def test_an_algorithm_without_a_step_or_a_loss_is_refused() -> None:
    class Nothing(Algorithm): ...

    with pytest.raises(ConfigError, match="subclasses of Algorithm that define training_step"):
        AlgorithmConfig(algo_class=Nothing).environment("CartPole-v1").build()
    with (
        reinforce(learner_class=TorchLearner).build() as algo,
        pytest.raises(LossError, match="returned as the loss None"),
    ):
        algo.train()


class Twice(PPO):
    def training_step(self) -> None:
        super().training_step()
        episodes = synchronous_parallel_sample(worker_set=self.env_runner_group, max_env_steps=50)
        self.metrics.log_value("more", sum(map(len, episodes)), reduce="sum")


def test_a_step_may_sample_more_than_the_algorithm_does() -> None:
    config = small()
    config.algo_class = Twice
    with config.build() as algo:
        assert algo.train()["more"] >= 50
        with pytest.raises(ConfigError, match=r"call super\(\).training_step\(\)"):
            algo.learner_group.update(episodes=algo.env_runner.sample(num_episodes=1))


@pytest.mark.slow
def test_reinforce_learns_cartpole_with_two_runners_of_the_engine() -> None:
    config = reinforce(num_episodes=10, gamma=0.99).env_runners(num_env_runners=2)
    with config.build() as algo:
        best = max(algo.train()["env_runners"]["episode_return_mean"] for _ in range(60))
    assert best > 80  # at random 22


@pytest.mark.slow
def test_two_learners_share_the_episodes_of_an_own_algorithm() -> None:
    with reinforce().learners(num_learners=2).build() as algo:
        result = algo.train()
    steps = result["num_env_steps_sampled_lifetime"]
    assert result["learners"]["__all_modules__"]["num_module_steps_trained_lifetime"] == steps


def joint_config(**training: Any) -> ReinforceConfig:
    env = gym.make("CartPole-v1")
    specs = {
        "encoder": RLModuleSpec(Encoder, observation_space=env.observation_space, action_space=env.action_space),
        "p0": RLModuleSpec(Head),
        "p1": RLModuleSpec(Head),
    }
    config = reinforce(learner_class=SharedLearner, lr=0.5, **training)
    config.environment(make_multi_agent("CartPole-v1"), env_config={"num_agents": 2})
    config.multi_agent(policies={"p0", "p1"}, policy_mapping_fn=mapping)
    found: ReinforceConfig = config.rl_module(
        rl_module_spec=MultiRLModuleSpec(multi_rl_module_class=Joint, rl_module_specs=specs)
    )
    return found


def mapping(agent_id: Any, episode: Any, **settings: Any) -> str:
    return f"p{agent_id}"


def test_modules_with_an_encoder_in_common_take_one_step_together() -> None:
    SharedLearner.steps.clear()
    with joint_config().build() as algo:
        result = algo.train()
        after = {name: part for name, part in algo.learner_group._learner.module.items()}
    (expected, batch), *more = SharedLearner.steps
    assert not more and result["learners"]["p0"]["num_gradient_steps"] == 1
    total = 0
    for module_id, part in batch.items():
        features = expected["encoder"]._forward(part)
        logits = expected[module_id]._forward({**part, **features})["action_dist_inputs"]
        total = total - (TorchCategorical(logits=logits).logp(part["actions"]) * part["returns_to_go"]).mean()
    total.backward()  # type: ignore[attr-defined]
    for module_id in ("encoder", "p0", "p1"):
        for mine, its in zip(after[module_id].parameters(), expected[module_id].parameters(), strict=True):
            torch.testing.assert_close(mine, its - 0.5 * its.grad, rtol=1e-4, atol=1e-6)


def test_an_own_algorithm_is_saved_and_continued(tmp_path: Path) -> None:
    for make in (reinforce, joint_config):
        with make().build() as algo:  # type: ignore[operator]
            algo.train()
            saved = algo.save_to_path(tmp_path / make.__name__)
            expected = copy.deepcopy(algo.native.learner_group.get_weights())
        with Reinforce.from_checkpoint(saved) as algo:
            assert algo.iteration == 1
            for module_id, weights in algo.native.learner_group.get_weights().items():
                for name, value in weights.items():
                    np.testing.assert_array_equal(value, expected[module_id][name])
            algo.train()


def test_a_module_starts_with_the_weights_of_a_checkpoint(tmp_path: Path) -> None:
    with small().build() as algo:
        algo.train()
        saved = Path(algo.save_to_path(tmp_path / "first")) / "learner_group/learner/rl_module"
        expected = weights_of(algo)
    spec = RLModuleSpec(model_config=SEPARATE, load_state_path=saved / ID)
    with small(model={}).rl_module(rl_module_spec=spec).build() as algo:
        for name, value in weights_of(algo).items():
            np.testing.assert_array_equal(value, expected[name])
    with pytest.raises(CheckpointError, match="holds no module: give the directory"):
        small().rl_module(rl_module_spec=RLModuleSpec(load_state_path=tmp_path)).build()


class _DQNByHand(DQNTorchLearner):
    def postprocess_gradients_for_module(self, **settings: Any) -> Any:
        return super().postprocess_gradients_for_module(**settings)


def test_dqn_stepped_by_a_learner_class_is_the_same_and_sets_priorities() -> None:
    weights, reported = [], []
    for settings in ({}, {"learner_class": _DQNByHand}):
        config = DQNConfig().environment("CartPole-v1").debugging(seed=0)
        config.training(num_steps_sampled_before_learning_starts=10, **settings)
        algorithm = config.reporting(min_sample_timesteps_per_iteration=15).build_algo()
        reported.append(algorithm.train()["learners"][ID])
        weights.append(algorithm.get_module().get_state())
        algorithm.stop()
    for name, value in weights[0].items():
        np.testing.assert_allclose(value, weights[1][name], atol=1e-5)
    assert set(reported[0]) == set(reported[1])  # with the names of rates and norms of RLlib
    assert reported[0]["gradients_default_optimizer_global_norm"] == pytest.approx(
        reported[1]["gradients_default_optimizer_global_norm"], rel=1e-2
    )


class _SACByHand(SACTorchLearner):
    def compute_gradients(self, loss_per_module: Any, **settings: Any) -> Any:
        return super().compute_gradients(loss_per_module, **settings)


class _SACOptimizers(SACTorchLearner):
    def configure_optimizers_for_module(self, module_id: str, config: Any = None) -> None:
        pass


@pytest.mark.parametrize("cls", [_SACByHand, _SACOptimizers])
def test_learner_classes_that_change_the_steps_of_sac_are_refused(cls: Any) -> None:
    config = SACConfig().environment("Pendulum-v1").training(learner_class=cls)
    with pytest.raises(ConfigError, match="changes the steps of SAC"):
        config.build_algo()


def test_a_loss_may_read_rewards_and_ends_of_episodes() -> None:
    seen: list[dict[str, Any]] = []

    class Reads(PPOTorchLearner):
        def compute_loss_for_module(self, *, module_id: str, config: Any, batch: Any, fwd_out: Any) -> Any:
            seen.append({name: batch[name].numpy() for name in ("rewards", "terminateds", "truncateds", "obs")})
            return super().compute_loss_for_module(module_id=module_id, config=config, batch=batch, fwd_out=fwd_out)

    with small(learner_class=Reads, train_batch_size=200).build() as algo:
        algo.train()
    (batch,) = seen
    assert len(batch["obs"]) == len(batch["rewards"]) > 190 and set(batch["rewards"]) == {1.0}
    assert batch["terminateds"].sum() > 0 == batch["truncateds"].sum()


def test_a_loss_of_dqn_reads_the_columns_of_rllib() -> None:
    seen: list[dict[str, Any]] = []

    class Reads(DQNTorchLearner):
        def compute_loss_for_module(self, *, module_id: str, config: Any, batch: Any, fwd_out: Any) -> Any:
            names = ("obs", "new_obs", "actions", "rewards", "terminateds", "weights")
            seen.append({name: batch[name].numpy() for name in names})
            return super().compute_loss_for_module(module_id=module_id, config=config, batch=batch, fwd_out=fwd_out)

    config = DQNConfig().environment("CartPole-v1").debugging(seed=0)
    config.training(num_steps_sampled_before_learning_starts=10, learner_class=Reads)
    with config.reporting(min_sample_timesteps_per_iteration=15).build_algo() as algo:
        algo.train()
    batch = seen[0]
    assert batch["new_obs"].shape == batch["obs"].shape
    # The position moves by the velocity of the cart in 0.02 s.
    moved = batch["obs"][:, 0] + 0.02 * batch["obs"][:, 1]
    np.testing.assert_allclose(batch["new_obs"][:, 0], moved, atol=1e-5)
