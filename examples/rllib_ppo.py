"""RLlib's PPO on CartPole: two remote EnvRunners with two environments each.

    python examples/rllib_ppo.py
    python examples/rllib_ppo.py --fault obs:f16

The fault is made at env 1 of EnvRunner 1, between the ledgers of the taps env and vector. `faults.py` names all faults.
"""

import sys

from faults_rllib import options, train
from ray.rllib.algorithms.ppo import PPOConfig

if __name__ == "__main__":
    found = options(__doc__, iterations=3)
    config = (
        PPOConfig()
        .environment("CartPole-v1")
        .env_runners(num_env_runners=2, num_envs_per_env_runner=2)
        .training(train_batch_size_per_learner=512, minibatch_size=128, num_epochs=2)
        .debugging(seed=0)
    )
    sys.exit(train(config, found))
