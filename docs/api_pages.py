"""The reference of classes: which public names are on which page. Sphinx takes the text from the docstrings."""

from __future__ import annotations

import importlib

import corral

TOPICS = {
    "algorithms": (
        "Algorithms",
        "Configs, and the algorithms that they build.",
        "AlgorithmConfig Algorithm PPOConfig PPO APPOConfig APPO IMPALAConfig IMPALA PQNConfig PQN DQNConfig DQN "
        "SACConfig SAC TQCConfig TQC CrossQConfig CrossQ TD3Config TD3 DDPGConfig DDPG "
        "DreamerV3Config DreamerV3 BCConfig BC MARWILConfig MARWIL CQLConfig CQL IQLConfig IQL "
        "Below register_algorithm algorithms.registry.config_from_dict algorithms.tuned_settings.tuned_settings "
        "algorithms.off_policy.OffPolicyConfig algorithms.off_policy.OffPolicyAlgorithm summary",
    ),
    "envs": (
        "Envs",
        "What envs are given, and envs with tasks or several agents.",
        "EnvContext TaskSettableEnv EpisodeReset MultiAgentEnv make_multi_agent TensorVectorEnv ExternalEnv "
        "runners.serving.client.PolicyClient runners.serving.client.MultiAgentPolicyClient "
        "runners.serving.client.drive runners.serving.client.ClientError runners.serving.client.EpisodesLost "
        "runners.serving.client.ServerStopped",
    ),
    "modules": (
        "Modules",
        "Networks, rules without one, and distributions over actions.",
        "Module HeuristicModule RandomModule modules.q_module.QModule modules.sac_module.SACModule "
        "modules.tqc_module.TQCModule modules.crossq_module.CrossQModule "
        "modules.batch_renorm.BatchRenorm modules.td3_module.TD3Module modules.dreamerv3_module.DreamerV3Module "
        "modules.distributions.ActionDistribution modules.distributions.Categorical "
        "modules.distributions.MultiCategorical modules.distributions.Bernoulli modules.distributions.DiagGaussian "
        "modules.distributions.SquashedGaussian modules.distributions.Deterministic",
    ),
    "transforms": (
        "Transforms",
        "What changes observations and rewards between env and module.",
        "Transform TemporalTransform ClipObservations FlattenObservations NormalizeObservations FrameStack "
        "PrevActionsPrevRewards ClipRewards NormalizeRewards",
    ),
    "exploration": (
        "Exploration",
        "The base class, and the functions around it. The built-in types are in [Exploration](../exploration.md).",
        "Exploration exploration.make_exploration exploration.check_exploration exploration.exploration_class "
        "exploration.RowDistribution",
    ),
    "replay": (
        "Replay buffers",
        "Buffers, and what makes them from a config.",
        "data.replay.ReplayBuffer data.replay.PrioritizedReplayBuffer data.replay.ReplayConfig "
        "data.replay.make_replay_buffer data.replay.EmptyReplayBufferError",
    ),
    "callbacks": (
        "Callbacks",
        "The base class of callbacks; [Events](../events.md) lists what they are given.",
        "Callback make_multi_callbacks callbacks.Event callbacks.keep_frames",
    ),
    "episodes": ("Episodes", "Views of what was sampled.", "SingleAgentEpisode MultiAgentEpisode"),
    "metrics": ("Metrics", "The logger that callbacks and algorithms write to.", "core.metrics.logger.MetricsLogger"),
    "runners": (
        "Runners",
        "What samples, and what it returns.",
        "SampleRequest runners.runner.EnvRunner runners.runner_group.EnvRunnerGroup data.episodes.rollout.Rollout",
    ),
    "learners": (
        "Learners",
        "What takes gradient steps.",
        "learners.learner.Learner learners.learner_group.LearnerGroup learners.learner_group.PendingUpdate "
        "learners.build.make_learner_group "
        "learners.settings.LearningSpec learners.settings.UpdateSettings learners.ready_optimizers.ready_optimizers",
    ),
    "returns": (
        "Returns and schedules",
        "Pure functions for losses and training steps.",
        "core.returns.gae core.returns.n_step_returns core.schedules.schedule_value",
    ),
    "evaluation": (
        "Policies in use",
        "Policies without training code, and parts of rounds of evaluation.",
        "Policy load_policy from_sb3 compat.sb3.models.SB3Model PolicyEvaluation evaluate_policy "
        "runners.evaluation.rounds.RoundPlan runners.evaluation.rounds.play_round "
        "runners.evaluation.statistics.summarize_episodes OffPolicyEvaluation estimate_return "
        "data.offline.off_policy_estimates.ValueEstimate data.offline.off_policy_estimates.Bootstrap "
        "data.offline.off_policy_estimates.importance_sampling "
        "data.offline.off_policy_estimates.weighted_importance_sampling "
        "data.offline.off_policy_estimates.per_decision_importance_sampling "
        "data.offline.off_policy_estimates.weighted_per_decision_importance_sampling "
        "data.offline.off_policy_estimates.doubly_robust data.offline.off_policy_estimates.weighted_doubly_robust "
        "data.offline.fitted_values.fit_values data.offline.fitted_values.FittedValues "
        "data.offline.fitted_values.FitSettings",
    ),
    "curriculum": (
        "Curricula",
        "Callbacks that choose tasks.",
        "callbacks.curriculum.ThresholdCurriculum callbacks.curriculum.LearningProgressSampler",
    ),
    "loggers": (
        "Loggers",
        "What writes results.",
        "runs.loggers.Logger runs.loggers.CSVLogger runs.loggers.JSONLinesLogger runs.loggers.ImageLogger "
        "runs.loggers.TensorBoardLogger runs.loggers.WandbLogger runs.loggers.MLflowLogger runs.loggers.TrackioLogger "
        "runs.loggers.default_loggers runs.loggers.classify runs.loggers.Run",
    ),
    "report": ("Reports", "Pages and pictures of runs.", "tools.report.write_report tools.report.write_plot"),
    "checkpoint": (
        "Checkpoints",
        "Files of the state of an algorithm.",
        "runs.checkpoint.Checkpoint runs.checkpoint.find_checkpoint runs.checkpoint.read_checkpoint "
        "runs.checkpoint.write_checkpoint",
    ),
    "engines": (
        "Engines",
        "What starts workers, and objects that all workers share.",
        "engines.Engine engines.WorkerHandle engines.Resources engines.engine_for engines.make_engine "
        "coordination.create coordination.get coordination.remove coordination.ActorHandle",
    ),
    "tune": (
        "Ray Tune",
        "Algorithms as trials.",
        "compat.tune.trainable compat.tune.configured compat.tune.register compat.tune.resources "
        "compat.tune.reportable compat.tune.AlgorithmTrainable",
    ),
    "testing": (
        "Testing",
        "Small envs with known results, for your own tests.",
        "testing.CartPolePositions testing.CountingEnv testing.DeepSea testing.DoorCorridor testing.FaultyEnv "
        "testing.FindSquare testing.IdentityEnv testing.PoorHabit testing.TMaze testing.TimeLimitCorridor "
        "testing.BitFlippingEnv testing.ReachEnv",
    ),
    "errors": ("Errors", "All derive from `CorralError`, or from an error of Python that fits.", "*errors"),
}
"""Title, first line and names below `corral` by name of the page."""


