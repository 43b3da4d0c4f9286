"""`python -m corral.compat.rllib` behaves as `python` itself."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest
from rllib_scripts import Run

REPORT = """
import __main__, os, sys
print(__name__, os.path.basename(__file__), sys.argv[1:], os.path.basename(sys.path[0]))
class Own:
    pass
assert __main__.Own is Own and Own.__module__ == "__main__"
"""


def test_a_script_sees_what_python_shows_it(run: Run, tmp_path: Path) -> None:
    (tmp_path / "next_to.py").write_text("value = 3")
    done = run(REPORT + "from next_to import value\nprint(value)", "--stop-iters", "2", "-x", directory=Path("/"))
    assert done.stdout == f"__main__ script.py ['--stop-iters', '2', '-x'] {tmp_path.name}\n3\n"


@pytest.mark.slow
def test_a_module_runs_as_with_python_m(run: Run, tmp_path: Path) -> None:
    (tmp_path / "test_own.py").write_text(
        "import unittest\n"
        "from ray.rllib.utils.test_utils import check\n"
        "class TestOwn(unittest.TestCase):\n"
        "    def test_it(self):\n"
        "        check({'a': [1.0, 2]}, {'a': [1.0 + 1e-7, 2]})\n"
        "    def test_other(self):\n"
        "        check(1, 2)\n"
    )
    passed = run(["-m", "unittest", "-v", "test_own.TestOwn.test_it"])
    assert "... ok" in passed.stderr
    failed = run(["-m", "unittest", "test_own"], code=1)
    assert "failures=1" in failed.stderr


def test_exit_codes_and_tracebacks_are_the_scripts_own(run: Run) -> None:
    assert run("import sys; sys.exit(7)", code=7).stderr == ""
    done = run("def f():\n    raise ValueError('too many')\nf()", code=1)
    assert done.stderr.startswith('Traceback (most recent call last):\n  File "')
    assert "__main__.py" not in done.stderr
    assert done.stderr.endswith("ValueError: too many\n")
    assert "usage" in run([], code=1).stderr
    assert "can't open file" in run(["no_such_script.py"], code=1).stderr
    assert "SyntaxError" in run("a b", code=1).stderr


def test_ctrl_c_ends_the_script_with_the_status_of_the_signal(tmp_path: Path) -> None:
    script = tmp_path / "sleeps.py"
    script.write_text("import time\nprint('ready', flush=True)\ntime.sleep(60)")
    process = subprocess.Popen(
        [sys.executable, "-m", "corral.compat.rllib", str(script)], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    assert process.stdout is not None
    assert process.stdout.readline() == b"ready\n"
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=30)
    assert process.returncode == -signal.SIGINT
    assert b"KeyboardInterrupt" in errors
