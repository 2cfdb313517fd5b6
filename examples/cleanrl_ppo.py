"""PPO in the style of CleanRL, on CartPole: Gymnasium's next-step autoreset, and what a loop must leave out because of it.

    python examples/cleanrl_ppo.py
    python examples/cleanrl_ppo.py --fault reset_row

In next-step mode the step after an episode's end is a reset: its action was ignored, its reward is 0, and its "transition" would join the
end of one episode to the beginning of the next. A loop written for Gymnasium before 1.0 stores it. With the fault this one does too.
"""

import argparse
import sys

import gymnasium as gym
import numpy as np
import torch
from gymnasium.vector import SyncVectorEnv
from torch import nn
from torch.distributions import Categorical

from stepledger import LearnerLedger, LedgerVectorEnv, compare

ENVS, HORIZON, EPOCHS, GAMMA, LAMBDA, CLIP = 4, 128, 4, 0.99, 0.95, 0.2


def train(envs: gym.vector.VectorEnv, ledger: LearnerLedger, updates: int, fault: str | None) -> None:
    torch.manual_seed(0)
    actor, critic = (nn.Sequential(nn.Linear(4, 64), nn.Tanh(), nn.Linear(64, out)) for out in (2, 1))
    optimizer = torch.optim.Adam([*actor.parameters(), *critic.parameters()], lr=2.5e-3)
    obs, _ = envs.reset(seed=0)
    done = np.zeros(ENVS, bool)  # of the step before: this step is then a reset
    for update in range(updates):
        store = {name: np.zeros((HORIZON, ENVS, *shape), np.float32) for name, shape in [("obs", (4,)), ("next", (4,))]}
        action, logprob, reward, terminated, truncated = (np.zeros((HORIZON, ENVS), np.float32) for _ in range(5))
        real = np.zeros((HORIZON, ENVS), bool)
        for t in range(HORIZON):
            with torch.no_grad():
                policy = Categorical(logits=actor(torch.as_tensor(obs)))
                chosen = policy.sample()
            store["obs"][t], action[t], logprob[t], real[t] = obs, chosen, policy.log_prob(chosen), ~done
            obs, reward[t], terminated[t], truncated[t], _ = envs.step(chosen.numpy())
            store["next"][t] = obs
            done = (terminated[t] + truncated[t]) > 0
        if fault == "reset_row":
            real[:] = True
        ledger.transitions(store["obs"][real], action[real], reward[real], store["next"][real], terminated[real], truncated[real])
        with torch.no_grad():
            value, following = (critic(torch.as_tensor(store[name])).squeeze(-1).numpy() for name in ("obs", "next"))
        delta = reward + GAMMA * following * (1 - terminated) - value
        ended = (terminated + truncated) > 0
        advantage, last = np.zeros((HORIZON, ENVS), np.float32), np.zeros(ENVS, np.float32)
        for t in reversed(range(HORIZON)):
            advantage[t] = last = real[t] * (delta[t] + GAMMA * LAMBDA * ~ended[t] * last)
        x, a, old, adv, target = (torch.as_tensor(part[real]) for part in (store["obs"], action, logprob, advantage, advantage + value))
        for _ in range(EPOCHS):
            for rows in torch.randperm(len(x)).split(128):
                policy = Categorical(logits=actor(x[rows]))
                ratio = (policy.log_prob(a[rows]) - old[rows]).exp()
                scaled = (adv[rows] - adv[rows].mean()) / (adv[rows].std() + 1e-8)
                loss = -torch.min(ratio * scaled, ratio.clamp(1 - CLIP, 1 + CLIP) * scaled).mean()
                loss = loss + 0.5 * (critic(x[rows]).squeeze(-1) - target[rows]).pow(2).mean() - 0.01 * policy.entropy().mean()
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
        print(f"update {update:2d}: steps per episode {real.sum() / max(1, ended.sum()):.1f}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--directory", default="ledger")
    parser.add_argument("--fault", choices=["reset_row"], metavar="NAME", help="reset_row: store the reset as a transition")
    parser.add_argument("--updates", type=int, default=10)
    options = parser.parse_args()

    torch.set_num_threads(1)  # threads slow a model of this size down
    envs = LedgerVectorEnv(SyncVectorEnv([lambda: gym.make("CartPole-v1")] * ENVS), f"{options.directory}/vector.npz")
    ledger = LearnerLedger(f"{options.directory}/learner.npz", each_step_once=True)
    train(envs, ledger, options.updates, options.fault)
    envs.close()
    ledger.close()

    comparison = compare(options.directory)
    print(comparison)
    sys.exit(comparison.exit_status)
