"""Measures what the NumPy form of Q-learning gains, which has to earn its place."""

from functools import partial
from typing import Any

import measuring
from measuring import Fields, Options

BATCH_SIZE, UPDATES_PER_TURN = 32, 200


def numpy_against_autograd(options: Options) -> Fields:
    """How many times the updates per second of autograd the NumPy form takes, on a net of 64-64."""
    import numpy as np
    from gymnasium import spaces

    from corral.algorithms.dqn import dqn_loss
    from corral.learners.learner import Learner
    from corral.learners.settings import LearningSpec, UpdateSettings
    from corral.modules.q_module import QModule

    rng = np.random.default_rng(options.seed)
    obs, next_obs = rng.standard_normal((2, BATCH_SIZE, 4), dtype=np.float32)
    batch = {
        "obs": obs,
        "next_obs": next_obs,
        "actions": rng.integers(0, 2, BATCH_SIZE),
        "rewards": np.ones(BATCH_SIZE, np.float32),
        "terminated": rng.random(BATCH_SIZE) < 0.05,
        "discounts": np.full(BATCH_SIZE, 0.99, np.float32),
        "weights": np.ones(BATCH_SIZE, np.float32),
    }
    settings = {"p": UpdateSettings(lr=5e-4, grad_clip=10.0)}

    def updater(loss: Any) -> Any:
        module = QModule(spaces.Box(-1, 1, (4,), np.float32), spaces.Discrete(2), {"fcnet_hiddens": measuring.HIDDEN})
        learner = Learner({"p": module}, {"p": LearningSpec(loss)}, device="cpu")

        def update() -> int:
            for _ in range(UPDATES_PER_TURN):
                learner.update({"p": batch}, settings)
            return UPDATES_PER_TURN

        return update

    loss = partial(dqn_loss, double_q=True, huber=True)
    # The gate knows the loss by its partial: behind another function it is left to autograd.
    return measuring.relative_rate(updater(loss), updater(lambda *arguments: loss(*arguments)), options)
