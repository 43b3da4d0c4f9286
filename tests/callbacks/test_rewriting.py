"""Rewriting trajectories: what callbacks put into columns is what the learner trains on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from at_least import at_least
from corral import PPOConfig
from corral.algorithms.ppo import PPO
from corral.core.returns import gae
from corral.errors import CallbackError, ColumnError, LossError
from corral.testing import CountingEnv

Batch = dict[str, NDArray[Any]]


def config(num_envs: int = 2, batch_size: int = 16, mode: str = "next_step", **events: Any) -> PPOConfig:
    """PPO that takes one gradient step on the whole batch, in the order of the rollout, with nothing normalised."""
    config = PPOConfig().environment(CountingEnv, disable_env_checking=True)
    config.env_runners(num_envs_per_env_runner=num_envs, autoreset_mode=mode)
    config.training(train_batch_size_per_learner=batch_size, minibatch_size=None, num_epochs=1)
    config.training(normalize_advantages=False, gamma=0.9, lambda_=0.8)
    return config.debugging(seed=0).callbacks(**events)


def trained_on(**events: Any) -> tuple[Batch, Any]:
    """Return the batch that the learner was given in the first iteration, and the rollout it came from."""
    seen: dict[str, Any] = {}
    settings = {name: events.pop(name) for name in [*events] if not name.startswith("on_")}
    keep: dict[str, Callable[..., None]] = {
        "on_learn_on_batch": lambda train_batch: seen.update(batch=dict(train_batch)),
        "on_sample_end": lambda samples: seen.update(rollout=samples),
    }
    with config(**settings).callbacks(**events).add_callbacks(**keep).build() as algo:
        algo.train()
    return seen["batch"], seen["rollout"]


def expected_advantages(rollout: Any, rewards: NDArray[Any]) -> NDArray[Any]:
    """Work out the advantages of a rollout from rewards of its shape, with the values that the learner had."""
    with config().build() as algo:  # the same seed, so the same first weights
        assert isinstance(algo, PPO)
        values, next_values = rollout.compute_values(lambda obs: algo.learner_group.values("default_policy", obs))
    advantages, _ = gae(
        rewards, values, next_values, rollout.terminated, rollout.truncated, rollout.valid, gamma=0.9, lambda_=0.8
    )
    flat: NDArray[Any] = rollout.valid_rows(advantages)
    return flat


@pytest.mark.parametrize("mode", ["next_step", "same_step"])
@pytest.mark.parametrize(
    "how", ["in place", "replaced", "by attribute", "by episode", "by trajectory", "trajectory in place"]
)
def test_changed_rewards_change_the_advantages(how: str, mode: str) -> None:
    def on_sample_end(samples: Any) -> None:
        if how == "in place":
            samples.rewards[...] = -samples.rewards
        elif how == "replaced":
            samples["rewards"] = -samples["rewards"]
        elif how == "by attribute":
            samples.rewards = -samples.rewards
        elif how == "by episode":
            for episode in samples.episodes():
                episode.set_rewards(new_data=-episode.get_rewards())

    def on_postprocess_trajectory(postprocessed_batch: Any) -> None:
        if how == "by trajectory":
            postprocessed_batch["rewards"] = -postprocessed_batch["rewards"]
        elif how == "trajectory in place":
            postprocessed_batch["rewards"] *= -1

    before = trained_on(mode=mode)[1].rewards.copy()
    batch, rollout = trained_on(
        mode=mode, on_sample_end=on_sample_end, on_postprocess_trajectory=on_postprocess_trajectory
    )
    assert np.array_equal(rollout.rewards[rollout.valid], -before[rollout.valid])
    np.testing.assert_allclose(batch["advantages"], expected_advantages(rollout, -before), rtol=1e-5)


def test_the_reported_return_stays_the_return_of_the_env() -> None:
    results = []
    for events in ({}, {"on_sample_end": lambda samples: samples.rewards.fill(0.0)}):
        with config(**events).build() as algo:
            results.append(algo.train()["env_runners"]["episode_return_mean"])
    assert results == [6.0, 6.0]


@pytest.mark.parametrize("name", ["logp", "dist_inputs"])
def test_what_the_policy_said_can_be_changed(name: str) -> None:
    def change(samples: Any) -> None:
        samples[name] = samples[name] - np.float32(0.25)

    before, _ = trained_on()
    after, _ = trained_on(on_sample_end=change)
    np.testing.assert_allclose(after[name], before[name] - 0.25, rtol=1e-6)


@pytest.mark.parametrize("name", ["value_targets", "advantages", "values"])
def test_an_added_column_takes_the_place_of_a_computed_one_where_it_is_a_number(name: str) -> None:
    def change(samples: Any) -> None:
        column = np.full(samples.rewards.shape, np.nan)
        column[0] = 7.0
        samples[name] = column

    before, _ = trained_on()
    after, rollout = trained_on(on_sample_end=change)
    first = rollout.valid_rows(np.arange(len(rollout))[:, None].repeat(2, 1)) == 0
    assert after[name].dtype == before[name].dtype
    assert (after[name][first] == 7).all()
    assert np.array_equal(after[name][~first], before[name][~first])


def test_an_added_column_reaches_the_learner_with_the_others() -> None:
    def add(samples: Any) -> None:
        samples["step"] = samples.obs[:-1, :, 1].astype(np.int64)

    batch, _ = trained_on(on_sample_end=add)
    assert batch["step"].dtype == np.int64
    assert np.array_equal(batch["step"], batch["obs"][:, 1])


def test_a_column_added_for_some_trajectories_is_nan_for_the_others() -> None:
    def add(postprocessed_batch: Any, episode: Any) -> None:
        if episode.env_index == 1:
            postprocessed_batch["share"] = postprocessed_batch["rewards"] / 3

    batch, rollout = trained_on(on_postprocess_trajectory=add)
    of_env = rollout.valid_rows(np.broadcast_to(np.arange(2), rollout.valid.shape))
    assert np.isnan(batch["share"][of_env == 0]).all()
    np.testing.assert_allclose(batch["share"][of_env == 1], (batch["obs"][of_env == 1][:, 1] + 1) / 3)


def test_rollouts_with_and_without_an_added_column_make_one_batch() -> None:
    def add(samples: Any, env_runner: Any) -> None:
        if env_runner.worker_index == 2:
            samples["mark"] = np.ones((*samples.rewards.shape, 3), np.float32)

    seen: list[Batch] = []
    with (
        config(on_sample_end=add, on_learn_on_batch=lambda train_batch: seen.append(dict(train_batch)))
        .env_runners(num_env_runners=2)
        .engine("local")
        .build() as algo
    ):
        algo.train()
    marked = seen[0]["mark"]
    assert marked.shape == (16, 3)
    assert np.isnan(marked).sum() == (marked == 1).sum() == 24


def test_taking_steps_out_takes_them_out_of_the_batch() -> None:
    batch, rollout = trained_on(on_sample_end=lambda samples: samples.valid[0].fill(False))
    assert len(batch["advantages"]) == rollout.valid.sum() < 16


def test_a_trajectory_has_the_columns_of_its_episode() -> None:
    seen: list[dict[str, Any]] = []

    def look(**arguments: Any) -> None:
        seen.append(arguments)

    with config(on_postprocess_trajectory=look).build() as algo:
        algo.train()
    assert {(entry["agent_id"], entry["policy_id"]) for entry in seen} == {("default_agent", "default_policy")}
    assert [(e["episode"].env_index, len(e["episode"])) for e in seen] == [
        (0, 3),
        (0, 3),
        (0, 2),
        (1, 3),
        (1, 3),
        (1, 2),
    ]
    for entry in seen:
        batch, episode = entry["postprocessed_batch"], entry["episode"]
        assert entry["policies"] == {"default_policy": entry["env_runner"].module}
        assert np.array_equal(batch["obs"], episode.get_observations(slice(0, -1)))
        assert np.array_equal(batch["next_obs"], episode.get_observations(slice(1, None)))
        assert np.array_equal(batch["rewards"], np.arange(1, len(episode) + 1))
        assert batch["terminated"].tolist() == [False] * (len(episode) - 1) + [episode.is_terminated]
        assert len(batch["logp"]) == len(batch["dist_inputs"]) == len(batch["actions"]) == len(episode)
        policy, original = entry["original_batches"]["default_agent"]
        assert policy is entry["env_runner"].module
        assert np.array_equal(original["rewards"], batch["rewards"]) and original.keys() == batch.keys()


def test_original_batches_keep_what_was_sampled() -> None:
    pairs: list[tuple[float, float]] = []

    def zero(postprocessed_batch: Any) -> None:
        postprocessed_batch["rewards"] *= 0

    def compare(postprocessed_batch: Any, original_batches: Any) -> None:
        pairs.append((postprocessed_batch["rewards"].sum(), original_batches["default_agent"][1]["rewards"].sum()))

    trained_on(on_postprocess_trajectory=[zero, compare])
    assert pairs == [(0, 6), (0, 6), (0, 3)] * 2


class TestBatch:
    """The learner's own event."""

    def test_changes_of_the_train_batch_are_trained_on(self) -> None:
        def change(train_batch: Any) -> None:
            train_batch["advantages"] *= 0
            train_batch["value_targets"] = train_batch["values"].copy()

        with config(on_learn_on_batch=change).build() as algo:
            before = {name: value.copy() for name, value in algo.learner_group.get_weights()["default_policy"].items()}
            metrics = algo.train()["learners"]["default_policy"]
            after = algo.learner_group.get_weights()["default_policy"]
        assert metrics["gradients_default_optimizer_global_norm"] == pytest.approx(0, abs=1e-6)
        assert all(np.allclose(before[name], after[name], atol=1e-4) for name in at_least(1, before))

    def test_what_it_reports_is_in_the_result(self) -> None:
        def report(train_batch: Any, result: dict[str, float], metrics_logger: Any) -> None:
            result["batch_size"] = len(train_batch["advantages"])
            metrics_logger.log_value("mine", 3.0, reduce="sum")

        with config(on_learn_on_batch=report).build() as algo:
            learners = algo.train()["learners"]
        assert learners["default_policy"]["batch_size"] == 16
        assert learners["mine"] == 3

    @pytest.mark.parametrize("in_place", [True, False])
    def test_zeroed_gradients_leave_their_parameters_alone(self, in_place: bool) -> None:
        names: set[str] = set()

        def freeze_policy(gradients: dict[str, Any], policy: Any) -> None:
            names.update(gradients)
            assert gradients.keys() == dict(policy.named_parameters()).keys()
            for name, gradient in gradients.items():
                if name.startswith("policy"):
                    if in_place:
                        gradient.zero_()
                    else:
                        gradients[name] = gradient * 0

        with config(on_gradients=freeze_policy).build() as algo:
            before = {name: value.copy() for name, value in algo.learner_group.get_weights()["default_policy"].items()}
            algo.train()
            after = algo.learner_group.get_weights()["default_policy"]
        assert {name for name in names if not np.array_equal(before[name], after[name])} == {
            name for name in names if not name.startswith("policy")
        }

    def test_the_update_s_end_sees_and_changes_the_metrics(self) -> None:
        with config(
            on_update_end=lambda result: result.update(loss_times_two=2 * result["total_loss"])
        ).build() as algo:
            metrics = algo.train()["learners"]["default_policy"]
        assert metrics["loss_times_two"] == pytest.approx(2 * metrics["total_loss"])


