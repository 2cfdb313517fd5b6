"""RLlib's PPO on CartPole: two remote EnvRunners with two environments each.

    python examples/rllib_ppo.py
    python examples/rllib_ppo.py --fault obs:f16

The fault is made at env 1 of EnvRunner 1, between the ledgers of the taps env and vector. `faults.py` names all faults.
"""

import sys

import ray
from faults_rllib import options, with_fault
from ray.rllib.algorithms.ppo import PPOConfig

from stepledger_ray import attach, finish

if __name__ == "__main__":
    found = options(__doc__, iterations=3)
    config = (
        PPOConfig()
        .environment("CartPole-v1")
        .env_runners(num_env_runners=2, num_envs_per_env_runner=2)
        .training(train_batch_size_per_learner=512, minibatch_size=128, num_epochs=2)
        .debugging(seed=0)
    )
    attach(config, found.directory, keep_values=True)
    algorithm = with_fault(config, found).build_algo()
    for _ in range(found.iterations):
        algorithm.train()
    comparison = finish(algorithm)
    algorithm.stop()  # gathers the ledgers once more, and prints the report
    ray.shutdown()
    sys.exit(comparison.exit_status)
