"""What is measured: the cases, the systems that take part, and the budgets that Corral has to reach."""

from collections.abc import Mapping
from dataclasses import dataclass, field

# The script of each system. Those in RIVALS run with the rivals' interpreter, the others with Corral's own.
SCRIPTS = {
    "corral": "corral_side.py",
    "bare_loop": "bare_loop.py",
    "floor": "floor_side.py",
    "rllib": "rllib_side.py",
    "sb3": "sb3_side.py",
}
RIVALS = frozenset({"rllib", "sb3"})
NAMES = {
    "corral": "Corral",
    "bare_loop": "bare NumPy loop",
    "floor": "the floor",
    "rllib": "RLlib",
    "sb3": "Stable-Baselines3",
}

# How fast Corral has to be, relative to the leanest loop that does the same.
FLOOR_SHARE = 0.9
# Corral's speed relative to a rival has no budget, but may not fall by more than 5% below the last recorded ratio. Who
# measures on an idle machine and finds a higher one records it here; a lower one needs its reason in the commit.
KEPT_SHARE = 0.95
RECORDED_RATIOS: Mapping[str, Mapping[str, float]] = {
    "sampling_8": {"rllib": 15.59, "sb3": 6.37},
    "sampling_64": {"rllib": 23.91, "sb3": 10.74},
    "ppo": {"rllib": 6.16, "sb3": 3.03},
    "ppo_memory": {"rllib": 7.60, "sb3": 8.45},
    "agents_sampling": {"rllib": 7.47},
    "agents_ppo": {"rllib": 6.82},
    "ppo_wide": {"sb3": 0.97},
    "ppo_images": {"sb3": 1.37},
    "dqn": {"rllib": 20.85, "sb3": 2.25},
    "sac": {"sb3": 1.22},
    "td3": {"sb3": 0.99},
    "time_to_450": {"rllib": 20.11, "sb3": 7.26},
    "callback_logging": {"rllib": 16.32},
    "two_runners_process_sampling": {"rllib": 11.01},
    "two_runners_ray_sampling": {"rllib": 9.16},
    "two_runners_process_ppo": {"rllib": 5.15},
    "two_runners_ray_ppo": {"rllib": 4.82},
}

CAP_SECONDS = 300.0
QUICK_CAP_SECONDS = 60.0


@dataclass(frozen=True)
class Case:
    """One table of the report.

    Attributes:
        name: How `--only` and the raw results call it.
        title: The heading.
        what: What was run, for a reader who has only the report.
        measure: The first argument of the measuring scripts.
        unit: Unit of the value.
        value: The key of the value in the script's line, or None for the CPU seconds from the start of the
            process to the arrival of its line.
        digits: Shown after the decimal point.
        higher_is_better: True for rates, False for durations.
        systems: Who takes part.
        num_envs: Given to the script if set.
        seconds: The time to measure over, given to the script if set.
        engine: What runs Corral's runners where a measure has several, given to the script if set.
        threads: Threads of the numeric libraries, the same for all systems, or None for each library's default. A
            second thread gains nothing with nets of this size, and costs most of the speed as soon as
            another process wants the core it runs on.
        ratio_budgets: For a system, how many times as fast Corral has to be. A rival has none, see `RECORDED_RATIOS`.
        limit: Corral's own value has to stay below it.
        floor: Corral's own value has to reach it.
        limit_without_torch: Corral must also not have imported torch.
        has_ratio: False where a value may be about zero, so that a ratio says nothing.
        timeout: Seconds after which a run is killed.
    """

    name: str
    title: str
    what: str
    measure: str
    unit: str
    value: str | None
    digits: int
    higher_is_better: bool
    systems: tuple[str, ...]
    num_envs: int | None = None
    seconds: float | None = None
    engine: str | None = None
    threads: int | None = None
    ratio_budgets: Mapping[str, float] = field(default_factory=dict)
    limit: float | None = None
    floor: float | None = None
    limit_without_torch: bool = False
    has_ratio: bool = True
    timeout: float = 180.0

    def arguments(self, seed: int | str, quick: bool) -> list[str]:
        """Returns the command line of the measuring script, after its name."""
        arguments = [self.measure]
        if self.num_envs is not None:
            arguments += ["--num-envs", str(self.num_envs)]
        if self.seconds is not None:
            arguments += ["--seconds", f"{self.seconds / 4 if quick else self.seconds:g}"]
        if self.engine is not None:
            arguments += ["--engine", self.engine]
        if self.threads is not None:
            arguments += ["--threads", str(self.threads)]
        if self.value is None:
            arguments += ["--cap", f"{QUICK_CAP_SECONDS if quick else CAP_SECONDS:g}"]
        return [*arguments, "--seed", str(seed)]

    def budget(self, system: str) -> tuple[str, float] | None:
        """Returns what Corral's speed relative to a system must reach, in words and as a number, or `None`."""
        if (wanted := self.ratio_budgets.get(system)) is not None:
            return f">= {wanted:g}x", wanted
        if (recorded := RECORDED_RATIOS.get(self.name, {}).get(system)) is not None:
            return f">= {KEPT_SHARE:.0%} of {recorded:g}x", KEPT_SHARE * recorded
        return None

    @property
    def own_budget_text(self) -> str:
        """The limit or floor of Corral's own value in words, or nothing."""
        if self.floor is not None:
            return f">= {self.floor:g} {self.unit}"
        if self.limit is None:
            return ""
        suffix = " without torch" if self.limit_without_torch else ""
        return f"< {self.limit:g} {self.unit}{suffix}"

    def keeps_own_budget(self, value: float) -> bool:
        """Says whether a value of Corral's stays below the limit and reaches the floor, if there are any."""
        return (self.limit is None or value < self.limit) and (self.floor is None or value >= self.floor)


