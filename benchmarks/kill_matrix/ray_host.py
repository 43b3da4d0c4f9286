"""A program that keeps a Ray cluster on this machine, and adds and removes its second node when it is told to.

`python ray_host.py NUM_CPUS` prints the address, then reads lines: `add`, `remove`, and the end of the input.
"""

from __future__ import annotations

import sys
from typing import Any

NODE: dict[str, Any] = {"object_store_memory": 100 * 2**20, "include_dashboard": False}


def main() -> None:
    """Keep the cluster until the input ends."""
    from ray.cluster_utils import Cluster

    num_cpus = int(sys.argv[1])
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": num_cpus, **NODE})
    second = None
    print(cluster.address, flush=True)
    try:
        for line in sys.stdin:
            if line.strip() == "add" and second is None:
                second = cluster.add_node(num_cpus=num_cpus, **NODE)
            elif line.strip() == "remove" and second is not None:
                cluster.remove_node(second)
                second = None
            print("done", flush=True)
    finally:
        cluster.shutdown()


if __name__ == "__main__":
    main()
