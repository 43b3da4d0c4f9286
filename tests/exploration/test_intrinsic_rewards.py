"""Curiosity, RND and RE3: what they reward, where the rewards go, and what is left alone."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from explorers import FOUR, STATE, Explorer, SamplingConfig, rollout_of
from gymnasium import spaces

from at_least import all_of
from corral import PPOConfig
from corral.core.tree import map_tree
from corral.data.episodes.rollout import Rollout
from corral.exploration.base import overrides_method
from corral.exploration.distillation import Moments
from corral.exploration.intrinsic import next_observations
from corral.exploration.state_entropy import neighbour_distances
from corral.modules.threads import torch_threads
from corral.runners.runner import EnvRunner
from corral.runs.checkpoint.codec import decode, encode
from corral.testing import IDENTITY_ACTION_SPACES, CountingEnv, IdentityEnv

KINDS = ["Curiosity", "RND", "RE3"]
T, N = 32, 4


def walk(seed: int, action_space: Any = FOUR, distribution: Any = None, **columns: Any) -> Rollout:
    """Return a rollout in which the action says where the state moves."""
    rng = np.random.default_rng(seed)
    if distribution is None:
        actions = rng.integers(0, 4, (T, N))
        moves = (np.eye(4)[actions] - 0.25)[..., :3]
    else:
        actions = distribution.random(rng, T * N).reshape(T, N, *distribution.action_shape)
        moves = np.resize(actions.reshape(T, N, -1), (T, N, 3)) * 0.5
    obs = np.zeros((T + 1, N, 3), np.float32)
    for t in range(T):
        obs[t + 1] = 0.5 * obs[t] + moves[t]
    return rollout_of(obs, actions, **columns)


@pytest.mark.parametrize("name", IDENTITY_ACTION_SPACES)
def test_curiosity_learns_what_actions_do(name: str) -> None:
    space = IDENTITY_ACTION_SPACES[name]
    explorer = Explorer("Curiosity", space, feature_dim=16, lr=1e-2)
    rollout = walk(0, space, explorer.module.distribution)
    found = []
    for timestep in range(60):
        rollout.rewards[:] = 0.0
        found.append(explorer.exploration.learn([rollout], timestep=timestep))
        assert found[-1]["intrinsic_reward_mean"] == pytest.approx(rollout.rewards.mean(), rel=1e-5)
    assert found[-1].keys() == {"intrinsic_reward_mean", "forward_loss", "inverse_loss"}
    assert found[-1]["inverse_loss"] < 0.8 * found[0]["inverse_loss"]
    # Later it rises again, with the features that tell the actions apart.
    assert min(losses["forward_loss"] for losses in found) < 0.4 * found[0]["forward_loss"]


def test_curiosity_pays_half_the_squared_error_times_eta() -> None:
    rollouts = [walk(0), walk(0)]
    for eta, rollout in zip((1.0, 3.0), rollouts, strict=True):
        explorer = Explorer("Curiosity", feature_dim=16, eta=eta, lr=0.0)
        found = explorer.exploration.learn([rollout], timestep=0)
        assert rollout.rewards.mean() == pytest.approx(eta * found["forward_loss"], rel=1e-5)
    assert rollouts[1].rewards == pytest.approx(3 * rollouts[0].rewards)
    net = explorer.exploration.net
    obs, next_obs = (torch.from_numpy(part.reshape(-1, 3)) for part in (rollout.obs[:-1], rollout.obs[1:]))
    one_hot = torch.nn.functional.one_hot(torch.from_numpy(rollout.actions.reshape(-1)), 4)
    with torch.no_grad():
        expected = net.forward_model(torch.cat([net.features(obs), one_hot], -1))
        errors = 0.5 * (expected - net.features(next_obs)).square().sum(-1)
    assert rollouts[0].rewards.reshape(-1) == pytest.approx(errors.numpy(), rel=1e-4)


def test_curiosity_is_higher_where_it_has_not_been() -> None:
    explorer = Explorer("Curiosity", feature_dim=16)
    for timestep in range(100):
        explorer.exploration.learn([walk(timestep)], timestep=timestep)
    known, strange = walk(1000), walk(1000)
    strange.obs[1:] = strange.obs[:-1] - 3 * np.diff(strange.obs, axis=0)
    explorer.exploration.learn([known], timestep=1000)
    explorer.exploration.learn([strange], timestep=1001)
    assert strange.rewards.mean() > 5 * known.rewards.mean()


@pytest.mark.parametrize("normalize", [False, True])
def test_distillation_error_falls_on_seen_states_and_stays_on_others(normalize: bool) -> None:
    explorer = Explorer("RND", embed_dim=16, normalize=normalize)
    half = walk(0)
    half.obs[..., 0] = -np.abs(half.obs[..., 0])
    first, *_, last = [explorer.exploration.learn([half], timestep=t)["distillation_loss"] for t in range(80)]
    assert last < 0.05 * first
    other = walk(0)
    other.obs[..., 0] = 1.0
    assert explorer.exploration.learn([other], timestep=99)["distillation_loss"] > 10 * last


def test_the_target_of_distillation_does_not_learn() -> None:
    explorer = Explorer("RND", embed_dim=16)
    net = explorer.exploration.net
    before = {name: value.clone() for name, value in net.state_dict().items()}
    explorer.exploration.learn([walk(0)], timestep=0)
    changed = {name.split(".")[0] for name, value in net.state_dict().items() if not torch.equal(value, before[name])}
    assert changed == {"predictor", "count", "mean_0", "variance_0"}


def test_distillation_rewards_are_divided_by_the_deviation_of_their_discounted_sums() -> None:
    explorer = Explorer("RND", embed_dim=16, lr=0.0, intrinsic_reward_coeff=0.5)
    plain = Explorer("RND", embed_dim=16, lr=0.0, normalize=False)
    plain.exploration.net.load_state_dict(explorer.exploration.net.state_dict())
    sums, total = [], np.zeros(N)
    for seed, continues in ((0, False), (1, True), (2, False)):
        rollout = walk(seed, valid=np.random.default_rng(seed).random((T, N)) < 0.8)
        rollout.continues = continues
        errors = np.zeros((T, N))
        explorer.exploration.learn([rollout], timestep=0)
        with torch.no_grad():
            errors.reshape(-1)[:] = explorer.exploration.net(torch.from_numpy(rollout.obs[1:].reshape(-1, 3))).numpy()
        total = total if continues else np.zeros(N)
        for t in range(T):
            for n in range(N):
                if rollout.valid[t, n]:
                    total[n] = 0.99 * total[n] + errors[t, n]
                    sums.append(total[n])
        expected = np.where(rollout.valid, 0.5 * errors / np.std(sums), 0.0)
        assert rollout.rewards == pytest.approx(expected, rel=1e-4)


def test_observations_are_normalised_by_all_that_were_seen() -> None:
    explorer = Explorer("RND", embed_dim=16)
    seen = []
    for seed in range(3):
        rollout = walk(seed, valid=np.random.default_rng(seed).random((T, N)) < 0.8)
        explorer.exploration.learn([rollout], timestep=0)
        seen.append(rollout.obs[1:][rollout.valid])
    state = explorer.exploration.net.state_dict()
    assert state["mean_0"].numpy() == pytest.approx(np.concatenate(seen).mean(0), abs=1e-6)
    assert state["variance_0"].numpy() == pytest.approx(np.concatenate(seen).var(0), abs=1e-6)
    assert float(state["count"]) == sum(map(len, seen))


@pytest.mark.parametrize("normalize", [True, False])
def test_normalised_observations_are_clipped_at_five_deviations(normalize: bool) -> None:
    explorer = Explorer("RND", embed_dim=16, normalize=normalize)
    for seed in range(3):
        explorer.exploration.learn([walk(seed)], timestep=0)
    obs = torch.tensor([[4.0], [4.9], [6.0], [60.0], [-6.0], [-60.0]]).expand(6, 3)
    if normalize:
        state = explorer.exploration.net.state_dict()
        obs = (state["mean_0"] + obs * state["variance_0"].sqrt()).float()
    errors = explorer.exploration.net(obs).detach().numpy()
    assert abs(errors[0] - errors[1]) > 1e-4
    for one, other in ((2, 3), (4, 5)):
        assert bool(errors[one] == errors[other]) is normalize


def test_moments_of_parts_match_the_whole() -> None:
    values = np.random.default_rng(0).normal(5, 2, (100, 3))
    moments = Moments()
    for part in np.split(values, [1, 10, 60]):
        moments.update(part)
    assert (moments.count, moments.mean, moments.variance) == (
        100,
        pytest.approx(values.mean(0)),
        pytest.approx(values.var(0)),
    )


@pytest.mark.parametrize("kind", KINDS)
def test_small_nets_run_in_one_thread(kind: str) -> None:
    exploration = Explorer(kind).exploration
    found = []
    exploration.net.register_forward_hook(lambda *_: found.append(torch.get_num_threads()))
    with torch_threads(2):
        exploration.learn([walk(0)], timestep=0)
        assert torch.get_num_threads() == 2
    assert set(found) == {1}


def test_a_lone_state_is_rewarded_most() -> None:
    explorer = Explorer("RE3", k_nn=3, beta=0.5)
    rollout = walk(0)
    rollout.obs[:] = 0.01 * rollout.obs
    rollout.obs[7, 2] = 1.0
    explorer.exploration.learn([rollout], timestep=0)
    assert np.unravel_index(rollout.rewards.argmax(), (T, N)) == (6, 2)  # the step that led there
    assert rollout.rewards.max() > 10 * np.sort(rollout.rewards.reshape(-1))[-2]


def test_entropy_rewards_are_logarithms_of_distances() -> None:
    explorer = Explorer("RE3", k_nn=3, beta=0.5)
    rollout = walk(0)
    explorer.exploration.learn([rollout], timestep=0)
    with torch.no_grad():
        embeds = explorer.exploration.net(torch.from_numpy(rollout.obs[1:].reshape(-1, 3))).numpy()
    distances = np.sort(np.linalg.norm(embeds[:, None] - embeds, axis=-1))[:, 3]
    assert rollout.rewards.reshape(-1) == pytest.approx(0.5 * np.log(distances + 1), abs=1e-3)


def test_neighbours() -> None:
    points = np.random.default_rng(0).normal(5, 1, (600, 8)).astype(np.float32)
    points[100:120] = points[0]
    expected = np.sort(np.linalg.norm(points[:, None] - points, axis=-1))
    assert neighbour_distances(points, points, 5) == pytest.approx(expected[:, 5], abs=1e-5)
    assert neighbour_distances(points, points, 5)[0] == 0
    assert neighbour_distances(points[:2], points[:2], 50) == pytest.approx(np.linalg.norm(points[0] - points[1]))
    assert neighbour_distances(points[:1], points[:1], 50) == 0


def test_entropy_goes_by_what_it_remembers() -> None:
    """A rollout of one step has no neighbours of its own."""

    def step(place: float) -> float:
        rollout = rollout_of(np.full((2, 1, 3), place, np.float32), [[0]])
        explorer.exploration.learn([rollout], timestep=0)
        return float(rollout.rewards[0, 0])

    explorer = Explorer("RE3", k_nn=1, beta=1.0, memory_size=3)
    assert step(0.0) == 0
    assert step(1.0) > 0.1
    assert step(0.0) == 0
    assert step(0.5) > 0.1
    assert step(0.6) < step(1.5)
    assert step(0.0) > 0.1  # it is forgotten
    assert explorer.exploration.get_state()["memory"].shape == (3, 128)


def test_the_weight_of_entropy_decays() -> None:
    explorer = Explorer("RE3", beta=0.5, beta_schedule="linear_decay", rho=0.2)
    found = [explorer.exploration.learn([walk(0)], timestep=0)["re3_beta"] for _ in range(3)]
    assert found == pytest.approx([0.5, 0.4, 0.32])
    constant = Explorer("RE3", beta=0.5, rho=0.2).exploration
    assert [constant.learn([walk(0)], timestep=0)["re3_beta"] for _ in range(3)] == [0.5] * 3


@pytest.mark.parametrize("kind", KINDS)
def test_only_valid_steps_are_rewarded_and_learned_from(kind: str) -> None:
    valid = np.random.default_rng(0).random((T, N)) < 0.7
    clean, dirty = (walk(0, valid=valid, rewards=7.0) for _ in range(2))
    # Nothing of an invalid step is looked at, apart from the observation that the step before led to.
    dirty.actions[~valid] = 3
    dirty.rewards[~valid] = clean.rewards[~valid] = 0.0
    results = [Explorer(kind).exploration.learn([rollout], timestep=0) for rollout in (clean, dirty)]
    assert results[0] == results[1]
    assert np.array_equal(clean.rewards, dirty.rewards)
    assert np.all(clean.rewards[~valid] == 0)
    assert np.mean(clean.rewards[valid] > 7) > 0.9
    assert results[0]["intrinsic_reward_mean"] == pytest.approx(np.mean(clean.rewards[valid] - 7))


@pytest.mark.parametrize("kind", KINDS)
def test_rollouts_are_judged_together_and_may_be_read_only(kind: str) -> None:
    rollouts = [walk(0, rewards=1.0), walk(1, rewards=2.0)]
    before = []
    for rollout in rollouts:
        for column in rollout.columns.values():
            column.flags.writeable = False
        before.append(rollout.rewards)
    found = Explorer(kind).exploration.learn([*rollouts, walk(2, valid=False)], timestep=0)
    added = [rollout.rewards - old for rollout, old in zip(rollouts, before, strict=True)]
    assert np.mean(added) == pytest.approx(found["intrinsic_reward_mean"])
    assert [np.unique(old).tolist() for old in before] == [[1.0], [2.0]]


@pytest.mark.parametrize("kind", ["Curiosity", "RND"])
def test_few_steps_wait_for_a_gradient_step(kind: str) -> None:
    exploration, other = Explorer(kind).exploration, Explorer(kind).exploration
    whole = walk(0)
    parts = [
        rollout_of(whole.obs[t : t + 5], whole.actions[t : t + 4], rewards=0.0) for t in range(0, 32, 4)
    ]  # of 16 steps each
    weights = []
    for t, part in enumerate(parts[:4]):
        exploration.learn([part], timestep=t)
        assert np.all(part.rewards > 0)
        weights.append({k: v.clone() for k, v in exploration.net.state_dict().items() if k[:4] in ("pred", "feat")})
        if t == 1:
            other.set_state(decode(encode(exploration.get_state())))
    changed = [any(not torch.equal(now[k], before[k]) for k in now) for before, now in itertools.pairwise(weights)]
    assert changed == [False, False, True]
    for t, part in enumerate(parts[2:6], 2):
        part.rewards[:] = 0.0
        other.learn([part], timestep=t)
    for t, part in enumerate(parts[4:6], 4):
        before, part.rewards = part.rewards.copy(), np.zeros_like(part.rewards)
        exploration.learn([part], timestep=t)
        assert np.array_equal(part.rewards, before)


@pytest.mark.parametrize("kind", ["Curiosity", "RND"])
def test_a_state_replaces_the_steps_that_wait(kind: str) -> None:
    whole = walk(0)
    one, other = Explorer(kind).exploration, Explorer(kind).exploration
    for exploration, t in ((one, 0), (other, 8)):
        exploration.learn([rollout_of(whole.obs[t : t + 5], whole.actions[t : t + 4])], timestep=t)
    saved = one.get_state()
    other.set_state(saved)
    (kept,), (expected,) = other.get_state()["waiting"], saved["waiting"]
    assert all_of(map(np.array_equal, kept, expected))


@pytest.mark.parametrize(
    ("kind", "setting", "width", "nets"),
    [
        ("Curiosity", "feature_net_config", "feature_dim", ["features"]),
        ("RND", "distill_net_config", "embed_dim", ["target", "predictor"]),
        ("RE3", "encoder_net_config", "embeds_dim", [""]),
    ],
)
def test_the_settings_of_a_net_are_those_asked_for(kind: str, setting: str, width: str, nets: list[str]) -> None:
    config = {"fcnet_hiddens": [7, 5], "fcnet_activation": "elu"}
    net = Explorer(kind, **{setting: config, width: 9}).exploration.net
    for name in nets:
        parts = list(net.get_submodule(name).modules())
        assert [part.out_features for part in parts if isinstance(part, torch.nn.Linear)] == [7, 5, 9]
        assert sum(isinstance(part, torch.nn.ELU) for part in parts) == 2


def test_the_models_of_curiosity_have_settings_of_their_own() -> None:
    settings = {"inverse_net_hiddens": [7], "forward_net_hiddens": [6, 5], "inverse_net_activation": "elu"}
    net = Explorer("Curiosity", feature_dim=9, **settings).exploration.net
    found = []
    for model in (net.inverse_model, net.forward_model):
        parts = list(model.modules())
        widths = [part.out_features for part in parts if isinstance(part, torch.nn.Linear)]
        found.append((widths, sum(isinstance(part, torch.nn.ELU) for part in parts)))
    assert found == [([7, 4], 1), ([6, 5, 9], 0)]


@pytest.mark.parametrize("kind", KINDS)
def test_nothing_valid_is_nothing_learned(kind: str) -> None:
    explorer = Explorer(kind)
    assert explorer.exploration.learn([walk(0, valid=False)], timestep=0) == {}
    assert explorer.exploration.learn([], timestep=0) == {}
    assert explorer.exploration.get_state() == {}


@pytest.mark.parametrize("mode", ["next_step", "same_step"])
def test_the_last_step_of_an_episode_leads_to_its_own_end(mode: str) -> None:
    config = PPOConfig().environment(CountingEnv).env_runners(num_envs_per_env_runner=3, autoreset_mode=mode)
    runner = EnvRunner(config.debugging(seed=0).freeze())
    rollout = runner.sample(num_timesteps=60)
    runner.stop()
    found = next_observations(rollout)
    for t, n in np.argwhere(rollout.valid):
        assert np.array_equal(found[t, n], rollout.next_obs_at(t, n))
    ends = rollout.done & rollout.valid
    assert ends.any()
    assert np.all(found[ends][:, 1] == 3)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "space",
    [
        spaces.Discrete(5, start=2),
        spaces.MultiDiscrete([3, 4]),
        spaces.MultiBinary(4),
        spaces.Box(0, 255, (8, 8, 3), np.uint8),
        spaces.Dict({"b": spaces.Box(-1, 1, (2,), np.float32), "a": spaces.Tuple([FOUR, STATE])}),
    ],
    ids=["discrete", "multi_discrete", "multi_binary", "image", "dict"],
)
def test_any_observation_space(kind: str, space: spaces.Space[Any]) -> None:
    space.seed(0)
    rows = [map_tree(lambda *leaves: np.stack(leaves), *(space.sample() for _ in range(3))) for _ in range(9)]
    obs = map_tree(lambda *leaves: np.stack(leaves), *rows)
    rollout = rollout_of(np.zeros((9, 3)), np.zeros((8, 3), np.int64))
    rollout.columns["obs"] = obs
    rollout.add_final_obs(4, 1, map_tree(lambda leaf: leaf[0, 0], obs))
    config = {"encoder_net_config" if kind == "RE3" else "distill_net_config": {"fcnet_hiddens": [8]}}
    explorer = Explorer(kind, observation_space=space, **({} if kind == "Curiosity" else config))
    found = explorer.exploration.learn([rollout], timestep=0)
    assert np.isfinite(rollout.rewards).all()
    assert found["intrinsic_reward_mean"] > 0


@pytest.mark.parametrize("kind", KINDS)
def test_runners_have_no_nets_and_episodes_their_own_rewards(kind: str) -> None:
    config = PPOConfig().environment(CountingEnv).exploration(exploration_config={"type": kind})
    config.training(train_batch_size_per_learner=256, num_epochs=1).debugging(seed=0)
    seen = []
    config.callbacks(on_sample_end=lambda samples: seen.append(samples.rewards.copy()))
    with config.build() as algo:
        result = algo.train()
        runner: Any = algo.env_runner
        assert runner.exploration._net is None
        assert algo.exploration._net is not None  # type: ignore[attr-defined]
    assert result["env_runners"]["episode_return_mean"] == 1 + 2 + 3
    assert set(np.unique(seen)) == {0, 1, 2, 3}  # 0 where an env was reset
    assert result["exploration"]["intrinsic_reward_mean"] > 0
    assert result["timers"]["exploring_s"] > 0


@pytest.mark.slow
def test_rollouts_of_other_processes_are_rewarded() -> None:
    config = PPOConfig().environment(CountingEnv).exploration(exploration_config={"type": "RND"}).engine("process")
    config.env_runners(num_env_runners=2).training(train_batch_size_per_learner=256, num_epochs=1)
    with config.debugging(seed=0).build() as algo:
        result = algo.train()
    assert result["env_runners"]["episode_return_mean"] == 1 + 2 + 3
    assert result["exploration"]["intrinsic_reward_mean"] > 0


@pytest.mark.parametrize("kind", KINDS)
def test_the_state_is_all_that_learning_continues_from(kind: str) -> None:
    exploration = Explorer(kind).exploration
    for seed in range(3):
        exploration.learn([walk(seed)], timestep=seed)
    state = decode(encode(exploration.get_state()))
    other = Explorer(kind).exploration
    other.set_state(state)
    fresh, results = Explorer(kind).exploration, []
    for chosen in (exploration, other, fresh):
        rollout = walk(7)
        rollout.continues = True
        results.append((chosen.learn([rollout], timestep=9), rollout.rewards.tolist()))
    assert results[0] == results[1]
    assert results[0] != results[2]


def identity_rollout() -> Rollout:
    """Return a rollout as of `IdentityEnv`, whose observations are Discrete."""
    rng = np.random.default_rng(0)
    return rollout_of(rng.integers(0, 4, (9, 2)), rng.integers(0, 4, (8, 2)))


@pytest.mark.parametrize("kind", KINDS)
def test_a_checkpoint_holds_the_state(kind: str, tmp_path: Path) -> None:
    config = PPOConfig().environment(IdentityEnv).exploration(exploration_config={"type": kind})
    config.training(train_batch_size_per_learner=256, num_epochs=1).debugging(seed=0)
    with config.build() as algo, config.build() as other:
        algo.train()
        other.restore_from_path(algo.save(tmp_path / "checkpoint"))
        rollouts = [identity_rollout(), identity_rollout()]
        found = [a.exploration.learn([r], timestep=9) for a, r in zip((algo, other), rollouts, strict=True)]
    assert found[0] == found[1]
    assert np.array_equal(rollouts[0].rewards, rollouts[1].rewards)


def test_a_sub_exploration_acts() -> None:
    sub = {"type": "EpsilonGreedy", "epsilon_schedule": 1.0}
    explorer = Explorer("Curiosity", sub_exploration=sub)
    values = np.tile([0.0, 0.1, 0.3, 0.2], (200, 1))
    assert len(set(explorer.choose(values)[0])) == 4
    assert set(explorer.choose(values, explore=False)[0]) == {2}
    assert explorer.exploration.get_metrics(0) == {"epsilon": 1.0}


def test_the_algorithms_default_acts_where_no_other_is_named() -> None:
    class Greedy(SamplingConfig):
        DEFAULT_EXPLORATION = {"type": "EpsilonGreedy", "epsilon_schedule": 0.25}  # noqa: RUF012

    config = Greedy().environment(CountingEnv).exploration(exploration_config={"type": "RND"}).debugging(seed=0)
    with config.build() as algo:
        assert algo.train()["env_runners"]["epsilon"] == 0.25


def test_the_first_timesteps_are_random() -> None:
    explorer = Explorer("RND", random_timesteps=10)
    logits = np.tile([0.0, 0.0, 100.0, 0.0], (200, 1))
    actions, logp = explorer.choose(logits, timestep=9)
    assert len(set(actions)) == 4
    assert logp == pytest.approx(np.full(200, -np.log(4)))
    assert set(explorer.choose(logits, timestep=10)[0]) == {2}


def test_only_what_is_there_is_delegated() -> None:
    plain = Explorer("Curiosity").exploration
    assert not any(overrides_method(plain, name) for name in ("begin_episodes", "end_sample", "get_weights"))
    assert overrides_method(plain, "learn")
    box = spaces.Box(-1, 1, (2,), np.float32)
    sub = {"type": "OrnsteinUhlenbeckNoise", "random_timesteps": 0}
    noisy = Explorer("RE3", box, num_envs=2, sub_exploration=sub)
    assert overrides_method(noisy.exploration, "begin_episodes")
    noisy.choose(np.zeros((2, 4)))
    state = noisy.exploration.get_state()
    noisy.exploration.begin_episodes(np.ones(2, np.bool_), timestep=0, explore=True)
    assert np.all(noisy.exploration.get_state()["sub"]["ou_state"] == 0)
    noisy.exploration.set_state(state)
    assert np.all(noisy.exploration.get_state()["sub"]["ou_state"] != 0)
