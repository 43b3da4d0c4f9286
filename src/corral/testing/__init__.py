"""Small envs with known answers, for tests of algorithms and of code built on Corral."""

from corral.testing.envs import (
    IDENTITY_ACTION_SPACES,
    BitFlippingEnv,
    CartPolePositions,
    CountingEnv,
    DeepSea,
    DoorCorridor,
    FaultyEnv,
    FindSquare,
    IdentityEnv,
    PoorHabit,
    ReachEnv,
    TimeLimitCorridor,
    TMaze,
)

__all__ = [
    "IDENTITY_ACTION_SPACES",
    "BitFlippingEnv",
    "CartPolePositions",
    "CountingEnv",
    "DeepSea",
    "DoorCorridor",
    "FaultyEnv",
    "FindSquare",
    "IdentityEnv",
    "PoorHabit",
    "ReachEnv",
    "TMaze",
    "TimeLimitCorridor",
]
