"""Groups of parameters that are stepped separately, and updates that end before all their epochs are taken."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
import torch
from learner_cases import (
    DeterministicActorCritic,
    Recorder,
    StopAbove,
    algorithm_batch,
    algorithm_loss,
    make_learner,
    sac_module,
    td3_batch,
    td3_loss,
    td3_reference,
    td3_training_step,
    td3_update_at_once,
    update,
)
from torch import Tensor, nn

from at_least import all_of
from corral import DQNConfig, PPOConfig
from corral.callbacks.dispatch import Dispatcher
from corral.errors import ConfigError, LossError
from corral.learners.learner_group import LearnerGroup
from corral.learners.losses import Batch
from corral.modules.module import Module

GROUPS = ("actor.", "critic.")


def copies(module: torch.nn.Module) -> dict[str, Tensor]:
    return {name: parameter.detach().clone() for name, parameter in module.named_parameters()}


def moved(module: torch.nn.Module, before: dict[str, Tensor]) -> set[str]:
    """Return the networks of which any parameter moved, after checking that all of each did or none."""
    by_network: dict[str, set[bool]] = {}
    for name, parameter in module.named_parameters():
        by_network.setdefault(name.partition(".")[0], set()).add(not torch.equal(parameter, before[name]))
    assert all_of(len(answers) == 1 for answers in by_network.values())
    return {name for name, answers in by_network.items() if True in answers}


@pytest.mark.parametrize("optimizer", [torch.optim.Adam, torch.optim.Adagrad])
def test_a_delayed_actor_and_targets_move_every_second_step(optimizer: type[torch.optim.Optimizer]) -> None:
    module = DeterministicActorCritic()
    group = LearnerGroup(make_learner(module, td3_loss, optimizer))
    batches = [td3_batch(index) for index in range(6)]
    everything = {"actor", "critic", "target_actor", "target_critic"}
    for number, batch in enumerate(batches, 1):
        before = copies(module)
        results = td3_training_step(group, batch, number)
        assert moved(module, before) == (everything if number % 2 == 0 else {"critic"})
        norms = {name for name in results if name.endswith("_norm")}
        assert ("gradients_actor_optimizer_global_norm" in norms) is (number % 2 == 0)
    for name, value in td3_reference(batches, optimizer).items():
        torch.testing.assert_close(module.state_dict()[name], value, atol=1e-6, rtol=0)


def test_many_critic_steps_and_some_of_the_actor_in_one_update() -> None:
    module = DeterministicActorCritic()
    batches = [td3_batch(index) for index in range(6)]
    whole = {name: np.concatenate([batch[name] for batch in batches]) for name in batches[0]}
    results = td3_update_at_once(LearnerGroup(make_learner(module, td3_loss)), whole, num_steps=6)
    assert results["num_gradient_steps"] == 6
    for name, value in td3_reference(batches, torch.optim.Adam).items():
        torch.testing.assert_close(module.state_dict()[name], value, atol=1e-6, rtol=0)


def test_a_step_of_one_group_leaves_weights_moments_and_gradients_of_the_others() -> None:
    """SAC's loss is one scalar for three groups."""
    module, batch = sac_module(), algorithm_batch("sac")
    learner = make_learner(module, algorithm_loss("sac"))
    update(learner, batch, lr=0.01)
    for names in (["alpha"], ["critic"], ["actor", "alpha"]):
        before, state = copies(module), learner.get_state()["optimizers"]["m"]["state"]["state"]
        results = update(learner, batch, lr=0.01, groups=names)
        networks = {"alpha": "log_alpha", "critic": "q", "actor": "actor"}
        assert moved(module, before) == {networks[name] for name in names}
        assert {name for name in networks if f"gradients_{name}_optimizer_global_norm" in results} == set(names)
        later = learner.get_state()["optimizers"]["m"]["state"]["state"]
        parameters = [(name, p) for name, group in module.parameter_groups().items() for p in group]
        for index, (name, _) in enumerate(parameters):
            assert (later[index]["step"] > state[index]["step"]) == (name in names)


