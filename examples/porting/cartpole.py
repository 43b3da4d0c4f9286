"""The experiment of `cartpole_rllib.py`, written for Corral: the same returns with the same seed.

python cartpole.py
"""

from corral import Callback, PPOConfig

LONG = 100  # steps


class CountLongEpisodes(Callback):
    def on_episode_end(self, *, episode, metrics_logger, **kwargs):
        metrics_logger.log_value("long", episode.t > LONG, reduce="mean", window=100)


# The values of clip_param, grad_clip, vf_loss_coeff and kl_coeff are RLlib's defaults; Corral's are others.
config = (
    PPOConfig()
    .environment("CartPole-v1")
    # without vectorization="sync" CartPole runs as one vector env: faster, with other random numbers
    .env_runners(num_envs_per_env_runner=8, vectorization="sync")
    .training(
        lr=0.001,
        train_batch_size_per_learner=1024,
        minibatch_size=128,
        num_epochs=6,
        lambda_=0.95,
        clip_param=0.3,
        grad_clip=None,
        vf_loss_clip=10000.0,
        vf_loss_coeff=1.0,
        kl_coeff=0.2,
        kl_target=0.01,
        kl_band=2.0,
        kl_factors=(1.5, 0.5),
    )
    .rl_module(
        model_config={
            "fcnet_hiddens": [64, 64],
            "vf_share_layers": False,
            # RLlib leaves weights as torch makes them; without these lines they are orthogonal
            "fcnet_kernel_initializer": "torch",
            "fcnet_bias_initializer": "torch",
            "head_kernel_initializer": "torch",
            "head_bias_initializer": "torch",
        }
    )
    .callbacks(CountLongEpisodes)
    # RLlib explores in evaluation, and Corral takes the most probable action unless told otherwise
    .evaluation(
        evaluation_interval=2,
        evaluation_duration=5,
        evaluation_config={"explore": True, "num_envs_per_env_runner": 8},
    )
    .debugging(seed=0)
)

if __name__ == "__main__":
    with config.build() as algo:
        for _ in range(4):
            result = algo.train()
            runners = result["env_runners"]
            print(round(runners["episode_return_mean"], 3), round(runners["long"], 3))
        evaluated = result["evaluation"]["env_runners"]
        print(round(evaluated["episode_return_mean"], 3))
