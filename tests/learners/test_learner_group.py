"""Several learners: their gradients, what they report, and what happens when one of them fails."""

from __future__ import annotations

import itertools
import os
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from learner_cases import (
    ALGORITHMS,
    OPTIMIZERS,
    PPO_COEFFICIENTS,
    DeterministicActorCritic,
    MakeLearner,
    Recorder,
    StopAbove,
    Weights,
    algorithm_batch,
    algorithm_loss,
    count_end,
    count_gradients,
    die_in_second,
    freeze,
    log_rows,
    minibatches_of,
    ones_of_rank,
    pid_of,
    raise_in_second,
    rebuild,
    regression,
    roots,
    squares_and_large,
    td3_batch,
    td3_loss,
    td3_reference,
    td3_training_step,
    td3_update_at_once,
    update,
    weights_of,
)

from at_least import all_of
from corral import PPOConfig
from corral.core.metrics.logger import MetricsLogger
from corral.core.metrics.timers import Timers
from corral.core.tree import map_tree
from corral.engines.base import WorkerHandle
from corral.engines.call_limits import FACTOR, LEAST_S, CallLimits
from corral.engines.local import LocalEngine
from corral.engines.process import ProcessEngine
from corral.errors import CallbackError, ConfigError, CorralError, LossError, WorkerDiedError
from corral.learners.build import start_learners
from corral.learners.distributed import backend_for, find_host_address
from corral.learners.learner import Learner
from corral.learners.learner_group import LearnerGroup, _apply
from corral.learners.losses import Batch
from corral.learners.remote_learners import RemoteLearners, merge_results, split_batches
from corral.learners.settings import UpdateSettings

# One process runs them all, with the same workers.
pytestmark = pytest.mark.xdist_group("learners")


def start(factories: Sequence[Callable[[], Any]]) -> list[WorkerHandle]:
    return start_learners(ProcessEngine(), PPOConfig(), factories)


@pytest.fixture(scope="module")
def workers() -> Iterator[list[WorkerHandle]]:
    """Processes of learners that one test after another uses; a start costs seconds of work."""
    handles: list[WorkerHandle] = []
    yield handles
    for handle in handles:
        handle.kill()


Build = Callable[[MakeLearner], LearnerGroup]


@pytest.fixture
def build(workers: list[WorkerHandle]) -> Build:
    """Give a group of new learners in processes that are there, or are started if a test ended them."""

    def group_of(make: MakeLearner) -> LearnerGroup:
        workers[:] = [worker for worker in workers if worker.alive()]
        workers.extend(start([partial(make, 0)] * (make.num_learners - len(workers))))
        used = workers[: make.num_learners]
        for future in [worker.call(rebuild, make, rank) for rank, worker in enumerate(used)]:
            future.result()
        return LearnerGroup(make(), RemoteLearners(used, host="127.0.0.1"))

    return group_of


def take_time_of_callbacks(learner: Any, seconds: float) -> None:
    learner.timers.add({"learning": -seconds, "callbacks": seconds})


def assert_same_weights(weights: Weights, others: Weights, atol: float, *, skip: tuple[str, ...] = ()) -> None:
    assert weights["m"].keys() == others["m"].keys()
    for name in weights["m"].keys() - set(skip):
        np.testing.assert_allclose(weights["m"][name], others["m"][name], atol=atol, rtol=0, err_msg=name)


def union_steps(batch: Batch, num_learners: int, num_minibatches: int) -> Iterator[Batch]:
    """Yield what the learners' minibatches of each gradient step hold together, without shuffling."""
    shards = [shard["m"] for shard in split_batches({"m": batch}, num_learners)]
    for step in range(num_minibatches):
        parts = []
        for shard in shards:
            bounds = np.linspace(0, len(shard["y"]), num_minibatches + 1).astype(int)
            parts.append(map_tree(lambda column, b=bounds: column[b[step] : b[step + 1]], shard))  # noqa: B023
        yield map_tree(lambda *columns: np.concatenate(columns), *parts)


