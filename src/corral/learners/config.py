"""The settings of learning and of the learners."""

from __future__ import annotations

from dataclasses import dataclass, field
from operator import attrgetter
from typing import Annotated, Any, ClassVar, Literal, Protocol

from corral.core.config import Config
from corral.core.schedules import schedule_value
from corral.core.settings import (
    Importable,
    Need,
    NonNegativeFloat,
    NonNegativeInt,
    NonNegativeSchedule,
    PositiveFloat,
    PositiveInt,
    Probability,
    check_called,
    check_names,
)
from corral.engines import engine_for
from corral.engines.base import TRAITS, Resources
from corral.errors import ConfigError


@dataclass(kw_only=True)
class TrainingSettings:
    """Settings of learning. Algorithms add their own settings to this group.

    Attributes:
        lr: Learning rate, or a schedule over env steps.
        gamma: Discount per step.
        train_batch_size_per_learner: Number of env steps in the batch of one iteration, per learner.
        minibatch_size: Number of env steps, or with several agents of steps of the module, in one gradient step; `None`
            means the whole batch.
        num_epochs: Number of passes over each batch.
        shuffle_batch_per_epoch: Whether each pass uses the batch in a new order.
        grad_clip: Limit for the gradients, or one for each group of parameters, `{"critic": 1.0}`; `None` means no
            clipping.
        grad_clip_by: Quantity that is limited: `"global_norm"`, `"norm"` (of each parameter) or `"value"`.
        loss: Function `(module, batch, coefficients, default_loss)` used in place of the algorithm's loss; see
            docs/learners.md.
        optimizer: `"adam"`, `"adamw"`, `"sgd"`, `"rmsprop"`, or a `torch.optim.Optimizer` class or its import path; or
            one for each group of parameters, `{"actor": "adam", "critic": "sgd"}`.
        optimizer_config: Keyword arguments of the optimizer, except `lr`; by group if `optimizer` is, `{"critic":
            {"momentum": 0.9}}`.
        lr_scheduler: Function that makes a torch learning-rate scheduler for an optimizer, such as
            `functools.partial(torch.optim.lr_scheduler.StepLR, step_size=100)`. It steps after each update of the
            module.
    """

    lr: NonNegativeSchedule = 3e-4
    gamma: Probability = 0.99
    train_batch_size_per_learner: PositiveInt = 4096
    minibatch_size: PositiveInt | None = None
    num_epochs: PositiveInt = 1
    shuffle_batch_per_epoch: Annotated[
        bool, Need("minibatch_size", lambda config: config.minibatch_size is not None)
    ] = True
    grad_clip: PositiveFloat | dict[str, PositiveFloat] | None = None
    grad_clip_by: Annotated[
        Literal["global_norm", "norm", "value"], Need("grad_clip", lambda config: config.grad_clip is not None)
    ] = "global_norm"
    loss: Importable = None
    optimizer: Any = "adam"
    optimizer_config: dict[str, Any] = field(default_factory=dict)
    lr_scheduler: Importable = None

    LR_GROUPS: ClassVar[tuple[str, ...]] = ()
    """Groups of parameters that have a learning rate of their own, in the setting `GROUP_lr`; `None` there is `lr`."""

    LEARNS_SEQUENCES: ClassVar[bool] = False
    """Whether the algorithm can train modules with memory."""

    def check_settings(self) -> None:
        """Refuse a loss that cannot be called, limits of unknown groups of parameters, and optimizers that cannot step.

        Raises:
            ConfigError: Names the settings and the remedy.
        """
        from corral.learners.optimizer_settings import check_optimizer  # here, since it imports torch

        check_called("loss", self.loss, "module", "batch", "coefficients", "default_loss", group="training")
        if isinstance(self.grad_clip, dict) and self.LR_GROUPS:
            check_names("grad_clip", self.grad_clip, self.LR_GROUPS, list_known=True)
        check_optimizer(self)

    @property
    def total_train_batch_size(self: Any) -> int:
        """Env steps in the batch of one iteration, over all learners."""
        return int(self.train_batch_size_per_learner * max(1, self.num_learners))

    def lrs(self, num_env_steps: int) -> float | dict[str, float]:
        """Return the learning rate after so many env steps, or the one of each group of parameters."""
        if not self.LR_GROUPS:
            return schedule_value(self.lr, num_env_steps)
        lrs: dict[str, float] = {}
        for group in self.LR_GROUPS:
            own = getattr(self, f"{group}_lr")
            lr = self.lr if own is None else own
            lrs[group] = schedule_value(lr, num_env_steps) if isinstance(lr, list) else float(lr)
        return lrs


