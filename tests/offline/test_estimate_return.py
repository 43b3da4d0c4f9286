"""The return of policies from recorded episodes: log-probabilities, what applies to which policy, and the command."""

from __future__ import annotations

import json
import logging
import math
import sys
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium import spaces
from numpy.typing import NDArray

import warm
from corral import (
    ClipRewards,
    DQNConfig,
    FrameStack,
    NormalizeObservations,
    OffPolicyEvaluation,
    PPOConfig,
    RandomModule,
    estimate_return,
    load_policy,
    make_multi_agent,
)
from corral.errors import ConfigError, DataError
from corral.modules.module import ActorCritic, Module
from corral.modules.q_module import QModule
from corral.modules.recurrent import RecurrentActorCritic
from corral.modules.spec import ModuleSpec
from corral.modules.td3_module import TD3Module
from corral.runs.policies.estimate_return import METHODS
from corral.runs.policies.policy import Policy
from corral.tools.cli.estimate import gamma_of
from corral.tools.cli.main import main
from offline.recorded_envs import Counting

BOX = spaces.Box(-1, 1, (2,), np.float32)
BY_RATIOS = ["is", "wis", "pdis", "wpdis", "dr", "wdr"]
QUICK: dict[str, Any] = {"num_gradient_steps": 20, "model_config": {"fcnet_hiddens": [8]}, "num_resamples": 50}


def policy_of(module_class: type[Module], action_space: Any, **model_config: Any) -> Policy:
    config = {"fcnet_hiddens": [4], **model_config} if module_class is not RandomModule else {}
    return Policy(ModuleSpec(module_class, BOX, action_space, config, seed=3).build())


def random_data(action_space: Any, size: int = 120, *, length: int = 4) -> dict[str, Any]:
    """Steps of uniform actions, in episodes that terminate and that are truncated in turn."""
    rng = np.random.default_rng(0)
    action_space.seed(0)
    ends = np.arange(1, size + 1) % length == 0
    odd = np.arange(size) // length % 2 == 1
    obs, next_obs = rng.uniform(-1, 1, (2, size, 2)).astype(np.float32)
    next_obs[:-1] = np.where(ends[:-1, None], next_obs[:-1], obs[1:])
    return {
        "obs": obs,
        "next_obs": next_obs,
        "actions": np.stack([action_space.sample() for _ in range(size)]),
        "rewards": rng.normal(size=size),
        "terminated": ends & ~odd,
        "truncated": ends & odd,
        "logp": np.full(size, -math.log(2)),
    }


def test_steps_in_no_order_are_refused() -> None:
    data = random_data(spaces.Discrete(2))
    order = np.random.default_rng(1).permutation(len(data["rewards"]))
    with pytest.raises(DataError, match="in another observation than their 'next_obs'"):
        estimate_return(
            policy_of(ActorCritic, spaces.Discrete(2)), {name: column[order] for name, column in data.items()}
        )


def probabilities(policy: Policy, obs: NDArray[Any]) -> NDArray[Any]:
    with torch.no_grad():
        return policy.module.policy(torch.from_numpy(obs)).softmax(-1).double().numpy()


# Numbers.


def test_estimates_match_the_policy_with_these_probabilities() -> None:
    policy, data = policy_of(ActorCritic, spaces.Discrete(2, start=5)), random_data(spaces.Discrete(2, start=5))
    found = estimate_return(policy, data, methods=["is", "wis"], gamma=0.9, explore=True)
    chances = probabilities(policy, data["obs"])[np.arange(120), data["actions"] - 5]
    weights = (2 * chances).reshape(30, 4).prod(1)
    returns = data["rewards"].reshape(30, 4) @ 0.9 ** np.arange(4)
    assert found.estimates["is"].value == pytest.approx((weights * returns).mean(), rel=1e-5)
    assert found.estimates["wis"].value == pytest.approx((weights * returns).sum() / weights.sum(), rel=1e-5)
    assert found.estimates["is"].effective_sample_size == pytest.approx(
        weights.sum() ** 2 / (weights**2).sum(), rel=1e-5
    )
    assert found.recorded.value == pytest.approx(returns.mean())
    assert found.episode_return_mean == pytest.approx(data["rewards"].reshape(30, 4).sum(1).mean())
    assert (found.num_episodes, found.num_steps, found.skipped) == (30, 120, {})


