"""PPO on CartPole with a callback and evaluation, written for RLlib.

python -m corral.compat.rllib cartpole_rllib.py
"""

from ray.rllib.algorithms.ppo import PPOConfig
from ray.rllib.callbacks.callbacks import RLlibCallback
from ray.rllib.core.rl_module.default_model_config import DefaultModelConfig

LONG = 100  # steps


class CountLongEpisodes(RLlibCallback):
    def on_episode_end(self, *, episode, metrics_logger, **kwargs):
        metrics_logger.log_value("long", episode.t > LONG, reduce="mean", window=100)


config = (
    PPOConfig()
    .environment("CartPole-v1")
    .env_runners(num_env_runners=0, num_envs_per_env_runner=8)
    .training(
        lr=0.001,
        train_batch_size_per_learner=1024,
        minibatch_size=128,
        num_epochs=6,
        lambda_=0.95,
        vf_clip_param=10000.0,
    )
    .rl_module(model_config=DefaultModelConfig(fcnet_hiddens=[64, 64], vf_share_layers=False))
    .callbacks(CountLongEpisodes)
    .evaluation(evaluation_interval=2, evaluation_duration=5)
    .debugging(seed=0)
)

if __name__ == "__main__":
    algo = config.build_algo()
    for _ in range(4):
        result = algo.train()
        runners = result["env_runners"]
        print(round(runners["episode_return_mean"], 3), round(runners["long"], 3))
    print(round(result["evaluation"]["env_runners"]["episode_return_mean"], 3))
    algo.stop()