def _sampling(num_envs: int, ratio_budgets: Mapping[str, float] | None = None) -> Case:
    """Returns the sampling case for one number of envs."""
    return Case(
        name=f"sampling_{num_envs}",
        title=f"Sampling, {num_envs} env{'s' if num_envs > 1 else ''}",
        what=(
            "Env steps per second of the env runner in one process and thread, without learning: "
            "CartPole-v1, a policy of 64-64 tanh, stochastic actions, about 2048 env steps asked for per "
            "call. RLlib runs its SingleAgentEnvRunner on the env's own vector implementation "
            "(`vector_entry_point`, its fastest mode here); Stable-Baselines3 runs `collect_rollouts`, "
            "which also computes values; the bare loop runs the same vector env and policy in NumPy and "
            "stores nothing."
        ),
        measure="sampling",
        unit="env steps/s",
        value="env_steps_per_s",
        digits=0,
        higher_is_better=True,
        systems=("corral", "rllib", "sb3", "bare_loop"),
        num_envs=num_envs,
        seconds=2.0,
        threads=1,
        ratio_budgets=ratio_budgets or {},
    )


_ENGINES = {"process": "local processes", "ray": "Ray"}
_START = (
    "the start of two runners of PPO on CartPole-v1 with 8 envs each, from nothing until both have answered a call, in "
    "a process that has already imported Corral"
)


def _group_sampling(engine: str) -> Case:
    """Returns the case of sampling through a group of two runners, for one engine."""
    return Case(
        name=f"two_runners_{engine}_sampling",
        title=f"Sampling with two runners, {_ENGINES[engine]}",
        what=(
            "Env steps per second that two runners bring to the driving process, without learning: CartPole-v1, 8 envs "
            "a runner, a policy of 64-64 tanh, stochastic actions, 2048 env steps per round, half of them from each "
            "runner, and a round begins when the one before it has arrived. Corral runs `EnvRunnerGroup.sample` and "
            "collects the runners' metrics, as in training. RLlib runs `foreach_env_runner` with "
            "`sample(num_timesteps=1024)`, from which the episodes come back as in its training, but not the "
            "metrics, which saves it work; its envs are the env's own vector implementation (`vector_entry_point`). "
            "Numeric libraries have one thread in each process."
        ),
        measure="group_sampling",
        unit="env steps/s",
        value="env_steps_per_s",
        digits=0,
        higher_is_better=True,
        systems=("corral", "rllib"),
        num_envs=8,
        seconds=4.0,
        engine=engine,
        threads=1,
    )


