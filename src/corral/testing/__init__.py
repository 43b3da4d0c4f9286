"""Small envs with known answers, for tests of algorithms and of code built on Corral."""

from corral.testing.envs import (
    IDENTITY_ACTION_SPACES,
    CountingEnv,
    DeepSea,
    DoorCorridor,
    FaultyEnv,
    FindSquare,
    IdentityEnv,
    PoorHabit,
    TimeLimitCorridor,
)

__all__ = [
    "IDENTITY_ACTION_SPACES",
    "CountingEnv",
    "DeepSea",
    "DoorCorridor",
    "FaultyEnv",
    "FindSquare",
    "IdentityEnv",
    "PoorHabit",
    "TimeLimitCorridor",
]
