"""The benchmark on envs of tensors, without its rivals: systems take turns, and the table compares them."""

import argparse
import sys

import pytest

import bench_tensor_envs as bench

SIZES = {"num_envs": 4, "hidden": 8, "rows": 5, "minibatch": 10, "epochs": 1}


@pytest.mark.slow
def test_systems_take_turns_and_the_table_compares_them() -> None:
    options = argparse.Namespace(
        python=sys.executable, torchrl_python=None, turns=2, warmup=1, seed=0, curves=True, **SIZES
    )
    systems = ["corral:cart_pole:tensors", "floor:cart_pole:work"]
    found = bench.take_turns(systems, options)
    for lines in found.values():
        assert [line["env_steps"] for line in lines] == [0, 20, 20, 20]  # ready, the warm-up, two turns
        assert all(line["cpu_s"] > 0 for line in lines[1:])
    table = bench.render("cart_pole", options, found).splitlines()
    assert [line.split("|")[1].strip() for line in table if line.startswith("|")][2:] == [
        "Corral",
        "only the env's steps and the passes through the nets",
    ]
    assert any("learning" in line for line in table)
