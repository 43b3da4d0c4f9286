"""Send a message to a chat when runners were restarted, when a run fails, and when it ends.

The URL is an incoming webhook, as Slack, Mattermost and others have them: it takes JSON with a `text`.
"""

import argparse
import json
import urllib.request

from corral import Callback, PPOConfig
from corral.core.metrics.result import describe_faults


class Notify(Callback):
    def __init__(self, url, timeout_s=5.0):
        self.url, self.timeout_s = url, timeout_s

    def send(self, text):
        data = json.dumps({"text": text}).encode()
        request = urllib.request.Request(self.url, data, {"Content-Type": "application/json"})
        try:
            urllib.request.urlopen(request, timeout=self.timeout_s).close()
        except OSError as error:  # a chat that cannot be reached ends no run
            print(f"Not sent: {text} ({error})")

    def on_env_runners_recreated(self, *, env_runner_indices, **kwargs):
        self.send(f"Env runners {env_runner_indices} failed and were restarted.")

    def on_exception(self, *, algorithm, exception, **kwargs):
        self.send(f"The run in {algorithm.run_dir} failed: {type(exception).__name__}: {exception}")

    def on_algorithm_stop(self, *, algorithm, **kwargs):
        result = algorithm.latest_numbers
        if result:
            mean, faults = result["env_runners"]["episode_return_mean"], describe_faults(result) or "no faults"
            iteration = result["training_iteration"]
            self.send(
                f"The run in {algorithm.run_dir} ended after iteration {iteration}: mean return {mean:.1f}, {faults}."
            )


def main(url, num_iterations=5):
    config = PPOConfig().environment("CartPole-v1").callbacks(Notify(url))
    with config.build() as algo:
        algo.fit(stop={"training_iteration": num_iterations})


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("url", help="address of the webhook")
    main(parser.parse_args().url)