def test_callbacks_get_the_gradients_of_the_groups_that_move() -> None:
    seen: list[set[str]] = []

    def note(gradients: dict[str, Tensor]) -> None:
        seen.append({name.partition(".")[0] for name in gradients})

    callbacks = Dispatcher([], {"on_gradients": [note]}, "raise")
    learner = make_learner(DeterministicActorCritic(), td3_loss, callbacks=callbacks)
    for groups in (None, ["critic"], ["actor"]):
        update(learner, td3_batch(0), lr=0.1, groups=groups)
    assert seen == [{"actor", "critic"}, {"critic"}, {"actor"}]


def test_callbacks_get_no_gradients_of_parameters_outside_of_all_groups() -> None:
    class CriticOnly(DeterministicActorCritic):
        def parameter_groups(self) -> dict[str, list[nn.Parameter]]:
            return {"critic": list(self.critic.parameters())}

    def loss(module: Any, batch: Any, coefficients: Any) -> Any:
        losses, reported = td3_loss(module, batch, coefficients)
        return losses["critic"] + losses["actor"], reported

    seen: list[set[str]] = []

    def note(gradients: dict[str, Tensor]) -> None:
        seen.append({name.partition(".")[0] for name in gradients})

    learner = make_learner(CriticOnly(), loss, callbacks=Dispatcher([], {"on_gradients": [note]}, "raise"))
    update(learner, td3_batch(0), lr=0.1)
    assert seen == [{"critic"}]


@pytest.mark.parametrize("optimizer", [torch.optim.Adam, torch.optim.NAdam])
def test_a_parameter_in_two_groups_is_refused(optimizer: type[torch.optim.Optimizer]) -> None:
    class Overlapping(DeterministicActorCritic):
        def parameter_groups(self) -> dict[str, list[nn.Parameter]]:
            return {"critic": list(self.critic.parameters()), "actor": list(self.parameters())}

    with pytest.raises(ConfigError, match="the groups 'critic' and 'actor' share parameters of shapes"):
        make_learner(Overlapping(), td3_loss, optimizer)


def test_a_parameter_that_a_group_names_twice_is_stepped_once() -> None:
    class Twice(DeterministicActorCritic):
        def parameter_groups(self) -> dict[str, list[nn.Parameter]]:
            return {name: 2 * group for name, group in super().parameter_groups().items()}

    results = []
    for make in (Twice, DeterministicActorCritic):
        module = make()
        results.append(update(make_learner(module, td3_loss), td3_batch(0), lr=0.1, grad_clip=0.01))
        results[-1] |= copies(module)
    for name, value in results[1].items():
        torch.testing.assert_close(torch.as_tensor(results[0][name]), torch.as_tensor(value))


def test_a_loss_that_is_not_finite_is_refused_in_any_group() -> None:
    learner = make_learner(DeterministicActorCritic(), td3_loss)
    batch = td3_batch(0)
    with pytest.raises(LossError, match="total_loss is nan"):
        update(learner, {**batch, "rewards": batch["rewards"] * np.float32("nan")}, lr=0.1, groups=["critic"])


def test_each_group_has_its_own_learning_rate_and_limit_of_gradients() -> None:
    def norms_of_steps(**settings: Any) -> list[float]:
        module = DeterministicActorCritic()
        before = copies(module)
        update(make_learner(module, td3_loss, torch.optim.SGD), td3_batch(0), **settings)
        groups = [[p - before[key] for key, p in module.named_parameters() if key.startswith(name)] for name in GROUPS]
        return [torch.cat([step.flatten() for step in steps]).norm().item() for steps in groups]

    lrs = {"actor": 0.5, "critic": 0.25}
    assert norms_of_steps(lr=lrs, grad_clip=1e-3) == pytest.approx([0.5e-3, 0.25e-3], rel=1e-4)
    limits = {"actor": 1e-3, "critic": 2e-3}
    assert norms_of_steps(lr=lrs, grad_clip=limits) == pytest.approx([0.5e-3, 0.5e-3], rel=1e-4)
    free, limited = norms_of_steps(lr=lrs), norms_of_steps(lr=lrs, grad_clip={"critic": 2e-3})
    assert limited == pytest.approx([free[0], 0.5e-3], rel=1e-4) and free[1] > 1e-3
    with pytest.raises(ConfigError, match=r"no group\(s\) of parameters \['tail'\]"):
        norms_of_steps(lr=0.1, grad_clip={"tail": 1.0})


