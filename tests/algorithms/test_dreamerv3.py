"""DreamerV3: each part of its loss against a slow loop, what is sampled and drawn for it, and that it learns."""

from __future__ import annotations

import copy
from functools import partial
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium import spaces
from torch import Tensor
from torch.nn import functional

from at_least import all_of
from corral import DreamerV3Config, PPOConfig, make_multi_agent
from corral.algorithms.dreamerv3 import (
    arrivals,
    dreamerv3_loss,
    imagine,
    imagined_returns,
    model_loss,
    moved_range,
    observe_batch,
)
from corral.core.tree import map_tree
from corral.errors import ConfigError
from corral.learners.settings import UpdateSettings
from corral.learners.update import to_tensors
from corral.modules.dreamerv3_module import DreamerV3Module
from corral.runs.policies.export_check import WatchedPolicy, check_export
from corral.runs.policies.policy import Policy, load_policy
from memory_modules import CountsSteps

LOSS = partial(dreamerv3_loss, gamma=0.9, lambda_=0.8, entropy_coeff=0.01)
NO_RANGE = {"return_low": 0.0, "return_high": 0.0, "return_decay": 0.0}


class Walk(gym.Env[Any, Any]):
    """A walk on a line, whose observation is the place: it ends on the right, or with the sixth step.

    The reward is 1 where it ends on the right, and 0.1 for a step to the left.
    """

    observation_space = spaces.Box(-6, 6, (1,), np.float32)

    def __init__(self, config: dict[str, Any] | None = None) -> None:
        self.is_box = (config or {}).get("space") == "box"
        self.action_space = spaces.Box(-2, 2, (1,), np.float32) if self.is_box else spaces.Discrete(2)

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self.place = self.steps = 0
        return np.zeros(1, np.float32), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        right = bool(action[0] > 0) if self.is_box else bool(action)
        self.place += 1 if right else -1
        self.steps += 1
        ends = self.place == 2
        reward = 1.0 if ends else 0.0 if right else 0.1
        return np.full(1, self.place, np.float32), reward, ends, self.steps == 6 and not ends, {}


def make_config(space: str = "discrete", **settings: Any) -> DreamerV3Config:
    config = DreamerV3Config().environment(Walk, env_config={"space": space}).debugging(seed=0)
    config.training(model_size="nano", train_batch_size_per_learner=48, horizon=3, training_intensity=48)
    config.training(num_steps_sampled_before_learning_starts=60, replay_buffer_config={"capacity": 500})
    config.reporting(min_sample_timesteps_per_iteration=60)
    return config.rl_module(model_config={"max_seq_len": 8}).copy(**settings)


def drawn_batch(algo: Any) -> dict[str, Any]:
    """Return a batch as the loss is given it, as tensors."""
    batch = algo.prepare_batch("default_policy", algo._draw("default_policy"))
    return to_tensors(batch, torch.device("cpu"))


@pytest.fixture(scope="module", params=["discrete", "box"])
def learned(request: Any) -> Any:
    """The module of a run of some updates, and a batch from its buffer."""
    with make_config(request.param, training_intensity=16).build() as algo:
        for _ in range(2):
            algo.train()
        batch = drawn_batch(algo)
        yield algo.get_module(), batch


def test_imagined_returns_are_those_of_a_slow_loop() -> None:
    rewards, continues, values = torch.randn(3, 4), torch.rand(3, 4), torch.randn(3, 5)
    found = imagined_returns(rewards, continues, values, gamma=0.9, lambda_=0.7)
    for row in range(3):
        after = values[row, 4].item()
        for t in (3, 2, 1, 0):
            mixed = 0.3 * values[row, t + 1].item() + 0.7 * after
            after = rewards[row, t].item() + 0.9 * continues[row, t].item() * mixed
            assert found[row, t].item() == pytest.approx(after, abs=1e-5)


