"""Plays episodes of CartPole with the actions of a policy server, until the training is over.

    corral serve --config cartpole.yaml --port 5555 &
    python cartpole.py 127.0.0.1:5555

Its arguments are the address, the number of envs (8) and a seed (0). The token, if the server asks for one, is in the
environment variable CORRAL_TOKEN. The last line that it prints is the number of env steps. Where Corral is not
installed, put src/corral/runners/serving/client.py next to this file, as corral_client.py.
"""

import os
import sys

import gymnasium as gym

try:
    from corral.runners.serving.client import ClientError, PolicyClient, drive
except ImportError:
    from corral_client import ClientError, PolicyClient, drive


def main():
    """Play with the address, the number of envs and the seed of the command line."""
    address, num_envs, seed = (*sys.argv[1:], *("127.0.0.1:5555", "8", "0")[len(sys.argv) - 1 :])
    envs = [gym.make("CartPole-v1") for _ in range(int(num_envs))]
    for index, env in enumerate(envs):
        env.reset(seed=int(seed) + index)
    try:
        with PolicyClient(address, len(envs), token=os.environ.get("CORRAL_TOKEN")) as client:
            print(drive(client, envs))
    except ClientError as error:
        sys.exit(f"error {error.code}: {error}")


if __name__ == "__main__":
    main()