RUNS_LEARNERS = Need("learners of the engine (num_learners)", attrgetter("num_learners"))


@dataclass(kw_only=True)
class LearnersSettings:
    """Settings of the learners.

    Attributes:
        num_learners: Number of learners that the engine runs, which share each batch; 0 embeds one learner in the
            algorithm.
        num_cpus_per_learner: CPUs that Ray reserves for each learner.
        num_gpus_per_learner: GPUs that Ray reserves for each learner; processes share the GPUs of the machine.
        device: Torch device of the learners: `"auto"` (CUDA if available), or a device name.
        num_threads: Number of threads of torch and NumPy during `train()`; `"auto"` means one for small networks. See
            docs/performance.md.
        learner_class: A subclass of `corral.learners.learner.Learner`, or a function that returns one; see
            docs/learners.md.
        compile: Whether `torch.compile` compiles the loss, which makes updates of large networks faster.
            `"cuda_graphs"` also lets CUDA graphs replay it; on other devices it is `True`. See docs/modules.md.
        precision: Precision in which layers multiply when the loss and its gradients are computed. Weights, gradients,
            other numbers of the loss and actions stay float32.
    """

    num_learners: NonNegativeInt = 0
    num_cpus_per_learner: Annotated[NonNegativeFloat, RUNS_LEARNERS] = 1
    num_gpus_per_learner: Annotated[NonNegativeFloat, RUNS_LEARNERS] = 0
    device: str = "auto"
    num_threads: PositiveInt | Literal["auto"] = "auto"
    learner_class: Importable = None
    compile: bool | Literal["cuda_graphs"] = False
    precision: Literal["float32", "bfloat16"] = "float32"

    def check_settings(self: Any) -> None:
        """Refuse learners that cannot run here.

        Raises:
            ConfigError: Names the setting and the remedy.
        """
        if self.num_learners and not TRAITS[engine_for(self.engine_name)].has_own_process:
            raise ConfigError(
                f"num_learners={self.num_learners} learners wait for each other, so each needs its own process, and "
                f"engine_name={self.engine_name!r} runs all in one process: use 'process' or 'ray', or num_learners=0."
            )
        if self.learner_class is not None and not callable(self.learner_class):
            raise ConfigError(
                f"learner_class={self.learner_class!r:.80} must be a subclass of corral.learners.learner.Learner, or a "
                "function that returns one."
            )
        _check_device(self.device)

    @property
    def learner_resources(self) -> Resources:
        """The resources that each learner needs."""
        return Resources(self.num_cpus_per_learner, self.num_gpus_per_learner)


class LearnerConfig(Config, Protocol):
    """What learners read of a config."""

    minibatch_size: int | None
    num_epochs: int
    shuffle_batch_per_epoch: bool
    grad_clip: float | dict[str, float] | None
    grad_clip_by: Literal["global_norm", "norm", "value"]
    num_learners: int
    device: str
    num_threads: int | Literal["auto"]
    learner_class: Any
    compile: bool | Literal["cuda_graphs"]
    precision: Literal["float32", "bfloat16"]
    shared_layers: dict[str, list[list[str]]]
    worker_timeout_s: float | Literal["auto"] | None
    start_timeout_s: float

    @property
    def learner_resources(self) -> Resources:
        """The resources that each learner needs."""


def _check_device(device: str) -> None:
    import torch

    try:
        kind = "cpu" if device == "auto" else torch.device(device).type
    except RuntimeError as error:
        raise ConfigError(f"device={device!r} is not a torch device: {error}") from None
    if kind == "cuda" and not torch.cuda.is_available():
        raise ConfigError(f"device={device!r}, but torch finds no CUDA device here; use 'auto' or 'cpu'.")