def test_the_range_of_returns_is_a_moving_average_of_their_percentiles() -> None:
    returns = torch.randn(40, 7, generator=torch.Generator().manual_seed(0))
    low, high = np.percentile(returns.numpy(), [5, 95])
    found = moved_range(returns, {"return_low": -3.0, "return_high": 8.0, "return_decay": 0.75})
    assert [part.item() for part in found] == pytest.approx([-2.25 + low / 4, 6 + high / 4], abs=1e-5)
    assert [part.item() for part in moved_range(returns, NO_RANGE)] == pytest.approx([low, high], abs=1e-5)


def test_a_run_keeps_the_range_of_returns_from_its_first_update_on() -> None:
    with make_config(return_decay=0.5).build() as algo:
        assert algo._return_ranges == {}
        algo.train()
        ranges = []
        for _ in range(3):
            result = algo.learn("default_policy")
            ranges.append([result["return_low"], result["return_high"]])
            assert algo._return_ranges["default_policy"] == pytest.approx(ranges[-1])
        batch = algo.prepare_batch("default_policy", algo._draw("default_policy"))
        outputs: dict[str, Tensor] = {}
        known = {"return_low": ranges[-1][0], "return_high": ranges[-1][1], "return_decay": 0.5}
        with torch.no_grad():
            LOSS(algo.get_module(), to_tensors(batch, torch.device("cpu")), known, outputs=outputs)
        low, high = np.percentile(outputs["returns"].numpy(), [5, 95])
        found = LOSS(algo.get_module(), to_tensors(batch, torch.device("cpu")), known)[1]
    assert ranges[0] != ranges[1]
    expected = [(ranges[-1][0] + low) / 2, (ranges[-1][1] + high) / 2]
    assert [found["return_low"].item(), found["return_high"].item()] == pytest.approx(expected, abs=1e-4)


def test_states_of_a_batch_are_those_that_single_steps_give(learned: Any) -> None:
    module, batch = learned
    model, states = module.world_model, batch["states"]
    with torch.no_grad():
        seen = observe_batch(module, batch)
        embedded, actions = model.encode(batch["obs"]), module.action_inputs(batch["actions"])
        h = z = action = torch.zeros(0)
        for row in range(len(batch["rewards"])):
            if batch["sequence_starts"][row]:
                h, z, action = module.begin(map_tree(lambda leaf, row=row: leaf[row : row + 1], states))
            h = model.advance(h, z, action)
            logp = model.posterior(h, embedded[row : row + 1])
            below = logp.exp().cumsum(-1) <= batch["noise"][row : row + 1].unsqueeze(-1)
            z = functional.one_hot(below.sum(-1).clamp(max=3), 4).float().flatten(1)
            action = actions[row : row + 1]
            torch.testing.assert_close(seen.h[row], h[0])
            torch.testing.assert_close(seen.z[row], z[0])
            torch.testing.assert_close(seen.posterior[row], logp[0])
            torch.testing.assert_close(seen.prior[row], model.prior(h)[0])
    assert batch["sequence_starts"].sum() > 6  # some sequences begin in the middle of a window of 8 steps


def test_sequences_begin_with_the_states_in_which_the_runner_saw_them(learned: Any) -> None:
    _, batch = learned
    actions, started = batch["states"]["action"], batch["states"]["started"]
    inner = (~batch["sequence_starts"]).nonzero().squeeze(1)
    inner = inner[batch["learns"][inner]]
    assert torch.equal(actions[inner], batch["actions"][inner - 1]) and started[inner].all()
    assert len(inner) > 10
    begins = batch["sequence_starts"] & (batch["obs"][:, 0] == 0) & (started == 0)
    assert begins.any() and not batch["states"]["h"][begins].any()


def test_rewards_and_ends_belong_to_the_observations_that_steps_led_to(learned: Any) -> None:
    _, batch = learned
    before, continues = arrivals(batch)
    place, num_ends = batch["obs"][:, 0], 0
    for row, starts in enumerate(batch["sequence_starts"].tolist()):
        if starts:
            assert continues[row] == 1 and before[row] == row
            continue
        assert before[row] == row - 1
        ends = place[row] == 2
        reward = 1.0 if ends else 0.1 if place[row] < place[row - 1] else 0.0
        assert batch["rewards"][before[row]].item() == pytest.approx(reward)
        assert continues[row].item() == (not ends)
        num_ends += bool(ends)
    assert num_ends


