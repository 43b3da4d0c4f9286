"""DQN's losses on batches worked out by hand, how much it learns and when, and small envs that every form solves."""

from __future__ import annotations

import itertools
from functools import partial
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import small_configs
import torch
from gymnasium import spaces
from torch import Tensor, nn

from at_least import all_of
from corral import DQNConfig
from corral.algorithms.dqn import DQN, c51_loss, dqn_loss, projected
from corral.core.ids import DEFAULT_MODULE_ID
from corral.data.episodes.rollout import Rollout
from corral.errors import ConfigError
from corral.learners import numpy_q_learning
from corral.learners.losses import Batch
from corral.modules.q_module import DuelingHead, NoisyLinear, QModule
from corral.testing import CountingEnv, IdentityEnv, TimeLimitCorridor

OBS = spaces.Box(0, 10, (1,), np.float32)


class Table(nn.Module):
    """A row of outputs for each state; the state is the observation's first entry."""

    def __init__(self, rows: Any) -> None:
        super().__init__()
        self.rows = nn.Parameter(torch.as_tensor(rows, dtype=torch.float32))

    def forward(self, obs: Tensor) -> Tensor:
        return self.rows[obs[:, 0].long()]


class TableModule(QModule):
    """Q-values, or logits of atoms, from tables: `rows` of the network, `target_rows` of the target."""

    def make_network(self) -> nn.Module:
        return Table(self.model_config["rows"])


def tables(rows: Any, target_rows: Any, **settings: Any) -> TableModule:
    num_actions = len(rows[0]) // settings.get("num_atoms", 1)
    module = TableModule(OBS, spaces.Discrete(num_actions), {"rows": rows, **settings})
    module.target_q = Table(target_rows).requires_grad_(False)
    return module


def make_batch(**columns: Any) -> Batch:
    """Make a batch of one step from state 0 by action 0 to state 1, or of several as the columns say."""
    size = max((len(column) for column in columns.values()), default=1)
    defaults = {
        "obs": np.zeros((size, 1), np.float32),
        "next_obs": np.ones((size, 1), np.float32),
        "actions": np.zeros(size, np.int64),
        "rewards": np.zeros(size, np.float32),
        "terminated": np.zeros(size, np.bool_),
        "discounts": np.full(size, 0.5, np.float32),
        "weights": np.ones(size, np.float32),
    }
    return {
        name: torch.as_tensor(np.asarray(columns.get(name, column), column.dtype)) for name, column in defaults.items()
    }


class TestTargets:
    Q, TARGET = [[1.0, 2.0], [5.0, 4.0]], [[0.0, 0.0], [10.0, 20.0]]

    @pytest.mark.parametrize(("double_q", "next_value"), [(False, 20.0), (True, 10.0)])
    def test_the_next_action_is_chosen_by_the_target_or_the_network(self, double_q: bool, next_value: float) -> None:
        batch = make_batch(rewards=[3.0])
        _, reported = dqn_loss(tables(self.Q, self.TARGET), batch, {}, double_q=double_q, huber=False)
        assert reported["td_error"].tolist() == [1.0 - (3.0 + 0.5 * next_value)]

    def test_a_terminated_step_bootstraps_nothing_and_a_truncated_one_does(self) -> None:
        batch = make_batch(rewards=[3.0, 3.0], terminated=[True, False], discounts=[0.5, 0.25])
        _, reported = dqn_loss(tables(self.Q, self.TARGET), batch, {}, double_q=False, huber=False)
        assert reported["td_error"].tolist() == [1 - 3, 1 - (3 + 0.25 * 20)]

    def test_the_loss_weighs_rows_and_is_linear_far_away(self) -> None:
        module = tables(self.Q, self.TARGET)
        batch = make_batch(actions=[0, 1], rewards=[1.5, 12.0], terminated=[True, True], weights=[1.0, 0.5])
        loss, _ = dqn_loss(module, batch, {}, double_q=False, huber=True)
        assert loss.item() == pytest.approx((0.5 * 0.5**2 + 0.5 * (10 - 0.5)) / 2)
        loss.backward()
        assert module.q.rows.grad.tolist() == [[-0.5 / 2, -0.5 / 2], [0, 0]]
        loss, _ = dqn_loss(module, batch, {}, double_q=False, huber=False)
        assert loss.item() == pytest.approx((0.5**2 + 0.5 * 10**2) / 2)

    @pytest.mark.parametrize("double_q", [False, True])
    @pytest.mark.parametrize("td_error_loss_fn", ["huber", "mse"])
    def test_the_loss_has_the_settings_of_the_config(self, double_q: bool, td_error_loss_fn: str) -> None:
        module, batch = tables(self.Q, self.TARGET), make_batch(rewards=[3.0])
        with small_config(double_q=double_q, td_error_loss_fn=td_error_loss_fn).build() as algo:
            loss, _ = algo.make_loss(algo.config)(module, batch, {})
        error = 3.0 + 0.5 * (10.0 if double_q else 20.0) - 1.0
        assert loss.item() == pytest.approx(error - 0.5 if td_error_loss_fn == "huber" else error**2)

    def test_what_is_reported(self) -> None:
        batch = make_batch(actions=[0, 1])
        _, reported = dqn_loss(tables(self.Q, self.TARGET), batch, {}, double_q=False, huber=True)
        assert {name: value.item() for name, value in reported.items() if not value.ndim} == {
            "qf_mean": 1.5,
            "qf_min": 1.0,
            "qf_max": 2.0,
        }