def assign(name: str, change: Callable[[Any], Any]) -> Callable[..., None]:
    def assigning(**arguments: Any) -> None:
        (columns,) = [arguments[n] for n in ("samples", "postprocessed_batch", "train_batch") if n in arguments]
        columns[name] = change(columns[name])

    return assigning


@pytest.mark.parametrize("event", ["on_sample_end", "on_postprocess_trajectory", "on_learn_on_batch"])
@pytest.mark.parametrize(
    ("name", "change", "words"),
    [
        ("logp", lambda column: column[:-1], "float32"),
        ("logp", lambda column: column.astype(np.float64), ".astype(np.float32)"),
        ("obs", lambda column: column[..., :1], "1]"),
        ("actions", lambda column: column[:, None], "int64"),
    ],
    ids=["length", "dtype", "shape", "axes"],
)
def test_another_shape_or_dtype_is_refused_with_both(event: str, name: str, change: Any, words: str) -> None:
    with config(**{event: assign(name, change)}).build() as algo, pytest.raises(CallbackError) as caught:
        algo.train()
    assert isinstance(caught.value.__cause__, ColumnError)
    message = str(caught.value)
    assert message.startswith(f"{event}: callback")
    assert f"column {name!r} is" in message and "cannot become" in message and words in message


@pytest.mark.parametrize("event", ["on_sample_end", "on_postprocess_trajectory", "on_learn_on_batch"])
@pytest.mark.parametrize(
    "new",
    [np.zeros(1), np.zeros((3, 3, 3, 3)), np.array(["text"] * 16), None],
    ids=["length", "axes", "text", "none"],
)
def test_a_new_column_has_to_fit(event: str, new: Any) -> None:
    def add(**arguments: Any) -> None:
        (columns,) = [arguments[n] for n in ("samples", "postprocessed_batch", "train_batch") if n in arguments]
        columns["new"] = new

    with config(**{event: add}).build() as algo, pytest.raises(CallbackError, match="column 'new'"):
        algo.train()


