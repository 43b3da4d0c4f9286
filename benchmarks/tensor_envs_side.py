"""Trains PPO on an env of tensors, an iteration for each line on stdin (see `bench_tensor_envs.py`)."""

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
import warnings
from collections import deque
from collections.abc import Callable, Mapping
from time import process_time
from typing import Any, TextIO

import measuring

NUM_AGENTS = 4
# Arguments of VMAS's balance, as BenchMARL 1.5.2 sets them.
BALANCE: dict[str, Any] = {
    "max_steps": 100,
    "n_agents": NUM_AGENTS,
    "random_package_pos_on_line": True,
    "package_mass": 5,
}
# Settings that both systems have; BenchMARL's are its defaults, except for `lr` and the sizes on the command line.
GAMMA, CLIP_PARAM = 0.99, 0.2
LR = {"balance": 3e-4, "cart_pole": 1e-3}
LAMBDA = {"balance": 0.9, "cart_pole": 0.95}
VF_LOSS_COEFF = {"balance": 1.0, "cart_pole": 0.5}
GRAD_CLIP = {"balance": 5.0, "cart_pole": 0.5}
ADAM_EPS = 1e-6

Settings = argparse.Namespace
"""`num_envs`, `hidden`, `rows`, `minibatch`, `epochs`, `iterations`, `seed`; see `main`."""

Report = Callable[[int, float, Mapping[str, float]], None]
"""`report(num_frames, mean_return, timers)` waits for the next turn.

It is called when all is built, and after each iteration with the env steps, the mean return of an agent in the latest
`num_envs` episodes, and the seconds by part.
"""


def corral_config(env: str, form: str, settings: Settings) -> Any:
    """Returns the config of PPO; with `form="arrays"` a callback listens, because of which each step is copied."""
    from corral import Callback, PPOConfig
    from corral.envs.torch_envs import TorchCartPole

    class Listener(Callback):
        """Listens to the end of episodes."""

        def on_episode_end(self, **arguments: Any) -> None:
            """Does nothing."""

    rows_per_env_step = NUM_AGENTS if env == "balance" else 1
    config = PPOConfig().env_runners(num_envs_per_env_runner=settings.num_envs).debugging(seed=settings.seed)
    config.training(
        lr=LR[env],
        train_batch_size_per_learner=settings.rows * settings.num_envs,
        minibatch_size=settings.minibatch * rows_per_env_step,
        num_epochs=settings.epochs,
        gamma=GAMMA,
        lambda_=LAMBDA[env],
        clip_param=CLIP_PARAM,
        vf_loss_coeff=VF_LOSS_COEFF[env],
        grad_clip=GRAD_CLIP[env],
        normalize_advantages=env == "cart_pole",
        optimizer_config={"eps": ADAM_EPS},
    )
    model: dict[str, Any] = {"fcnet_hiddens": [settings.hidden, settings.hidden], "fcnet_activation": "tanh"}
    if env == "balance":
        from corral.envs.vmas_env import VmasVectorEnv

        config.environment(VmasVectorEnv, env_config={"scenario": "balance", **BALANCE})
        config.multi_agent(policies=["agents"], policy_mapping_fn=map_to_agents)
        model["free_log_std"] = False
        model["fcnet_kernel_initializer"] = "torch"
    else:
        config.environment(TorchCartPole)
    config.rl_module(model_config=model)
    config.reporting(metrics_num_episodes_for_smoothing=settings.num_envs)
    return config.callbacks(Listener) if form == "arrays" else config


def map_to_agents(agent: str, *_: Any, **__: Any) -> str:
    """Returns the one module that all agents share."""
    return "agents"


def train_corral(env: str, form: str, settings: Settings, report: Report) -> None:
    """Trains with Corral's PPO."""
    frames = 0
    with corral_config(env, form, settings).build() as algo:
        report(0, float("nan"), {})
        for _ in range(settings.iterations):
            result = algo.train()
            runners = result["env_runners"]
            returns = (
                runners["agent_episode_return_mean"].values() if env == "balance" else [runners["episode_return_mean"]]
            )
            now = int(result["num_env_steps_sampled_lifetime"])
            timers = {name.removesuffix("_s"): seconds for name, seconds in result["timers"].items()}
            report(now - frames, statistics.fmean(returns), timers)
            frames = now