@pytest.mark.parametrize("cls", [PPOConfig, DQNConfig])
def test_a_limit_of_a_group_that_the_module_does_not_have_is_refused_before_anything_is_sampled(cls: Any) -> None:
    config = cls().environment("CartPole-v1")
    with config.training(grad_clip={"default": 1.0}).build() as algo:
        assert [*algo.get_module().parameter_groups()] == ["default"]
    with pytest.raises(ConfigError, match=r"grad_clip: unknown setting 'critic'\. It takes default"):
        config.copy(grad_clip={"critic": 1.0}).build()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"groups": ["critics"]}, r"no group\(s\) of parameters \['critics'\].*\['actor', 'critic'\]"),
        ({"every": {"aktor": 2}}, r"no group\(s\) of parameters \['aktor'\]"),
        ({"every": {"actor": 0}}, r"every={'actor': 0} must be at least 1"),
        ({"every": {"actor": 2}}, r"every={'actor': 2} .* this update takes 1, so the group\(s\) would never move"),
        ({"lr": {"actor": 0.1}}, r"has no learning rate for the group\(s\) \['critic'\]"),
    ],
)
def test_groups_that_do_not_exist_are_named(settings: dict[str, Any], message: str) -> None:
    learner = make_learner(DeterministicActorCritic(), td3_loss)
    with pytest.raises(ConfigError, match=message):
        update(learner, td3_batch(0), **{"lr": 0.1, **settings})


def test_a_loss_without_a_scalar_for_a_group_that_moves_is_refused() -> None:
    def only_critic(module: Any, batch: Batch, coefficients: Mapping[str, float]) -> Any:
        losses, reported = td3_loss(module, batch, coefficients)
        return {"critic": losses["critic"]}, reported

    learner = make_learner(DeterministicActorCritic(), only_critic)
    update(learner, td3_batch(0), lr=0.1, groups=["critic"])
    with pytest.raises(LossError, match=r"groups of parameters \['critic'\], but the update also moves \['actor'\]"):
        update(learner, td3_batch(0), lr=0.1)


# Stops.


def rows(size: int) -> Batch:
    return {"obs": np.ones((size, 3), np.float32), "row": np.arange(size)}


@pytest.mark.parametrize(("limit", "num_epochs"), [(-1.0, 1), (2.5, 3), (1e9, 5)])
def test_an_update_ends_once_the_means_of_an_epoch_say_so(limit: float, num_epochs: int) -> None:
    calls = 0

    def counting(module: Module, batch: Batch, coefficients: Mapping[str, float]) -> Any:
        """Report 0.5 in the first epoch of two minibatches, then 2.5, 4.5, ...: 0, 1, 2, 3, ..."""
        nonlocal calls
        calls += 1
        return 0 * module.value(batch["obs"]).mean(), {"calls": torch.tensor(float(calls - 1))}

    from learner_cases import Net

    stop = StopAbove("calls", limit)
    results = update(make_learner(Net(), counting), rows(8), lr=0.0, num_epochs=5, minibatch_size=4, stop=stop)
    # 0.5 and 2.5 are not above 2.5, and 4.5 is.
    assert results["num_epochs"] == num_epochs
    assert results["num_gradient_steps"] == calls == 2 * num_epochs


def test_the_columns_of_a_stopped_update_match_its_last_epoch() -> None:
    def loss(module: Module, batch: Batch, coefficients: Mapping[str, float]) -> Any:
        values = module.value(batch["obs"])
        return values.mean(), {"row": batch["row"].float(), "one": torch.ones(())}

    from learner_cases import Net

    stop = StopAbove("one", 0.5)
    results = update(make_learner(Net(), loss), rows(10), lr=0.1, num_epochs=3, minibatch_size=3, stop=stop)
    assert results["num_epochs"] == 1
    assert results["row"].tolist() == list(range(10))


def test_without_a_stop_all_epochs_are_taken() -> None:
    from learner_cases import Net

    assert update(make_learner(Net(), Recorder()), rows(4), lr=0.1, num_epochs=3)["num_epochs"] == 3