def _group_ppo(engine: str) -> Case:
    """Returns the case of PPO with two runners, for one engine."""
    return Case(
        name=f"two_runners_{engine}_ppo",
        title=f"PPO with two runners, {_ENGINES[engine]}",
        what=(
            "Trained env steps per second of the whole loop after two warm-up iterations, with two runners in "
            "processes of their own and the learner in the driving process: 8 envs x 128 steps from each runner, and "
            "the other hyperparameters as in the case with one process. Numeric libraries have one thread in each "
            "process."
        ),
        measure="group_ppo",
        unit="env steps/s",
        value="env_steps_per_s",
        digits=0,
        higher_is_better=True,
        systems=("corral", "rllib"),
        seconds=8.0,
        engine=engine,
        threads=1,
    )


def _checkpoints(algorithm: str, what: str) -> Case:
    """Returns the case of what checkpoints cost an algorithm."""
    return Case(
        name=f"checkpoints_{algorithm.lower()}",
        title=f"What checkpoints cost {algorithm}",
        what=(
            f"Percent that the default checkpoints add to the wall time of a `fit`: {what}. It is the time within the "
            "code of the checkpoints divided by the rest. A run is shorter than the default interval of 60 s, and ends "
            "with the last and the best checkpoint: one write per run. The same `fit` without any checkpoints runs in "
            "turn with it, with the same seed and the same steps; how their wall times differ is in the raw results."
        ),
        measure=f"checkpoints_{algorithm.lower()}",
        unit="%",
        value="percent",
        digits=2,
        higher_is_better=False,
        systems=("corral",),
        seconds=30.0,
        threads=1,
        limit=2.0,
        has_ratio=False,
    )


def _stalling(name: str, title: str, what: str, value: str, floor: float) -> Case:
    """Returns a case of an env that stalls."""
    return Case(
        name=name,
        title=f"An env that stalls: {title}",
        what=(
            f"{what}. An env step takes 1 ms of sleep, and one step in a hundred 200 ms; two process runners with one "
            "env each, batches of 500 env steps, policy and value nets of two layers of 512. PPO makes 10 epochs of "
            "minibatches of 64, APPO has its defaults; they are measured one after the other, in an order that changes "
            "from pair to pair. The raw results have PPO with `sample_async=True`, too."
        ),
        measure="stalling",
        unit="%" if value.startswith("percent") else value,
        value=value,
        digits=2,
        higher_is_better=True,
        systems=("corral",),
        seconds=30.0,
        threads=1,
        floor=floor,
        has_ratio=False,
        timeout=300.0,
    )


def _compiled(name: str, title: str, what: str) -> Case:
    return Case(
        name=name,
        title=title,
        what=what,
        measure=name,
        unit="times",
        value="times",
        digits=2,
        higher_is_better=True,
        systems=("corral",),
        seconds=15.0,
        threads=1,
        has_ratio=False,
    )


def _async_time_to_450(algo: str) -> Case:
    return Case(
        name=f"{algo.lower()}_time_to_450",
        title=f"Time of {algo} to a mean return of 450",
        what=(
            f"As the time to a mean return of 450, with {algo} and two runner processes: Corral with its tuned "
            "settings for CartPole-v1, RLlib with the settings of its tuned example, "
            f"`{algo.lower()}/cartpole_{algo.lower()}.py`, with iterations of at least one second instead of ten. The "
            "env steps that each needed are in the raw results."
        ),
        measure=f"{algo.lower()}_time_to_450",
        unit="s",
        value=None,
        digits=1,
        higher_is_better=False,
        systems=("corral", "rllib"),
        threads=1,
        timeout=CAP_SECONDS + 120.0,
    )


def _agents(measure: str, title: str, what: str, seconds: float) -> Case:
    """Returns a case of four agents in each env, for Corral and RLlib."""
    return Case(
        name=measure,
        title=title,
        what=(
            f"{what} 8 envs, in each of which four agents have a CartPole-v1 each until its end; the env ends with the "
            "last of them, and all agents share one module. RLlib steps its own `MultiAgentCartPole`. The unit is one "
            "action of one agent."
        ),
        measure=measure,
        unit="agent steps/s",
        value="env_steps_per_s",
        digits=0,
        higher_is_better=True,
        systems=("corral", "rllib"),
        num_envs=8,
        seconds=seconds,
        threads=1,
    )


