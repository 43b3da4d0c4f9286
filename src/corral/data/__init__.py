"""What was sampled: episodes and rollouts, replay buffers, and recorded data."""
