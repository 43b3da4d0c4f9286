"""What a policy of a multi-agent config is made of, in RLlib's spelling."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass
class PolicySpec:
    """Spaces and settings of one policy; `None` means that they are found from the env and the config.

    Attributes:
        policy_class: Policy class of the old API, which is refused; use `rl_module_spec`.
        observation_space: Space of the observations of the policy's agents.
        action_space: Space of the actions of the policy's agents.
        config: Settings of the algorithm that differ for this policy.
    """

    policy_class: Any = None
    observation_space: Any = None
    action_space: Any = None
    config: Any = None
