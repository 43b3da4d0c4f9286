"""The learners that a config asks for: one in this process, or several that the engine runs."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from corral.callbacks.dispatch import Dispatcher, make_dispatcher
from corral.core.metrics.logger import MetricsLogger
from corral.core.metrics.timers import Timers
from corral.core.seeding import seed_everything
from corral.engines.base import Engine, WorkerHandle
from corral.engines.call_limits import CallLimits
from corral.learners.distributed import LOOPBACK, Peers, learner_device
from corral.learners.learner import Learner
from corral.learners.learner_group import LearnerGroup
from corral.learners.remote_learners import RemoteLearners, build_copy, frozen_parameters
from corral.learners.settings import LearningSpec
from corral.modules.layers import share_layers
from corral.modules.module import Module
from corral.modules.spec import ModuleSpec

if TYPE_CHECKING:
    from corral.learners.config import LearnerConfig


def make_learner_group(
    config: LearnerConfig,
    specs: Mapping[str, ModuleSpec],
    modules: Mapping[str, Module],
    learning: Mapping[str, LearningSpec],
    engine: Any,
    metrics: MetricsLogger,
    timers: Timers,
) -> LearnerGroup:
    """Return the group of learners.

    Args:
        config: A frozen config; its `seed` is set.
        specs: What the modules are built from, by module id.
        modules: The modules to train, by module id; with `num_learners` above 0, the copies that stay in this process.
        learning: Losses and optimizers by module id; a module without an entry does not learn.
        engine: The engine that runs the learners, if `num_learners` is above 0.
        metrics: Logger of the algorithm, into which a learner of this process logs.
        timers: Timers of the algorithm, for a learner of this process.

    Raises:
        SerializationError: A callback, a loss, a module's class or a setting cannot be pickled.
        CorralError: The learners did not start in time.
    """
    assert config.seed is not None
    if not config.num_learners:
        learner = _make_learner(config, modules, learning, config.seed, callbacks=make_dispatcher(config))
        learner.log_into(metrics, timers)
        return LearnerGroup(learner)
    copy = _make_learner(config, modules, learning, config.seed)
    # Learners have no env, so an env that cannot be pickled must not make this fail if the runner is embedded.
    config = config.copy(env=None, env_config={}, wrappers=[]).freeze()
    weights = copy.get_weights()
    frozen = {module_id: frozen_parameters(module) for module_id, module in modules.items()}
    factories = [
        partial(_make_worker, config, specs, learning, weights, frozen, rank) for rank in range(config.num_learners)
    ]
    remote = RemoteLearners(
        start_learners(engine, config, factories),
        host=LOOPBACK if engine.traits.is_on_one_machine else None,
        start_timeout_s=config.start_timeout_s,
        describe_available=engine.describe_available,
        limits=CallLimits(config.worker_timeout_s),
    )
    return LearnerGroup(copy, remote)


def start_learners(engine: Engine, config: LearnerConfig, factories: Sequence[Callable[[], Any]]) -> list[WorkerHandle]:
    """Start one worker per factory, named `learner 1` and so on, and return them: all of them, or none.

    Raises:
        SerializationError: A factory holds something that cannot be pickled.
    """
    resources = config.learner_resources
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
    config: LearnerConfig,
    modules: Mapping[str, Module],
    learning: Mapping[str, LearningSpec],
    seed: int,
    *,
    device: str | None = None,
    callbacks: Dispatcher | None = None,
) -> Learner:
    return (config.learner_class or Learner)(
        modules,
        learning,
        device=device or config.device,
        num_threads=config.num_threads,
        compile=config.compile,
        precision=config.precision,
        seed=seed,
        callbacks=callbacks,
    )


def _make_worker(
    config: LearnerConfig,
    specs: Mapping[str, ModuleSpec],
    learning: Mapping[str, LearningSpec],
    weights: Mapping[str, dict[str, Any]],
    frozen: Mapping[str, Collection[str]],
    rank: int,
) -> Learner:
    """Build one of several learners, in its process; all start with the same weights and shuffle differently."""
    assert config.seed is not None
    seed = int(np.random.SeedSequence([config.seed, rank]).generate_state(1)[0]) >> 1
    seed_everything(seed)
    modules: dict[str, Module] = {}
    for module_id, spec in specs.items():
        module = build_copy(spec, frozen[module_id])
        share_layers(module_id, module, modules, config.shared_layers)
        modules[module_id] = module
    device = learner_device(config.device, rank)
    learner = _make_learner(config, modules, learning, seed, device=device, callbacks=make_dispatcher(config))
    if config.num_learners > 1:
        learner.set_peers(Peers(rank, config.num_learners, learner.device))
    learner.set_weights(weights)
    return learner