def test_the_reward_loss_is_of_the_rewards_with_which_states_were_reached(learned: Any) -> None:
    module, batch = copy.deepcopy(learned[0]), learned[1]
    model, errors = module.world_model, []
    with torch.no_grad():
        torch.nn.init.normal_(model.reward_head[-1].weight)
        seen = observe_batch(module, batch)
        reported = model_loss(module, batch, seen, *arrivals(batch))[1]
        for row, starts in enumerate(batch["sequence_starts"].tolist()):
            if not starts:  # the reward before a sequence is not known
                logits = model.reward_head(seen.features[row : row + 1])
                errors.append(model.bins.cross_entropy(logits, batch["rewards"][row - 1 : row]).item())
    assert reported["reward_loss"].item() == pytest.approx(sum(errors) / int(batch["learns"].sum()), rel=1e-4)


def test_returns_are_of_the_values_of_the_critic_and_not_of_its_target(learned: Any) -> None:
    module, batch = copy.deepcopy(learned[0]), learned[1]
    outputs: dict[str, Tensor] = {}
    with torch.no_grad():
        torch.nn.init.normal_(module.target_critic[-1].weight)
        LOSS(module, batch, NO_RANGE, outputs=outputs)
        values = module.world_model.bins.mean(module.critic(outputs["imagined_features"]))
    torch.testing.assert_close(outputs["values"], values)


def test_settings_reach_the_loss() -> None:
    config = make_config(gamma=0.7, lambda_=0.6, entropy_coeff=0.5, return_decay=1.0)
    with config.build() as algo:
        loss: Any = algo.make_loss(config)
        assert loss.keywords == {"gamma": 0.7, "lambda_": 0.6, "entropy_coeff": 0.5}
        algo.train()
        before = list(algo._return_ranges["default_policy"])
        algo.learn("default_policy")
        assert algo._return_ranges["default_policy"] == pytest.approx(before)  # a decay of 1 keeps the first one


def test_defaults_are_those_of_the_paper() -> None:
    config = DreamerV3Config()
    assert (config.gamma, config.lambda_, config.horizon, config.entropy_coeff) == (0.997, 0.95, 15, 3e-4)
    assert (config.lr, config.actor_lr, config.critic_lr) == (1e-4, 3e-5, 3e-5)
    assert (config.tau, config.target_network_update_freq, config.return_decay) == (0.02, 0, 0.99)


@pytest.mark.parametrize("space", ["discrete", "box"])
def test_each_state_and_each_imagined_step_has_noise_of_its_own(space: str) -> None:
    with make_config(space).build() as algo:
        algo.train()
        batch = algo.prepare_batch("default_policy", algo._draw("default_policy"))
    for name in ("noise", "imagined_noise", "action_noise"):
        assert len(np.unique(batch[name])) > 0.99 * batch[name].size, name


def test_the_divergence_trains_the_prior_five_times_as_much_and_nothing_below_one_nat(learned: Any) -> None:
    module, batch = learned
    seen = observe_batch(module, batch)
    before, continues = arrivals(batch)

    def gradients(scale: float) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        prior = torch.zeros_like(seen.prior, requires_grad=True)
        posterior = (scale * torch.arange(4.0)).expand_as(prior).clone().requires_grad_()
        states = seen._replace(prior=prior.log_softmax(-1), posterior=posterior.log_softmax(-1))
        loss, parts = model_loss(module, batch, states, before, continues)
        of_prior, of_posterior = torch.autograd.grad(loss, [prior, posterior])
        return of_prior, of_posterior, parts

    of_prior, of_posterior, parts = gradients(1.0)
    logp = torch.arange(4.0).log_softmax(-1)
    divergence = 4 * (logp.exp() * (logp + np.log(4))).sum().item()  # of four variables
    assert divergence > 1
    num_steps = int(batch["learns"].sum())
    share = len(batch["rewards"]) / num_steps  # of rows with observations, per step
    assert parts["dynamics_loss"].item() == pytest.approx(share * divergence, rel=1e-4)
    assert parts["representation_loss"].item() == pytest.approx(share * divergence, rel=1e-4)
    torch.testing.assert_close(of_prior, (0.5 * (0.25 - logp.exp()) / num_steps).expand_as(of_prior))
    slope = logp.exp() * (logp + np.log(4) - divergence / 4)
    torch.testing.assert_close(of_posterior, (0.1 * slope / num_steps).expand_as(of_posterior))
    of_prior, of_posterior, parts = gradients(0.3)
    assert parts["dynamics_loss"].item() == parts["representation_loss"].item() == pytest.approx(share)
    assert not of_prior.any() and not of_posterior.any()


