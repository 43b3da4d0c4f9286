"""Measures a bare NumPy sampling loop and prints it as a JSON line (see `run.py`).

It is what sampling costs at the least without a library: the env's own NumPy vector implementation, the
policy's forward pass and a stochastic action with its log-probability. It stores nothing and learns nothing,
so the gap between it and a library is what the library's work on top costs.
"""

import itertools

import measuring
from measuring import Fields, Options


def sampling(options: Options) -> Fields:
    """Env steps per second of the bare loop."""
    import gymnasium
    import numpy as np

    num_envs = options.num_envs
    envs = gymnasium.make_vec(measuring.ENV, num_envs=num_envs, vectorization_mode="vector_entry_point")
    rng = np.random.default_rng(options.seed)
    sizes = [4, *measuring.HIDDEN, 2]
    weights = [
        rng.normal(0.0, fan_in**-0.5, (fan_in, fan_out)).astype(np.float32)
        for fan_in, fan_out in itertools.pairwise(sizes)
    ]
    # A small last layer, as in a fresh policy, so that the actions are close to uniform.
    weights[-1] *= np.float32(0.01)
    biases = [np.zeros(size, np.float32) for size in sizes[1:]]
    rows = np.arange(num_envs)
    observations, _ = envs.reset(seed=options.seed)

    def sample() -> int:
        nonlocal observations
        steps = 0
        while steps < measuring.STEPS_PER_SAMPLE:
            hidden = np.tanh(observations @ weights[0] + biases[0])
            hidden = np.tanh(hidden @ weights[1] + biases[1])
            logits = hidden @ weights[2] + biases[2]
            logits -= logits.max(axis=1, keepdims=True)
            exponentials = np.exp(logits)
            sums = exponentials.cumsum(axis=1)
            totals = sums[:, -1]
            thresholds = rng.random(num_envs, dtype=np.float32) * totals
            actions = (sums[:, :-1] < thresholds[:, None]).sum(axis=1)
            _log_probabilities = logits[rows, actions] - np.log(totals)
            observations, _, terminated, truncated, _ = envs.step(actions)
            # After an episode's end the env spends one step on its reset, which is not an env step.
            steps += num_envs - int(np.count_nonzero(terminated | truncated))
        return steps

    return measuring.sampling_rate(sample, options)


if __name__ == "__main__":
    measuring.run_measure("bare_loop", {"sampling": sampling})
