"""RLlib's IMPALA on CartPole, asynchronous: two EnvRunners, and two aggregator actors that make the batches of one Learner.

    python examples/rllib_impala.py
    python examples/rllib_impala.py --fault step:lost

The fault is made at env 1 of EnvRunner 1, between the ledgers of the taps env and vector. An asynchronous learner may drop what is
old: the report counts how many of the sampled steps were learned from.
"""

import sys

from faults_rllib import options, train
from ray.rllib.algorithms.impala import IMPALAConfig

if __name__ == "__main__":
    found = options(__doc__, iterations=2)
    config = (
        IMPALAConfig()
        .environment("CartPole-v1")
        .env_runners(num_env_runners=2, num_envs_per_env_runner=2, rollout_fragment_length=25)
        .learners(num_learners=1, num_aggregator_actors_per_learner=2)
        .training(train_batch_size_per_learner=200)
        .reporting(min_time_s_per_iteration=1)
        .debugging(seed=0)
    )
    sys.exit(train(config, found))