def test_losses_of_actor_and_critic_are_those_of_a_slow_loop(learned: Any) -> None:
    module, batch = learned
    outputs: dict[str, Tensor] = {}
    with torch.no_grad():
        _, reported = LOSS(module, batch, NO_RANGE, outputs=outputs)
        seen = observe_batch(module, batch)
        dreams = imagine(module, seen.h, seen.z, batch["imagined_noise"], batch["action_noise"])
        model, bins = module.world_model, module.world_model.bins
        features, returns, values = outputs["imagined_features"], outputs["returns"], outputs["values"]
        torch.testing.assert_close(bins.mean(module.critic(features)), values)
        torch.testing.assert_close(model.rewards(features[:, 1:]), outputs["rewards"])
        torch.testing.assert_close(model.continues(features[:, 1:]).sigmoid(), outputs["continues"])
        low, high = np.percentile(returns.numpy(), [5, 95])
        scale, actor, critic = max(1.0, high - low), [], []
        _, goes_on = arrivals(batch)
        for row in range(len(goes_on)):
            weight = goes_on[row].item()
            for t in range(3):
                state = features[row, t][None]
                policy = module.policy_of(state)
                logp = module.distribution.logp(policy, dreams.actions[row, t][None]).item()
                entropy = module.distribution.entropy(policy).item()
                advantage = (returns[row, t] - values[row, t]).item() / scale
                actor.append(-weight * (advantage * logp + 0.01 * entropy))
                aims = returns[row, t][None], bins.mean(module.target_critic(state))
                critic.append(weight * sum(bins.cross_entropy(module.critic(state), aim).item() for aim in aims))
                weight *= 0.9 * outputs["continues"][row, t].item()
    num_steps = 3 * int(batch["learns"].sum())
    assert reported["actor_loss"].item() == pytest.approx(sum(actor) / num_steps, rel=1e-3, abs=1e-6)
    assert reported["critic_loss"].item() == pytest.approx(sum(critic) / num_steps, rel=1e-3)
    assert torch.equal(reported["td_error"], (returns - values[:, :-1])[:, 0].abs())


def test_imagined_steps_follow_the_prior_and_the_actions_of_the_policy(learned: Any) -> None:
    module, batch = learned
    model = module.world_model
    with torch.no_grad():
        seen = observe_batch(module, batch)
        dreams = imagine(module, seen.h, seen.z, batch["imagined_noise"], batch["action_noise"])
        h, z = seen.h[5:6], seen.z[5:6]
        for t in range(3):
            torch.testing.assert_close(dreams.features[5, t], torch.cat([h, z], -1)[0])
            policy = module.policy_of(torch.cat([h, z], -1))
            action = module.distribution.sample(policy, batch["action_noise"][5:6, t])
            torch.testing.assert_close(dreams.actions[5, t], action[0])
            h = model.advance(h, z, module.action_inputs(action))
            shares = model.prior(h).exp().cumsum(-1)
            z = model.vectors((shares <= batch["imagined_noise"][5:6, t].unsqueeze(-1)).sum(-1).clamp(max=3))


