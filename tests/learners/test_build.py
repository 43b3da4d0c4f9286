"""Algorithms whose learners an engine runs."""

from __future__ import annotations

import os
import signal
import threading
import time
from typing import Any

import pytest

from corral import PPOConfig
from corral.errors import ConfigError, WorkerDiedError
from corral.modules.module import ActorCritic
from corral.testing import IdentityEnv


def counted(metrics_logger: Any) -> None:
    metrics_logger.log_value("updates", 1, reduce="sum")


def learning(**env_config: Any) -> PPOConfig:
    return (
        PPOConfig()
        .environment(IdentityEnv, env_config=env_config)
        .training(gamma=0.0, lr=3e-3, train_batch_size_per_learner=512, minibatch_size=64, num_epochs=4)
        .callbacks(on_update_end=counted)
        .learners(num_learners=2)
        .debugging(seed=1)
    )


def is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["process", pytest.param("ray", marks=pytest.mark.xdist_group("ray"))])
def test_ppo_learns_with_two_learners_until_one_is_killed(engine: str, request: pytest.FixtureRequest) -> None:
    if engine == "ray":
        request.getfixturevalue("ray_runtime")
    # The env holds what cannot be pickled: it stays here, with the runner.
    with learning(lock=threading.Lock()).engine(engine).build() as algorithm:
        best, results = 0.0, []
        while best < 15 and len(results) < 40:  # of 16
            results.append(algorithm.train())
            best = max(best, results[-1]["env_runners"]["episode_return_mean"])
        assert best >= 15
        first = results[0]["learners"]
        assert first["updates"] == 2  # one in each learner
        assert first["default_policy"]["num_gradient_steps"] == 4 * 8
        assert first["default_policy"]["module_train_batch_size_mean"] == pytest.approx(2 * 64, rel=0.05)
        assert algorithm.env_runner is not None
        trained = algorithm.get_module().state_dict()
        assert all((value == trained[name]).all() for name, value in algorithm.env_runner.module.state_dict().items())

        pids = algorithm.learner_group._call_all(lambda learner: os.getpid())
        assert os.getpid() not in pids
        os.kill(pids[1], signal.SIGKILL)
        start = time.monotonic()
        with pytest.raises(WorkerDiedError, match="learner"):
            algorithm.train()
        assert time.monotonic() - start < 30
        with pytest.raises(WorkerDiedError, match="the learners have ended, and are not restarted"):
            algorithm.train()
        assert algorithm.compute_single_action(0, explore=False) == 0
    deadline = time.monotonic() + 20
    while any(is_running(pid) for pid in pids):
        assert time.monotonic() < deadline, "a learner's process is left"
        time.sleep(0.02)


def freeze_policy(policy: Any) -> None:
    policy.policy_head.requires_grad_(False)


def unfreeze(module: Any) -> None:
    module.requires_grad_(True)


@pytest.mark.slow
def test_learners_freeze_what_the_driver_froze_when_it_made_the_module() -> None:
    config = learning().training(train_batch_size_per_learner=64, num_epochs=1).callbacks(None)
    with config.callbacks(on_create_policy=freeze_policy).engine("process").build() as algorithm:
        heads = []
        for change in (None, unfreeze):
            if change is not None:
                algorithm.learner_group.foreach_module("default_policy", change)
            module = algorithm.get_module()
            before = {name: value.clone() for name, value in module.state_dict().items()}
            algorithm.train()
            after = module.state_dict()
            assert not (after["value_head.weight"] == before["value_head.weight"]).all()
            heads.append(bool((after["policy_head.weight"] == before["policy_head.weight"]).all()))
        assert heads == [True, False]


def unfreeze_policy(policy: Any) -> None:
    policy.requires_grad_(True)


class FrozenAtFirst(ActorCritic):
    """Its own constructor freezes the head of the policy."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.policy_head.requires_grad_(False)


@pytest.mark.slow
def test_learners_train_what_the_driver_made_trainable() -> None:
    config = learning().training(train_batch_size_per_learner=64, num_epochs=1).learners(num_learners=1)
    config.rl_module(module_class=FrozenAtFirst).callbacks(None).callbacks(on_create_policy=unfreeze_policy)
    with config.engine("process").build() as algorithm:
        before = algorithm.get_module().state_dict()["policy_head.weight"].clone()
        algorithm.train()
        assert not (algorithm.get_module().state_dict()["policy_head.weight"] == before).all()


def test_learners_that_would_have_to_take_turns_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"num_learners=2.*engine_name='local'"):
        learning().engine("local").validate()
    learning().engine("auto").validate()
    learning().learners(num_learners=0).engine("local").validate()