def test_a_column_cannot_be_removed_from_a_batch() -> None:
    with (
        config(on_learn_on_batch=lambda train_batch: train_batch.pop("logp")).build() as algo,
        pytest.raises(CallbackError, match="'logp' cannot be removed"),
    ):
        algo.train()


def test_an_added_column_of_a_computed_name_needs_its_shape() -> None:
    def add(samples: Any) -> None:
        samples["advantages"] = np.zeros((*samples.rewards.shape, 2))

    with (
        config(on_sample_end=add).build() as algo,
        pytest.raises(ColumnError, match=r"'advantages' was added as float64"),
    ):
        algo.train()


class TestTrajectoryAsADict:
    def test_a_copy_is_a_plain_dict_and_changes_nothing(self) -> None:
        before, _ = trained_on()
        after, _ = trained_on(on_postprocess_trajectory=lambda postprocessed_batch: postprocessed_batch.copy().clear())
        assert all(np.array_equal(before[name], after[name]) for name in at_least(1, before))

    def test_updates_of_all_kinds_write(self) -> None:
        def change(postprocessed_batch: Any) -> None:
            columns = postprocessed_batch
            columns |= {"rewards": columns["rewards"] + 1}
            columns.update(rewards=columns["rewards"] * 2)
            assert columns.get("nothing") is None and "rewards" in columns and len(columns) == len(list(columns))

        _, plain = trained_on()
        _, rollout = trained_on(on_postprocess_trajectory=change)
        assert np.array_equal(rollout.rewards[rollout.valid], 2 * (plain.rewards[plain.valid] + 1))

    @pytest.mark.parametrize("name", ["valid", "row_times_s", "next_obs", "infos"])
    def test_what_is_not_one_trajectory_s_to_write_is_refused(self, name: str) -> None:
        def write(postprocessed_batch: Any) -> None:
            postprocessed_batch[name] = np.ones(len(postprocessed_batch["rewards"]), np.bool_)

        with (
            config(on_postprocess_trajectory=write).build() as algo,
            pytest.raises(CallbackError, match=f"'{name}' cannot"),
        ):
            algo.train()

    def test_a_misspelt_column_is_named(self) -> None:
        for event, look in (
            ("on_postprocess_trajectory", lambda postprocessed_batch: postprocessed_batch["reward"]),
            ("on_sample_end", lambda samples: samples["reward"]),
        ):
            with config(**{event: look}).build() as algo, pytest.raises(CallbackError, match="Did you mean 'rewards'"):
                algo.train()
        with (
            config(on_sample_end=lambda samples: setattr(samples, "reward", 0)).build() as algo,
            pytest.raises(CallbackError, match=r"AttributeError.*'reward'"),
        ):
            algo.train()


