"""A state that does not fit changes nothing; one of which only a part can be set stops the algorithm."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from several_agents import config_of

from corral import PPO, Algorithm, Callback, DQNConfig
from corral.errors import CheckpointError, CorralError
from exact_runs import differences, make_config, without_times

MODULE = "default_policy"
Damage = Callable[[dict[str, Any]], Any]


def put(*path: Any, value: Any) -> Damage:
    """Put a value into a state."""

    def damage(state: dict[str, Any]) -> None:
        holder: Any = state
        for name in path[:-1]:
            holder = holder[name]
        assert path[-1] in holder or isinstance(holder, list)
        holder[path[-1]] = value

    return damage


def drop(*path: Any) -> Damage:
    """Remove a part of a state."""

    def damage(state: dict[str, Any]) -> None:
        holder: Any = state
        for name in path[:-1]:
            holder = holder[name]
        del holder[path[-1]]

    return damage


OF_LATER_VERSIONS = ("counts", "num_episodes_over")
"""Parts of the state of a runner that checkpoints of earlier versions lack."""


def damages(state: dict[str, Any]) -> Iterator[tuple[str, Damage]]:
    """Yield ways to damage a state, by name."""
    runner, learners, episodes = ("runners", "runners", 0), ("learners",), ("runners", "runners", 0, "episodes")
    weights, moments = state["learners"]["weights"][MODULE], state["learners"]["optimizers"][MODULE]["state"]["state"]
    name, index = max(weights, key=lambda name: weights[name].size), next(iter(moments))
    for part in state:
        yield f"without {part}", drop(part) if part != "replay_buffer" else put(part, value={})
        yield f"{part} is a number", put(part, value=3)
    for part in state["runners"]["runners"][0]:
        if part not in OF_LATER_VERSIONS:
            yield f"a runner without {part}", drop(*runner, part)
    yield "counts of episodes are no numbers", put(*runner, "num_episodes_over", value=["many"])
    for part in state["learners"]:
        yield f"learners without {part}", drop(*learners, part)
    for part in state["attributes"]:
        yield f"without attribute {part}", drop("attributes", part)
        yield f"attribute {part} is a string", put("attributes", part, value="much")
    saved = weights[name]
    yield "a missing weight", drop(*learners, "weights", MODULE, name)
    yield "a weight of another shape", put(*learners, "weights", MODULE, name, value=saved[:-1])
    yield "a weight of another dtype", put(*learners, "weights", MODULE, name, value=saved.astype(np.float64))
    yield "a weight that is a list", put(*learners, "weights", MODULE, name, value=saved.tolist())
    yield "one more module", put(*learners, "weights", value={MODULE: weights, "other": weights})
    for key, value in moments[index].items():
        where = (*learners, "optimizers", MODULE, "state", "state", index)
        yield f"no {key} in the optimizer", drop(*where, key)
        yield f"{key} of another shape", put(*where, key, value=np.zeros((7, 7), np.float32))
        yield f"{key} is a string", put(*where, key, value=str(value))
    yield "moments of a parameter that is not there", put(*where[:-1], value={99: moments[index]})
    yield "a metric without its values", drop("metrics", "keys", 0, "reducer")
    yield "a metric of strings", put("metrics", "keys", 0, "reducer", value={"_all": "ab", "_new": "cd"})
    yield "exploration is a list", put("exploration", value=[1])
    yield "generators of another size", put("rngs", "torch", value=np.zeros(3, np.uint8))
    yield "no generator of Python", drop("rngs", "python")
    yield "another generator", put("policy", "rng", "bit_generator", value="system")
    yield "seeds of a string", put(*runner, "env", "seeds", "entropy", value="abc")
    yield (
        "a generator of an env",
        put(*runner, "env", "envs", 0, "kept", "generators", 0, "bit_generator", value="seed"),
    )
    yield "a wrapper without its steps", put(*runner, "env", "envs", 0, "wrappers", value=[["TimeLimit", {}]])
    yield "returns of another number of envs", put(*episodes, "returns", value=np.zeros(9))
    yield "observations of another shape", put(*episodes, "obs", value=np.zeros((3, 8), np.float32))
    if "replay_buffer" in state:
        column = state["replay_buffer"]["columns"]["rewards"]
        yield "a column cut off", put("replay_buffer", "columns", "rewards", value=column[:-1])
        yield "another buffer", put("replay_buffer", "capacity", value=17)


@pytest.mark.parametrize(
    "algo_name", ["PPO", "DQN", *(pytest.param(name, marks=pytest.mark.slow) for name in ("SAC", "TD3"))]
)
def test_a_damaged_state_changes_nothing(algo_name: str) -> None:
    with make_config(algo_name, seed=8).build() as donor:
        donor.train()
        donor.train()
        state = donor.get_state()
    with make_config(algo_name).build() as algo, make_config(algo_name).build() as untouched:
        for _ in range(2):  # of a new algorithm, and of one that has trained
            num_damages, accepted = 0, list[str]()
            for name, damage in damages(state):
                damaged = copy.deepcopy(state)
                damage(damaged)
                try:
                    algo.set_state(damaged)
                except CheckpointError:
                    num_damages += 1
                else:
                    accepted.append(name)
            assert accepted == []
            assert num_damages > 60
            pair = [without_times(each.train()) for each in (algo, untouched)]
            assert differences(*pair) == []
            assert differences(*(without_times(each.get_state()) for each in (algo, untouched))) == []
        algo.set_state(state)  # which is not damaged
        assert differences(without_times(algo.get_state()), without_times(state)) == []


@pytest.mark.parametrize("settings", [{}, {"num_env_runners": 2, "engine_name": "local"}])
def test_a_refused_state_does_not_undo_an_earlier_one(settings: dict[str, Any]) -> None:
    with make_config("PPO", **settings).build() as algo, make_config("PPO", **settings).build() as untouched:
        algo.train()
        untouched.train()
        state = algo.get_state()
        algo.set_state(state)
        for _ in range(2):
            assert differences(*(without_times(each.train()) for each in (algo, untouched))) == []
            with pytest.raises(CheckpointError):
                algo.set_state({**state, "metrics": {}})


EVALUATING: dict[str, Any] = {"evaluation_interval": 2, "evaluation_duration": 4}


@pytest.mark.parametrize("num_runners", [0, 2])
def test_a_damaged_state_of_evaluation_changes_nothing(num_runners: int) -> None:
    settings = {**EVALUATING, "evaluation_num_env_runners": num_runners, "engine_name": "local"}
    with make_config("PPO", seed=8, **settings).build() as donor:
        donor.train()
        donor.train()
        state = donor.get_state()
    parts = [("evaluation",), *(("evaluation", name) for name in state["evaluation"] if name != "rngs")]
    runner = ("evaluation", "runners", "runners", 0)
    ways = [put(*path, value="much") for path in parts] + [drop(*path) for path in parts[1:]]
    ways += [
        drop(*runner, part) for part in state["evaluation"]["runners"]["runners"][0] if part not in OF_LATER_VERSIONS
    ]
    with make_config("PPO", **settings).build() as algo, make_config("PPO", **settings).build() as untouched:
        for _ in range(3):
            for damage in ways:
                damaged = copy.deepcopy(state)
                damage(damaged)
                with pytest.raises(CheckpointError):
                    algo.set_state(damaged)
            assert differences(*(without_times(each.train()) for each in (algo, untouched))) == []
            assert differences(*(without_times(each.get_state()) for each in (algo, untouched))) == []
        algo.set_state(state)
        assert differences(without_times(algo.get_state()), without_times(state)) == []


def test_an_algorithm_that_evaluates_later_keeps_the_state_of_evaluation() -> None:
    with make_config("PPO", evaluation_duration=4).build() as algo, make_config("PPO").build() as other:
        algo.evaluate()
        state = algo.get_state()
        other.set_state(state)
        assert differences(without_times(other.get_state()), without_times(state)) == []


def assert_stops(algo: Algorithm, restore: Callable[[], None], error: str) -> None:
    """Check that an algorithm says what to do when setting a state fails, and then neither trains nor has workers."""
    with pytest.raises(CheckpointError, match=f"only a part of the state .* must be built again: .*{error}"):
        restore()
    with pytest.raises(CorralError, match="this algorithm was stopped"):
        algo.train()
    assert not algo.engine.running()


@pytest.mark.slow_cases("settings1")
@pytest.mark.parametrize(
    "damage",
    [
        put("runners", "runners", -1, "env", "envs", 1, "state", "place", value=np.zeros(5)),
        put("runners", "runners", -1, "env", "envs", 2, "state", value={"place": None}),
    ],
    ids=["a value of another shape", "a part is missing"],
)
@pytest.mark.parametrize("settings", [{}, {"num_env_runners": 2, "engine_name": "process"}])
def test_an_env_that_refuses_its_state_stops_the_algorithm(damage: Damage, settings: dict[str, Any]) -> None:
    with make_config("PPO", **settings).build() as algo:
        algo.train()
        state = algo.get_state()
        damage(state)
        assert_stops(algo, lambda: algo.set_state(state), "")


def test_the_first_damaged_buffer_changes_nothing_and_a_later_one_stops_the_algorithm() -> None:
    with config_of(DQNConfig).build() as algo, config_of(DQNConfig).build() as untouched:
        assert differences(*(without_times(each.train()) for each in (algo, untouched))) == []
        for module_id in ("red", "blue"):
            state = algo.get_state()
            state["replay_buffer"][module_id]["columns"]["rewards"] = np.zeros(3)
            if module_id == "blue":
                assert_stops(algo, lambda damaged=state: algo.set_state(damaged), "a column has shape")  # type: ignore[misc]
            else:
                with pytest.raises(CheckpointError, match="a column has shape"):
                    algo.set_state(state)
                assert differences(*(without_times(each.train()) for each in (algo, untouched))) == []


class Refusing(Callback):
    """Refuses any state."""

    def on_train_result(self, **kwargs: Any) -> None:
        """Make it a callback."""

    def get_state(self) -> dict[str, Any]:
        return {"value": 1}

    def set_state(self, state: dict[str, Any]) -> None:
        if state != {"value": 1}:
            raise RuntimeError("no such value")


@pytest.mark.parametrize("place", ["driver", "runner", "learner"])
def test_a_callback_that_refuses_its_state_stops_the_algorithm(place: str) -> None:
    with make_config("PPO", callbacks_class=[Refusing]).build() as algo:
        algo.train()
        state = algo.get_state()
        holder = {
            "driver": state["callbacks"],
            "runner": state["runners"]["runners"][0]["callbacks"],
            "learner": state["learners"]["by_learner"][0]["callbacks"],
        }[place]
        holder["callbacks"][0][1] = {"value": 2}
        assert_stops(algo, lambda: algo.set_state(state), "no such value")


class Extended(PPO):
    """An algorithm of a user with a state of its own."""

    extra = 0

    def set_state(self, state: Any) -> None:
        super().set_state(state)
        self.extra = state["extra"]


def test_what_a_subclass_cannot_restore_stops_the_algorithm(tmp_path: Any) -> None:
    with Extended(make_config("PPO", seed=8)) as donor:
        donor.train()
        path = donor.save(tmp_path / "saved")  # without "extra"
    with Extended(make_config("PPO")) as algo:
        assert_stops(algo, lambda: algo.restore_from_path(path), "KeyError: 'extra'")
