"""Tic-tac-toe of PettingZoo in self-play, against a league of frozen copies of the policy.

python examples/multi_agent/tic_tac_toe.py --seeds 3
"""

import argparse

import gymnasium as gym
import numpy as np
from pettingzoo.classic import tictactoe_v3

from corral import Callback, PPOConfig, RandomModule

POOL = ["past_0", "past_1", "past_2", "past_3"]
ILLEGAL_REWARD = -0.1


class LegalMoves(gym.Wrapper):
    """Plays a random legal move in place of an illegal one, with a small punishment.

    So a player that draws its actions uniformly, such as `RandomModule`, draws uniformly from the legal moves.
    """

    def reset(self, *, seed=None, options=None):
        if seed is not None:
            self.rng = np.random.default_rng(seed)
        self.obs, infos = self.env.reset(seed=seed, options=options)
        return self.obs, infos

    def step(self, actions):
        ((player, move),) = actions.items()  # one player moves in each step
        legal_moves = np.flatnonzero(self.obs[player]["action_mask"])
        is_legal = move in legal_moves
        found = self.env.step({player: move if is_legal else self.rng.choice(legal_moves)})
        self.obs, rewards = found[:2]
        if not is_legal:
            rewards[player] = rewards.get(player, 0.0) + ILLEGAL_REWARD
        return found


def map_to_modules(agent_id, episode, worker=None):
    """`main` plays first in every second game, in evaluation against random moves, and in training against the pool."""
    rng = np.random.default_rng(list(episode.id_.encode()))  # the same draw for both players of a game
    if agent_id == ("player_1", "player_2")[rng.integers(2)]:
        return "main"
    if worker is not None and worker.config.in_evaluation:
        return "random"
    return (["main"] * len(POOL) + POOL)[rng.integers(2 * len(POOL))]


class League(Callback):
    """Copies the weights of `main` into the oldest module of the pool from time to time."""

    def __init__(self, every=5):
        super().__init__()
        self.every = every

    def on_train_result(self, *, algorithm, **kwargs):
        if algorithm.training_iteration % self.every == 0:
            oldest = POOL[algorithm.training_iteration // self.every % len(POOL)]
            algorithm.learner_group.set_weights({oldest: algorithm.learner_group.get_weights()["main"]})
            algorithm.sync_weights()

    def on_episode_end(self, *, episode, metrics_logger, env_runner, **kwargs):
        for player, own in episode.agent_episodes.items():
            if own.module_id == "main" and env_runner.config.in_evaluation:
                result = round(own.get_rewards()[-1])
                metrics_logger.log_value("win_rate", float(result == 1), reduce="mean")
                metrics_logger.log_value("loss_rate", float(result == -1), reduce="mean")
                masks = own.get_observations()["action_mask"][:-1]
                legal = masks[np.arange(len(masks)), own.get_actions()]
                metrics_logger.log_value("legal_share", float(legal.mean()), reduce="mean")


def make_config(seed):
    return (
        PPOConfig()
        .environment(lambda config: tictactoe_v3.raw_env(), wrappers=[LegalMoves])
        .env_runners(num_envs_per_env_runner=32)
        .multi_agent(
            policies={"main": {}, "random": {"module_class": RandomModule}} | {name: {} for name in POOL},
            policy_mapping_fn=map_to_modules,
            policies_to_train=["main"],
        )
        .training(train_batch_size_per_learner=4096, minibatch_size=512, num_epochs=6, lr=1e-3, entropy_coeff=0.01)
        .evaluation(evaluation_interval=10, evaluation_duration=400, evaluation_config={"explore": False})
        .callbacks(League)
        .debugging(seed=seed)
    )


if __name__ == "__main__":
    import time, sys
    t = time.time()
    with make_config(int(sys.argv[1])).build() as algo:
        for i in range(60):
            r = algo.train()
            if i % 10 == 9:
                e=r["evaluation"]["env_runners"]
                print(algo.num_env_steps_sampled_lifetime, round(time.time() - t, 1), *[round(e[k],3) for k in ("win_rate","loss_rate","legal_share")], flush=True)
