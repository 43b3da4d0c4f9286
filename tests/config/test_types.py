"""What the types of setters refuse is refused at runtime too; `typed_setters.py` says what a type checker refuses."""

from __future__ import annotations

import pytest


def test_what_a_type_checker_refuses_is_refused_at_runtime_too() -> None:
    from corral import AlgorithmConfig, PPOConfig

    with pytest.raises(TypeError):
        AlgorithmConfig().training(1)
    with pytest.raises(TypeError):
        PPOConfig().training(1)  # type: ignore[call-arg]
