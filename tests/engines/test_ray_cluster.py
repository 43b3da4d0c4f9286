"""The Ray engine on a cluster of two nodes, of which one goes away."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
from engine_workers import is_running, until

pytestmark = [pytest.mark.xdist_group("ray"), pytest.mark.slow]

# In a process of its own: a process has one Ray runtime.
SCRIPT = """
import json
import ray
from ray.cluster_utils import Cluster
from corral.engines import Resources, make_engine
from engine_workers import DEADLINE_S, Counter, pid, sleep, start_a_family

def node_id(worker):
    return ray.get_runtime_context().get_node_id()

node = {"object_store_memory": 100 * 2**20, "include_dashboard": False}
cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 2, "resources": {"first": 4}, **node})
second = cluster.add_node(num_cpus=2, resources={"second": 4}, **node)
try:
    ray.init(address=cluster.address, include_dashboard=False, logging_level="ERROR", log_to_driver=False)
    engine = make_engine("ray")
    found = {"require": []}
    for asked in ([Resources(1)] * 4, [Resources(3)]):
        try:
            found["require"].append(engine.require(asked))
        except Exception as error:
            found["require"].append(str(error))
    here, there = [Resources(0.5, custom={name: 1}) for name in ("first", "second")]
    workers = [engine.start(Counter, name=f"worker {i}", resources=here) for i in range(2)]
    leaving = [engine.start(Counter, name=f"leaving {i}", resources=there) for i in range(2)]
    shared = engine.put(5)
    found["counts"] = [worker.call("add", shared).result(DEADLINE_S) for worker in [*workers, *leaving]]
    found["processes"] = [leaving[0].call(pid).result(DEADLINE_S), *leaving[0].call(start_a_family).result(DEADLINE_S)]
    nodes = [worker.call(node_id).result(DEADLINE_S) for worker in [*workers, *leaving]]
    found["nodes"] = [nodes.index(node) for node in nodes]
    running = leaving[0].call(sleep, 600)
    cluster.remove_node(second)
    errors = [future.exception(DEADLINE_S) for future in (running, leaving[0].call("add"), leaving[1].call("add"))]
    found["errors"] = [f"{type(error).__name__}: {error}" for error in errors]
    found["alive"] = [worker.alive() for worker in [*workers, *leaving]]
    found["later"] = [worker.call("add").result(DEADLINE_S) for worker in workers]
    for worker in [*workers, *leaving]:
        worker.kill()
    engine.stop()
    found["still there"] = ray.is_initialized()
    print(json.dumps(found))
finally:
    ray.shutdown()
    cluster.shutdown()
"""


def test_workers_on_a_node_that_goes_away_die_and_the_others_continue() -> None:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    environment.pop("RAY_ADDRESS", None)
    done = subprocess.run([sys.executable, "-c", SCRIPT], env=environment, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["require"][0] is None
    assert "needs 3 CPU" in found["require"][1] and "in one place" in found["require"][1]
    assert found["counts"] == [5, 5, 5, 5]
    assert found["nodes"] == [0, 0, 2, 2]
    assert len(found["errors"]) == 3
    for error, name in zip(found["errors"], ("leaving 0", "leaving 0", "leaving 1"), strict=True):
        assert error.startswith(f"WorkerDiedError: {name}: ") and "node" in error and "\n" not in error
    assert found["alive"] == [True, True, False, False]
    assert found["later"] == [6, 6]
    assert found["still there"]
    until(lambda: not any(map(is_running, found["processes"])))