def train_benchmarl(env: str, form: str, settings: Settings, report: Report) -> None:
    """Trains with BenchMARL's IPPO; `form="tanh"` takes its default distribution of actions, not the plain normal.

    An iteration is a training and the collection of the next batch. The first batch is collected before the first one.
    """
    from benchmarl.algorithms import IppoConfig
    from benchmarl.environments import VmasTask
    from benchmarl.experiment import Callback, Experiment, ExperimentConfig
    from benchmarl.models.mlp import MlpConfig

    latest: deque[float] = deque(maxlen=settings.num_envs)

    class Watch(Callback):  # type: ignore[misc]
        """Reports each batch."""

        def on_batch_collected(self, batch: Any) -> None:
            """Report the batch."""
            returns = batch["next", "agents", "episode_reward"].mean((2, 3))
            latest.extend(latest_returns(returns, batch["next", "done"].squeeze(-1), settings.num_envs))
            report(batch.numel(), statistics.fmean(latest), {})

        def __reduce__(self) -> Any:
            return str, ()  # BenchMARL pickles the callbacks of an experiment; this one belongs to this process

    with tempfile.TemporaryDirectory() as folder:
        config = ExperimentConfig.get_from_yaml()
        config.lr, config.gamma, config.adam_eps = LR[env], GAMMA, ADAM_EPS
        config.clip_grad_norm, config.clip_grad_val = True, GRAD_CLIP[env]
        config.max_n_frames, config.max_n_iters = None, settings.iterations + 1
        config.on_policy_collected_frames_per_batch = settings.rows * settings.num_envs
        config.on_policy_n_envs_per_worker = settings.num_envs
        config.on_policy_n_minibatch_iters = settings.epochs
        config.on_policy_minibatch_size = settings.minibatch
        config.evaluation, config.render, config.loggers, config.create_json = False, False, [], False
        config.save_folder = folder
        algorithm = IppoConfig.get_from_yaml()
        algorithm.lmbda, algorithm.clip_epsilon, algorithm.critic_coef = LAMBDA[env], CLIP_PARAM, VF_LOSS_COEFF[env]
        algorithm.use_tanh_normal = form == "tanh"
        model = MlpConfig.get_from_yaml()
        model.num_cells = [settings.hidden, settings.hidden]
        task = VmasTask.BALANCE.get_from_yaml()
        task.config = dict(BALANCE)
        Experiment(
            task=task,
            algorithm_config=algorithm,
            model_config=model,
            seed=settings.seed,
            config=config,
            callbacks=[Watch()],
        ).run()


def latest_returns(returns: Any, done: Any, num_episodes: int) -> list[float]:
    """Returns the returns of the latest episodes that end in a batch `[N, T]`, at most `num_episodes`."""
    found: list[float] = returns.T[done.T][-num_episodes:].tolist()
    return found


def make_torchrl_cart_pole(num_envs: int) -> Any:
    """Returns an env of TorchRL with the dynamics of Corral's `TorchCartPole`."""
    import torch
    from tensordict import TensorDict
    from torchrl.data import Binary, Categorical, Composite, Unbounded
    from torchrl.envs import EnvBase

    from corral.envs.torch_envs import TorchCartPole

    class CartPole(EnvBase):  # type: ignore[misc]
        """Steps and resets as `TorchCartPole` does, in the form of TorchRL."""

        def __init__(self) -> None:
            """Set the specs."""
            super().__init__(device=torch.device("cpu"), batch_size=torch.Size([num_envs]))
            self.dynamics = TorchCartPole(num_envs)
            self.states, self.num_steps = torch.zeros(num_envs, 4), torch.zeros(num_envs, dtype=torch.int64)
            shape = self.batch_size
            self.observation_spec = Composite(observation=Unbounded((*shape, 4)), shape=shape)
            self.action_spec = Categorical(2, shape=shape)
            self.reward_spec = Unbounded((*shape, 1))
            flag = Binary(1, shape=(*shape, 1), dtype=torch.bool)
            self.full_done_spec = Composite(done=flag, terminated=flag.clone(), truncated=flag.clone(), shape=shape)

        def _reset(self, tensordict: Any = None, **_: Any) -> Any:
            mask = torch.ones(num_envs, dtype=torch.bool)
            if tensordict is not None and "_reset" in tensordict.keys():
                mask = tensordict["_reset"].view(-1)
            new = self.dynamics.sample_states(self.dynamics._generator)
            self.states, self.num_steps = (
                torch.where(mask[:, None], new, self.states),
                torch.where(mask, 0, self.num_steps),
            )
            flags = {name: torch.zeros(num_envs, 1, dtype=torch.bool) for name in ("done", "terminated", "truncated")}
            return TensorDict({"observation": self.states, **flags}, batch_size=self.batch_size)

        def _step(self, tensordict: Any) -> Any:
            self.states, rewards, terminated = self.dynamics.advance(self.states, tensordict["action"])
            self.num_steps = self.num_steps + 1
            truncated = self.num_steps >= self.dynamics.max_episode_steps
            flags = {"done": terminated | truncated, "terminated": terminated, "truncated": truncated}
            columns = {"observation": self.states, "reward": rewards[:, None]}
            columns |= {name: flag[:, None] for name, flag in flags.items()}
            return TensorDict(columns, batch_size=self.batch_size)

        def _set_seed(self, seed: int | None) -> None:
            if seed is not None:
                self.dynamics._generator.manual_seed(seed)

    return CartPole()


