"""What every algorithm does: it solves an env, repeats with its seed, learns alike with learners, refuses settings."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import torch
from small_configs import ON_POLICY, TRAINING, small_config

from at_least import at_least
from corral import Algorithm
from corral.algorithms.registry import ALGORITHMS, config_class
from corral.errors import ConfigError
from corral.learners.settings import UpdateSettings
from exact_runs import differences, without_times

FORMS = [
    *((algo, "discrete") for algo in (*ON_POLICY, "DQN", "SAC")),
    *((algo, "box") for algo in ("SAC", "TQC", "CrossQ", "TD3", "DDPG")),
    ("DreamerV3", "discrete"),
]
OFF_POLICY_FORMS = [form for form in FORMS if form[0] not in ON_POLICY]
SLOW_FORMS = [
    *(("SAC", space) for space in ("box_uneven", "discrete_from_minus_2")),
    *((algo, "box") for algo in ("DDPG", "TQC", "CrossQ")),
    ("DreamerV3", "discrete"),
]
# Settings that make it learn faster.
FAST = {"lr": 5e-3, "initial_alpha": 0.03, "train_batch_size_per_learner": 128}
SOLVES: dict[str, dict[str, Any]] = {"SAC": FAST, "TQC": FAST, "CrossQ": FAST}


PRIORITIZED = {"replay_buffer_config": {"type": "prioritized", "capacity": 2000}}


def test_every_algorithm_that_samples_is_held_to_the_contract() -> None:
    samples = {algo for algo in ALGORITHMS if config_class(algo)().samples}
    assert {algo for algo, _ in FORMS} == TRAINING.keys() == samples


def share_of_best_return(algorithm: Algorithm) -> float:
    """Return the mean reward of greedy steps; 1 is the best."""
    assert algorithm.env_runner is not None
    rollout = algorithm.env_runner.sample(num_episodes=10, explore=False)
    return float(rollout.rewards[rollout.valid].mean())


@pytest.mark.parametrize(
    ("algo", "space"),
    [
        *(form for form in FORMS if form not in SLOW_FORMS),
        *(pytest.param(*form, marks=pytest.mark.slow) for form in SLOW_FORMS),
    ],
)
def test_it_solves_the_identity_env(algo: str, space: str) -> None:
    with small_config(algo, space, **SOLVES.get(algo, {})).build() as algorithm:
        best = share_of_best_return(algorithm)
        assert best < 0.75
        while best < 15 / 16 and algorithm.num_env_steps_sampled_lifetime < 3000:
            for _ in range(4):
                algorithm.train()
            best = share_of_best_return(algorithm)
    assert best >= 15 / 16


@pytest.mark.parametrize(("algo", "space"), FORMS)
def test_the_same_seed_gives_the_same_results(algo: str, space: str) -> None:
    settings = {} if algo in ON_POLICY else {"num_steps_sampled_before_learning_starts": 32, "gamma": 0.9}
    config = small_config(algo, space, **settings, **(PRIORITIZED | {"noisy": True} if algo == "DQN" else {}))
    if algo not in ON_POLICY:
        config.reporting(min_sample_timesteps_per_iteration=24)  # it learns in the second iteration

    def results(seed: int) -> list[Any]:
        with config.copy().debugging(seed=seed).build() as algorithm:
            return [without_times(algorithm.train()) for _ in range(2)]

    first, again, other = (results(seed) for seed in (7, 7, 8))
    assert differences(first, again) == []
    assert any("/learners/" in place for place in differences(first, other))


@pytest.mark.parametrize(("algo", "space"), FORMS)
def test_the_result_has_its_keys_before_anything_is_learned(algo: str, space: str) -> None:
    config = small_config(algo, space)
    if algo not in ON_POLICY:
        config.training(num_steps_sampled_before_learning_starts=32)
        config.reporting(min_sample_timesteps_per_iteration=16)
    with config.build() as algorithm:
        first, *_, last = (algorithm.train()["learners"]["default_policy"] for _ in range(3))
        assert sorted(first) == sorted(last)
        if algo not in ON_POLICY:  # which learn in each iteration
            assert sorted(first) == sorted(algorithm.METRICS)
            assert np.isnan(list(first.values())).all()
    assert np.isfinite(list(last.values())).all()


@pytest.mark.parametrize(("algo", "space"), OFF_POLICY_FORMS)
def test_a_state_holds_all_that_updates_continue_from(algo: str, space: str) -> None:
    def learn(algorithm: Any) -> list[dict[str, float]]:
        """Learn from the buffer alone: the envs are no part of a state."""
        found, buffer, record = [], algorithm.local_replay_buffer, algorithm.modules["default_policy"]
        for _ in range(5):
            drawn = record.draw_sequences(buffer, 32) if record.has_memory else buffer.sample(32)
            batch = algorithm.prepare_batch("default_policy", drawn)
            update = algorithm.update_module("default_policy", batch, UpdateSettings(lr=1e-3))
            found.append({name: float(np.mean(value)) for name, value in update.items()})
        return found

    delay = {"policy_delay": 3} if algo in ("CrossQ", "TD3", "DDPG") else {}
    config = small_config(
        algo, space, store_buffer_in_checkpoints=True, num_steps_sampled_before_learning_starts=32, gamma=0.9, **delay
    )
    config.reporting(min_sample_timesteps_per_iteration=24)
    with config.build() as algorithm, config.copy().debugging(seed=9).build() as other:
        for _ in range(2):
            algorithm.train()
        other.train()
        state = algorithm.get_state()
        expected = learn(algorithm)
        assert learn(algorithm) != expected
        other.set_state(state)
        assert learn(other) == expected


@pytest.mark.parametrize(("algo", "space"), [form for form in OFF_POLICY_FORMS if form[0] != "CrossQ"])
def test_targets_become_the_networks_as_tau_says(algo: str, space: str) -> None:
    delay = {"policy_delay": 1} if algo in ("TD3", "DDPG") else {}
    moved = {}
    for tau in (1.0, 0.25):
        settings = {"tau": tau, "target_network_update_freq": 0, "num_steps_sampled_before_learning_starts": 32}
        with small_config(algo, space, **settings, **delay).build() as algorithm:
            before = copy.deepcopy(algorithm.get_module().state_dict())
            algorithm.train()
            after = algorithm.get_module().state_dict()
        names = [name for name in after if name.startswith("target_")]
        assert names
        same = [torch.equal(after[name], after[name.removeprefix("target_")]) for name in names]
        moved[tau] = [not torch.equal(after[name], before[name]) for name in names]
        assert all(same) if tau == 1 else not all(same)
    assert all(any(each) for each in at_least(1, moved.values()))


# Learners shuffle only their own parts of a batch, so they take the minibatches of one learner if each is a whole part.
WHOLE_PARTS: dict[str, dict[str, Any]] = {
    "PPO": {"minibatch_size": None},
    "PQN": {"minibatch_size": None},
    "APPO": {"circular_buffer_iterations_per_batch": 1},  # a second one would begin before the first one is received
    "DQN": {**PRIORITIZED, "dueling": True, "n_step": 3},
}


@pytest.mark.slow
@pytest.mark.parametrize(("algo", "space"), [form for form in FORMS if form[0] != "CrossQ"])  # whose batches normalise
def test_learners_together_take_the_steps_of_one(algo: str, space: str) -> None:
    def weights(num_learners: int) -> dict[str, Any]:
        config = small_config(algo, space, **WHOLE_PARTS.get(algo, {}))
        size = config.train_batch_size_per_learner // max(1, num_learners)
        config.training(train_batch_size_per_learner=size)
        if algo in ON_POLICY:  # one update per iteration: others are made while the next batch is sampled
            config.reporting(min_sample_timesteps_per_iteration=0)
        with config.learners(num_learners=num_learners).engine("process").build() as algorithm:
            for _ in range(3):
                algorithm.train()
            return {name: value.numpy().copy() for name, value in algorithm.get_module().state_dict().items()}

    one, two = weights(0), weights(2)
    for name, value in one.items():
        np.testing.assert_allclose(two[name], value, rtol=1e-4, atol=1e-5, err_msg=name)


OFF_POLICY: list[tuple[dict[str, Any], str]] = [
    ({"replay_buffer_config": {"capacity": 10}}, "capacity=10 is less than train_batch_size_per_learner"),
    ({"replay_buffer_config": {"kapacity": 16}}, "unknown setting 'kapacity'"),
    ({"replay_buffer_config": {"alpha": 0.5}}, "alpha=0.5 contradicts type='uniform'"),
    ({"training_intensity": 0}, "training_intensity=0 must be positive, 'auto' or None"),
    ({"tau": 0}, "tau=0 must be in (0, 1]"),
    ({"n_step": 0}, "n_step=0 must be at least 1"),
    ({"n_step": (5, 2)}, "n_step=(5, 2): the first number must not be larger than the second"),
    ({"n_step": [0, 2]}, "n_step=[0, 2]: 0 must be at least 1"),
    ({"target_network_update_freq": -1}, "target_network_update_freq=-1 must be at least 0"),
]
OF_ACTOR = [({"actor_lr": -1.0}, "actor_lr")]
OF_TD3 = [
    ({"policy_delay": 0}, "policy_delay=0 must be"),
    ({"target_noise": -0.1}, "target_noise=-0.1"),
    ({"target_noise_clip": -1.0}, "target_noise_clip"),
]
OF_IMPALA = [
    ({"broadcast_interval": 0}, "broadcast_interval=0 must be at least 1"),
    ({"broadcast_interval": 4, "max_lag": 2}, "max_lag=2 drops all fragments, because broadcast_interval=4"),
    ({"lambda_": 1.5}, "lambda_=1.5"),
    (
        {"circular_buffer_num_batches": 4, "use_circular_buffer": False},
        "circular_buffer_num_batches=4 has no effect without use_circular_buffer=True",
    ),
]
REFUSED: dict[str, list[tuple[dict[str, Any], str]]] = {
    "PPO": [
        ({"clip_param": 0.0}, "clip_param=0.0"),
        ({"kl_target": 0.01}, "kl_target=0.01"),
        ({"kl_band": 2}, "kl_band=2.0 has no effect without kl_target"),
        ({"target_kl": 0.0}, "target_kl"),
    ],
    "PQN": [
        ({"lambda_": 1.5}, "lambda_=1.5"),
        ({"minibatch_size": 4096}, "minibatch_size=4096 is larger than train_batch_size_per_learner=256"),
    ],
    "IMPALA": OF_IMPALA,
    "APPO": [
        *OF_IMPALA,
        ({"clip_param": 0.0}, "clip_param"),
        ({"kl_target": 0.1}, "kl_target=0.1 has no effect without use_kl_loss=True"),
        ({"learner_queue_size": 5}, "learner_queue_size=5 has no effect without sample_async=True and no circular"),
    ],
    "DQN": [
        *OFF_POLICY,
        ({"num_atoms": 0}, "num_atoms=0 must be at least 1"),
        ({"num_atoms": 5, "v_min": 3.0, "v_max": 3.0}, "v_min=3.0 must be below v_max=3.0"),
        ({"sigma0": -1.0}, "sigma0=-1.0 must be at least 0"),
    ],
    "SAC": [
        *OFF_POLICY,
        *OF_ACTOR,
        ({"initial_alpha": 0.0}, "initial_alpha=0.0 must be positive"),
        ({"alpha_lr": [(10, 1e-3)]}, "the first step"),
    ],
    "TQC": [
        *OFF_POLICY,
        *OF_ACTOR,
        ({"num_critics": 0}, "num_critics=0 must be at least 1"),
        ({"num_quantiles": 0}, "num_quantiles=0 must be at least 1"),
        ({"num_dropped_quantiles": -1}, "num_dropped_quantiles=-1 must be at least 0"),
    ],
    "CrossQ": [
        *OFF_POLICY,
        *OF_ACTOR,
        ({"num_critics": 0}, "num_critics=0 must be at least 1"),
        ({"policy_delay": 0}, "policy_delay=0 must be at least 1"),
    ],
    "TD3": [*OFF_POLICY, *OF_ACTOR, *OF_TD3],
    "DDPG": [*OFF_POLICY, *OF_ACTOR, *OF_TD3],
    "DreamerV3": [
        *(refused for refused in OFF_POLICY if "n_step" not in refused[0]),
        *OF_ACTOR,
        ({"n_step": 2}, "n_step=2 has no effect on DreamerV3"),
        ({"burn_in_len": 2}, "burn_in_len=2: DreamerV3 learns from all steps"),
        ({"horizon": 0}, "horizon=0 must be at least 1"),
        ({"model_size": "tiny"}, "model_size='tiny' must be"),
        ({"grad_clip": {"critic": 0.0}}, "grad_clip"),
        ({"grad_clip": {"critics": 1.0}}, "grad_clip: unknown setting 'critics'"),
    ],
}


@pytest.mark.parametrize("algo", TRAINING)
def test_settings_that_cannot_work_are_refused_before_anything_starts(algo: str) -> None:
    wrong = []
    for settings, message in REFUSED[algo]:
        try:
            small_config(algo).copy(**settings).build().stop()
        except ConfigError as error:
            if message not in str(error):
                wrong.append(f"{settings}: {error}")
        else:
            wrong.append(f"{settings}: not refused")
    assert not wrong, "\n".join(wrong)
