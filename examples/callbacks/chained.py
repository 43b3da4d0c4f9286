"""Several callbacks for one event: classes run first, in list order, then callables, in list order.

After each iteration this prints

    debug subclass
    Callback subclass
    lambda 1
    lambda 2
"""

from corral import Callback, PPOConfig


class MyCallbacks(Callback):
    def on_train_result(self, *, algorithm, metrics_logger, result, **kwargs):
        print("Callback subclass")


class MyDebugCallbacks(Callback):
    def on_train_result(self, *, algorithm, metrics_logger, result, **kwargs):
        print("debug subclass")


config = (
    PPOConfig()
    .environment("CartPole-v1")
    .callbacks(
        callbacks_class=[MyDebugCallbacks, MyCallbacks],  # the debug class first
        on_train_result=[
            lambda algorithm, **kw: print("lambda 1"),
            lambda algorithm, **kw: print("lambda 2"),
        ],
    )
)


def main(num_iterations: int = 2) -> None:
    with config.build() as algo:
        for _ in range(num_iterations):
            algo.train()


if __name__ == "__main__":
    main()