def train_torchrl(env: str, form: str, settings: Settings, report: Report) -> None:
    """Trains with the parts of TorchRL: a collector, GAE, a buffer that is drawn from without replacement, ClipPPOLoss.

    An iteration is a training and the collection of the next batch. The first batch is collected before the first one.
    """
    import torch
    from tensordict.nn import TensorDictModule
    from torch.distributions import Categorical
    from torchrl import collectors
    from torchrl.data import LazyTensorStorage, TensorDictReplayBuffer
    from torchrl.data.replay_buffers.samplers import SamplerWithoutReplacement
    from torchrl.envs import RewardSum, TransformedEnv
    from torchrl.modules import MLP, ProbabilisticActor, ValueOperator
    from torchrl.objectives import ClipPPOLoss
    from torchrl.objectives.value import GAE

    torch.manual_seed(settings.seed)
    made = make_torchrl_cart_pole(settings.num_envs)
    made.set_seed(settings.seed)
    made = TransformedEnv(made, RewardSum())
    net = {"num_cells": [settings.hidden, settings.hidden], "activation_class": torch.nn.Tanh}
    actor = ProbabilisticActor(
        TensorDictModule(MLP(in_features=4, out_features=2, **net), in_keys=["observation"], out_keys=["logits"]),
        in_keys=["logits"],
        spec=made.full_action_spec,
        distribution_class=Categorical,
        return_log_prob=True,
    )
    critic = ValueOperator(MLP(in_features=4, out_features=1, **net), in_keys=["observation"])
    gae = GAE(gamma=GAMMA, lmbda=LAMBDA[env], value_network=critic, average_gae=True)
    loss = ClipPPOLoss(
        actor,
        critic,
        clip_epsilon=CLIP_PARAM,
        loss_critic_type="l2",
        entropy_coeff=0.0,
        critic_coeff=VF_LOSS_COEFF[env],
        normalize_advantage=False,  # `average_gae` does it for the batch
    )
    parameters = list(loss.parameters())
    optimizer = torch.optim.Adam(parameters, lr=LR[env], eps=ADAM_EPS)
    num_frames = settings.rows * settings.num_envs
    buffer = TensorDictReplayBuffer(
        storage=LazyTensorStorage(num_frames), sampler=SamplerWithoutReplacement(), batch_size=settings.minibatch
    )
    collector_class = getattr(collectors, "Collector", None) or collectors.SyncDataCollector
    collector = collector_class(
        made,
        actor,
        frames_per_batch=num_frames,
        total_frames=num_frames * (settings.iterations + 1),
    )
    latest: deque[float] = deque(maxlen=settings.num_envs)
    for batch in collector:
        returns, done = batch["next", "episode_reward"].squeeze(-1), batch["next", "done"].squeeze(-1)
        latest.extend(latest_returns(returns, done, settings.num_envs))
        report(batch.numel(), statistics.fmean(latest), {})
        with torch.no_grad():
            batch = gae(batch)
        buffer.empty()
        buffer.extend(batch.reshape(-1))
        for _ in range(settings.epochs):
            for minibatch in buffer:
                losses = loss(minibatch)
                total = losses["loss_objective"] + losses["loss_critic"] + losses["loss_entropy"]
                total.backward()
                torch.nn.utils.clip_grad_norm_(parameters, GRAD_CLIP[env])
                optimizer.step()
                optimizer.zero_grad(set_to_none=True)
    collector.shutdown()


