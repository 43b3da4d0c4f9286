"""Modules that are added, removed and copied while an algorithm trains."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from several_agents import CONFIGS, Repeats, all_to_red, config_of, module_of, same, weights_of

from at_least import at_least
from corral import Algorithm, AlgorithmConfig, APPOConfig, Callback, DQNConfig, NormalizeObservations, PPOConfig
from corral.errors import CheckpointError, ConfigError, CorralError
from corral.runs.checkpoint import read_checkpoint, write_checkpoint


def green_to_new(agent_id: str, episode: Any, **_: Any) -> str:
    """Map green to the module `new`, and the others as before."""
    return "new" if agent_id == "green" else module_of(agent_id, episode)


@pytest.mark.slow_cases("DQNConfig")
@pytest.mark.parametrize("base", CONFIGS)
def test_a_module_that_was_added_plays_and_learns(base: type[AlgorithmConfig]) -> None:
    with config_of(base).build() as algo:
        algo.train()
        before = weights_of(algo)
        algo.add_module("new", overrides={"lr": 0.125}, policy_mapping_fn=green_to_new)
        assert algo.module_ids == ["red", "blue", "rest", "new"]
        assert all(same(before[name], part) for name, part in weights_of(algo).items() if name != "new")
        first = weights_of(algo)["new"]
        results = [algo.train() for _ in range(3)]
        name = f"{'actor' if base.__name__ == 'SACConfig' else 'default'}_optimizer_learning_rate"
        assert results[-1]["learners"]["new"][name] == 0.125
        assert not same(first, weights_of(algo)["new"])
        sampled = results[-1]["env_runners"]["num_module_steps_sampled"]
        assert sampled["new"] > 0 == sampled["rest"]
        acting = algo.env_runner.actors["new"].module.acting_weights()  # type: ignore[union-attr]
        assert all(
            np.array_equal(value.numpy(), weights_of(algo)["new"][key]) for key, value in at_least(1, acting.items())
        )


@pytest.mark.parametrize("base", CONFIGS)
def test_a_run_with_an_added_module_continues_exactly(base: type[AlgorithmConfig], tmp_path: Path) -> None:
    with config_of(base).build() as one:
        one.train()
        one.add_module("new", policy_mapping_fn=green_to_new, policies_to_train=["red", "new"])
        one.train()
        one.save(tmp_path / "checkpoint")
        with Algorithm.from_checkpoint(tmp_path / "checkpoint") as other, config_of(base).build() as third:
            with pytest.raises(CheckpointError, match=r"\['blue', 'new', 'red', 'rest'\]"):
                third.set_state(one.get_state())
            third.add_module("old", copy_from="red")
            third.train()
            third.restore_from_path(tmp_path / "checkpoint")
            results = [[algo.train() for _ in range(2)] for algo in (one, other, third)]
            for restored, again in ((other, results[1]), (third, results[2])):
                assert restored.module_ids == one.module_ids
                assert again[0]["restored"]["num_envs_continued"] == 2
                for module_id, weights in weights_of(one).items():
                    assert same(weights, weights_of(restored)[module_id])
                for result, continued in zip(results[0], again, strict=True):
                    # Without what `blue` reported once.
                    assert continued["learners"].keys() <= result["learners"].keys()
                    for module_id, learned in continued["learners"].items():
                        np.testing.assert_equal(learned, result["learners"][module_id])


@pytest.mark.parametrize("base", [PPOConfig, DQNConfig])
def test_modules_that_cannot_be_made_change_nothing_and_a_damaged_checkpoint_of_others_stops_the_algorithm(
    base: type[AlgorithmConfig], tmp_path: Path
) -> None:
    class Local(Repeats):
        """A class that no file can name."""

    with config_of(base).build() as one:
        one.add_module("new", copy_from="red")
        one.remove_module("rest", policy_mapping_fn=all_to_red)
        one.save(tmp_path / "fits")
        one.add_module("local", module_class=Local)
        one.save(tmp_path / "local")
    found = read_checkpoint(tmp_path / "fits")
    write_checkpoint(
        tmp_path / "wrong",
        state=found.state,
        weights={**found.weights, "new": {name: array[:1] for name, array in found.weights["new"].items()}},
        config=found.config,
        metadata=dict(found.metadata),
        policies=found.policies,
        arrays=found.arrays,
    )
    with config_of(base).build() as algo, config_of(base).build() as other:
        for made in (algo, other):
            made.train()
        with pytest.raises(
            CheckpointError, match=r"policies\.local\.module_class .*Build the algorithm .*multi_agent\(policies="
        ):
            algo.restore_from_path(tmp_path / "local")
        assert algo.module_ids == other.module_ids == ["red", "blue", "rest"]
        mine, theirs = algo.train(), other.train()
        np.testing.assert_equal(mine["restored"], theirs["restored"])
        np.testing.assert_equal(mine["learners"], theirs["learners"])
        with pytest.raises(CheckpointError, match=r"stopped and must be built again.*learners/new"):
            algo.restore_from_path(tmp_path / "wrong")
        with pytest.raises(CorralError, match="this algorithm was stopped"):
            algo.train()


class AddsInTurn(Callback):
    """Adds a module after the second iteration, and another one in place of it after the fourth."""

    def on_train_result(self, *, algorithm: Any, **kwargs: Any) -> None:
        if algorithm.training_iteration == 2:
            algorithm.add_module("new", copy_from="red", policy_mapping_fn=green_to_new)
        if algorithm.training_iteration == 4:
            algorithm.remove_module("new", policy_mapping_fn=module_of)
            algorithm.add_module("newer", copy_from="blue")


@pytest.mark.parametrize("last", [pytest.param(3, marks=pytest.mark.slow), 5])
def test_a_run_whose_modules_changed_is_resumed_exactly(last: int, tmp_path: Path) -> None:
    for name, stops in (("whole", [7]), ("parts", [last, 7])):
        for number, stop in enumerate(stops):
            where = {"resume": tmp_path / name} if number else {"run_dir": tmp_path / name}
            with config_of(PPOConfig).callbacks(AddsInTurn).build() as algo:
                algo.fit(stop={"training_iteration": stop}, progress=False, **where)
                assert algo.module_ids == ["red", "blue", "rest", {3: "new"}.get(stop, "newer")]
    rows = {name: (tmp_path / name / "progress.csv").read_text().splitlines() for name in ("whole", "parts")}
    columns = rows["whole"][0].split(",")
    assert "learners/newer/total_loss" in columns and sorted(columns) == sorted(rows["parts"][0].split(","))
    found = {
        name: [dict(zip(lines[0].split(","), row, strict=True)) for row in csv.reader(lines[1:])]
        for name, lines in rows.items()
    }
    for one, other in zip(found["whole"], found["parts"], strict=True):
        for column in columns:
            if column.startswith("learners/"):
                assert one[column] == other[column], column


@pytest.mark.slow_cases("SACConfig")
@pytest.mark.parametrize("base", CONFIGS)
def test_a_run_whose_agents_changed_modules_continues_exactly(base: type[AlgorithmConfig], tmp_path: Path) -> None:
    with config_of(base).build() as one:
        one.train()
        one.remove_module("blue", policy_mapping_fn=all_to_red)  # whose agents come after those that red has
        for _ in range(3):
            one.train()
        one.save(tmp_path / "checkpoint")
        with Algorithm.from_checkpoint(tmp_path / "checkpoint") as other:
            for result, again in [(one.train(), other.train()) for _ in range(2)]:
                np.testing.assert_equal(again["learners"]["red"], result["learners"]["red"])
                assert again["env_runners"]["episode_return_mean"] == result["env_runners"]["episode_return_mean"]
            assert same(weights_of(one)["red"], weights_of(other)["red"])


@pytest.mark.slow_cases("SACConfig")
@pytest.mark.parametrize("base", CONFIGS)
def test_a_copy_begins_with_the_weights_and_is_then_on_its_own(base: type[AlgorithmConfig], tmp_path: Path) -> None:
    policies: dict[str, Any] = {"red": {"model_config": {"fcnet_hiddens": [5]}}, "blue": {}, "rest": {}}
    with config_of(base, policies=policies).build() as algo:
        algo.train()
        red = weights_of(algo)["red"]
        algo.add_module("new", copy_from="red", policies_to_train=["red"])  # no agent has it yet, as in a league
        assert same(weights_of(algo)["new"], red)
        algo.train()
        assert same(weights_of(algo)["new"], red)
        assert not same(weights_of(algo)["red"], red)
        algo.save(tmp_path / "checkpoint")
        with Algorithm.from_checkpoint(tmp_path / "checkpoint") as other:  # with the spaces that the copy was given
            assert same(weights_of(other)["new"], red)
            assert other.get_module("new").observation_space == algo.get_module("red").observation_space


def test_removing_a_module_takes_it_from_everywhere(tmp_path: Path) -> None:
    with config_of(DQNConfig).build() as algo:
        algo.train()
        with pytest.raises(ConfigError, match=r"policy_mapping_fn returned 'blue'.*no such module"):
            algo.remove_module("blue")
        assert algo.module_ids == ["red", "blue", "rest"]
        algo.remove_module("blue", policy_mapping_fn=all_to_red)
        assert algo.module_ids == ["red", "rest"]
        result = algo.train()
        assert list(algo.env_runner.actors) == ["red", "rest"]  # type: ignore[union-attr]
        assert list(algo.replay_buffers) == list(algo.learner_group.learning_ids) == ["red"]  # type: ignore[attr-defined]
        assert result["env_runners"]["num_module_steps_sampled"]["red"] >= 40
        algo.save(tmp_path / "checkpoint")
        with Algorithm.from_checkpoint(tmp_path / "checkpoint") as other:
            assert other.module_ids == ["red", "rest"]
            other.train()


@pytest.mark.parametrize("base", [PPOConfig, APPOConfig])
def test_a_module_that_comes_back_begins_with_the_first_coefficient(base: type[AlgorithmConfig]) -> None:
    config = config_of(base, policy_mapping_fn=module_of).training(kl_coeff=0.5, kl_target=1e-9)
    with config.build() as algo:
        algo.train()
        adapted = algo.train()["learners"]["blue"]["curr_kl_coeff"]
        algo.remove_module("blue", policy_mapping_fn=all_to_red)
        algo.add_module("blue", policy_mapping_fn=module_of)
        results = [algo.train() for _ in range(3)]  # episodes that have begun have no such module
        first = next(found for result in results if (found := result["learners"]["blue"]["curr_kl_coeff"]) > 0)
        assert adapted > 0.5 and first < adapted


@pytest.mark.parametrize("num_env_runners", [0, 1])
def test_a_module_that_comes_back_has_the_returns_of_its_own_episodes(num_env_runners: int) -> None:
    config = config_of(PPOConfig, policy_mapping_fn=module_of).env_runners(num_env_runners=num_env_runners)
    with config.copy(engine_name="local").build() as algo:
        assert algo.train()["env_runners"]["module_episode_return_mean"]["blue"] > 0
        algo.remove_module("blue", policy_mapping_fn=all_to_red)
        algo.add_module("blue", policy_mapping_fn=all_to_red)
        found = algo.train()["env_runners"]["module_episode_return_mean"]
        assert np.isnan(found["blue"]) and found["red"] > 0


def test_episodes_that_have_begun_keep_their_modules() -> None:
    seen: list[str] = []

    def note(episode: Any) -> None:
        seen.append(episode.module_for("green"))  # who stays until the end

    config = config_of(PPOConfig).training(train_batch_size_per_learner=4, minibatch_size=None)
    with config.callbacks(on_episode_end=note).build() as algo:
        algo.train()
        algo.add_module("new", policy_mapping_fn=green_to_new)
        while len(seen) < 6:
            algo.train()
    assert seen == ["rest"] * 2 + ["new"] * (len(seen) - 2)


def test_callbacks_of_unfinished_episodes_get_the_module() -> None:
    seen: set[str] = set()
    config = config_of(PPOConfig).training(train_batch_size_per_learner=4, minibatch_size=None)
    with config.callbacks(on_episode_step=lambda rl_module: seen.update(rl_module)).build() as algo:
        algo.train()
        algo.add_module("new", copy_from="red")
        seen.clear()
        algo.train()
        assert seen == {"red", "blue", "rest", "new"}
        algo.remove_module("new")
        seen.clear()
        algo.train()
        assert seen == {"red", "blue", "rest"}


def test_statistics_of_its_transforms_are_measured_where_no_other_module_has_any() -> None:
    with config_of(PPOConfig).build() as algo:
        algo.train()
        algo.add_module(
            "new", overrides={"transforms": [NormalizeObservations()]}, policy_mapping_fn=lambda agent, episode: "new"
        )
        counts = [algo.train()["env_runners"]["num_module_steps_sampled"]["new"] for _ in range(2)]
        pipeline = algo.acting_policy("new").pipeline
        assert pipeline is not None
        assert counts[0] <= float(pipeline.state["NormalizeObservations"]["count"]) <= sum(counts)


@pytest.mark.slow
@pytest.mark.parametrize("num_learners", [0, 2])
def test_runners_and_learners_in_other_processes_get_the_module(num_learners: int) -> None:
    config = config_of(PPOConfig).training(train_batch_size_per_learner=32 if num_learners else 64)
    config.env_runners(num_env_runners=1).learners(num_learners=num_learners).engine("process")
    config.evaluation(evaluation_duration=2)
    with config.build() as algo:
        algo.evaluate()
        algo.train()
        algo.add_module("new", copy_from="red", policy_mapping_fn=green_to_new, policies_to_train=["new"])
        algo.add_module("rules", module_class=Repeats, policy_mapping_fn=green_to_new)
        before = weights_of(algo)
        results = [algo.train() for _ in range(2)]
        after = weights_of(algo)
        assert not same(before["new"], after["new"])
        assert same(before["red"], after["red"])
        assert results[-1]["env_runners"]["num_module_steps_sampled"]["new"] > 0
        [mine] = algo.env_runner_group.foreach_env_runner(
            lambda runner: {name: value.numpy() for name, value in runner.actors["new"].module.state_dict().items()}
        )
        assert same(mine, after["new"])
        algo.evaluate()
        algo.env_runner_group._runners[1].handle.kill()
        result = algo.train()  # by a replacement, which has the added modules too
        assert result["fault_tolerance"]["num_remote_worker_restarts"] == 1
        assert result["env_runners"]["num_module_steps_sampled"]["new"] > 0
        algo.remove_module("rules")
        algo.train()


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda algo: algo.add_module("red"), r"there is a module 'red' already"),
        (lambda algo: algo.add_module("new", module_class=int), r"module 'new': rl_module: module_class must be"),
        (lambda algo: algo.add_module("new", copy_from="rot"), r"no module 'rot'"),
        (lambda algo: algo.add_module("new", overrides={"num_env_runners": 2}), r"module 'new': .*num_env_runners"),
        (lambda algo: algo.add_module("new", policies_to_train=["neu"]), r"no module 'neu'.*'new'"),
        (lambda algo: algo.add_module("a/b"), r"'a/b' is no module id"),
        (lambda algo: algo.add_module("new", policy_mapping_fn=lambda agent_id, episode: "neu"), r"returned 'neu'"),
        (lambda algo: algo.add_module("new", model_config={"fcnet_hidens": [3]}), r"module 'new': .*fcnet_hidens"),
        (lambda algo: algo.remove_module("neu"), r"no module 'neu'"),
    ],
    ids=["id", "class", "copy", "override", "train", "slash", "mapping", "model", "remove"],
)
def test_what_is_refused_changes_nothing(call: Any, message: str) -> None:
    with config_of(PPOConfig).build() as algo, config_of(PPOConfig).build() as other:
        with pytest.raises(ConfigError, match=message):
            call(algo)
        assert algo.module_ids == ["red", "blue", "rest"]
        assert algo.config.to_dict() == other.config.to_dict()
        for _ in range(2):
            mine, theirs = algo.train()["learners"], other.train()["learners"]
            np.testing.assert_equal(mine, theirs)


def test_a_single_agent_has_one_module() -> None:
    with PPOConfig().environment("CartPole-v1").build() as algo, pytest.raises(ConfigError, match="multi_agent"):
        algo.add_module("new")