def test_each_loss_has_gradients_in_its_own_networks_only(learned: Any) -> None:
    module, batch = learned
    groups = module.parameter_groups()
    assert {id(p) for group in groups.values() for p in group} == {
        id(p) for p in module.parameters() if p.requires_grad
    }

    def gradients(loss: Tensor) -> dict[str, list[Tensor | None]]:
        every = [p for group in groups.values() for p in group]
        found = iter(torch.autograd.grad(loss, every, allow_unused=True))
        return {name: [next(found) for _ in group] for name, group in groups.items()}

    seen, (before, continues) = observe_batch(module, batch), arrivals(batch)
    of_model = gradients(model_loss(module, batch, seen, before, continues)[0])
    of_all = gradients(LOSS(module, batch, NO_RANGE)[0])
    assert all_of(gradient is None for name in ("actor", "critic") for gradient in of_model[name])
    for gradient, expected in zip(of_all["world_model"], of_model["world_model"], strict=True):
        assert gradient is not None and expected is not None  # all of its weights learn
        torch.testing.assert_close(gradient, expected)
    assert all_of(gradient is not None for name in ("actor", "critic") for gradient in of_all[name])


@pytest.mark.parametrize("space", ["discrete", "box"])
def test_losses_go_down_on_a_recorded_batch(space: str) -> None:
    config = make_config(space, lr=3e-3, critic_lr=3e-3)
    with config.build() as algo:
        algo.train()
        batch = algo._draw("default_policy")
        parts = []
        for _ in range(80):
            given = algo.prepare_batch("default_policy", batch)
            result = algo.update_module("default_policy", given, UpdateSettings(lr=config.lrs(0)))
            parts.append({name: result[name] for name in ("observation_loss", "reward_loss", "continue_loss")})
            parts[-1]["critic_loss"] = result["critic_loss"]
    first, last = parts[0], {name: np.mean([each[name] for each in parts[-5:]]) for name in parts[0]}
    assert last["observation_loss"] < 0.3 * first["observation_loss"]
    assert last["reward_loss"] < 0.3 * first["reward_loss"]
    assert last["continue_loss"] < 0.5 * first["continue_loss"]
    assert last["critic_loss"] < 0.7 * max(each["critic_loss"] for each in parts)


@pytest.mark.parametrize("num_envs", [1, 3])
@pytest.mark.parametrize("space", ["discrete", "box"])
def test_runners_write_the_actions_that_they_take_into_the_states(num_envs: int, space: str) -> None:
    config = make_config(space).env_runners(num_envs_per_env_runner=num_envs)
    with config.build() as algo:
        assert algo.env_runner is not None
        rollout, module = algo.env_runner.sample(num_timesteps=30), algo.get_module()
        states, obs, valid = rollout.states, rollout.obs, rollout.valid
        done = rollout.terminated | rollout.truncated
        for t in range(rollout.num_rows):
            for n in range(num_envs):
                begins = t == 0 or not valid[t - 1, n] or (done[t - 1, n] and valid[t, n])
                if not valid[t, n]:
                    continue
                assert states["started"][t, n] == (not begins)
                if not begins:
                    assert np.array_equal(states["action"][t, n], rollout.actions[t - 1, n])
                given = {name: torch.as_tensor(part[t, n : n + 1]) for name, part in states.items()}
                with torch.no_grad():
                    inputs, after = module.policy(torch.as_tensor(obs[t, n : n + 1]), given)
                np.testing.assert_allclose(rollout.dist_inputs[t, n], inputs[0], rtol=1e-4, atol=1e-5)
                if not done[t, n] and t + 1 < rollout.num_rows:
                    np.testing.assert_allclose(states["h"][t + 1, n], after["h"][0], rtol=1e-4, atol=1e-5)
                    assert np.array_equal(states["z"][t + 1, n], after["z"][0])