@pytest.mark.parametrize("module_class", [ActorCritic, QModule])
def test_the_greedy_policy_takes_its_best_action_with_probability_1(module_class: type[Module]) -> None:
    policy, data = policy_of(module_class, spaces.Discrete(2)), random_data(spaces.Discrete(2), length=2)
    found = estimate_return(policy, data, methods="pdis", gamma=1.0)
    is_best = (policy.batch(data["obs"]) == data["actions"]).reshape(60, 2)
    weights = np.cumprod(2.0 * is_best, axis=1)
    assert 0 < is_best.all(1).sum() < 60
    assert found.estimates["pdis"].value == pytest.approx((weights * data["rewards"].reshape(60, 2)).sum(1).mean())


def test_a_policy_of_action_values_that_explores_is_their_softmax() -> None:
    policy, data = policy_of(QModule, spaces.Discrete(2)), random_data(spaces.Discrete(2), length=1)
    found = estimate_return(policy, data, methods="is", explore=True)
    chances = probabilities(policy, data["obs"])[np.arange(120), data["actions"]]
    assert found.estimates["is"].value == pytest.approx((2 * chances * data["rewards"]).mean(), rel=1e-5)


def test_fitted_values_match_the_greedy_policy_or_the_policy_that_draws() -> None:
    """Episodes of one step, whose reward is the action: the greedy policy gets its action, the other the mean."""
    policy, data = policy_of(ActorCritic, spaces.Discrete(2)), random_data(spaces.Discrete(2), 2000, length=1)
    data |= {"rewards": data["actions"].astype(float), "terminated": np.ones(2000, bool), "truncated": None}
    fit = {"methods": "fqe", "num_gradient_steps": 400, "lr": 1e-2, "model_config": {"fcnet_hiddens": [16]}}
    greedy = estimate_return(policy, data, **fit).estimates["fqe"]
    drawn = estimate_return(policy, data, explore=True, **fit)
    assert greedy.value == pytest.approx(policy.batch(data["obs"]).mean(), abs=0.02)
    assert drawn.estimates["fqe"].value == pytest.approx(probabilities(policy, data["obs"])[:, 1].mean(), abs=0.02)
    assert math.isnan(drawn.estimates["fqe"].effective_sample_size) and drawn.td_error < 0.1


def test_fitted_values_of_box_actions_are_of_the_actions_as_the_env_receives_them() -> None:
    """The reward is the action in the env's units; the policy's one follows from the module."""
    box = spaces.Box(np.float32(2), np.float32(10), (1,))
    for policy in (policy_of(TD3Module, box), policy_of(ActorCritic, box)):
        data = random_data(box, 2000, length=1)
        data |= {"rewards": data["actions"][:, 0].astype(float), "terminated": np.ones(2000, bool), "truncated": None}
        del data["logp"]
        fit: dict[str, Any] = {"num_gradient_steps": 400, "lr": 1e-2, "model_config": {"fcnet_hiddens": [16]}}
        found = estimate_return(policy, data, methods="fqe", **fit)
        assert found.estimates["fqe"].value == pytest.approx(policy.batch(data["obs"]).mean(), abs=0.2)


def recorded_by(config: Any, path: Path, num_episodes: int = 8) -> Policy:
    """The policy of an algorithm after it has recorded episodes in which it explores."""
    with config.debugging(seed=0).build() as algorithm:
        algorithm.train()
        algorithm.record(path, num_episodes=num_episodes, explore=True, seed=0)
        return load_policy(algorithm.save(path.with_suffix(".checkpoint")))


def small(config: Any) -> Any:
    config = config.env_runners(num_envs_per_env_runner=1).rl_module(model_config={"fcnet_hiddens": [4]})
    return config.training(train_batch_size_per_learner=20, minibatch_size=20, num_epochs=1)


