"""Sampled data: columns of time steps, episodes (views of them) and rollouts (the columns of one `sample()` call)."""
