"""What was sampled: rollouts (columns) and episodes (views of them)."""
