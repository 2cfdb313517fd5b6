"""DQN in the style of CleanRL, on CartPole: what is sampled from the replay buffer, compared with what the vector env gave.

    python examples/cleanrl_dqn.py
    python examples/cleanrl_dqn.py --fault reset_row

The fault is that of `cleanrl_ppo.py`: the reset step of next-step autoreset is put into the replay buffer as a transition.
"""

import argparse
import sys

import gymnasium as gym
import numpy as np
import torch
from gymnasium.vector import SyncVectorEnv
from torch import nn

from stepledger import LearnerLedger, LedgerVectorEnv, compare

ENVS, BATCH, GAMMA, START = 4, 64, 0.99, 100


class ReplayBuffer:
    """Single transitions, in a ring."""

    def __init__(self, size: int) -> None:
        self.rows = [
            np.zeros((size, *shape), dtype) for shape, dtype in [((4,), "f4"), ((), "i8"), ((), "f4"), ((4,), "f4"), ((), "?"), ((), "?")]
        ]
        self.added = 0

    def add(self, *transitions: np.ndarray) -> None:
        """Put a batch of transitions in."""
        size, n = len(self.rows[0]), len(transitions[0])
        at = (self.added + np.arange(n)) % size
        for column, values in zip(self.rows, transitions):
            column[at] = values
        self.added += n

    def sample(self, rng: np.random.Generator) -> list[np.ndarray]:
        """Draw a batch, with replacement."""
        at = rng.integers(0, min(self.added, len(self.rows[0])), BATCH)
        return [column[at] for column in self.rows]


def train(envs: gym.vector.VectorEnv, ledger: LearnerLedger, steps: int, fault: str | None) -> None:
    torch.manual_seed(0)
    rng = np.random.default_rng(0)
    q, target = (nn.Sequential(nn.Linear(4, 64), nn.ReLU(), nn.Linear(64, 2)) for _ in range(2))
    target.load_state_dict(q.state_dict())
    optimizer = torch.optim.Adam(q.parameters(), lr=1e-3)
    buffer = ReplayBuffer(10_000)
    obs, _ = envs.reset(seed=0)
    done = np.zeros(ENVS, bool)  # of the step before: this step is then a reset
    episodes = 0
    for step in range(steps):
        with torch.no_grad():
            greedy = q(torch.as_tensor(obs)).argmax(1).numpy()
        action = np.where(rng.random(ENVS) < max(0.05, 1 - step / 500), rng.integers(0, 2, ENVS), greedy)
        following, reward, terminated, truncated, _ = envs.step(action)
        real = np.ones(ENVS, bool) if fault == "reset_row" else ~done
        buffer.add(*(part[real] for part in (obs, action, reward, following, terminated, truncated)))
        obs, done = following, terminated | truncated
        episodes += int(done.sum())
        if step < START:
            continue
        batch = buffer.sample(rng)
        ledger.transitions(*batch)
        x, a, r, y, ended, _ = map(torch.as_tensor, batch)
        with torch.no_grad():
            wanted = r + GAMMA * target(y).max(1).values * ~ended
        loss = nn.functional.smooth_l1_loss(q(x).gather(1, a[:, None]).squeeze(1), wanted)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 100 == 0:
            target.load_state_dict(q.state_dict())
    print(f"{ENVS * steps:,} steps, {episodes:,} episodes")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--directory", default="ledger")
    parser.add_argument("--fault", choices=["reset_row"], metavar="NAME", help="reset_row: store the reset as a transition")
    parser.add_argument("--steps", type=int, default=1000)
    options = parser.parse_args()

    torch.set_num_threads(1)  # threads slow a model of this size down
    envs = LedgerVectorEnv(SyncVectorEnv([lambda: gym.make("CartPole-v1")] * ENVS), f"{options.directory}/vector.npz")
    ledger = LearnerLedger(f"{options.directory}/learner.npz")
    train(envs, ledger, options.steps, options.fault)
    envs.close()
    ledger.close()

    comparison = compare(options.directory)
    print(comparison)
    sys.exit(comparison.exit_status)
