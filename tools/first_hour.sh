#!/usr/bin/env bash
# The first hour with Corral as a new user spends it, from a clone to a policy in use, with the seconds of each step:
#     tools/first_hour.sh [REPOSITORY] [FOLDER]
set -euo pipefail
repository=${1:-$(cd "$(dirname "$0")/.." && pwd)}
folder=${2:-$(mktemp -d)}
begin=$SECONDS

step() {
    local name=$1 start=$SECONDS
    shift
    printf '\n== %s\n' "$name"
    "$@"
    printf '   %s s, %s s in all\n' "$((SECONDS - start))" "$((SECONDS - begin))"
}

fails() { # a mistake that Corral must explain: the command fails, and its last line is shown
    if "$@" 2> mistake.txt; then
        echo "this should have failed: $*" >&2
        return 1
    fi
    tail -n 1 mistake.txt
}

mkdir -p "$folder" && cd "$folder"
step "clone" git clone --quiet "$repository" corral
step "make an environment" python3 -m venv venv
export PATH=$PWD/venv/bin:$PATH
step "install PyTorch for CPUs" pip install --quiet --requirement corral/requirements/torch.txt
step "install Corral" pip install --quiet './corral[report,play,onnx]'
step "ask for help" corral --help
step "see which settings there are" corral config PPO lr
step "mistype a setting" fails corral train --algo PPO --env CartPole-v1 --stop num_env_steps=1000 --set training.lrr=1
step "mistype an env" fails corral train --algo PPO --env CartPol-v1 --stop num_env_steps=1000
step "train with tuned settings" corral train --tuned CartPole-v1 --run-dir first
step "measure the policy" corral evaluate first --episodes 20
step "record it" env SDL_VIDEODRIVER=dummy corral play first --episodes 1 --record videos
step "continue the run" corral train --resume first --stop num_env_steps=120000 --quiet

cat > corridor.py << 'PYTHON'
"""An env of one's own: walk to the end of a corridor."""

import gymnasium as gym
import numpy as np


class Corridor(gym.Env):
    observation_space = gym.spaces.Box(0.0, 1.0, (1,), np.float32)
    action_space = gym.spaces.Discrete(2)

    def __init__(self, length=10):
        self.length = length

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.place = 0
        return self._observe(), {}

    def step(self, action):
        self.place = max(0, self.place + (1 if action else -1))
        return self._observe(), -0.1, self.place == self.length, False, {}

    def _observe(self):
        return np.array([self.place / self.length], np.float32)
PYTHON
step "train in an env of one's own, with three seeds" \
    corral train --algo PPO --env corridor:Corridor --stop num_env_steps=20000 --seeds 0-2 --run-dir corridor-runs --quiet
step "compare the runs on a page" corral report first corridor-runs -o report.html
step "draw the curves" corral plot corridor-runs -o curves.png

cat > use.py << 'PYTHON'
"""Uses a policy without its env and without the config."""

import corral

policy = corral.load_policy("corridor-runs/seed-0")
print("at the begin of the corridor:", policy([0.0]), " near its end:", policy([0.9]))
policy.export("policy.onnx")
PYTHON
step "use a policy in a program, and export it" python use.py
ls -l report.html curves.png policy.onnx videos
printf '\nAll in %s minutes and %s seconds, in %s\n' "$(((SECONDS - begin) / 60))" "$(((SECONDS - begin) % 60))" "$folder"
