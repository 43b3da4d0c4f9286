"""Vector envs: making them, stepping them, checking them, and keeping their sub-envs alive."""