@pytest.mark.parametrize("actions", ["discrete", "parts"])
@pytest.mark.parametrize("transforms", [(), (NormalizeObservations(), FrameStack(2), ClipRewards())])
def test_the_policy_that_was_recorded_has_ratios_of_1(actions: str, transforms: Any, tmp_path: Path) -> None:
    config = PPOConfig().environment(
        Counting, env_config={"actions": actions, "nested": not transforms}, disable_env_checking=True
    )
    config = small(config.env_runners(transforms=list(transforms)))
    policy = recorded_by(config, tmp_path / "data")
    found = estimate_return(policy, str(tmp_path / "data"), methods=BY_RATIOS[:4], gamma=0.9, explore=True)
    for estimate in found.estimates.values():
        assert estimate.value == pytest.approx(found.recorded.value, rel=1e-5)
        assert estimate.effective_sample_size == pytest.approx(8, rel=1e-5)


class Wide(gym.Env[Any, Any]):
    """Actions whose bounds no policy reaches, or narrow ones; episodes of three steps."""

    observation_space: Any = BOX

    def __init__(self, config: Any = None) -> None:
        bound = (config or {}).get("bound", 100.0)
        self.action_space: Any = spaces.Box(-bound, bound, (2,), np.float32)

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self.t = 0
        return np.zeros(2, np.float32), {}

    def step(self, action: Any) -> Any:
        self.t += 1
        return np.full(2, self.t / 4, np.float32), float(np.sum(action)), self.t == 3, False, {}


def test_box_actions_inside_of_their_bounds_have_ratios_of_1(tmp_path: Path) -> None:
    config = small(PPOConfig().environment(Wide, normalize_actions=False))
    policy = recorded_by(config, tmp_path / "data")
    found = estimate_return(policy, str(tmp_path / "data"), methods=BY_RATIOS[:4], explore=True)
    for estimate in found.estimates.values():
        assert estimate.value == pytest.approx(found.recorded.value, rel=1e-4)


def test_clipped_actions_have_no_ratios(tmp_path: Path) -> None:
    policy = recorded_by(small(PPOConfig().environment(Wide, env_config={"bound": 1.0})), tmp_path / "data", 20)
    found = estimate_return(policy, str(tmp_path / "data"), explore=True, **QUICK)
    assert list(found.skipped) == BY_RATIOS and list(found.estimates) == ["fqe"]
    assert "actions at the bounds of Box(-1.0, 1.0" in found.skipped["is"]


def test_an_algorithm_is_evaluated_with_its_weights_of_now(tmp_path: Path) -> None:
    config = small(PPOConfig().environment(Counting, disable_env_checking=True)).debugging(seed=0)
    with config.build() as algorithm:
        algorithm.record(tmp_path / "data", num_episodes=8, explore=True)
        algorithm.train()
        found = estimate_return(algorithm, str(tmp_path / "data"), methods="is", explore=True)
        policy = load_policy(algorithm.save(tmp_path / "saved"))
    assert found.estimates == estimate_return(policy, str(tmp_path / "data"), methods="is", explore=True).estimates
    assert found.estimates["is"].effective_sample_size < 8  # it has learned since then


# What does not apply.


def test_without_log_probabilities_only_fitted_values_are_left(caplog: pytest.LogCaptureFixture) -> None:
    policy, data = policy_of(ActorCritic, spaces.Discrete(2)), random_data(spaces.Discrete(2))
    data["logp"][7:9] = np.nan
    with caplog.at_level(logging.WARNING, "corral"):
        found = estimate_return(policy, data, **QUICK)
    assert list(found.estimates) == ["fqe"] and list(found.skipped) == BY_RATIOS
    (message,) = [record.getMessage() for record in caplog.records]
    assert message.startswith(
        "Not estimated by is, wis, pdis, wpdis, dr, wdr: 2 of 120 recorded steps have no log-prob"
    )
    assert "column 'logp'" in message and "corral record RUN --explore" in message and "'fqe' needs none" in message
    del data["logp"]
    assert "120 of 120 recorded steps" in estimate_return(policy, data, **QUICK).skipped["is"]
    with pytest.raises(DataError, match=r"importance sampling \('is'\) does not apply: 120 of 120"):
        estimate_return(policy, data, methods=["fqe", "is"], **QUICK)