@pytest.mark.slow_cases("settings0-3")
@pytest.mark.parametrize("num_learners", [2, 3])
@pytest.mark.parametrize(
    ("size", "num_minibatches", "num_epochs", "settings"),
    [
        (12, 1, 1, {"optimizer_class": torch.optim.SGD}),
        (13, 1, 1, {"optimizer_class": torch.optim.SGD}),
        (47, 4, 3, {"optimizer_class": torch.optim.SGD, "grad_clip": 0.5}),
        (48, 4, 3, {}),  # Adam
        (47, 4, 3, {"grad_clip": 0.5}),
        (47, 4, 3, {"grad_clip": 0.1, "grad_clip_by": "norm"}),
        (47, 4, 3, {"grad_clip": 0.05, "grad_clip_by": "value"}),
        # No optimizer of one vector: it treats parameters without a gradient in another way.
        (47, 4, 3, {"optimizer_class": torch.optim.Adagrad, "optimizer_config": {"weight_decay": 0.1}}),
        (47, 4, 3, {"optimizer_class": torch.optim.NAdam, "grad_clip": 0.5}),
    ],
)
def test_steps_match_one_learner_on_the_whole_batch(
    build: Build, num_learners: int, size: int, num_minibatches: int, num_epochs: int, settings: dict[str, Any]
) -> None:
    clipping = {name: settings[name] for name in ("grad_clip", "grad_clip_by") if name in settings}
    optimizer = {name: settings[name] for name in settings.keys() - clipping.keys()}
    make, batch, lr = MakeLearner(num_learners, **optimizer), regression(size), 0.05
    group, single = build(make), make()
    minibatch_size = None if num_minibatches == 1 else round(size // num_learners / num_minibatches)
    sizes = {"num_epochs": num_epochs, "minibatch_size": minibatch_size, "shuffle": False}
    results = update(group, batch, lr=lr, **sizes, **clipping)
    before = weights_of(make())
    of_single = [
        update(single, step, lr=lr, **clipping)
        for _ in range(num_epochs)
        for step in union_steps(batch, num_learners, num_minibatches)
    ]
    assert_same_weights(group.get_weights(), single.get_weights(), 1e-6, skip=("count",))
    assert np.abs(before["m"]["layers.0.weight"] - group.get_weights()["m"]["layers.0.weight"]).max() > 1e-3
    assert results["num_gradient_steps"] == len(of_single)
    assert results["default_optimizer_learning_rate"] == lr
    for name in ("gradients_default_optimizer_global_norm", "module_train_batch_size_mean"):
        assert results[name] == pytest.approx(np.mean([result[name] for result in of_single]), rel=1e-5), name
    # Means of means, where the minibatches of the learners differ by a row.
    for name in ("total_loss", "mean_y"):
        tolerance = 1e-5 if size % (num_learners * num_minibatches) == 0 or num_minibatches == 1 else 0.1
        assert results[name] == pytest.approx(np.mean([r[name] for r in of_single]), rel=tolerance, abs=tolerance), name


def test_all_learners_and_the_driver_have_the_same_weights_and_buffers(build: Build) -> None:
    group = build(MakeLearner(3))
    for index in range(3):
        update(group, regression(20 + index), lr=0.01, num_epochs=2, minibatch_size=3)
        group.collect_metrics(MetricsLogger(), Timers())
        first, *others = group._call_all(weights_of)
        for weights in [*others, group.get_weights()]:
            assert_same_weights(first, weights, 0)
        assert group.weights_version == index + 1
    obs = regression(5)["obs"]
    module = group.get_module("m").eval()
    np.testing.assert_allclose(group.values("m", obs), module.value(torch.from_numpy(obs)).detach(), atol=1e-6)


def test_weights_can_be_given_to_all_learners(build: Build) -> None:
    group = build(MakeLearner(2))
    update(group, regression(8), lr=0.1)
    kept = weights_of(group.learner_here)
    update(group, regression(8), lr=0.1)
    group.set_weights(kept)
    assert group.weights_version == 3
    for weights in [*group._call_all(weights_of), group.get_weights()]:
        assert_same_weights(weights, kept, 0)


@pytest.mark.parametrize(
    ("module_id", "change", "message"),
    [
        ("m", {"layers.0.bias": np.ones(1, np.float32)}, r"layers.0.bias of module 'm' is \(1,\).*\(8,\) here"),
        ("m", {"layers.0.weights": np.ones(8, np.float32)}, r"layers.0.weights of module 'm' is \(8,\).*missing here"),
        ("other", {}, "module 'other'.*missing here"),
    ],
)
def test_weights_of_other_shapes_or_names_are_refused(module_id: str, change: dict[str, Any], message: str) -> None:
    group = LearnerGroup(MakeLearner(1)())
    before = weights_of(group.learner_here)
    with pytest.raises(ConfigError, match=message):
        group.set_weights({module_id: {**{name: array + 1 for name, array in before["m"].items()}, **change}})
    assert_same_weights(weights_of(group.learner_here), before, 0)


def test_each_learner_sees_each_row_of_its_shard_once_an_epoch(build: Build) -> None:
    group = build(MakeLearner(3, Recorder()))
    batch = {**regression(31), "row": np.arange(31)}
    update(group, batch, lr=0.0, num_epochs=2, minibatch_size=3)
    seen = group._call_all(minibatches_of)
    assert [len(minibatches) for minibatches in seen] == [6, 6, 6]  # round(10 / 3) steps an epoch, in all
    rows = [[sorted(itertools.chain(*minibatches[start : start + 3])) for start in (0, 3)] for minibatches in seen]
    assert rows == [[list(range(11))] * 2, [list(range(11, 21))] * 2, [list(range(21, 31))] * 2]
    firsts = [[row - minimum for row in minibatches[0]] for minibatches, minimum in zip(seen, (0, 11, 21), strict=True)]
    assert firsts[0] != firsts[1] != firsts[2]  # in an order of its own


def test_minibatches_of_one_row_with_unequal_shards(build: Build) -> None:
    make, batch = MakeLearner(2), regression(7)  # shards of 4 and 3
    group, single = build(make), make()
    results = update(group, batch, lr=0.01, minibatch_size=1, shuffle=False)
    assert results["num_gradient_steps"] == 3
    for step in union_steps(batch, 2, 3):
        update(single, step, lr=0.01)
    assert_same_weights(group.get_weights(), single.get_weights(), 1e-6, skip=("count",))


def test_events_fire_in_every_learner(build: Build) -> None:
    functions = {"on_learn_on_batch": [log_rows], "on_gradients": [count_gradients], "on_update_end": [count_end]}
    group = build(MakeLearner(3, callbacks=functions))
    results = update(group, regression(13), lr=0.1, num_epochs=2, minibatch_size=2)
    metrics, timers = MetricsLogger(), Timers()
    group.collect_metrics(metrics, timers)
    assert metrics.peek("learners") == {"rows": 13, "gradients": 3 * 4, "ends": 3}
    assert timers.seconds["callbacks"] == -timers.seconds["learning"] > 0
    assert results["rank"] == pytest.approx((0 * 5 + 1 * 4 + 2 * 4) / 13)
    assert results["who"] == "learner of rank 0"
    assert results["only_in_one"] == 5
    metrics.reduce()
    group.collect_metrics(metrics, timers)
    assert metrics.peek(("learners", "rows")) == 0


def test_callbacks_of_several_learners_take_the_time_of_the_slowest_and_once(build: Build) -> None:
    group, timers = build(MakeLearner(2)), Timers()
    group._call_each(take_time_of_callbacks, [(1.0,), (2.5,)])
    for _ in range(2):
        group.collect_metrics(MetricsLogger(), timers)
        assert (timers.seconds["callbacks"], timers.seconds["learning"]) == (2.5, -2.5)


def test_changed_gradients_give_the_same_weights_in_all_learners(build: Build) -> None:
    settings = {"optimizer_class": torch.optim.SGD, "callbacks": {"on_gradients": [ones_of_rank]}}
    group = build(MakeLearner(2, **settings))
    before = weights_of(group.learner_here)
    results = update(group, regression(4), lr=0.5)
    first, second = group._call_all(weights_of)
    assert_same_weights(first, second, 0)
    # Each learner has half of the rows, so the gradient is (1 + 2) / 2.
    np.testing.assert_allclose(before["m"]["scale"] - first["m"]["scale"], 0.75, rtol=1e-6)
    assert results["gradients_default_optimizer_global_norm"] > 1.5


def test_logged_errors_of_callbacks_are_counted(build: Build) -> None:
    group = build(MakeLearner(3, callbacks={"on_update_end": [raise_in_second]}, on_error="log"))
    assert group.num_callback_errors == 0
    for _ in range(2):
        update(group, regression(6), lr=0.1)
    group.collect_metrics(MetricsLogger(), Timers())
    assert group.num_callback_errors == 2


def test_nan_in_one_shard_ends_the_update_in_all_learners_and_names_one(build: Build) -> None:
    make, batch = MakeLearner(2), regression(16)  # shards of 8 rows, 2 minibatches
    group, single = build(make), make()
    batch["y"][13] = np.nan  # in the second half of the second shard
    with pytest.raises(LossError) as caught:
        update(group, batch, lr=0.1, minibatch_size=4, shuffle=False)
    message = str(caught.value)
    assert message.startswith("learner 2: learners/m/total_loss is nan in epoch 0, minibatch 1 (mean_y=nan)")
    assert "learner 1" not in message
    # The step before it was taken, and the driver knows; the learners are in step, and continue.
    update(single, next(union_steps(batch, 2, 2)), lr=0.1)
    for weights in [*group._call_all(weights_of), group.get_weights()]:
        assert_same_weights(weights, single.get_weights(), 1e-6, skip=("count",))
    assert group.weights_version == 1
    assert np.isfinite(update(group, regression(16), lr=0.1)["total_loss"])


def test_a_gradient_that_is_not_finite_in_one_learner_is_named(build: Build) -> None:
    group = build(MakeLearner(3, roots))
    before, batch = weights_of(group.learner_here), regression(9)
    batch["y"][4] = 7
    with pytest.raises(LossError, match=r"^learner 2: .*gradient norm=nan") as caught:
        update(group, batch, lr=0.1)
    assert "learner 1" not in str(caught.value) and "learner 3" not in str(caught.value)
    for weights in group._call_all(weights_of):
        assert_same_weights(weights, before, 0, skip=("count",))


def test_fewer_rows_than_learners_are_learned_as_by_one(build: Build) -> None:
    group, single = build(MakeLearner(3)), MakeLearner(0)()
    found, expected = (update(each, regression(2), lr=0.1) for each in (group, single))
    assert_same_weights(group.get_weights(), single.get_weights(), 1e-6, skip=("count",))
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        np.testing.assert_allclose(found[name], value, rtol=1e-5, err_msg=name)
    with pytest.raises(LossError, match="learners/m: the batch is empty"):
        update(group, {name: column[:0] for name, column in regression(2).items()}, lr=0.1)
    update(group, regression(3), lr=0.1)


# Groups of parameters, stops and frozen parameters: the same in all learners.


def td3_steps(num_steps: int, size: int) -> list[Batch]:
    """Return batches, each of the rows that meet in a gradient step of `td3_update_at_once` with two learners."""
    whole, steps = algorithm_batch("sac", num_steps * size), range(num_steps)
    shards = [shard["m"] for shard in split_batches({"m": whole}, 2)]
    half = size // 2
    return [
        {name: np.concatenate([shard[name][half * step : half * (step + 1)] for shard in shards]) for name in whole}
        for step in steps
    ]


@pytest.mark.slow
def test_a_delayed_actor_in_two_learners_moves_as_in_one(build: Build) -> None:
    make = MakeLearner(2, td3_loss, DeterministicActorCritic)
    group, batches = build(make), [td3_batch(index) for index in range(4)]
    for number, batch in enumerate(batches, 1):
        td3_training_step(group, batch, number)
    expected = td3_reference(batches, torch.optim.Adam)
    for weights in [*group._call_all(weights_of), group.get_weights()]:
        for name, value in expected.items():
            np.testing.assert_allclose(weights["m"][name], value, atol=1e-6, rtol=0, err_msg=name)
    group = build(make)
    results = td3_update_at_once(group, algorithm_batch("sac", 48), num_steps=4)
    assert results["num_gradient_steps"] == 4
    expected = td3_reference(td3_steps(4, 12), torch.optim.Adam)
    for weights in [*group._call_all(weights_of), group.get_weights()]:
        for name, value in expected.items():
            np.testing.assert_allclose(weights["m"][name], value, atol=1e-6, rtol=0, err_msg=name)


@pytest.mark.parametrize(("limit", "num_epochs"), [(4.9, 1), (5.1, 3)])
def test_all_learners_stop_after_the_same_epoch(build: Build, limit: float, num_epochs: int) -> None:
    group, batch = build(MakeLearner(2)), regression(11)
    batch["y"] = np.where(np.arange(11) < 6, 0.0, 11.0).astype(np.float32)  # 0 and 11 in the learners, 5 in the mean
    stop = StopAbove("mean_y", limit)
    results = update(group, batch, lr=0.01, num_epochs=3, minibatch_size=3, stop=stop)
    assert (results["num_epochs"], results["mean_y"]) == (num_epochs, pytest.approx(5))
    first, second = group._call_all(weights_of)
    assert_same_weights(first, second, 0)


@pytest.mark.parametrize(("limit", "num_epochs"), [(10.0, 1), (12.0, 3)])
def test_a_stop_gets_scalars_that_only_some_learners_report(build: Build, limit: float, num_epochs: int) -> None:
    group, batch = build(MakeLearner(2, squares_and_large)), regression(8)
    batch["y"] = np.where(np.arange(8) < 4, 0.0, 11.0).astype(np.float32)
    results = update(group, batch, lr=0.01, num_epochs=3, stop=StopAbove("large_y", limit))
    assert (results["num_epochs"], results["large_y"]) == (num_epochs, pytest.approx(11))


@pytest.mark.parametrize(
    ("algorithm", "optimizer"),
    [
        ("ppo", "adam"),
        ("ppo", "adagrad"),
        pytest.param("impala", "rmsprop", marks=pytest.mark.slow),
        pytest.param("appo", "adam", marks=pytest.mark.slow),
        ("dqn", "sgd"),
        ("sac", "adamw"),
        pytest.param("sac", "own", marks=pytest.mark.slow),
    ],
)
def test_no_learner_moves_frozen_parameters(build: Build, algorithm: str, optimizer: str) -> None:
    optimizer_class, config = OPTIMIZERS[optimizer]
    settings = {"optimizer_class": optimizer_class, "optimizer_config": config}
    group = build(MakeLearner(2, algorithm_loss(algorithm), ALGORITHMS[algorithm][0], **settings))
    names = [name for name, _ in group.get_module("m").named_parameters() if not name.startswith("target_")]
    for frozen in ([], names[::2], names[1:], []):
        group.foreach_module("m", freeze, frozen)
        before = weights_of(group.learner_here)["m"]
        for _ in range(3):
            update(group, algorithm_batch(algorithm), lr=0.01, coefficients=PPO_COEFFICIENTS)
        for weights in [*group._call_all(weights_of), group.get_weights()]:
            for name in names:
                assert np.array_equal(weights["m"][name], before[name]) == (name in frozen), name


def add_one(learner: Learner) -> None:
    learner.set_weights(
        {
            name: {key: np.asarray(array + 1) for key, array in own.items()}
            for name, own in learner.get_weights().items()
        }
    )


def test_what_a_function_changes_in_all_learners_is_read_here(build: Build) -> None:
    group = build(MakeLearner(2))
    wanted = {name: array + 1 for name, array in group.get_weights()["m"].items()}
    assert group.foreach_learner(add_one) == [None, None]
    for weights in [*group._call_all(weights_of), group.get_weights()]:
        assert all_of(np.array_equal(weights["m"][name], array) for name, array in wanted.items())


def ids_of(learner: Learner) -> list[str]:
    return list(learner.modules)


def test_a_module_that_was_removed_is_gone_in_all_learners(build: Build) -> None:
    group = build(MakeLearner(2))
    group.remove_module("m")
    assert [ids_of(group.learner_here), *group._call_all(ids_of)] == [[], [], []]


def test_other_losses_reach_all_learners(build: Build) -> None:
    group, one = build(MakeLearner(2)), MakeLearner(1)()
    for learner in (group, one):
        learner.set_losses({"m": roots})
    results = [update(learner, regression(8), lr=0.01)["total_loss"] for learner in (group, one)]
    assert results[0] == pytest.approx(results[1], rel=1e-5)


def test_learners_that_froze_different_parameters_are_refused(build: Build) -> None:
    group = build(MakeLearner(2))
    group.remote.workers[1].call(_apply, "m", freeze, ["scale"]).result()
    with pytest.raises(LossError, match="learners/m: the learners have frozen different parameters"):
        update(group, regression(8), lr=0.1)
    group.foreach_module("m", freeze, ["scale"])
    update(group, regression(8), lr=0.1)


# Faults.


def is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def assert_gone(pids: list[int]) -> None:
    deadline = time.monotonic() + 10
    while any(is_running(pid) for pid in pids):
        assert time.monotonic() < deadline, "a learner's process is left"
        time.sleep(0.02)


@pytest.mark.parametrize(
    ("callback", "error", "message"),
    [
        (raise_in_second, CallbackError, r"on_learn_on_batch.*ZeroDivisionError: the second learner has had enough"),
        (die_in_second, WorkerDiedError, r"learner \d: process .* was killed by SIGKILL"),
    ],
)
def test_a_learner_that_fails_ends_the_update_and_all_learners(
    build: Build, callback: Callable[..., None], error: type[CorralError], message: str
) -> None:
    group = build(MakeLearner(3, callbacks={"on_learn_on_batch": [callback]}))
    pids = group._call_all(pid_of)
    start = time.monotonic()
    with pytest.raises(error, match=message) as caught:
        update(group, regression(8), lr=0.1)
    assert time.monotonic() - start < 20  # not the half hour of a collective's timeout
    if error is CallbackError:
        assert isinstance(caught.value.__cause__, ZeroDivisionError)
    assert_gone(pids)
    for call in (
        partial(update, group, regression(8), lr=0.1),
        partial(group.collect_metrics, MetricsLogger(), Timers()),
    ):
        with pytest.raises(WorkerDiedError, match=rf"(?s)the learners have ended, and are not restarted.*{message}"):
            call()
    assert group.values("m", regression(3)["obs"]).shape == (3,)
    group.stop()


@pytest.mark.slow
def test_a_learner_that_was_killed_between_updates(build: Build) -> None:
    group = build(MakeLearner(2))
    pids = group._call_all(pid_of)
    update(group, regression(8), lr=0.1)
    os.kill(pids[0], signal.SIGKILL)
    with pytest.raises(WorkerDiedError, match=r"learner \d: process .* was killed by SIGKILL"):
        update(group, regression(8), lr=0.1)
    assert_gone(pids)


@pytest.mark.slow
def test_the_last_weights_can_be_saved_after_a_learner_died(build: Build) -> None:
    group = build(MakeLearner(2))
    update(group, regression(8), lr=0.1)
    weights = {"m": {name: value.copy() for name, value in group.get_weights()["m"].items()}}
    os.kill(group._call_all(pid_of)[1], signal.SIGKILL)
    with pytest.raises(WorkerDiedError):
        update(group, regression(8), lr=0.1)
    state = group.get_state()
    single = LearnerGroup(MakeLearner(0)())
    single.set_state(state)
    assert_same_weights(single.get_weights(), weights, 0)
    update(single, regression(8), lr=0.1)


@pytest.mark.slow
def test_an_interrupt_between_the_calls_to_two_learners(build: Build) -> None:
    make, batch = MakeLearner(2), regression(8)
    group, undisturbed = build(make), LearnerGroup(make())
    call = group.remote.workers[0].call

    def interrupted(*args: Any, **kwargs: Any) -> Any:
        group.remote.workers[0].call = call  # type: ignore[method-assign]
        future = call(*args, **kwargs)
        os.kill(os.getpid(), signal.SIGINT)
        return future

    for _ in range(2):
        group.remote.workers[0].call = interrupted  # type: ignore[method-assign]
        with pytest.raises(KeyboardInterrupt):
            update(group, batch, lr=0.1, shuffle=False)
        update(undisturbed, batch, lr=0.1, shuffle=False)
    skip = ("count",)  # a buffer, which counts the rows of one learner
    assert_same_weights(group.get_weights(), undisturbed.get_weights(), 1e-5, skip=skip)  # all took the update
    update(group, batch, lr=0.1, shuffle=False)
    update(undisturbed, batch, lr=0.1, shuffle=False)
    assert_same_weights(group.get_weights(), undisturbed.get_weights(), 1e-5, skip=skip)


@pytest.mark.slow
def test_an_exception_between_the_calls_to_two_learners_ends_all_of_them(build: Build) -> None:
    group = build(MakeLearner(2))
    second = group.remote.workers[1]
    call = second.call
    try:
        second.call = lambda *args, **kwargs: 1 / 0  # type: ignore[method-assign, assignment, return-value]
        with pytest.raises(ZeroDivisionError):
            update(group, regression(8), lr=0.1)
    finally:
        second.call = call  # type: ignore[method-assign]
    with pytest.raises(WorkerDiedError, match=r"the learners have ended.*only some of them were called: ZeroDivision"):
        update(group, regression(8), lr=0.1)


@pytest.mark.slow
def test_one_learner_of_the_engine_needs_no_peers_and_leaves_no_process(build: Build) -> None:
    make, batch = MakeLearner(1), regression(20)
    group, single = build(make), make()
    [pid] = group._call_all(pid_of)
    results = update(group, batch, lr=0.1, minibatch_size=5, shuffle=False)
    assert results == update(single, batch, lr=0.1, minibatch_size=5, shuffle=False)
    assert_same_weights(group.get_weights(), single.get_weights(), 0)
    group.stop()
    group.stop()
    assert_gone([pid])
    with pytest.raises(WorkerDiedError, match=r"the learners have ended.*stopped"):
        update(group, batch, lr=0.1)
    assert_same_weights(group.get_weights(), single.get_weights(), 0)


@pytest.mark.parametrize("num_epochs", [1, 3])
def test_the_time_limit_of_an_update_follows_the_rows_and_epochs_of_earlier_updates(num_epochs: int) -> None:
    limits, make = CallLimits("auto"), MakeLearner(1)
    group = LearnerGroup(make(), RemoteLearners([LocalEngine().start(partial(make, 0))], limits=limits))
    start_s = time.monotonic()
    update(group, regression(500), lr=0.01, num_epochs=num_epochs)
    elapsed_s = time.monotonic() - start_s
    limit_s = limits.limit_s("row passes", 1e9)
    assert limit_s is not None and LEAST_S < limit_s <= FACTOR * elapsed_s * 1e9 / (500 * num_epochs)


def test_learners_that_do_not_start_in_time() -> None:
    workers = start([partial(time.sleep, 1000)])
    with pytest.raises(CorralError, match=r"learner 1 did not start within start_timeout_s=0.5. No room."):
        RemoteLearners(workers, start_timeout_s=0.5, describe_available=lambda: "No room.")
    assert not workers[0].alive()


def test_what_a_learner_raises_at_its_start_comes_through() -> None:
    workers = start([partial(divmod, 1, 0), partial(time.sleep, 1000)])
    with pytest.raises(ZeroDivisionError):
        RemoteLearners(workers)
    assert not any(worker.alive() for worker in workers)


# The embedded learner, and pure functions.


def test_the_embedded_learner_is_the_learner() -> None:
    make, batch = MakeLearner(0), regression(20)
    group, single = LearnerGroup(make()), make()
    settings: dict[str, Any] = {"lr": 0.1, "minibatch_size": 5, "num_epochs": 2}
    assert update(group, batch, **settings) == update(single, batch, **settings)
    assert_same_weights(group.get_weights(), single.get_weights(), 0)
    group.stop()
    assert isinstance(group.learner_here, Learner)
    update(group, batch, lr=0.1)


@given(size=st.integers(1, 200), num_learners=st.integers(1, 9))
def test_shards_hold_all_rows_in_order_and_are_of_one_size(size: int, num_learners: int) -> None:
    batch = {"obs": {"a": np.arange(size), "b": (np.arange(size) * 2,)}, "y": np.arange(size) * 3}
    shards = [shard["m"] for shard in split_batches({"m": batch}, num_learners)]
    if size < num_learners:
        assert all_of([shard is batch for shard in shards], num_learners)
        return
    sizes = [len(shard["y"]) for shard in shards]
    assert len(shards) == num_learners and max(sizes) - min(sizes) <= 1
    assert np.concatenate([shard["obs"]["a"] for shard in shards]).tolist() == list(range(size))
    for shard in shards:
        assert (shard["obs"]["b"][0] == shard["obs"]["a"] * 2).all() and (shard["y"] == shard["obs"]["a"] * 3).all()


def test_no_unit_is_split_between_learners() -> None:
    batch = {"y": np.arange(9), "unit_starts": np.isin(np.arange(9), [0, 5, 6])}
    assert [shard["m"]["y"].tolist() for shard in split_batches({"m": batch}, 2)] == [[0, 1, 2, 3, 4, 5], [6, 7, 8]]
    assert [shard["m"] is batch for shard in split_batches({"m": batch}, 4)] == [True] * 4


def test_results_are_merged_by_what_they_are() -> None:
    one = {"total_loss": 1.0, "num_gradient_steps": 4.0, "module_train_batch_size_mean": 2.5, "note": "a", "flag": True}
    two = {
        "total_loss": 4.0,
        "num_gradient_steps": 4.0,
        "module_train_batch_size_mean": 2.0,
        "note": "b",
        "flag": False,
    }
    merged = merge_results([one, {**two, "mine": np.float32(3)}], [10, 5])
    assert merged == {
        "total_loss": 2.0,
        "num_gradient_steps": 4.0,
        "module_train_batch_size_mean": 4.5,
        "note": "a",
        "flag": pytest.approx(2 / 3),
        "mine": 3.0,
    }


@pytest.mark.parametrize("kind", [np.array, torch.tensor])
def test_numbers_without_axes_are_merged_as_numbers(kind: Any) -> None:
    assert merge_results([{"mine": kind(1.0)}, {"mine": kind(4.0)}], [10, 5]) == {"mine": 2.0}


def test_the_extremes_of_learners_are_merged_as_extremes() -> None:
    merged = merge_results([{"qf_min": -3.0, "qf_max": 1.0}, {"qf_min": -1.0, "qf_max": 4.0}], [10, 5])
    assert merged == {"qf_min": -3.0, "qf_max": 4.0}


@pytest.mark.parametrize(
    ("gpu_ids", "backend"),
    [([None, None], "gloo"), (["a", "b"], "nccl"), (["a", "a"], "gloo"), (["a", None], "gloo")],
)
def test_nccl_only_where_each_learner_has_a_gpu_to_itself(gpu_ids: list[str | None], backend: str) -> None:
    assert backend_for(gpu_ids) == backend


def test_the_own_address_belongs_to_this_host() -> None:
    import socket

    with socket.socket() as server:
        server.bind((find_host_address(), 0))  # an address of another host cannot be bound


def test_an_update_of_the_embedded_learner_is_there_when_it_was_asked_for() -> None:
    make, batch = MakeLearner(0), regression(20)
    group, single = LearnerGroup(make()), make()
    settings = UpdateSettings(lr=0.1, minibatch_size=5)
    pending = group.update_async({"m": batch}, {"m": settings})
    assert pending.done()
    assert (pending.result(), group.weights_version) == (single.update({"m": batch}, {"m": settings}), 1)
    failing = group.update_async({"m": {name: column[:0] for name, column in batch.items()}}, {"m": settings})
    with pytest.raises(LossError, match="the batch is empty"):
        failing.result()


@pytest.mark.slow
@pytest.mark.parametrize("num_learners", [1, 2])
def test_updates_that_are_received_later_are_the_same_updates(build: Build, num_learners: int) -> None:
    group, single = build(MakeLearner(num_learners)), MakeLearner(0)()
    settings = {"m": UpdateSettings(lr=0.1, shuffle=False)}
    batches = [{"m": regression(size)} for size in (8, 12)]
    before = weights_of(group.learner_here)
    pending = [group.update_async(batch, settings) for batch in batches]
    skip = ("count",)  # a buffer, which counts the rows of one learner
    for version, (update_, batch) in enumerate(zip(pending, batches, strict=True), start=1):
        assert group.weights_version == version - 1
        assert_same_weights(group.get_weights(), before, 1e-5, skip=skip)  # nobody waits for the update
        results = update_.result()
        wanted = single.update(batch, settings)
        assert results["m"]["total_loss"] == pytest.approx(wanted["m"]["total_loss"], abs=1e-5)
        before = {"m": {name: value.copy() for name, value in single.get_weights()["m"].items()}}
        assert_same_weights(group.get_weights(), before, 1e-5, skip=skip)
    assert group.weights_version == 2 and all_of(update_.done() for update_ in pending)
