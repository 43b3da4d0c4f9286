"""Scripts written for RLlib, run by Corral: it serves the names of `ray.rllib` at their module paths.

    python -m corral.compat.rllib script.py --its-options

runs a script unchanged. In a notebook, call `install()` before the first import of `ray.rllib`. Both versions of the
API work, the older one up to `ModelV2`, `Policy` and TensorFlow, which are refused. Without Ray, the small part of
`ray` that most scripts need is served too.
"""

from __future__ import annotations

from corral.compat.rllib.finder import install

__all__ = ["install"]
