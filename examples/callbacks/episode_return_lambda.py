"""Print the return of every episode, in one line."""

from corral import PPOConfig

config = (
    PPOConfig()
    .environment("CartPole-v1")
    .callbacks(on_episode_end=lambda episode: print(f"Episode done. R={episode.get_return()}"))
)


def main(num_iterations: int = 1) -> None:
    with config.build() as algo:
        for _ in range(num_iterations):
            algo.train()


if __name__ == "__main__":
    main()
