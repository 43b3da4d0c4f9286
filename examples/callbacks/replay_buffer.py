"""Write the contents of DQN's replay buffer to disk after every second iteration.

Checkpoints leave the buffer out unless `store_buffer_in_checkpoints` is set: this writes it less often, and apart.

pip install ormsgpack
python examples/callbacks/replay_buffer.py
"""

import argparse
from functools import partial

import ormsgpack

from corral import DQNConfig


def write_buffer_if_necessary(path, algorithm, metrics_logger, result):
    if algorithm.training_iteration % 2 == 0:
        contents = algorithm.local_replay_buffer.get_state()  # a dict of plain data and arrays
        packed = ormsgpack.packb(contents, option=ormsgpack.OPT_SERIALIZE_NUMPY)
        with open(path, "wb") as file:
            file.write(packed)
        metrics_logger.log_value("buffer_bytes_written", len(packed), reduce="sum")


def main(num_iterations=4, path="replay_buffer_contents.msgpack"):
    config = (
        DQNConfig()
        .environment("CartPole-v1")
        .callbacks(on_train_result=partial(write_buffer_if_necessary, path))
        .debugging(seed=0)
    )
    sizes = []
    with config.build() as dqn:
        for _ in range(num_iterations):
            result = dqn.train()
            sizes.append((result["training_iteration"], len(dqn.local_replay_buffer)))
            print(*sizes[-1], result.get("buffer_bytes_written", "not written"))
    return sizes


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--iterations", type=int, default=4)
    main(parser.parse_args().iterations)
