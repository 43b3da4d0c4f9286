"""Multi-agent envs made of copies of a single-agent env, for examples, tests and benchmarks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from corral.envs.multi_agent_env import ALL, MultiAgentEnv
from corral.envs.sharing import refuse_same_object
from corral.envs.vector import EnvContext, env_name, make_one, resolve_env


def make_multi_agent(env: str | Callable[..., Any]) -> type[MultiAgentEnv]:
    """Return the class of a multi-agent env whose agents play copies of a single-agent env, each on its own.

    The class takes an `env_config`, of which `num_agents` is the number of agents, 1 by default. The copies receive the
    rest. The ids of the agents are 0, 1, and so on. The episode ends when it has ended for all agents.

    Args:
        env: A Gymnasium id, a `"package.module:Name"` import path, a class, or a factory `fn(env_config)`.

    Raises:
        ConfigError: The id is unknown, or the import fails.
    """
    made, name = resolve_env(env), env_name(env)

    class AgentCopies(MultiAgentEnv):
        __doc__ = f"Copies of {name}, one for each agent; `env_config` has `num_agents`."

        def __init__(self, config: dict[str, Any] | None = None) -> None:
            super().__init__()
            given = config if isinstance(config, EnvContext) else EnvContext(config or {})
            context = given.at(given.vector_index)
            self.envs = [make_one(made, name, context) for _ in range(context.pop("num_agents", 1))]
            refuse_same_object(self.envs, name)
            self.possible_agents = self.agents = list(range(len(self.envs)))
            self.observation_spaces = dict(enumerate(env.observation_space for env in self.envs))
            self.action_spaces = dict(enumerate(env.action_space for env in self.envs))
            self.metadata, self.render_mode = self.envs[0].metadata, self.envs[0].render_mode

        def reset(
            self, *, seed: int | None = None, options: dict[str, Any] | None = None
        ) -> tuple[dict[Any, Any], dict[Any, Any]]:
            """Reset all copies, each with its own seed, and return observations and infos by agent id."""
            seeds = [
                None if seed is None else int(s) for s in np.random.SeedSequence(seed).generate_state(len(self.envs))
            ]
            found = [env.reset(seed=s, options=options) for env, s in zip(self.envs, seeds, strict=True)]
            self.agents = list(self.possible_agents)
            return {i: obs for i, (obs, _) in enumerate(found)}, {i: info for i, (_, info) in enumerate(found)}

        def step(  # type: ignore[override]
            self, action_dict: dict[Any, Any]
        ) -> tuple[dict[Any, Any], dict[Any, Any], dict[Any, bool], dict[Any, bool], dict[Any, Any]]:
            """Step the copies of the agents that act, and return their results by agent id."""
            found: tuple[dict[Any, Any], ...] = ({}, {}, {}, {}, {})
            obs, rewards, terminateds, truncateds, infos = found
            for i, action in action_dict.items():
                obs[i], rewards[i], terminateds[i], truncateds[i], infos[i] = self.envs[i].step(action)
            self.agents = [i for i in self.agents if not (terminateds.get(i) or truncateds.get(i))]
            has_ended = not self.agents
            terminateds[ALL] = has_ended and any(terminateds.values())
            truncateds[ALL] = has_ended and not terminateds[ALL]
            return obs, rewards, terminateds, truncateds, infos

        def render(self) -> Any:
            """Return the images of the copies next to each other, or what the first copy renders otherwise."""
            frames = [env.render() for env in self.envs]
            are_images = all(isinstance(frame, np.ndarray) and frame.ndim == 3 for frame in frames)
            return np.concatenate(frames, axis=1) if are_images else frames[0]

        def close(self) -> None:
            """Close all copies."""
            for env in self.envs:
                env.close()

    AgentCopies.copied_env = env  # type: ignore[attr-defined]
    AgentCopies.__name__ = AgentCopies.__qualname__ = f"MultiAgent{name}"
    return AgentCopies
