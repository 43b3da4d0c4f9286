"""Measures of Corral with several agents: four agents with a cart and a pole each, and one env of 64 agents."""

import statistics
from collections.abc import Callable
from time import process_time
from typing import Any

import measuring
from corral_config import config, ppo_config
from measuring import Fields, Options

NUM_SEATS = 64


def _of_agents(settings: Any) -> Any:
    """Returns a config with four agents in each env, all with one module."""
    import corral

    env = corral.make_multi_agent(measuring.ENV)
    return settings.environment(env, env_config={"num_agents": measuring.NUM_AGENTS}).multi_agent(policies={"shared"})


def sampling(options: Options) -> Fields:
    """Agent steps per second of the embedded env runner."""
    with _of_agents(config(options, options.num_envs)).build() as algo:

        def sample() -> int:
            return int(algo.env_runner.sample(num_timesteps=measuring.STEPS_PER_SAMPLE).num_agent_steps)

        return measuring.sampling_rate(sample, options)


def ppo(options: Options) -> Fields:
    """Trained agent steps per second of PPO at the hyperparameters that both systems share."""
    with _of_agents(ppo_config(options)).build() as algo:
        return measuring.training_rate(measuring.trainer(algo, measuring.num_agent_steps), options)


def cost_of_seats(options: Options) -> Fields:
    """CPU time of an agent step with 64 agents in one env, as a ratio to a step with 64 sub-envs of one agent.

    Both step the same 64 envs in Python, and no agent ever ends: a pole that fell begins again.
    """
    single = config(options, NUM_SEATS).environment(_endless).env_runners(vectorization="sync")
    several = config(options, 1).environment(_endless_agents).multi_agent(policies={"shared"})
    ratios: list[float] = []
    with single.build() as one, several.build() as many:
        forms = (
            lambda: int(one.env_runner.sample(num_timesteps=100 * NUM_SEATS).num_env_steps),
            lambda: int(many.env_runner.sample(num_timesteps=100).num_agent_steps),
        )
        for form in forms:
            form()
        spent_s = 0.0
        while spent_s < options.seconds:
            costs = [_cpu_s_per_step(form) for form in forms]
            spent_s += sum(costs) * 100 * NUM_SEATS
            ratios.append(costs[1] / costs[0])
    return {"ratio": statistics.median(ratios), "ratios": ratios}


def _cpu_s_per_step(sample: Callable[[], int]) -> float:
    start = process_time()
    num_steps = sample()
    return (process_time() - start) / num_steps


def _endless(env_config: Any) -> Any:
    """Returns an env whose pole begins again where it would have ended."""
    import gymnasium as gym

    class Endless(gym.Wrapper):  # type: ignore[type-arg]
        def step(self, action: Any) -> Any:
            obs, reward, terminated, _, info = self.env.step(action)
            return (self.env.reset()[0] if terminated else obs), reward, False, False, info

    return Endless(gym.make(measuring.ENV).unwrapped)


def _endless_agents(env_config: Any) -> Any:
    """Returns one env with 64 agents, each of which has such an env."""
    import corral

    class EndlessAgents(corral.MultiAgentEnv):
        def __init__(self) -> None:
            super().__init__()
            self.envs = {agent: _endless({}) for agent in range(NUM_SEATS)}
            self.possible_agents = self.agents = list(self.envs)
            self.observation_space = self.envs[0].observation_space
            self.action_space = self.envs[0].action_space

        def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
            seeds = {agent: None if seed is None else seed + agent for agent in self.envs}
            return {agent: env.reset(seed=seeds[agent])[0] for agent, env in self.envs.items()}, {}

        def step(self, actions: dict[int, Any]) -> Any:
            obs, rewards = {}, {}
            for agent, action in actions.items():
                obs[agent], rewards[agent], _, _, _ = self.envs[agent].step(action)
            return obs, rewards, {"__all__": False}, {"__all__": False}, {}

    return EndlessAgents()
