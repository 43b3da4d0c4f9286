"""What code above the core keeps with objects of the core: views, and what a config was translated from."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Iterator
from operator import attrgetter
from typing import Any

import pytest
import torch

from corral import PPOConfig
from corral.core.metrics.logger import MetricsLogger
from corral.core.views import Viewable


class View:
    """A view with a setting."""

    def __init__(self, native: Any, factor: int = 1) -> None:
        self.native, self.factor = native, factor


class Other(View):
    """Another view."""


@pytest.fixture
def algorithm() -> Iterator[Any]:
    with PPOConfig().environment("CartPole-v1").build() as built:
        yield built


@pytest.mark.parametrize("find", ["env_runner", "learner_group.learner_here", "env_runner.module", "metrics"])
def test_an_object_has_one_view_of_each_class(algorithm: Any, find: str) -> None:
    native = attrgetter(find)(algorithm)
    assert isinstance(native, Viewable)
    view = native.view_as(View, 3)
    assert (view.native, view.factor) == (native, 3)
    assert native.view_as(View, 4) is view
    assert type(native.view_as(Other)) is Other
    native.keep_view(Other, kept := Other(native))
    assert native.view_as(Other) is kept and native.view_as(View) is view
    assert type(native)._views == {}


def test_a_view_is_no_part_of_the_weights_of_a_module_and_a_copy_has_views_of_its_own(algorithm: Any) -> None:
    module = algorithm.get_module()
    names = list(module.state_dict())
    view = module.view_as(View)
    assert list(module.state_dict()) == names and view not in list(module.modules())
    copied = copy.deepcopy(module)
    assert copied.view_as(View).native is copied and module.view_as(View).native is module
    with torch.no_grad():
        next(copied.parameters()).zero_()
    assert next(module.parameters()).any()


def test_a_logger_keeps_its_views_when_it_continues_from_a_state() -> None:
    logger = MetricsLogger()
    logger.log_value("x", 2.0)
    view = logger.view_as(View)
    logger.set_state(logger.get_state())
    assert logger.view_as(View) is view and logger.peek("x") == 2.0


def test_all_copies_of_a_config_have_its_origin_which_is_no_setting() -> None:
    config = PPOConfig().environment("CartPole-v1")
    before = config.to_dict()
    assert config.origin is None and config.with_origin({"lr": 3}) is config
    assert config.to_dict() == before
    for other in (config.copy(lr=0.1), config.for_workers(), config.for_runner(), pickle.loads(pickle.dumps(config))):
        assert other.origin == {"lr": 3}
    with config.build() as algorithm:
        assert algorithm.config.origin == {"lr": 3} and algorithm.env_runner.config.origin == {"lr": 3}
        assert algorithm.config.with_origin("new").origin == "new"  # after building, too