def train_floor(env: str, form: str, settings: Settings, report: Report) -> None:
    """Does only what no system can leave out, and learns nothing: an upper bound of the rate with these sizes.

    These are the env's steps (of VMAS's own env, reset as a whole), the policy for each row, the values of the batch,
    and forward and backward passes and Adam for each minibatch, on a loss of one operation.
    """
    import torch
    from torch import nn

    from corral.envs.torch_envs import TorchCartPole

    torch.manual_seed(settings.seed)
    is_balance = env == "balance"
    num_agents, width, num_outputs = (NUM_AGENTS, 16, 4) if is_balance else (1, 4, 2)
    num_rows, num_lanes = settings.rows * settings.num_envs * num_agents, settings.num_envs * num_agents

    def make_net(num_outputs: int) -> nn.Module:
        hidden = settings.hidden
        layers = nn.Linear(width, hidden), nn.Tanh(), nn.Linear(hidden, hidden), nn.Tanh()
        return nn.Sequential(*layers, nn.Linear(hidden, num_outputs))

    policy, critic = make_net(num_outputs), make_net(1)
    optimizer = torch.optim.Adam([*policy.parameters(), *critic.parameters()], fused=True)
    if is_balance:
        import vmas

        made = vmas.make_env("balance", num_envs=settings.num_envs, seed=settings.seed, **BALANCE)
        actions: Any = [torch.rand(settings.num_envs, 2) * 2 - 1 for _ in range(NUM_AGENTS)]
    else:
        made, actions = TorchCartPole(settings.num_envs), torch.randint(2, (settings.num_envs,))
        made.reset(seed=settings.seed)
    report(0, float("nan"), {})
    for _ in range(settings.iterations):
        obs = torch.randn(num_rows, width)
        with torch.inference_mode():
            for start in range(0, num_rows, num_lanes):
                policy(obs[start : start + num_lanes])
                made.step([action.clone() for action in actions] if is_balance else actions)
            critic(obs)
        if is_balance:
            made.reset()
        for _ in range(settings.epochs):
            for part in obs.split(settings.minibatch * num_agents):
                optimizer.zero_grad()
                (policy(part).mean() + critic(part).mean()).backward()
                optimizer.step()
        report(settings.rows * settings.num_envs, float("nan"), {})


TRAINERS = {"floor": train_floor, "corral": train_corral, "benchmarl": train_benchmarl, "torchrl": train_torchrl}


def take_turns(system: str, env: str, form: str, settings: Settings, line_out: TextIO) -> None:
    """Trains, and before each iteration waits for a line on stdin; writes a JSON line when the process is ready.

    After each iteration it writes another one: the env steps, the CPU seconds, the mean return and seconds by part.
    """
    import torch

    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    start = 0.0

    def report(num_frames: int, mean_return: float, timers: Mapping[str, float]) -> None:
        nonlocal start
        shown = mean_return if mean_return == mean_return else None  # JSON has no NaN
        line = {"env_steps": num_frames, "cpu_s": process_time() - start, "return": shown, "timers": dict(timers)}
        line_out.write(json.dumps(line) + "\n")
        line_out.flush()
        if not sys.stdin.readline():
            raise SystemExit  # the script that measures has ended
        start = process_time()

    TRAINERS[system](env, form, settings, report)


def main() -> None:
    """Take the turns of what the command line names, such as `corral:balance:tensors`."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", help="SYSTEM:ENV:FORM")
    parser.add_argument("--num-envs", type=int, default=1024)
    parser.add_argument("--hidden", type=int, default=256, help="width of both hidden layers of policy and critic")
    parser.add_argument("--rows", type=int, default=32, help="steps of each sub-env in a batch")
    parser.add_argument("--minibatch", type=int, default=4096, help="env steps in a minibatch, with all their agents")
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--iterations", type=int, default=4)
    parser.add_argument("--seed", type=int, default=0)
    settings = parser.parse_args()
    os.environ.update(dict.fromkeys(measuring.THREAD_VARIABLES, "1"))
    time.perf_counter = process_time  # the timers of a result then show CPU seconds, whatever else the machine does
    system, env, form = settings.what.split(":")
    with os.fdopen(os.dup(1), "w") as line_out:
        os.dup2(2, 1)  # what libraries print goes to stderr
        take_turns(system, env, form, settings, line_out)


if __name__ == "__main__":
    sys.exit(main())
