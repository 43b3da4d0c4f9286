"""An algorithm in a user's own file, as text that tests write where a user would have it."""

from __future__ import annotations

from pathlib import Path

MY_ALGO = '''
from dataclasses import dataclass
from typing import Any

from corral import PPO, Algorithm, PPOConfig
from corral.core.settings import PositiveFloat


@dataclass(kw_only=True)
class MyConfig(PPOConfig):
    """Settings of MyPPO."""

    bonus: PositiveFloat = 0.5

    @property
    def algo_class(self) -> type[Algorithm]:
        return MyPPO


class MyPPO(PPO):
    """PPO that reports its bonus."""

    STATE = (*PPO.STATE, "_num_bonuses")

    def setup(self) -> None:
        super().setup()
        self._num_bonuses = 0

    def training_step(self) -> Any:
        results = super().training_step()
        self._num_bonuses += 1
        for metrics in results.values():
            metrics |= {"bonus": self.config.bonus, "num_bonuses": float(self._num_bonuses)}
        return results
'''

SMALL = {"train_batch_size_per_learner": 64, "minibatch_size": 32, "num_epochs": 1}
"""Settings of `training` that make an iteration short."""


def write_my_algo(directory: Path) -> Path:
    """Write `my_algo.py` into a directory, and return its path."""
    path = directory / "my_algo.py"
    path.write_text(MY_ALGO, encoding="utf-8")
    return path
