"""Measures of Corral's SAC: the whole loop, and an update against the matrix products in it."""

from collections.abc import Callable
from statistics import median
from time import process_time
from typing import Any

import measuring
from measuring import Fields, Options

BATCH, OBS, ACTIONS, WIDTH = 256, 3, 1, 256
TURNS, CALLS_A_TURN = 5, 20


def config(options: Options, **learners: Any) -> Any:
    """Returns the hyperparameters that all systems share, with settings of the learners."""
    from corral import SACConfig

    return (
        SACConfig()
        .environment("Pendulum-v1")
        .training(
            lr=3e-4,
            train_batch_size_per_learner=BATCH,
            num_steps_sampled_before_learning_starts=100,
            replay_buffer_config={"capacity": 100_000},
            tau=0.005,
            gamma=0.99,
        )
        .rl_module(model_config={"fcnet_hiddens": [WIDTH, WIDTH], "fcnet_activation": "relu"})
        .reporting(min_sample_timesteps_per_iteration=200)
        .learners(**learners)
        .debugging(seed=options.seed)
    )


def sac(options: Options) -> Fields:
    """Env steps per second of SAC at the hyperparameters that all systems share, 200 env steps at a time."""
    with config(options).build() as algo:
        return measuring.training_rate(measuring.trainer(algo), options)


def limit(options: Options) -> Fields:
    """Percent of an update that its matrix products alone take, in turns of both."""
    import torch

    with config(options).build() as algo:
        for _ in range(2):
            algo.train()

        def update() -> None:
            algo.learn("default_policy")

        products = _products()

        def multiply() -> None:
            for left, right in products:
                torch.mm(left, right)

        shares, seconds = [], []
        start = process_time()
        with torch.no_grad():
            while process_time() - start < options.seconds or len(shares) < TURNS:
                whole, bare = _seconds(update), _seconds(multiply)
                shares.append(bare / whole)
                seconds.append(whole)
    return {
        "percent_products": 100 * median(shares),
        "ms_per_update": 1e3 * median(seconds),
        "gflop_per_update": sum(2 * a.shape[0] * a.shape[1] * b.shape[1] for a, b in products) / 1e9,
    }


def _products() -> list[Any]:
    """Returns pairs of matrices, one for each product of an update: of two critics, their targets and the actor."""
    import torch

    def layers(num_inputs: int, num_outputs: int) -> list[tuple[int, int]]:
        return [(num_inputs, WIDTH), (WIDTH, WIDTH), (WIDTH, num_outputs)]

    actor, critic = layers(OBS, 2 * ACTIONS), layers(OBS + ACTIONS, 1)
    forward = 2 * actor + 2 * 3 * critic  # here and next; targets, of the steps taken, of the policy's actions
    weights = actor + 2 * critic
    inputs = actor[1:] + 2 * critic[1:] + 2 * critic  # of the actor, of the critics, and down to the actions
    return [
        *((torch.randn(BATCH, a), torch.randn(a, b)) for a, b in forward),
        *((torch.randn(a, BATCH), torch.randn(BATCH, b)) for a, b in weights),
        *((torch.randn(BATCH, b), torch.randn(b, a)) for a, b in inputs),
    ]


def _seconds(work: Callable[[], None]) -> float:
    start = process_time()
    for _ in range(CALLS_A_TURN):
        work()
    return (process_time() - start) / CALLS_A_TURN