def test_a_loaded_policy_remembers_its_actions(tmp_path: Any) -> None:
    with make_config().build() as algo:
        algo.train()
        algo.save(tmp_path / "saved")
        policy, module = load_policy(tmp_path / "saved"), algo.get_module().eval()
    state = {name: part[None] for name, part in module.initial_state().items()}
    states = policy.initial_states(1)
    for place in (0.0, 1.0, 0.0, -1.0):
        obs = np.full((1, 1), place, np.float32)
        actions, states = policy.act(obs, states, explore=True)
        with torch.no_grad():
            _, state = module.policy(torch.as_tensor(obs), state)
        state["action"] = torch.as_tensor(actions)
        assert np.array_equal(states["action"], actions)
        np.testing.assert_allclose(states["h"], state["h"], rtol=1e-4, atol=1e-6)


@pytest.mark.xdist_group("graphs")
@pytest.mark.parametrize("space", ["discrete", "box"])
def test_an_exported_policy_acts_as_it_does(space: str, tmp_path: Any) -> None:
    with make_config(space).build() as algo:
        module = algo.get_module().eval()
    policy = WatchedPolicy(Policy(module))
    for place in (0.0, 1.0, 0.0, -1.0):
        policy.batch(np.array([[place], [place / 2]], np.float32))
    assert check_export(policy.export(tmp_path / "policy.pt2"), policy).is_close


def test_updates_are_as_many_as_the_ratio_of_steps_says() -> None:
    with make_config(training_intensity=16).build() as algo:
        learn, sizes = algo.learn, []

        def counted(module_id: str) -> Any:
            result = learn(module_id)
            sizes.append(result["module_train_batch_size_mean"])
            return result

        algo.learn = counted  # type: ignore[method-assign]
        for _ in range(2):
            algo.train()
        assert algo.num_env_steps_sampled_lifetime == 120
    assert len(sizes) == 61 * 16 // 48  # of the steps from the 60th on
    assert 0.6 * 48 < np.mean(sizes) < 1.3 * 48  # with observations after episodes, and without rows that only reset


