"""The learners that a config asks for: one in this process, or several that the engine runs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from corral.callbacks.dispatch import make_dispatcher
from corral.config.validation import optimizer_class
from corral.core.seeding import seed_everything
from corral.engines.base import Engine, WorkerHandle, resources_of_learner
from corral.learners.distributed import LOOPBACK, Peers, learner_device
from corral.learners.learner import Learner
from corral.learners.learner_group import LearnerGroup
from corral.learners.losses import Loss
from corral.modules.module import DEFAULT_MODULE_ID, Module

if TYPE_CHECKING:
    from corral.config.config import AlgorithmConfig


def make_learner_group(config: AlgorithmConfig, module: Module, loss: Loss, engine: Any) -> LearnerGroup:
    """Build the learners.

    Args:
        config: Frozen; its `seed` is set.
        module: To be trained; with `num_learners` above 0, the copy that stays in this process.
        loss: The algorithm's.
        engine: That runs the learners, if `num_learners` is above 0.

    Raises:
        SerializationError: A callback, the loss or a setting cannot be pickled.
        CorralError: The learners did not start in time.
    """
    assert config.seed is not None
    if not config.num_learners:
        return LearnerGroup(_make_learner(config, module, loss, config.seed, callbacks=make_dispatcher(config)))
    copy = _make_learner(config, module, loss, config.seed)
    # Learners have no env; one that cannot be pickled is no reason to fail, as long as the runner is here.
    config = config.copy(env=None, env_config={}, wrappers=[]).freeze()
    weights = copy.get_weights()
    trainable = {name for name, parameter in module.named_parameters() if parameter.requires_grad}
    factories = [
        partial(_make_worker, config, module.observation_space, module.action_space, loss, weights, trainable, rank)
        for rank in range(config.num_learners)
    ]
    return LearnerGroup(
        copy,
        start_learners(engine, config, factories),
        host=LOOPBACK if engine.traits.is_on_one_machine else None,
        start_timeout_s=config.start_timeout_s,
        describe_available=engine.describe_available,
    )


def start_learners(
    engine: Engine, config: AlgorithmConfig, factories: Sequence[Callable[[], Any]]
) -> list[WorkerHandle]:
    """Start a worker for each factory, `learner 1`, `learner 2`, ...; all of them, or none.

    Raises:
        SerializationError: A factory holds something that cannot be pickled.
    """
    resources = resources_of_learner(config)
    handles: list[WorkerHandle] = []
    try:
        for index, factory in enumerate(factories, 1):
            handles.append(engine.start(factory, name=f"learner {index}", resources=resources))
    except BaseException:
        for handle in handles:
            handle.kill()
        raise
    return handles


def _make_learner(
    config: AlgorithmConfig, module: Module, loss: Loss, seed: int, *, device: str | None = None, **parts: Any
) -> Learner:
    return Learner(
        {DEFAULT_MODULE_ID: module},
        loss,
        optimizer_class=optimizer_class(config.optimizer),
        optimizer_config=config.optimizer_config,
        grad_clip=config.grad_clip,
        grad_clip_by=config.grad_clip_by,
        device=device or config.device,
        num_threads=config.num_threads,
        seed=seed,
        **parts,
    )


def _make_worker(
    config: AlgorithmConfig,
    observation_space: Any,
    action_space: Any,
    loss: Loss,
    weights: dict[str, dict[str, Any]],
    trainable: set[str],
    rank: int,
) -> Learner:
    """Build one of several learners, in its process; they start with the same weights and shuffle differently."""
    assert config.seed is not None
    seed = int(np.random.SeedSequence([config.seed, rank]).generate_state(1)[0]) >> 1
    seed_everything(seed)
    module = config.module_spec(observation_space, action_space).build()
    for name, parameter in module.named_parameters():
        parameter.requires_grad_(name in trainable)  # a callback may have frozen some
    device = learner_device(config.device, rank)
    learner = _make_learner(config, module, loss, seed, device=device, callbacks=make_dispatcher(config))
    if config.num_learners > 1:
        learner.peers = Peers(rank, config.num_learners, learner.device)
    learner.set_weights(weights)
    return learner
