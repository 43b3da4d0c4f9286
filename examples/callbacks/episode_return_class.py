"""Print the return of every episode and the sum of all returns: a callback that keeps state between events."""

from corral import Callback, PPOConfig


class EpisodeReturn(Callback):
    def __init__(self):
        self.overall_sum_of_rewards = 0.0

    def on_episode_end(self, *, episode, **kwargs):
        self.overall_sum_of_rewards += episode.get_return()
        print(f"Episode done. R={episode.get_return()} Global SUM={self.overall_sum_of_rewards}")


config = PPOConfig().environment("CartPole-v1").callbacks(EpisodeReturn)


def main(num_iterations: int = 1) -> None:
    with config.build() as algo:
        for _ in range(num_iterations):
            algo.train()


if __name__ == "__main__":
    main()