@pytest.mark.parametrize("num_atoms", [1, 5])
def test_every_batch_is_learned_with_new_noise_in_network_and_target(num_atoms: int) -> None:
    module = QModule(OBS, spaces.Discrete(2), {"noisy": True, "num_atoms": num_atoms, "fcnet_hiddens": [8]})
    batch, found = make_batch(), []
    for _ in range(2):
        if num_atoms == 1:
            dqn_loss(module, batch, {}, double_q=True, huber=False)
        else:
            c51_loss(module, batch, {}, double_q=True)
        found.append([module.q_values(batch["next_obs"], target=target) for target in (False, True)])
    assert not any(itertools.starmap(torch.equal, zip(*found, strict=True)))


@pytest.mark.parametrize(
    ("settings", "takes_it"),
    [
        ({}, True),
        ({"td_error_loss_fn": "mse", "double_q": False}, True),
        *(
            (form, False)
            for form in (
                {"num_atoms": 5},
                {"noisy": True},
                {"dueling": True},
                {"optimizer": torch.optim.Adagrad},
                {"num_epochs": 2},
            )
        ),
    ],
    ids=str,
)
def test_small_plain_networks_are_trained_in_numpy(
    settings: dict[str, Any], takes_it: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    compute, calls = numpy_q_learning.dqn_loss_in_numpy, []

    def counted(*args: Any, **kwargs: Any) -> Any:
        calls.append(args)
        return compute(*args, **kwargs)

    monkeypatch.setattr(numpy_q_learning, "dqn_loss_in_numpy", counted)
    with small_config(CountingEnv, **settings).build() as algo:
        algo.train()
    assert bool(calls) is takes_it


def test_a_run_in_numpy_equals_a_run_with_autograd(monkeypatch: pytest.MonkeyPatch) -> None:
    weights = []
    for _ in range(2):
        with small_config(CountingEnv).build() as algo:
            algo.train()
            weights.append({name: value.clone() for name, value in algo.get_module().state_dict().items()})
        monkeypatch.setattr(numpy_q_learning, "PLAIN_PARTS", frozenset())  # nothing is plain: autograd does the rest
    for name, value in weights[0].items():
        torch.testing.assert_close(value, weights[1][name], rtol=1e-4, atol=1e-5)


class TestAtoms:
    ATOMS = torch.linspace(-1, 1, 5)

    def test_returns_on_atoms_stay_there(self) -> None:
        probs = torch.tensor([[0.1, 0.2, 0.3, 0.4, 0.0]])
        torch.testing.assert_close(projected(self.ATOMS.expand(1, 5), probs, self.ATOMS), probs)

    def test_returns_between_atoms_are_shared_and_returns_beyond_the_bounds_are_clipped(self) -> None:
        returns = torch.tensor([[-0.4, 7.0, -7.0, 0.25, 1.0]])
        probs = torch.tensor([[0.5, 0.1, 0.2, 0.1, 0.1]])
        expected = torch.tensor([[0.2, 0.4, 0.1 + 0.05, 0.05, 0.1 + 0.1]])
        torch.testing.assert_close(projected(returns, probs, self.ATOMS), expected)

    def test_mass_and_mean_are_kept_within_the_ends(self) -> None:
        torch.manual_seed(0)
        returns, probs = torch.rand(20, 5) * 2 - 1, torch.rand(20, 5).softmax(-1)
        moved = projected(returns, probs, self.ATOMS)
        torch.testing.assert_close(moved.sum(-1), torch.ones(20))
        torch.testing.assert_close(moved @ self.ATOMS, (returns * probs).sum(-1))

    @pytest.mark.parametrize("double_q", [False, True])
    def test_the_loss_is_the_cross_entropy_to_the_target(self, double_q: bool) -> None:
        log = np.log
        # Action 0 of state 1 is best for the network, action 1 for the target.
        rows = [[*log([0.2, 0.3, 0.5]), *log([0.6, 0.2, 0.2])], [*log([0.1, 0.1, 0.8]), *log([0.8, 0.1, 0.1])]]
        target = [[0.0] * 6, [*log([0.5, 0.25, 0.25]), *log([0.1, 0.2, 0.7])]]
        module = tables(rows, target, num_atoms=3, v_min=-1.0, v_max=1.0)
        batch = make_batch(rewards=[0.0], discounts=[1.0])
        loss, reported = c51_loss(module, batch, {}, double_q=double_q)
        with small_config(num_atoms=3, double_q=double_q).build() as algo:
            assert algo.make_loss(algo.config)(module, batch, {})[0].item() == loss.item()
        probs = [0.5, 0.25, 0.25] if double_q else [0.1, 0.2, 0.7]
        assert loss.item() == pytest.approx(-np.dot(probs, log([0.2, 0.3, 0.5])), rel=1e-5)
        assert reported["qf_mean"].item() == pytest.approx(0.5 - 0.2)
        _, reported = c51_loss(module, make_batch(rewards=[1.0], terminated=[True]), {}, double_q=double_q)
        assert reported["td_error"].item() == pytest.approx(-log(0.5), rel=1e-5)
        batch = make_batch(rewards=[1.0, -1.0], terminated=[True, True], weights=[1.0, 0.25])
        loss, reported = c51_loss(module, batch, {}, double_q=double_q)
        assert reported["td_error"].tolist() == pytest.approx([-log(0.5), -log(0.2)], rel=1e-5)
        assert loss.item() == pytest.approx((-log(0.5) - 0.25 * log(0.2)) / 2, rel=1e-5)

    @pytest.mark.parametrize("double_q", [False, True])
    def test_the_next_action_is_one_that_the_next_observation_allows(self, double_q: bool) -> None:
        obs = spaces.Dict(action_mask=spaces.MultiBinary(2), observations=OBS)
        module = QModule(obs, spaces.Discrete(2), {"num_atoms": 3, "v_min": -1.0, "v_max": 1.0, "fcnet_hiddens": [4]})
        next_obs = {"action_mask": torch.tensor([[1, 0], [0, 1]]), "observations": torch.ones(2, 1)}
        batch = make_batch(rewards=[0.0, 0.0], discounts=[1.0, 1.0])
        # Each observation allows only the other action than the one after it.
        batch |= {"obs": {**next_obs, "action_mask": 1 - next_obs["action_mask"]}, "next_obs": next_obs}
        outputs: dict[str, Tensor] = {}
        c51_loss(module, batch, {}, double_q=double_q, outputs=outputs)
        probs = module.logits(next_obs, target=True).softmax(-1)
        torch.testing.assert_close(outputs["targets"], probs[[0, 1], [0, 1]])

    def test_rows_count_by_their_weights(self) -> None:
        # Row 0 terminates with a return of 1, row 1 with a return of -1: one atom each, so minus its log-probability.
        rows = [[*np.log([0.2, 0.3, 0.5]), 0.0, 0.0, 0.0]] * 2
        module = tables(rows, rows, num_atoms=3, v_min=-1.0, v_max=1.0)
        batch = make_batch(rewards=[1.0, -1.0], terminated=[True, True], weights=[1.0, 0.25])
        loss, reported = c51_loss(module, batch, {}, double_q=False)
        errors = -np.log([0.5, 0.2])
        np.testing.assert_allclose(reported["td_error"], errors, rtol=1e-5)
        assert loss.item() == pytest.approx((errors[0] + 0.25 * errors[1]) / 2, rel=1e-5)


@pytest.mark.parametrize("num_atoms", [1, 5])
def test_each_loss_draws_new_noise_for_both_networks(num_atoms: int) -> None:
    """Fortunato et al. 2018, section 3.1: the noise of an update is independent in the network and in the target."""
    module = QModule(OBS, spaces.Discrete(3), {"fcnet_hiddens": [8], "noisy": True, "num_atoms": num_atoms})
    loss = c51_loss if num_atoms > 1 else partial(dqn_loss, huber=True)
    noises = []
    for _ in range(2):
        loss(module, make_batch(), {}, double_q=True)
        noises.append({name: noise.clone() for name, noise in module.named_buffers() if "noise" in name})
    assert any(name.startswith("q.") for name in noises[0])
    for name, noise in noises[0].items():
        assert not torch.equal(noise, noises[1][name]), name
        other = name.removeprefix("target_")
        assert other == name or not torch.equal(noise, noises[0][other]), name


def small_config(env: Any = IdentityEnv, **training: Any) -> Any:
    return small_configs.small_config("DQN", **training).environment(env)


PRIORITIZED = {"replay_buffer_config": {"type": "prioritized", "capacity": 2000}}
FORMS: dict[str, dict[str, Any]] = {
    "single": {"double_q": False},
    "dueling": {"dueling": True},
    "noisy": {"noisy": True, "training_intensity": 32, "lr": 1e-3},
    "prioritised": PRIORITIZED,
    "soft target": {"target_network_update_freq": 0, "tau": 0.05},
    "n-step": {"n_step": 3},
    "n-steps of a range": {"n_step": (1, 3)},
    "atoms": {"num_atoms": 11, "v_min": 0.0, "v_max": 3.0},
    "mse": {"td_error_loss_fn": "mse"},
    "rainbow": {
        "dueling": True,
        "noisy": True,
        "num_atoms": 11,
        "v_min": 0.0,
        "v_max": 3.0,
        "n_step": 2,
        **PRIORITIZED,
    },
}


# The others alone are parts of the rainbow, or have their losses compared with slow loops above.
FAST_FORMS = ("soft target", "n-steps of a range", "mse", "rainbow")


@pytest.mark.parametrize(
    "form", [pytest.param(form, marks=[] if form in FAST_FORMS else pytest.mark.slow) for form in FORMS]
)
def test_every_form_solves_the_identity_env(form: str) -> None:
    training = {**FORMS[form]}
    config = small_config(**training)
    if form in ("noisy", "rainbow"):
        config.exploration_config = {}
    with config.build() as algo:
        for _ in range(30):
            algo.train()
            right = [algo.compute_single_action(obs, explore=False) == obs for obs in range(4)]
            if all(right) and algo.training_iteration >= 5:
                break
        assert all_of(right)


@pytest.mark.slow_cases("1-same_step", "3-next_step")
@pytest.mark.parametrize("mode", ["next_step", "same_step"])
@pytest.mark.parametrize("n_step", [1, 3])
def test_the_value_under_a_time_limit_matches_the_endless_task(mode: str, n_step: int) -> None:
    config = small_config(TimeLimitCorridor, gamma=0.8, n_step=n_step, target_network_update_freq=20, lr=1e-2)
    with config.env_runners(autoreset_mode=mode, num_envs_per_env_runner=2).build() as algo:
        for _ in range(30):
            result = algo.train()
        assert result["learners"][DEFAULT_MODULE_ID]["qf_mean"] == pytest.approx(1 / (1 - 0.8), rel=0.05)


class TestRing:
    def updates(self, algo: DQN, num_rounds: int) -> list[int]:
        """Return how many updates each of some rounds made."""
        counts = []
        for _ in range(num_rounds):
            before = algo.learner_group.weights_version
            algo.training_step()
            counts.append(algo.learner_group.weights_version - before)
        return counts

    def config(self, **training: Any) -> DQNConfig:
        # Episodes that do not end within the test, so that every row is a step.
        config = small_config(CountingEnv, num_steps_sampled_before_learning_starts=8, **training)
        return config.environment(env_config={"episode_length": 1000}, disable_env_checking=True)

    def test_at_the_natural_ratio_every_round_makes_one_update(self) -> None:
        with self.config().build() as algo:
            assert self.updates(algo, 4) == [0, 1, 1, 1]
            assert (len(algo.local_replay_buffer), algo.num_env_steps_sampled_lifetime) == (16, 16)

    @pytest.mark.parametrize(
        ("training_intensity", "counts"),
        [(8, [0, 1, 1, 1, 1]), (4, [0, 0, 1, 0, 1]), (24, [0, 3, 3, 3, 3]), (12, [0, 1, 2, 1, 2])],
    )
    def test_a_set_ratio_counts_steps_trained_for_each_step_sampled(
        self, training_intensity: float, counts: list[int]
    ) -> None:
        with self.config(training_intensity=training_intensity).build() as algo:
            assert self.updates(algo, 5) == counts

    def test_a_set_ratio_counts_the_steps_of_all_learners(self) -> None:
        with self.config(training_intensity=24).build() as algo:
            record = algo.modules[DEFAULT_MODULE_ID]
            record.config = record.config.copy(num_learners=3)  # whose batch is three times as large
            assert self.updates(algo, 5) == [0, 1, 1, 1, 1]

    @pytest.mark.parametrize(
        ("rollout_fragment_length", "training_intensity", "counts"),
        [(4, "auto", [3, 3, 3]), (4, None, [1, 1, 1]), ("auto", "auto", [0, 0, 3]), ("auto", None, [0, 0, 1])],
    )
    def test_by_default_there_are_as_many_updates_per_env_step_for_any_number_of_sub_envs(
        self, rollout_fragment_length: Any, training_intensity: Any, counts: list[int]
    ) -> None:
        assert DQNConfig().training_intensity == "auto"
        config = self.config(training_intensity=training_intensity)
        config.env_runners(num_envs_per_env_runner=3, rollout_fragment_length=rollout_fragment_length)
        with config.build() as algo:
            assert self.updates(algo, 3) == counts

    def test_by_default_fractions_of_updates_are_carried_over(self) -> None:
        config = self.config().environment(env_config={"episode_length": 6})
        with config.env_runners(batch_mode="complete_episodes").build() as algo:
            assert self.updates(algo, 5) == [0, 1, 2, 1, 2]

    def test_several_sub_envs_sample_more_in_a_round(self) -> None:
        config = self.config(training_intensity=8).env_runners(num_envs_per_env_runner=4)
        with config.build() as algo:
            assert self.updates(algo, 3) == [4, 4, 4]
            assert len(algo.local_replay_buffer) == 48

    def test_a_result_is_the_mean_over_all_updates_of_an_iteration(self) -> None:
        losses: list[float] = []

        def note(result: Any) -> None:
            losses.append(result["total_loss"])

        config = self.config(training_intensity=24).callbacks(on_update_end=note)
        with config.reporting(min_sample_timesteps_per_iteration=12).build() as algo:
            result = algo.train()["learners"]["default_policy"]
        assert len(losses) == 6  # three per round, from the second one on
        assert result["total_loss"] == pytest.approx(np.mean(losses))

    @pytest.mark.parametrize("tau", [1.0, "auto"])
    def test_the_target_is_copied_at_its_frequency(self, tau: Any) -> None:
        with self.config(target_network_update_freq=12, tau=tau).build() as algo:
            same = []
            for _ in range(8):
                algo.training_step()
                module = algo.get_module()
                pairs = zip(module.q.parameters(), module.target_q.parameters(), strict=True)
                same.append(all(torch.equal(one, other) for one, other in pairs))
            # Steps 4 (nothing learned), 8 (learned), 12 (copied), 16, 20, 24 (copied), 28, 32.
            assert same == [True, False, True, False, False, True, False, False]

    def test_the_frequency_counts_from_the_last_update_of_the_target(self) -> None:
        config = self.config(target_network_update_freq=12).training(num_steps_sampled_before_learning_starts=24)
        with config.build() as algo:
            moved = []
            for _ in range(10):
                before = algo.get_module().target_q.state_dict()["head.weight"].clone()
                algo.training_step()
                moved.append(not torch.equal(algo.get_module().target_q.state_dict()["head.weight"], before))
            assert [4 * index for index, has_moved in enumerate(moved, 1) if has_moved] == [24, 36]

    @pytest.mark.parametrize(
        ("tau", "share", "is_normalized"), [(0.25, 0.25, True), ("auto", 0.03, True), ("auto", 0.01, False)]
    )
    def test_the_target_moves_by_tau_after_every_gradient_step(
        self, tau: Any, share: float, is_normalized: bool
    ) -> None:
        config = self.config(target_network_update_freq=0, tau=tau, training_intensity=8)
        config.rl_module(model_config={"fcnet_hiddens": [8], "use_layernorm": is_normalized})
        with config.build() as algo:
            module = algo.get_module()
            for _ in range(4):
                before = [target.detach().clone() for target in module.target_q.parameters()]
                algo.training_step()
                for old, target, new in zip(before, module.target_q.parameters(), module.q.parameters(), strict=True):
                    torch.testing.assert_close(target.detach(), old + share * (new.detach() - old))

    def test_schedules_follow_the_env_steps(self) -> None:
        weights: list[Any] = []

        def note(train_batch: Any) -> None:
            weights.append(train_batch["weights"].copy())

        buffer = {"type": "prioritized", "capacity": 64, "beta": [[0, 0.0], [40, 0.0], [44, 1.0]]}
        config = self.config(lr=[[0, 1e-2], [40, 1e-2], [44, 1e-3]], replay_buffer_config=buffer)
        with config.callbacks(on_learn_on_batch=note).build() as algo:
            lrs = [algo.training_step().get("default_policy", {}) for _ in range(12)]
            assert [lr["default_optimizer_learning_rate"] for lr in lrs[1:]] == 9 * [1e-2] + 2 * [1e-3]
        assert all_of((weight == 1).all() for weight in weights[:9]) and not (weights[9] == 1).all()

    @pytest.mark.parametrize("num_env_runners", [2])
    def test_runners_of_an_engine_fill_one_buffer(self, num_env_runners: int) -> None:
        config = self.config(training_intensity=8).env_runners(num_env_runners=num_env_runners).engine("local")
        with config.build() as algo:
            assert self.updates(algo, 2) == [2, 2]
            assert len(algo.local_replay_buffer) == 16

    def test_transitions_of_several_steps_continue_over_the_fragments_of_each_runner(self) -> None:
        with self.config().env_runners(num_env_runners=2).engine("local").build() as algo:
            for _ in range(3):
                algo.training_step()
            batch = algo.local_replay_buffer.sample(2000, n_step=3)
        _, first = np.unique(batch["indices"], return_index=True)
        counts = np.bincount(batch["num_steps"][first])
        assert counts.tolist() == [0, 2, 2, 20]  # only the two newest rows of each runner have fewer steps


class TestStorage:
    def test_stacks_of_frames_are_kept_once(self) -> None:
        sizes = []
        for frame_stack in (1, 4):
            config = small_config(replay_buffer_config={"frame_stack": frame_stack, "capacity": 500})
            config.environment(CountingEnv, wrappers=[partial(gym.wrappers.FrameStackObservation, stack_size=4)])
            with config.build() as algo:
                assert np.isfinite(algo.train()["learners"][DEFAULT_MODULE_ID]["total_loss"])
                batch = algo.local_replay_buffer.sample(64)
                sizes.append(algo.local_replay_buffer.nbytes)
            assert batch["obs"].shape == (64, 4, 2)
            # The env counts: one frame follows on another, in the observation and from it to the next.
            moved = batch["next_obs"][:, -1, 1] - batch["obs"][:, -1, 1]
            assert (moved == batch["num_steps"]).all()
            assert (batch["next_obs"][:, -2] == batch["obs"][:, -1]).all()
        assert sizes[1] < 0.55 * sizes[0]  # the other columns stay as they are

    def test_columns_may_lie_in_files(self, tmp_path: Any) -> None:
        config = small_config(replay_buffer_config={"directory": str(tmp_path), "capacity": 500})
        with config.build() as algo:
            assert np.isfinite(algo.train()["learners"][DEFAULT_MODULE_ID]["total_loss"])
            assert list(tmp_path.iterdir()) == []  # they have no names, and are gone with the buffer


class TestState:
    @pytest.mark.parametrize("with_buffer", [True, False])
    def test_a_restored_run_continues(self, with_buffer: bool, tmp_path: Any) -> None:
        config = small_config(store_buffer_in_checkpoints=with_buffer, training_intensity=5, **PRIORITIZED)
        with config.build() as one, config.build() as other:
            one.train()
            other.restore_from_path(one.save(tmp_path / "checkpoint"))
            assert len(other.local_replay_buffer) == (len(one.local_replay_buffer) if with_buffer else 0)
            assert (other._update_credit, other._target_updated_at) == (one._update_credit, one._target_updated_at)
            if with_buffer:
                ours, theirs = (algo.local_replay_buffer.sample(8) for algo in (one, other))
                np.testing.assert_array_equal(ours["indices"], theirs["indices"])
                np.testing.assert_array_equal(ours["obs"], theirs["obs"])
                return
            versions = []
            for _ in range(2):  # 64 steps fill the buffer again before it learns
                other.training_step()
                versions.append(other.learner_group.weights_version)
            assert versions[0] == versions[1]

    def test_epsilon_continues_where_it_was(self, tmp_path: Any) -> None:
        config = small_config()
        with config.build() as one, config.build() as other:
            for _ in range(3):
                epsilon = one.train()["env_runners"]["epsilon"]
            assert epsilon < 0.5
            other.restore_from_path(one.save(tmp_path / "checkpoint"))
            assert other.train()["env_runners"]["epsilon"] < epsilon


class TestEvents:
    def test_their_order_in_an_iteration(self) -> None:
        trace: list[str] = []
        names = ("on_sample_end", "on_learn_on_batch", "on_gradients", "on_update_end", "on_train_result")
        config = small_config(num_steps_sampled_before_learning_starts=8, training_intensity=16)
        config.reporting(min_sample_timesteps_per_iteration=8)
        config.callbacks(**{name: lambda name=name, **_: trace.append(name) for name in names})
        with config.build() as algo:
            algo.train()
        update = ["on_learn_on_batch", "on_gradients", "on_update_end"]
        assert trace == ["on_sample_end", "on_sample_end", *update, *update, "on_train_result"]

    def test_what_on_sample_end_changes_is_what_the_buffer_gets(self) -> None:
        def change(samples: Rollout) -> None:
            samples.rewards = samples.rewards + 10.0
            samples["bonus"] = np.full(samples.rewards.shape, 7.0)

        with small_config().callbacks(on_sample_end=change).build() as algo:
            algo.training_step()
            batch = algo.local_replay_buffer.sample(16)
        assert batch["rewards"].min() >= 10 and set(batch["bonus"]) == {7.0}

    def test_the_batch_has_indices_and_weights_and_can_be_changed(self) -> None:
        seen: list[dict[str, Any]] = []

        def note(train_batch: Any, result: dict[str, Any]) -> None:
            seen.append({name: np.array(train_batch[name]) for name in ("indices", "weights", "rewards", "next_obs")})
            train_batch["rewards"] = np.full(32, 5.0, np.float32)
            train_batch["discounts"] = np.zeros(32, np.float32)
            result["mine"] = 1.5

        config = small_config(num_steps_sampled_before_learning_starts=8, lr=0.05, **PRIORITIZED)
        with config.callbacks(on_learn_on_batch=note).build() as algo:
            for _ in range(4):
                result = algo.train()
        assert seen[0]["indices"].dtype == np.int64 and seen[0]["weights"].max() == 1.0
        assert result["learners"][DEFAULT_MODULE_ID]["mine"] == 1.5
        assert result["learners"][DEFAULT_MODULE_ID]["qf_mean"] == pytest.approx(5.0, abs=0.5)

    def test_priorities_follow_the_errors(self) -> None:
        config = small_config(num_steps_sampled_before_learning_starts=64, **PRIORITIZED)
        with config.build() as algo:
            algo.train()
            drawn = algo.local_replay_buffer.sample(512, beta=1.0)
        assert len(np.unique(drawn["weights"].round(6))) > 10

    def test_each_row_gets_the_priority_of_its_own_error(self) -> None:
        def reward_even_rows(train_batch: Any) -> None:
            train_batch["rewards"] = np.where(train_batch["indices"] % 2 == 0, 100.0, 0.0).astype(np.float32)
            train_batch["terminated"] = np.ones(len(train_batch["rewards"]), np.bool_)

        config = small_config(
            num_steps_sampled_before_learning_starts=64, training_intensity=64, lr=1e-5, **PRIORITIZED
        )
        with config.callbacks(on_learn_on_batch=reward_even_rows).build() as algo:
            algo.train()
            drawn = algo.local_replay_buffer.sample(512, beta=1.0)
        assert (drawn["indices"] % 2 == 0).mean() > 0.8


class TestBadInput:
    def test_box_actions_are_refused(self) -> None:
        with pytest.raises(ConfigError, match=r"EpsilonGreedy takes .*|Q-values need Discrete actions"):
            DQNConfig().environment("Pendulum-v1").build()

    def test_settings_of_the_networks_are_fixed(self) -> None:
        with (
            small_config().build() as algo,
            pytest.raises(ConfigError, match="dueling can only be set before building"),
        ):
            algo.reconfigure(dueling=True)

    def test_networks_are_built_as_the_config_says(self) -> None:
        config = DQNConfig(num_atoms=3, v_min=-2.0, v_max=4.0, noisy=True, sigma0=0.25)
        module: Any = config.module_spec(OBS, spaces.Discrete(2)).build()
        assert module.atoms.tolist() == [-2, 1, 4]
        assert module.logits(torch.zeros(5, 1)).shape == (5, 2, 3)
        for layer in (*module.q.streams, module.q.head):
            if isinstance(layer, NoisyLinear):
                size = layer.weight_mean.shape[1]
                torch.testing.assert_close(layer.weight_sigma, torch.full_like(layer.weight_sigma, 0.25 / size**0.5))
                torch.testing.assert_close(layer.bias_sigma, torch.full_like(layer.bias_sigma, 0.25 / size**0.5))
        assert module.is_noisy
        module = DQNConfig(dueling=True).module_spec(OBS, spaces.Discrete(2)).build()
        assert isinstance(module.q.head, DuelingHead) and not module.is_noisy
        module = DQNConfig().module_spec(OBS, spaces.Discrete(2)).build()
        assert isinstance(module.q.head, nn.Linear)

    def test_a_module_has_to_be_a_q_module(self) -> None:
        with pytest.raises(ConfigError, match=r"must be a subclass of corral.modules.q_module.QModule"):
            DQNConfig().environment("CartPole-v1").rl_module(nn.Module).build()

    def test_settings_of_other_modules_are_unknown(self) -> None:
        config = DQNConfig().environment("CartPole-v1").rl_module(model_config={"vf_share_layers": True})
        with pytest.raises(ConfigError, match="unknown setting 'vf_share_layers'"):
            config.build()


@pytest.mark.parametrize("config_explores", [True, False])
def test_actions_without_exploration_have_no_noise_of_layers(config_explores: bool) -> None:
    config = small_config(noisy=True, sigma0=20.0).env_runners(explore=config_explores)
    obs = np.repeat(np.arange(4), 25)

    def ever_differ(explore: bool | None) -> bool:
        return len({algo.compute_actions(obs, explore=explore).tobytes() for _ in range(10)}) > 1

    with config.build() as algo:
        assert ever_differ(True)
        assert not ever_differ(False)
        assert ever_differ(None) is config_explores  # asks the config


def test_actions_explore_as_the_runners_do_after_as_many_steps() -> None:
    epsilon = {"type": "EpsilonGreedy", "epsilon_schedule": [[0, 1.0], [40, 1.0], [41, 0.0]]}
    obs = np.zeros(400, np.int64)
    with small_config().exploration(exploration_config=epsilon).build() as algo:
        assert len(set(algo.compute_actions(obs).tolist())) == 4
        while algo.num_env_steps_sampled_lifetime <= 40:
            algo.training_step()
        assert len(set(algo.compute_actions(obs).tolist())) == 1


def test_a_custom_network_learns() -> None:
    config = small_config().rl_module(TableModule, model_config={"rows": np.zeros((4, 4)).tolist()})
    config.environment(env_config={"space": spaces.Discrete(4), "episode_length": 8}).environment(
        wrappers=[lambda env: WithVectorObs(env)]
    )
    with config.training(lr=0.1).build() as algo:
        for _ in range(8):
            algo.train()
        assert [algo.compute_single_action(np.float32([obs]), explore=False) for obs in range(4)] == [0, 1, 2, 3]


class WithVectorObs(gym.ObservationWrapper):  # type: ignore[type-arg]
    """Shows a Discrete observation as a vector of one entry."""

    def __init__(self, env: Any) -> None:
        super().__init__(env)
        self.observation_space = OBS

    def observation(self, observation: Any) -> Any:
        return np.float32([observation])
