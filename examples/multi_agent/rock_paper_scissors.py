"""Rock, paper, scissors against a rule, and then against itself.

Against a rule PPO learns the counter-moves, and wins nearly every round. It becomes predictable: another opponent could
win nearly every round against it. Then the same policy plays against itself, and learns to be unpredictable. The script
computes exactly how much the best opponent of a policy wins per game of 10 rounds.

python examples/multi_agent/rock_paper_scissors.py --seeds 5
"""

import argparse

import gymnasium as gym
import numpy as np
import torch

from corral import HeuristicModule, MultiAgentEnv, PPOConfig

NUM_ROUNDS = 10
NONE = 3  # in place of a last move, in the first round
POINTS = np.array([[0, -1, 1], [1, 0, -1], [-1, 1, 0]])  # of the row's player: rock 0, paper 1, scissors 2


class RockPaperScissors(MultiAgentEnv):
    """Two players move at the same time. Each sees its own last move and the other's."""

    possible_agents = ("first", "second")
    observation_space = gym.spaces.MultiDiscrete([4, 4])
    action_space = gym.spaces.Discrete(3)

    def __init__(self, config):
        super().__init__()

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.round = 0
        return self.show(NONE, NONE), {}

    def show(self, first, second):
        return {"first": np.array([first, second]), "second": np.array([second, first])}

    def step(self, actions):
        first, second = int(actions["first"]), int(actions["second"])
        self.round += 1
        points = float(POINTS[first, second])
        over = {"__all__": self.round == NUM_ROUNDS}
        return self.show(first, second), {"first": points, "second": -points}, over, {"__all__": False}, {}


class BeatsLastMove(HeuristicModule):
    """Plays what beats the other's last move, and draws the first move."""

    def choose_actions(self, obs, rng):
        others_last = obs[:, 1]
        return np.where(others_last == NONE, rng.integers(3, size=len(obs)), (others_last + 1) % 3)


def against_rule(agent_id, episode):
    return "learner" if agent_id == "first" else "rule"


def make_config(seed, opponent):
    config = (
        PPOConfig()
        .environment(RockPaperScissors)
        .env_runners(num_envs_per_env_runner=32)
        .training(train_batch_size_per_learner=1280, minibatch_size=320, num_epochs=6, lr=3e-3, gamma=0.9)
        .rl_module(model_config={"fcnet_hiddens": [32]})
        .debugging(seed=seed)
    )
    if opponent == "itself":
        # One module has both players, and learns from both. Without a high entropy bonus it would learn moves that beat
        # its present moves, then moves that beat those, in a circle.
        return config.multi_agent(policies={"learner"}).training(entropy_coeff=0.3)
    policies = {"learner": {}, "rule": {"module_class": BeatsLastMove}}
    return config.multi_agent(policies=policies, policy_mapping_fn=against_rule, policies_to_train=["learner"])


def best_response_return(module):
    """Return what the best opponent of a policy wins per game, by dynamic programming over pairs of last moves."""
    pairs = np.array([(own, other) for own in range(4) for other in range(4)])
    with torch.no_grad():
        moves = torch.softmax(module.policy(torch.from_numpy(pairs)), -1).numpy().reshape(4, 4, 3)
    values = np.zeros((4, 4))  # of the rounds left, by last moves of the policy and of its opponent
    for _ in range(NUM_ROUNDS):
        # Rows are moves of the policy, columns of the opponent, who wins what the policy loses.
        per_move = np.einsum("abm,mo->abo", moves, values[:3, :3] - POINTS)
        values = per_move.max(-1)
    return float(values[NONE, NONE])


def train(seed, opponent, weights=None, num_iterations=40):
    """Train, from given weights if there are any.

    Returns:
        Mean points per game of the first player, the return per game of the best opponent, and the weights.
    """
    with make_config(seed, opponent).build() as algo:
        if weights is not None:
            algo.learner_group.set_weights({"learner": weights})
            algo.sync_weights()
        for _ in range(num_iterations):
            points = algo.train()["env_runners"]["agent_episode_return_mean"]["first"]
        return points, best_response_return(algo.get_module("learner")), algo.learner_group.get_weights()["learner"]


def main(seeds=1):
    found, weights = {}, None
    for seed in range(seeds):
        for opponent in ("rule", "itself"):
            won, lost, weights = train(seed, opponent, weights if opponent == "itself" else None)
            print(f"seed {seed}, against {opponent}: wins {won:.1f} per game; the best opponent would win {lost:.1f}")
            found[opponent, seed] = won, lost
    return found


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=1, help="seeds 0, 1, ...")
    main(parser.parse_args().seeds)
