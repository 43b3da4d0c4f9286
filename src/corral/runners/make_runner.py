"""The choice between the runners of one agent and of several."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from corral.runners.runner import EnvRunner

if TYPE_CHECKING:
    from corral.runners.config import RunnerConfig


def make_runner(config: RunnerConfig, *args: Any, **settings: Any) -> EnvRunner:
    """Return the runner of a config; see `EnvRunner` for the arguments."""
    if not config.is_multi_agent:
        return EnvRunner(config, *args, **settings)
    from corral.runners.multi_agent_runner import MultiAgentEnvRunner

    return MultiAgentEnvRunner(config, *args, **settings)