@pytest.mark.parametrize(("batch", "sequence"), [(8, 32), (60, 32), (64, 8)])
def test_steps_trained_on_are_those_of_the_whole_sequences_that_are_drawn(batch: int, sequence: int) -> None:
    config = make_config(train_batch_size_per_learner=batch, model_config={"max_seq_len": sequence})
    with config.training(training_intensity=4).build() as algo:
        due = sum(algo._num_updates_due("default_policy", 10) for _ in range(40))
        assert due == 0  # nothing was sampled yet
        algo.train()
        algo._update_credit.clear()
        due = sum(algo._num_updates_due("default_policy", 10) for _ in range(80))
        num_sequences = int(algo._draw("default_policy")["unit_starts"].sum())
    assert due == 4 * 800 // (max(1, batch // sequence) * sequence)
    assert num_sequences >= max(1, batch // sequence)


def test_several_agents_learn_too() -> None:
    agents: Any = make_multi_agent(Walk)
    config = (
        make_config(training_intensity=8)
        .environment(agents, env_config={"num_agents": 2})
        .multi_agent(policies={"one"})
    )
    with config.build() as algo:
        for _ in range(2):
            result = algo.train()
        batch = algo.prepare_batch("one", algo._draw("one"))
        starts = np.flatnonzero(batch["sequence_starts"])
    assert np.isfinite(result["learners"]["one"]["world_model_loss"])
    begins = starts[batch["obs"][starts, 0] == 0]
    inner = np.flatnonzero(batch["learns"] & ~batch["sequence_starts"])
    assert np.array_equal(batch["states"]["action"][inner], batch["actions"][inner - 1]) and len(begins)


def test_box_actions_may_be_single_numbers() -> None:
    module = DreamerV3Module(Walk.observation_space, spaces.Box(-2, 2, ()), {"model_size": "nano"})
    assert module.action_inputs(torch.tensor([0.5, -2.0])).tolist() == [[0.5], [-1.0]]  # clipped, as the env takes them
    assert module.action_inputs(torch.zeros(3, 4)).shape == (3, 4, 1)


def test_pictures_learn_too() -> None:
    class Camera(gym.ObservationWrapper[Any, Any, Any]):
        observation_space = spaces.Dict(
            {"camera": spaces.Box(0, 255, (16, 32, 3), np.uint8), "place": Walk.observation_space}
        )

        def __init__(self, env: Any) -> None:
            super().__init__(env)
            self.observation_space = type(self).observation_space

        def observation(self, observation: Any) -> Any:
            picture = np.zeros((16, 32, 3), np.uint8)
            picture[:, 15 + int(observation[0])] = 255
            return {"camera": picture, "place": observation}

    config = make_config(horizon=2, training_intensity=16, lr=3e-3).environment(wrappers=[Camera])
    with config.build() as algo:
        algo.train()
        losses = [algo.train()["learners"]["default_policy"]["observation_loss"] for _ in range(2)]
    assert losses[1] < 0.7 * losses[0]


def test_other_algorithms_do_not_learn_without_the_actions_in_states() -> None:
    class Remembers(CountsSteps):
        ACTION_STATE = "action"

        def initial_state(self) -> dict[str, Tensor]:
            return {**super().initial_state(), "action": torch.zeros((), dtype=torch.int64)}

        def policy(self, obs: Tensor, state: Any) -> Any:  # type: ignore[override]
            outputs, after = super().policy(obs, state)
            return outputs, {**after, "action": state["action"]}

    config = PPOConfig().environment(Walk).training(train_batch_size_per_learner=32, minibatch_size=None)
    config.rl_module(module_class=Remembers)
    with config.build() as algo, pytest.raises(ConfigError, match=r"Remembers needs the latest action.*PrevActions"):
        algo.train()


def test_it_says_why_settings_of_other_algorithms_have_no_effect() -> None:
    for settings, message in (
        ({"n_step": 3}, "n_step=3 has no effect on DreamerV3.*horizon"),
        ({"burn_in_len": 2}, "burn_in_len=2.*max_seq_len"),
        (
            {"replay_buffer_config": {"type": "prioritized"}},
            "draws single steps, and DreamerV3Module .* gives the module memory.*'uniform'",
        ),
        ({"model_size": "tiny"}, "model_size"),
    ):
        with pytest.raises(ConfigError, match=message):
            make_config(**settings).validate()
    with pytest.raises(ConfigError, match="unknown setting 'fcnet_hiddens'"):
        make_config(model_config={"fcnet_hiddens": [8]}).validate()


@pytest.mark.parametrize("space", ["discrete", pytest.param("box", marks=pytest.mark.slow)])
def test_it_finds_the_reward_at_the_end_of_the_walk(space: str) -> None:
    config = make_config(space, gamma=0.97, lr=3e-3, actor_lr=3e-3, critic_lr=3e-3, training_intensity=96)
    config.training(train_batch_size_per_learner=96)
    with config.build() as algo:
        best = 0.0
        while best < 0.95 and algo.num_env_steps_sampled_lifetime < 2000:
            algo.train()
            assert algo.env_runner is not None
            rollout = algo.env_runner.sample(num_episodes=5, explore=False)
            best = float(rollout.rewards[rollout.valid].sum()) / 5  # 1 to the right, and at most 0.6 to the left
    assert best >= 0.95


LAKE = {"map_name": "4x4", "is_slippery": False}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("env", "env_config", "seed", "goal"),
    [
        ("CartPole-v1", {}, 0, 450.0),
        ("FrozenLake-v1", LAKE, 0, 0.99),
        ("Pendulum-v1", {}, 0, -200.0),
    ],
)
def test_it_learns_within_20_000_steps(env: str, env_config: dict[str, Any], seed: int, goal: float) -> None:
    config = DreamerV3Config().environment(env, env_config=env_config).debugging(seed=seed)
    config.training(model_size="nano", train_batch_size_per_learner=512, training_intensity=128)
    config.training(lr=3e-3, actor_lr=1e-3, critic_lr=3e-3).rl_module(model_config={"max_seq_len": 16})
    config.reporting(min_sample_timesteps_per_iteration=500, metrics_num_episodes_for_smoothing=5)
    best = -np.inf
    with config.build() as algo:
        while best < goal and algo.num_env_steps_sampled_lifetime < 20_000:
            best = max(best, algo.train()["env_runners"]["episode_return_mean"])
    assert best >= goal
