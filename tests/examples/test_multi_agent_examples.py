"""The examples in examples/multi_agent/: each reaches what it and the documentation state."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from types import ModuleType

import pytest

import example_files
from corral.algorithms.registry import config_from_dict
from corral.tools.cli.experiment import read_experiment


def load(name: str) -> ModuleType:
    return example_files.load(f"multi_agent/{name}.py")


def test_every_example_has_a_test() -> None:
    tested = set(re.findall(r'load\("(\w+)"\)', Path(__file__).read_text(encoding="utf-8")))
    assert {path.stem for path in (example_files.EXAMPLES / "multi_agent").glob("*.py")} == tested


@pytest.mark.parametrize("modules", [pytest.param("shared", marks=pytest.mark.slow), "separate"])
@pytest.mark.slow
def test_both_agents_learn_to_balance(modules: str) -> None:
    _, returns = load("two_cartpoles").train(0, modules, num_env_steps=16_000)
    assert min(returns.values()) >= 60  # 22 at first


@pytest.mark.slow
def test_both_agents_balance_for_five_of_five_seeds() -> None:
    example = load("two_cartpoles")
    for num_env_steps, returns in example.main(seeds=5).values():
        assert num_env_steps <= 120_000 and min(returns.values()) >= example.SOLVED


def test_rock_paper_scissors_beats_the_rule_and_can_be_beaten() -> None:
    won, lost, _ = load("rock_paper_scissors").train(0, "rule", num_iterations=14)
    assert won >= 6 and lost >= 6


def test_the_best_response_to_a_known_policy() -> None:
    """Against uniform moves nothing can be won; against a policy that always plays rock, every round."""
    example = load("rock_paper_scissors")
    policy = PlaysWith([0.0, 0.0, 0.0])
    assert example.best_response_return(policy) == pytest.approx(0, abs=1e-6)
    policy = PlaysWith([50.0, 0.0, 0.0])
    assert example.best_response_return(policy) == pytest.approx(example.NUM_ROUNDS)


class PlaysWith:
    """A policy with the same logits in all states."""

    def __init__(self, logits: list[float]) -> None:
        self.logits = logits

    def policy(self, obs: object) -> object:
        import torch

        return torch.tensor(self.logits).expand(len(obs), 3)  # type: ignore[arg-type]


@pytest.mark.slow
def test_rock_paper_scissors_for_five_of_five_seeds() -> None:
    for (opponent, _), (won, lost) in load("rock_paper_scissors").main(seeds=5).items():
        assert (won >= 8 and lost >= 9) if opponent == "rule" else (abs(won) <= 1 and lost <= 2.5)


needs_pettingzoo = pytest.mark.skipif(importlib.util.find_spec("pettingzoo") is None, reason="needs pettingzoo")


@pytest.mark.slow
@needs_pettingzoo
def test_the_league_of_tic_tac_toe_grows_and_forgets() -> None:
    example = load("tic_tac_toe")
    config = example.make_config(0, copy_every=1).training(train_batch_size_per_learner=512, num_epochs=1)
    config.evaluation(evaluation_duration=30)
    with config.build() as algo:
        frozen = {}
        for i in range(1, example.LEAGUE_SIZE + 3):
            result = algo.train()["env_runners"]
            weights = algo.learner_group.get_weights()
            assert all((weights[f"copy_{i}"][name] == array).all() for name, array in weights["main"].items())
            frozen[f"copy_{i}"] = {name: array.copy() for name, array in weights["main"].items()}
        league = [f"copy_{i}" for i in range(3, example.LEAGUE_SIZE + 3)]
        assert algo.module_ids == ["main", "random", *league]
        assert all((weights[name][key] == array).all() for name in league for key, array in frozen[name].items())
        assert sum(result["num_module_steps_sampled"].get(name, 0) for name in league) > 0
        evaluation = algo.evaluate()["env_runners"]
    assert 0 < evaluation["wins"] + evaluation["losses"] <= 1 and 0 < evaluation["legal_moves"] <= 1


@needs_pettingzoo
@pytest.mark.slow
def test_tic_tac_toe_for_five_of_five_seeds() -> None:
    for found in load("tic_tac_toe").main(seeds=5):
        assert found["wins"] >= 0.9 and found["losses"] <= 0.02 and found["legal_moves"] >= 0.99


@pytest.mark.slow
def test_the_central_critic_explains_what_single_agents_do_not_see() -> None:
    example = load("central_critic")
    explained = {}
    for critic_sees in (None, "all"):
        with example.make_config(0, critic_sees).build() as algo:
            for _ in range(6):
                explained[critic_sees] = algo.train()["learners"]["team"]["vf_explained_var"]
    assert explained["all"] > explained[None] + 0.1


@pytest.mark.slow
def test_the_central_critic_learns_faster_over_five_seeds() -> None:
    found = load("central_critic").main(seeds=5)
    assert sum(found["all"]) / 5 > sum(found["one"]) / 5


@pytest.mark.slow
def test_mappo_is_better_on_simple_spread_than_independent_ppo() -> None:
    settings = read_experiment(example_files.EXAMPLES / "tuned" / "mappo_simple_spread.yaml")
    del settings["stop"]
    for seed in range(2):
        mappo = config_from_dict(settings).debugging(seed=seed)
        independent = mappo.copy().multi_agent(policies={f"agent_{i}" for i in range(3)}, critic_sees=None)
        independent.training(normalize_values=False, minibatch_size=400)
        returns = []
        for config in (mappo, independent):
            with config.build() as algo:
                while algo.num_env_steps_sampled_lifetime < 41_600:
                    result = algo.train()
            returns.append(result["env_runners"]["episode_return_mean"])
        assert returns[0] > returns[1] + 1
