"""What a run leaves behind: its directory and logs, its checkpoints, and policies in use."""
