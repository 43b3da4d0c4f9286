"""Do something else in the episodes that evaluate than in those that collect steps to train on.

Every runner knows what it is for: `env_runner.config.in_evaluation`.
"""

from corral import Callback, PPOConfig


class ReturnsApart(Callback):
    def on_episode_end(self, *, episode, env_runner, metrics_logger, **kwargs):
        purpose = "evaluation" if env_runner.config.in_evaluation else "training"
        metrics_logger.log_value((purpose, "return"), episode.get_return(), reduce="mean")


def main(num_iterations=5):
    config = PPOConfig().environment("CartPole-v1").callbacks(ReturnsApart).debugging(seed=0)
    config.evaluation(evaluation_interval=num_iterations)
    with config.build() as algo:
        for _ in range(num_iterations):
            result = algo.train()
    training = result["env_runners"]["training"]
    evaluation = result["evaluation"]["env_runners"]["evaluation"]
    print(f"training: {training['return']:.1f}, evaluation: {evaluation['return']:.1f}")
    return training, evaluation


if __name__ == "__main__":
    main()