def names_of(topic: str) -> list[str]:
    """Return the names of a page, as paths from `corral`."""
    names = TOPICS[topic][2].split()
    if names == ["*errors"]:
        errors = importlib.import_module("corral.errors")
        return [
            f"errors.{name}"
            for name, found in vars(errors).items()
            if isinstance(found, type) and issubclass(found, BaseException) and found.__module__ == "corral.errors"
        ]
    return names


def find(path: str) -> object:
    """Return what a path from `corral` names."""
    found: object = corral
    for name in path.split("."):
        try:
            found = getattr(found, name)
        except AttributeError:
            found = importlib.import_module(f"{found.__name__}.{name}")  # type: ignore[attr-defined]
    return found


def api_pages(note: str) -> dict[str, str]:
    """Return the text of the pages by file name.

    Args:
        note: A line for the reader of the file.
    """
    pages = {}
    for topic, (title, about, _) in TOPICS.items():
        lines = [f"# {title}", "", note, "", about, ""]
        for path in names_of(topic):
            directive = "autoclass" if isinstance(find(path), type) else "autofunction"
            lines += ["```{eval-rst}", f".. {directive}:: corral.{path}", "```", ""]
        pages[f"api/{topic}.md"] = "\n".join(lines)
    rows = [f"| [{title}]({topic}.md) | {about} |" for topic, (title, about, _) in TOPICS.items()]
    tree = ["```{toctree}", ":hidden:", "", *TOPICS, "```", ""]
    head = ["# Classes", "", note, "", "Every public class and function, from its docstring.", ""]
    pages["api/index.md"] = "\n".join([*head, "| page | contents |", "| --- | --- |", *rows, "", *tree])
    return pages