CASES = (
    _sampling(1),
    _sampling(8),
    _sampling(64, {"bare_loop": FLOOR_SHARE}),
    Case(
        name="ppo",
        title="PPO at equal hyperparameters",
        what=(
            "Trained env steps per second of the whole loop, sampling and learning, in one process and "
            "thread and after two warm-up iterations: CartPole-v1, 8 envs x 256 steps, minibatches of "
            "256, 4 epochs, separate policy and value nets of 64-64 tanh, lr 3e-4, gamma 0.99, lambda "
            "0.95, clip 0.2, gradient clip 0.5, no entropy bonus. RLlib runs without its KL penalty, "
            "which saves it work."
            " The floor computes the layers of both nets in one product, and no entropy, divergence or clip fraction."
        ),
        measure="ppo",
        unit="env steps/s",
        value="env_steps_per_s",
        digits=0,
        higher_is_better=True,
        systems=("corral", "rllib", "sb3", "floor"),
        seconds=4.0,
        threads=1,
        ratio_budgets={"floor": FLOOR_SHARE},
    ),
    Case(
        name="ppo_memory",
        title="PPO with memory",
        what=(
            "As the case above, with an LSTM of 64 behind a hidden layer of 64, of their own for policy and value, and "
            "sequences of 20 steps. Stable-Baselines3 is RecurrentPPO of sb3-contrib, which has the hidden layer after "
            "the LSTM and learns from whole episodes."
        ),
        measure="ppo_memory",
        unit="env steps/s",
        value="env_steps_per_s",
        digits=0,
        higher_is_better=True,
        systems=("corral", "rllib", "sb3"),
        seconds=4.0,
        threads=1,
    ),
    _agents("agents_sampling", "Sampling, four agents", "Agent steps per second without learning:", 2.0),
    _agents(
        "agents_ppo",
        "PPO with four agents",
        "Trained agent steps per second of the whole loop, with the hyperparameters of the case above:",
        4.0,
    ),
    Case(
        name="cost_of_seats",
        title="What an agent costs",
        what=(
            "CPU time of one agent step with 64 agents in one env, as a ratio to one step with 64 sub-envs of a single "
            "agent: the same 64 CartPoles in Python, in which no agent ever ends, and the policy of the sampling cases."
        ),
        measure="cost_of_seats",
        unit="times",
        value="ratio",
        digits=2,
        higher_is_better=False,
        systems=("corral",),
        seconds=4.0,
        threads=1,
        limit=1.3,
        has_ratio=False,
    ),
    Case(
        name="ppo_wide",
        title="PPO with wide nets",
        what="As the case above, with policy and value nets of 512-512.",
        measure="ppo_wide",
        unit="env steps/s",
        value="env_steps_per_s",
        digits=0,
        higher_is_better=True,
        systems=("corral", "sb3", "floor"),
        seconds=4.0,
        threads=1,
        ratio_budgets={"floor": FLOOR_SHARE},
    ),
    Case(
        name="ppo_images",
        title="PPO on images",
        what=(
            "Trained env steps per second of the whole loop in one process and thread: an env of uint8 images "
            "`[84, 84, 4]` that costs next to nothing, 8 envs x 128 steps, minibatches of 256, 4 epochs, the "
            "convolutions of Mnih et al. 2015 and 512 features shared by policy and value."
        ),
        measure="ppo_images",
        unit="env steps/s",
        value="env_steps_per_s",
        digits=0,
        higher_is_better=True,
        systems=("corral", "sb3", "floor"),
        seconds=6.0,
        threads=1,
        ratio_budgets={"floor": FLOOR_SHARE},
    ),
    _compiled(
        "compiled",
        "A compiled learner against a plain one",
        "How many times the env steps per second of PPO with nets of 512-512 `learners(compile=True)` takes, after "
        "compiling. Both take turns of one iteration in one process.",
    ),
    _compiled(
        "compiled_sac",
        "A compiled learner of SAC against a plain one",
        "As the case above, for SAC at the hyperparameters of its own case, in turns of 200 env steps and updates.",
    ),
    Case(
        name="dqn",
        title="DQN at equal hyperparameters",
        what=(
            "Env steps per second of the whole loop, sampling and learning, in one process and thread and after two "
            "warm-up iterations: CartPole-v1, one env, an update on 32 steps after every 4, a uniform buffer of "
            "50,000, learning from step 500 on, a net of 64-64 relu and its target, copied every 500 env steps, "
            "one-step targets without double or dueling, Adam with lr 5e-4, Huber loss, gradient clip 10, gamma 0.99, "
            "epsilon from 1 to 0.02 over 10,000 env steps. RLlib runs its episode replay buffer."
            " The floor knows one kind of buffer, net and exploration; a round of Corral, 4 env steps and an update, "
            "enters about 200 functions."
        ),
        measure="dqn",
        unit="env steps/s",
        value="env_steps_per_s",
        digits=0,
        higher_is_better=True,
        systems=("corral", "rllib", "sb3", "floor"),
        seconds=4.0,
        threads=1,
        ratio_budgets={"floor": FLOOR_SHARE},
    ),
    Case(
        name="q_learning_forms",
        title="Q-learning in NumPy against autograd",
        what=(
            "How many times the updates per second of autograd the NumPy form of DQN's loss takes: a net of 64-64, "
            "batches of 32, double Q-learning, Adam. Both take turns of 200 updates in one process."
        ),
        measure="q_learning_forms",
        unit="times",
        value="times",
        digits=2,
        higher_is_better=True,
        systems=("corral",),
        seconds=6.0,
        threads=1,
        floor=2.0,
        has_ratio=False,
    ),
    Case(
        name="sac",
        title="SAC at equal hyperparameters",
        what=(
            "Env steps per second of the whole loop in one process and thread, after the random steps and a warm-up: "
            "Pendulum-v1, one env, an update on 256 steps after each, a uniform buffer of 100,000, policy and twin "
            "critics of 256-256 relu, soft targets with tau 0.005, automatic temperature, Adam with lr 3e-4, gamma "
            "0.99."
        ),
        measure="sac",
        unit="env steps/s",
        value="env_steps_per_s",
        digits=0,
        higher_is_better=True,
        systems=("corral", "sb3", "floor"),
        seconds=4.0,
        threads=1,
        ratio_budgets={"floor": FLOOR_SHARE},
    ),
    Case(
        name="td3",
        title="TD3 at equal hyperparameters",
        what=(
            "Env steps per second of the whole loop in one process and thread, after the random steps and a warm-up: "
            "Pendulum-v1, one env, an update on 256 steps after each, every second one with the actor, a uniform "
            "buffer of 100,000, actor and twin critics of 256-256 relu, soft targets with tau 0.005, target noise 0.2 "
            "clipped to 0.5, Gaussian exploration noise 0.1, Adam with lr 1e-3, gamma 0.99."
            " The floor computes both critics in one product, and leaves out all metrics."
        ),
        measure="td3",
        unit="env steps/s",
        value="env_steps_per_s",
        digits=0,
        higher_is_better=True,
        systems=("corral", "sb3", "floor"),
        seconds=4.0,
        threads=1,
        ratio_budgets={"floor": FLOOR_SHARE},
    ),
    Case(
        name="td3_return",
        title="What TD3 learns at equal hyperparameters",
        what="Mean return of 20 episodes without noise after 10,000 env steps, with the settings of the case above.",
        measure="td3_return",
        unit="return",
        value="mean_return",
        digits=0,
        higher_is_better=True,
        systems=("corral", "sb3"),
        threads=1,
        has_ratio=False,
    ),
    Case(
        name="sac_limit",
        title="SAC against its arithmetic",
        what=(
            "Percent of an update of SAC, with the sizes of the case above, that its matrix products alone take, one "
            "after another on matrices of the same shapes; drawing the batch and moving the targets belong to it. "
            "Both take turns in one process."
        ),
        measure="sac_limit",
        unit="%",
        value="percent_products",
        digits=0,
        higher_is_better=True,
        systems=("corral",),
        seconds=4.0,
        threads=1,
        has_ratio=False,
    ),
    Case(
        name="replay_sampling",
        title="A prioritised draw of 32 from 1,000,000",
        what=(
            "Microseconds of one `sample(32, beta=0.4)` of a prioritised buffer of 1,000,000 steps with CartPole's "
            "spaces, with different priorities: the batch with weights and indices (median of the repeats of a loop)."
        ),
        measure="replay_sampling",
        unit="us/call",
        value="us_per_call",
        digits=1,
        higher_is_better=False,
        systems=("corral",),
        seconds=4.0,
        threads=1,
        limit=100.0,
        has_ratio=False,
    ),
    Case(
        name="replay_insertion",
        title="Insertion into a prioritised buffer",
        what=(
            "Steps per second, with CartPole's spaces, that are added to a prioritised buffer of 1,000,000 as rollouts "
            "of 32 time steps and 64 sub-envs."
        ),
        measure="replay_insertion",
        unit="steps/s",
        value="transitions_per_s",
        digits=0,
        higher_is_better=True,
        systems=("corral",),
        seconds=2.0,
        threads=1,
        floor=2_000_000.0,
        has_ratio=False,
    ),
    Case(
        name="recorded_reading",
        title="Reading recorded data",
        what=(
            "Steps per CPU second that BC reads from ten Parquet files of 100,000 steps with CartPole's spaces when it "
            "is built, with all checks. The raw results have the steps per CPU second that are drawn in batches of "
            "2,048, too."
        ),
        measure="recorded_reading",
        unit="steps/s",
        value="steps_read_per_s",
        digits=0,
        higher_is_better=True,
        systems=("corral",),
        seconds=2.0,
        threads=1,
        floor=1_000_000.0,
        has_ratio=False,
    ),
    Case(
        name="recorded_memory",
        title="Memory for 10,000,000 recorded steps",
        what=(
            "Megabytes that a process needs at most, which trains BC on 10,000,000 recorded steps with CartPole's "
            "spaces, after it has written them."
        ),
        measure="recorded_memory",
        unit="MB",
        value="megabytes",
        digits=0,
        higher_is_better=False,
        systems=("corral",),
        threads=1,
        limit=2000.0,
        has_ratio=False,
        timeout=300.0,
    ),
    Case(
        name="time_to_450",
        title="Time to a mean return of 450",
        what=(
            "Seconds from the start of a fresh process (imports included) until PPO on CartPole-v1 "
            "(Corral: the settings for CartPole of `examples/cartpole.yaml`, which are not its defaults; RLlib and "
            "Stable-Baselines3: their defaults, with two env runner processes and with one env), reports a running "
            "mean episode return of 450. The seconds are summed over the process and those that it started, as Ray's "
            "are; how long the run took is in the raw results. The seed is the number of the pair. A run that does not "
            "get there within the cap counts with what it had used for a rival, and as a ratio of zero for Corral."
        ),
        measure="time_to_450",
        unit="s",
        value=None,
        digits=1,
        higher_is_better=False,
        systems=("corral", "rllib", "sb3"),
        threads=1,
        timeout=CAP_SECONDS + 120.0,
    ),
    Case(
        name="import",
        title="Import of the package",
        what="Seconds of `import corral`, `import ray.rllib` or `import stable_baselines3` in a new process.",
        measure="import",
        unit="s",
        value="seconds",
        digits=3,
        higher_is_better=False,
        systems=("corral", "rllib", "sb3"),
        limit=0.25,
        limit_without_torch=True,
    ),
    Case(
        name="import_ppo",
        title="Import of PPO",
        what=(
            "Seconds to import `PPOConfig` from corral, `PPOConfig` from RLlib and `PPO` from "
            "Stable-Baselines3 in a fresh process: what a package that imports lazily puts off has partly "
            "been paid here."
        ),
        measure="import_ppo",
        unit="s",
        value="seconds",
        digits=3,
        higher_is_better=False,
        systems=("corral", "rllib", "sb3"),
    ),
    Case(
        name="callbacks",
        title="A subscribed no-op `on_episode_step`",
        what=(
            "Microseconds per call that a no-op subscribed to `on_episode_step` adds to sampling, beyond "
            "the Python call itself: seconds per env step with it less without it (the median over turns "
            "within one process, 64 envs of CartPole-v1), less the same function called with the same "
            "keyword arguments in a plain loop. RLlib makes the arguments and calls an empty hook on "
            "every step whether or not anyone subscribes, so that its difference is only the added call; "
            "it is also small against the noise of its sampling and may come out negative."
        ),
        measure="callbacks",
        unit="us/call",
        value="us_per_call",
        digits=2,
        higher_is_better=False,
        systems=("corral", "rllib"),
        seconds=4.0,
        threads=1,
        limit=1.0,
        has_ratio=False,
    ),
    Case(
        name="callback_logging",
        title="An `on_episode_step` that logs one value, 64 envs",
        what=(
            "Env steps per second as under sampling, with a subscriber to `on_episode_step` that calls "
            '`metrics_logger.log_value("x", 1.0, reduce="mean", window=100)` at every step of every env, and the '
            "runner's metrics collected after each sampling call, as training does."
        ),
        measure="callback_logging",
        unit="env steps/s",
        value="env_steps_per_s",
        digits=0,
        higher_is_better=True,
        systems=("corral", "rllib"),
        num_envs=64,
        seconds=4.0,
        threads=1,
    ),
    Case(
        name="log_value",
        title="One `log_value`",
        what=(
            'Microseconds of one `log_value("x", 1.0, reduce="mean", window=50)`, over so many calls that what '
            "is put off from one to a later one is in it (median of the repeats of a loop). RLlib's logger is "
            "one as its env runners have it: of a mean it only keeps the window."
        ),
        measure="log_value",
        unit="us/call",
        value="us_per_call",
        digits=3,
        higher_is_better=False,
        systems=("corral", "rllib"),
        seconds=2.0,
        threads=1,
        limit=1.0,
    ),
    _group_sampling("process"),
    _group_sampling("ray"),
    _group_ppo("process"),
    _group_ppo("ray"),
    Case(
        name="two_runners_against_one",
        title="Two process runners against one",
        what=(
            "How many times the env steps per second of a group of one process runner a group of two takes, on an env "
            "whose step keeps its core busy for 200 microseconds: one env per runner, 2000 env steps per round for "
            "each runner. Both groups are there at once and take turns of one round; the value of a run is the median "
            "over its turns of the ratio within a turn."
        ),
        measure="scaling",
        unit="times",
        value="times",
        digits=2,
        higher_is_better=True,
        systems=("corral",),
        seconds=20.0,
        threads=1,
        floor=1.8,
        has_ratio=False,
    ),
    Case(
        name="process_start",
        title="Start of two process runners",
        what=f"Seconds of {_START}.",
        measure="process_start",
        unit="s",
        value="seconds",
        digits=2,
        higher_is_better=False,
        systems=("corral",),
        num_envs=8,
        threads=1,
        limit=4.0,
        has_ratio=False,
    ),
    Case(
        name="process_start_torch",
        title="The part of torch in the start of two process runners",
        what=(
            f"What two fresh processes at once take until they have imported torch, and nothing else, in percent of "
            f"{_START}. Both are measured in one run, in an order that changes from pair to pair; their seconds are "
            "in the raw results."
        ),
        measure="process_start",
        unit="%",
        value="percent_import_torch",
        digits=0,
        higher_is_better=True,
        systems=("corral",),
        num_envs=8,
        threads=1,
        floor=50.0,
        has_ratio=False,
    ),
    Case(
        name="ray_start",
        title="What the Ray engine adds to its start",
        what=(
            f"Seconds, computed as a - b - c. a: {_START} and Ray, but has not started Ray, with the Ray engine. b: "
            "`ray.init()` alone, with the settings that the engine gives it, in a process of its own that has imported "
            "Ray. c: what a is with the process engine. All three are measured in one run, in an order that changes "
            "from pair to pair, and are in the raw results. So is how long `ray.init()` and then two actors that do "
            "nothing take to answer (`seconds_ray_init_and_two_empty_actors`), for the actors' processes too are "
            "Ray's. The value may come out negative."
        ),
        measure="ray_start",
        unit="s",
        value="seconds",
        digits=2,
        higher_is_better=False,
        systems=("corral",),
        num_envs=8,
        threads=1,
        limit=1.0,
        has_ratio=False,
    ),
    Case(
        name="weight_sync",
        title="Weight sync to two process runners",
        what=(
            "Milliseconds from the call of `sync_weights` until two process runners have the weights and have "
            "answered a further call, which they take after it: the median over 50 syncs. The module is for "
            "CartPole-v1, with a policy and a value net of two layers of 704: 1,001,795 parameters in float32."
        ),
        measure="weight_sync",
        unit="ms",
        value="ms",
        digits=1,
        higher_is_better=False,
        systems=("corral",),
        num_envs=8,
        threads=1,
        limit=15.0,
        has_ratio=False,
    ),
    Case(
        name="cpu_per_wall",
        title="CPUs that a process with one thread keeps busy",
        what=(
            "CPU seconds per wall second of the busiest process, with `num_threads=1` and nets of two layers of 256: "
            "PPO, DQN and SAC, each with everything in one process and with two runners and two learners in processes. "
            "A library that starts a second thread all the same would show here."
        ),
        measure="cpu_per_wall",
        unit="CPUs",
        value="cpus",
        digits=2,
        higher_is_better=False,
        systems=("corral",),
        seconds=3.0,
        limit=1.05,
        has_ratio=False,
    ),
    _checkpoints("PPO", "CartPole-v1 with the settings of `examples/cartpole.yaml`, 60,000 env steps"),
    _checkpoints("DQN", "CartPole-v1, 15,000 env steps, with the replay buffer in the checkpoints"),
    _stalling(
        "stalling", "APPO against PPO", "How many times the env steps of PPO APPO trains on per second", "times", 1.7
    ),
    _stalling(
        "stalling_busy",
        "how busy the runners of APPO are",
        "Percent of the time that the idlest runner of APPO samples, and waits for no request",
        "percent_busy",
        95.0,
    ),
    Case(
        name="blocked_evaluation",
        title="A blocked evaluation runner",
        what=(
            "Seconds by which the longest `train()` from the second round on is longer with an evaluation runner of "
            "three whose first step blocks for 40 s than without; three episodes of 200 steps of 1 ms in each round, "
            "at the same time as training."
        ),
        measure="blocked_evaluation",
        unit="s",
        value="seconds",
        digits=2,
        higher_is_better=False,
        systems=("corral",),
        limit=1.0,
        has_ratio=False,
    ),
    _async_time_to_450("APPO"),
    _async_time_to_450("IMPALA"),
    Case(
        name="straggler",
        title="What a runner ten times slower costs the others",
        what=(
            "Percent of their env steps per second that two of three process runners lose when the third is ten times "
            "slower, against the same group with three equal ones. An env step takes 1 ms of sleep, in the slow "
            "runner 10 ms; one env per runner, 600 env steps per round. The first five rounds of each group are not "
            "counted. Then the groups take turns of nine rounds, of which the first is not counted: the slow runner "
            "could finish a late fragment while the other group has its turn. It may come out negative."
        ),
        measure="straggler",
        unit="%",
        value="percent",
        digits=1,
        higher_is_better=False,
        systems=("corral",),
        seconds=20.0,
        threads=1,
        limit=10.0,
        has_ratio=False,
    ),
)

# Measured before an issue is closed (`make bench-quick`): every path of the library that most users walk.
MAIN = (
    "sampling_8",
    "sampling_64",
    "ppo",
    "ppo_memory",
    "ppo_wide",
    "ppo_images",
    "agents_sampling",
    "agents_ppo",
    "dqn",
    "sac",
    "td3",
    "time_to_450",
    "import",
    "callbacks",
    "two_runners_process_sampling",
)


def select(only: str | None) -> list[Case]:
    """Returns the cases that a comma-separated list of case or measure names asks for, or all.

    Raises:
        ValueError: A name is of no case.
    """
    if only is None:
        return list(CASES)
    wanted = {name.strip() for name in only.split(",") if name.strip()}
    known = {case.name for case in CASES} | {case.measure for case in CASES}
    if not wanted or wanted - known:
        unknown = ", ".join(sorted(wanted - known)) or "nothing"
        raise ValueError(f"no such measure: {unknown}; there are {', '.join(sorted(known))}")
    return [case for case in CASES if wanted & {case.name, case.measure}]
