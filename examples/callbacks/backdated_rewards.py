"""Move a reward back to the step that earned it, as the env's infos say.

The env pays each action two steps late. With gamma=0 an agent learns from the reward of the very step only, so it
cannot learn this env - until a callback puts each payment where it was earned, before advantages are computed from it.
"""

import argparse

import gymnasium as gym
import numpy as np

from corral import Callback, PPOConfig

DELAY = 2


class LatePayments(gym.Env):
    """Repeat the observation as the action: worth 1 a step, paid two steps later; the info says for which step."""

    observation_space = gym.spaces.Discrete(2)
    action_space = gym.spaces.Discrete(2)

    def __init__(self, config):
        self.episode_length = config.get("episode_length", 16)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.earned = []
        return self.show(), {}

    def show(self):
        self.cue = int(self.np_random.integers(2))
        return self.cue

    def step(self, action):
        self.earned.append(float(action == self.cue))
        t = len(self.earned) - 1
        reward, info = 0.0, {}
        if t >= DELAY:
            reward = self.earned[t - DELAY]
            info = {"earned_at": t - DELAY}
        return self.show(), reward, False, t + 1 == self.episode_length, info


class BackdateRewards(Callback):
    def on_postprocess_trajectory(self, *, episode, postprocessed_batch, **kwargs):
        rewards = postprocessed_batch["rewards"]  # a view: what is written here, the learner trains on
        for t, info in enumerate(postprocessed_batch["infos"]):
            earned_at = info.get("earned_at", -1) - episode.t_started
            if earned_at >= 0:  # else the step is in an earlier rollout, which has been trained on
                payment = rewards[t]
                rewards[t] = 0.0
                rewards[earned_at] += payment


def main(backdate=True, num_iterations=15):
    config = PPOConfig().environment(LatePayments).training(gamma=0.0, lambda_=0.0).debugging(seed=0)
    if backdate:
        config.callbacks(BackdateRewards)
    with config.build() as algo:
        returns = [algo.train()["env_runners"]["episode_return_mean"] for _ in range(num_iterations)]
    print(f"mean return {np.round(returns[-1], 2)}; by chance it is 7, at best 14")
    return returns


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--late", action="store_true", help="leave the rewards where they are paid")
    main(backdate=not parser.parse_args().late)
