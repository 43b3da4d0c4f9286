"""Models that Stable-Baselines3 saved, as policies and configs of Corral."""