def test_weights_of_few_episodes_are_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    policy, data = policy_of(ActorCritic, spaces.Discrete(2)), random_data(spaces.Discrete(2), 1200, length=40)
    with caplog.at_level(logging.WARNING, "corral"):
        estimate_return(policy, data, methods=["is", "wis"])
    (message,) = [record.getMessage() for record in caplog.records]
    assert "The weights of 30 episodes count as much as 0.0 episodes" in message
    assert "--max-ratio" in message and "--explore" in message
    caplog.clear()
    data["logp"] = np.log(probabilities(policy, data["obs"])[np.arange(1200), data["actions"]])
    with caplog.at_level(logging.WARNING, "corral"):
        estimate_return(policy, data, methods=["is", "wis"], explore=True)
        four = {name: column[:160] for name, column in data.items()}
        estimate_return(policy, four, methods="is", explore=True)  # few, and all count
    assert not caplog.records


@pytest.mark.parametrize(
    ("module_class", "action_space", "explore", "skipped", "reason"),
    [
        (TD3Module, spaces.Box(-1, 1, (1,)), True, BY_RATIOS, "TD3Module is deterministic"),
        (
            ActorCritic,
            spaces.Box(-1, 1, (1,)),
            False,
            BY_RATIOS,
            "greedy policy has no density over continuous actions",
        ),
        (ActorCritic, spaces.MultiDiscrete([2, 2]), True, ["dr", "wdr", "fqe"], "need Discrete or Box actions"),
    ],
)
def test_methods_that_do_not_apply_are_named_with_the_reason(
    module_class: type[Module], action_space: Any, explore: bool, skipped: list[str], reason: str
) -> None:
    policy, data = policy_of(module_class, action_space), random_data(action_space)
    found = estimate_return(policy, data, explore=explore, **QUICK)
    assert list(found.skipped) == skipped and all(reason in text for text in found.skipped.values())
    assert sorted([*found.estimates, *found.skipped]) == sorted(METHODS)
    with pytest.raises(ConfigError, match=f"{METHODS['dr']}.*does not apply.*{reason}"):
        estimate_return(policy, data, methods="dr", explore=explore, **QUICK)


def test_without_discount_the_values_of_truncated_episodes_have_no_limit() -> None:
    policy, data = policy_of(ActorCritic, spaces.Discrete(2)), random_data(spaces.Discrete(2))
    found = estimate_return(policy, data, gamma=1.0, explore=True, **QUICK)
    assert list(found.skipped) == ["dr", "wdr", "fqe"]
    data |= {"terminated": data["terminated"] | data["truncated"], "truncated": None}
    assert not estimate_return(policy, data, gamma=1.0, explore=True, **QUICK).skipped


@pytest.mark.parametrize(
    ("module_class", "message"),
    [
        (RecurrentActorCritic, "RecurrentActorCritic has memory.*FrameStack"),
        (RandomModule, "RandomModule chooses actions by rules"),
    ],
)
def test_policies_that_cannot_be_evaluated_are_refused_by_name(module_class: type[Module], message: str) -> None:
    config = {"use_lstm": True} if module_class is RecurrentActorCritic else {}
    policy = policy_of(module_class, spaces.Discrete(2), **config)
    with pytest.raises(ConfigError, match=message):
        estimate_return(policy, random_data(spaces.Discrete(2)))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"methods": "wiss"}, "no method 'wiss'. Did you mean 'wis'"),
        ({"methods": []}, "no method was named"),
        ({"gamma": 1.1}, "gamma=1.1"),
        ({"max_ratio": 0}, "max_ratio=0"),
        ({"num_resamples": 0}, "num_resamples=0"),
        ({"num_gradient_steps": 0}, "num_gradient_steps=0"),
        ({"policy": "a path"}, "'a path' is no policy"),
    ],
)
def test_arguments_have_bounds(settings: dict[str, Any], message: str) -> None:
    policy = settings.pop("policy", None) or policy_of(ActorCritic, spaces.Discrete(2))
    with pytest.raises(ConfigError, match=message):
        estimate_return(policy, random_data(spaces.Discrete(2)), **settings)


