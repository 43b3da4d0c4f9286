"""Runners and what they are made of: vector envs, rollouts and episodes."""
