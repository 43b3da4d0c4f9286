"""Ids of agents and modules; some have a fixed meaning."""

AgentID = str | int
"""Id of an agent in an env."""

COMMON = "__common__"
"""Key in infos: the info of no agent in particular."""

DEFAULT_MODULE_ID = "default_policy"
"""Id of the module of a single agent."""

DEFAULT_AGENT_ID = "default_agent"
"""Id of the agent of an env with a single agent."""

ALL_MODULES = "__all_modules__"
"""Key of the learner results that count over all modules."""
