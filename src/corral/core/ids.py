"""Ids of modules and agents that have a fixed meaning."""

DEFAULT_MODULE_ID = "default_policy"
"""Id of the module of a single agent."""

DEFAULT_AGENT_ID = "default_agent"
"""Id of the agent of an env with a single agent."""

ALL_MODULES = "__all_modules__"
"""Key of the learner results that count over all modules."""