# Several modules.


@pytest.fixture(scope="module")
def agents(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with a checkpoint `saved` of two modules, and episodes of both in `data`."""
    directory = tmp_path_factory.mktemp("agents")
    config = PPOConfig().environment(
        make_multi_agent(Counting), env_config={"num_agents": 2}, disable_env_checking=True
    )
    config = small(config).multi_agent(policies=["one", "two"], policy_mapping_fn=mapped).debugging(seed=0)
    with config.build() as algorithm:
        algorithm.record(directory / "data", num_episodes=6, explore=True)
        algorithm.save(directory / "saved")
    return directory


def mapped(agent_id: Any, episode: Any = None, **kwargs: Any) -> str:
    return ["one", "two"][int(agent_id)]


def test_one_of_several_modules_is_chosen(agents: Path, capsys: pytest.CaptureFixture[str]) -> None:
    policy = load_policy(agents / "saved", module_id="two")
    data = str(agents / "data")
    with pytest.raises(DataError, match=r"of the modules \['one', 'two'\]: choose one of them with module_id"):
        estimate_return(policy, data, methods="is")
    found = estimate_return(policy, data, methods="is", module_id="two", explore=True)
    assert found.estimates["is"].effective_sample_size == pytest.approx(6)
    command = ["evaluate", str(agents / "saved"), "--data", data, "--method", "is", "--explore"]
    assert main(command) == 2
    assert "has the modules ['one', 'two']: choose one of them, with --module one" in capsys.readouterr().err
    assert main([*command, "--module", "two", "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown["estimates"]["is"]["value"] == pytest.approx(found.estimates["is"].value)


# The command.


@pytest.fixture(scope="module")
def cartpole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with a run of PPO on CartPole, `run`, and episodes of its policy in `data`."""
    directory = tmp_path_factory.mktemp("cartpole")
    config = PPOConfig().environment("CartPole-v1").training(train_batch_size_per_learner=256, gamma=0.95)
    with config.debugging(seed=0).build() as algorithm:
        algorithm.train()
        algorithm.save(directory / "run" / "checkpoints" / "iteration-000001")
    record = ["record", str(directory / "run"), "--output", str(directory / "data"), "--episodes", "20", "--explore"]
    assert main(record) == 0
    return directory


def evaluate(directory: Path, capsys: pytest.CaptureFixture[str], *more: str) -> Any:
    capsys.readouterr()
    assert main(["evaluate", str(directory / "run"), "--data", str(directory / "data"), "--json", *more]) == 0
    return json.loads(capsys.readouterr().out)


def test_a_run_that_recorded_itself(cartpole: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = evaluate(cartpole, capsys, "--explore", "--gamma", "1", "--gradient-steps", "20")
    for method in ("is", "wis", "pdis", "wpdis"):
        assert found["estimates"][method]["value"] == pytest.approx(found["episode_return_mean"], rel=1e-4)
        assert found["estimates"][method]["effective_sample_size"] == pytest.approx(20, rel=1e-4)
    assert found["recorded"]["value"] == pytest.approx(found["episode_return_mean"])
    assert found["num_episodes"] == 20 and found["checkpoint"].endswith("iteration-000001")
    # With the discount of the run, all methods apply to CartPole.
    found = evaluate(cartpole, capsys, "--explore", "--gradient-steps", "20", "--batch-size", "32", "--lr", "0.01")
    assert found["gamma"] == 0.95 and found["skipped"] == {}
    assert list(found["estimates"]) == [*METHODS]
    assert found["estimates"]["is"]["value"] == pytest.approx(found["recorded"]["value"], rel=1e-4)


def test_the_command_gives_what_python_gives(cartpole: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shown = evaluate(cartpole, capsys, "--method", "wis", "--max-ratio", "1.5", "--seed", "3")
    policy = load_policy(cartpole / "run")
    found = estimate_return(policy, cartpole / "data", methods="wis", max_ratio=1.5, gamma=0.95, seed=3)
    assert {name: shown[name] for name in found.to_dict()} == found.to_dict()
    assert main(["evaluate", str(cartpole / "run"), "--data", str(cartpole / "data"), "--method", "wis"]) == 0
    lines = capsys.readouterr().out.splitlines()
    table = [line.split() for line in lines if line.startswith(("recorded", "wis"))]
    assert [row[0] for row in table] == ["recorded", "wis"]
    assert table[0][2:4] != table[1][2:4] and "effective episodes" in "\n".join(lines)


def test_options_without_effect_are_refused(cartpole: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["evaluate", str(cartpole / "run")]
    for option, value in [("--method", "is"), ("--gamma", "1"), ("--max-ratio", "2"), ("--gradient-steps", "9")]:
        assert main([*command, option, value]) == 2
        assert f"{option} needs --data PATH" in capsys.readouterr().err
    for option, value in [("--episodes", "3"), ("--env", "CartPole-v1"), ("--seeds", "1"), ("--env-config", "a=1")]:
        assert main([*command, "--data", str(cartpole / "data"), option, value]) == 2
        assert f"{option} has no effect with --data" in capsys.readouterr().err
    assert main([*command, "--data", str(tmp_path / "nothing")]) == 1
    assert "does not exist" in capsys.readouterr().err


def test_an_evaluation_in_an_env_imports_nothing_of_it(cartpole: Path) -> None:
    code = (
        "import sys; from corral.tools.cli.main import main; "
        f"main(['evaluate', {str(cartpole / 'run')!r}, '--episodes', '1', '--json']); "
        "found = [name for name in sys.modules if name.startswith('corral.data.offline.')]; "
        "print(found + [name for name in sys.modules if name == 'corral.tools.cli.estimate'])"
    )
    done = warm.run([sys.executable, "-c", code])
    imported = done.stdout.splitlines()[-1]
    assert "estimate" not in imported and "fitted" not in imported


def test_data_of_a_policy_that_records_no_log_probabilities(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = DQNConfig().environment("CartPole-v1").rl_module(model_config={"fcnet_hiddens": [8]})
    with config.debugging(seed=0).build() as algorithm:
        algorithm.record(tmp_path / "data", num_episodes=6, explore=True)
        algorithm.save(tmp_path / "run")
    found = evaluate(tmp_path, capsys, "--gradient-steps", "20")
    assert list(found["estimates"]) == ["fqe"] and "column 'logp'" in found["skipped"]["is"]


def test_the_text_has_every_number(capsys: pytest.CaptureFixture[str]) -> None:
    policy, data = policy_of(ActorCritic, spaces.MultiDiscrete([2, 2])), random_data(spaces.MultiDiscrete([2, 2]))
    found = estimate_return(policy, data, explore=True, num_resamples=50)
    assert isinstance(found, OffPolicyEvaluation)
    text = str(found)
    for estimate in (found.recorded, *found.estimates.values()):
        assert (
            f"{estimate.value:#.5g}" in text and f"{estimate.interval[0]:#.5g} to {estimate.interval[1]:#.5g}" in text
        )
    assert "fqe                 not estimated: fitted values need" in text
    json.dumps(found.to_dict(), allow_nan=False)


def test_the_discount_of_the_command_is_the_discount_of_the_module() -> None:
    own = {"algorithm_config_overrides_per_module": {"main": {"gamma": 0.9}, "other": {"lr": 0.1}}}
    config = {"training": {"gamma": 0.95}, "multi_agent": own}
    assert [gamma_of(config, module_id) for module_id in ("main", "other")] == [0.9, 0.95]
    assert (gamma_of({"training": {"gamma": 0.95}}, "main"), gamma_of(None, "main")) == (0.95, 0.99)
