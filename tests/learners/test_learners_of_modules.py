"""Several modules in one learner, against a learner of one module that is fed with the same columns."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from learner_cases import ALGORITHMS, ON_POLICY, PPO_COEFFICIENTS, algorithm_batch, algorithm_loss

from corral.learners.learner import Learner
from corral.learners.settings import LearningSpec, UpdateSettings

OPTIMIZERS: dict[str, tuple[type[torch.optim.Optimizer], dict[str, Any]]] = {
    "adam": (torch.optim.Adam, {"eps": 1e-5}),
    "adamw": (torch.optim.AdamW, {}),
    "sgd": (torch.optim.SGD, {"momentum": 0.9}),
    "rmsprop": (torch.optim.RMSprop, {}),
    "adadelta": (torch.optim.Adadelta, {}),
}


def settings(name: str, lr: float, **more: Any) -> UpdateSettings:
    return UpdateSettings(lr=lr, coefficients=PPO_COEFFICIENTS if name in ON_POLICY else {}, **more)


@pytest.mark.slow_cases("True-", "adadelta")
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("name", ALGORITHMS)
@pytest.mark.parametrize("partly_frozen", [False, True])
def test_modules_learn_as_each_would_alone(name: str, optimizer: str, partly_frozen: bool) -> None:
    make = ALGORITHMS[name][0]
    own = {"one": LearningSpec(algorithm_loss(name), *OPTIMIZERS[optimizer])}
    own["other"] = LearningSpec(algorithm_loss(name), torch.optim.SGD, {"weight_decay": 0.01})
    how = {
        "one": settings(name, 0.01, num_epochs=2, minibatch_size=5, grad_clip=0.5),
        "other": settings(name, 0.003, num_epochs=3, grad_clip=10.0),
    }
    batches = {"one": algorithm_batch(name, 12), "other": algorithm_batch(name, 9), "frozen": algorithm_batch(name, 7)}
    together = Learner({module_id: make() for module_id in batches}, own | {"frozen": own["one"]}, device="cpu")
    alone = {module_id: Learner({module_id: make()}, {module_id: own[module_id]}, device="cpu") for module_id in own}
    if partly_frozen:
        for learner in (together, alone["one"]):
            next(learner.modules["one"].parameters()).requires_grad_(False)
    before = {key: array.copy() for key, array in together.get_weights()["frozen"].items()}
    for _ in range(3):
        torch.manual_seed(1)
        state = together.rng.bit_generator.state
        results = together.update(batches, how)
        assert results.keys() == how.keys()
        torch.manual_seed(1)
        for module_id, learner in alone.items():  # one after another, they draw what the learner of both draws
            learner.rng.bit_generator.state = state
            expected = learner.update({module_id: batches[module_id]}, {module_id: how[module_id]})[module_id]
            state = learner.rng.bit_generator.state
            assert results[module_id].keys() == expected.keys()
            for key, value in expected.items():
                assert np.array_equal(results[module_id][key], value), (module_id, key)
    weights = together.get_weights()
    for module_id, learner in alone.items():
        for key, array in learner.get_weights()[module_id].items():
            assert np.array_equal(weights[module_id][key], array)
    for key, array in before.items():
        assert np.array_equal(weights["frozen"][key], array)


@pytest.mark.parametrize("name", ALGORITHMS)
def test_a_module_that_was_added_learns_as_one_that_was_there(name: str) -> None:
    make, spec = ALGORITHMS[name][0], LearningSpec(algorithm_loss(name))
    batches, how = {"new": algorithm_batch(name)}, {"new": settings(name, 0.01)}
    one = Learner({"old": make(), "new": make()}, {"old": spec, "new": spec}, device="cpu")
    other = Learner({"old": make()}, {"old": spec}, device="cpu")
    other.add_module("new", make(), spec)
    for learner in (one, other):
        torch.manual_seed(0)
        learner.update(batches, how)
    for key, array in one.get_weights()["new"].items():
        assert np.array_equal(other.get_weights()["new"][key], array)
    other.remove_module("new")
    assert (other.learning_ids, list(other.modules), list(other.get_state()["optimizers"])) == (["old"],) * 3