def test_integers_do_not_take_the_place_of_a_computed_column() -> None:
    def add(postprocessed_batch: Any) -> None:
        postprocessed_batch["value_targets"] = np.full(len(postprocessed_batch["rewards"]), 5)

    with config(on_postprocess_trajectory=add).build() as algo, pytest.raises(ColumnError, match="as floats, with NaN"):
        algo.train()


def test_columns_of_two_rollouts_have_to_be_alike() -> None:
    def add(samples: Any, env_runner: Any) -> None:
        samples["mark"] = np.ones((*samples.rewards.shape, env_runner.worker_index))

    with (
        config(on_sample_end=add).env_runners(num_env_runners=2).engine("local").build() as algo,
        pytest.raises(ColumnError, match=r"'mark'.*same shape"),
    ):
        algo.train()


@pytest.mark.parametrize("dtype", [np.bool_, np.int8, np.uint8, np.float16, np.int64, np.float64])
def test_columns_of_any_number_reach_the_loss(dtype: Any) -> None:
    batch, _ = trained_on(on_sample_end=lambda samples: samples.__setitem__("x", samples.rewards.astype(dtype)))
    assert batch["x"].dtype == dtype


@pytest.mark.parametrize("dtype", [">f4", np.longdouble, np.complex64, object])
def test_columns_that_no_tensor_can_hold_are_refused(dtype: Any) -> None:
    with (
        config(on_sample_end=lambda samples: samples.__setitem__("x", samples.rewards.astype(dtype))).build() as algo,
        pytest.raises(CallbackError, match=r"'x' is .*64 bits"),
    ):
        algo.train()


@pytest.mark.parametrize("new", [None, np.zeros(3), torch.zeros(1)], ids=["none", "array", "shape"])
def test_a_gradient_is_replaced_by_one_like_it(new: Any) -> None:
    def replace(gradients: dict[str, Any]) -> None:
        gradients["policy_head.weight"] = new

    with config(on_gradients=replace).build() as algo, pytest.raises(ColumnError, match=r"on_gradients: 'policy_head"):
        algo.train()


def test_iterating_over_samples_gives_the_episodes() -> None:
    seen: list[list[int]] = []
    trained_on(on_sample_end=[lambda samples: seen.append([len(episode) for episode in samples])])
    assert seen == [[3, 3, 2, 3, 3, 2]]


@pytest.mark.parametrize(
    "change", [lambda gradients: gradients.clear(), lambda gradients: gradients.update(nobody=0)], ids=["gone", "new"]
)
def test_gradients_are_neither_added_nor_taken_away(change: Any) -> None:
    with config(on_gradients=change).build() as algo, pytest.raises(ColumnError, match="added or removed"):
        algo.train()


def test_a_batch_without_a_step_is_an_error_that_names_the_reason() -> None:
    with (
        config(on_sample_end=lambda samples: samples.valid.fill(False)).build() as algo,
        pytest.raises(LossError, match=r"default_policy: the batch is empty.*valid"),
    ):
        algo.train()
