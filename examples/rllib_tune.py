"""Tune: PPO on CartPole in three trials of different learning rates, two at a time, each with a run directory of its own.

    python examples/rllib_tune.py
    python examples/rllib_tune.py --fault obs:stale

The fault is made at env 1 of EnvRunner 1 of each trial, between the ledgers of the taps env and vector.
"""

import os
import sys
from pathlib import Path

import ray
from faults_rllib import options, with_fault
from ray import tune
from ray.rllib.algorithms.ppo import PPO, PPOConfig

from stepledger import compare
from stepledger_ray import TuneCallback, attach

if __name__ == "__main__":
    os.environ["RAY_AIR_NEW_OUTPUT"] = "0"
    found = options(__doc__, iterations=2)
    config = (
        PPOConfig()
        .environment("CartPole-v1")
        .env_runners(num_env_runners=1, num_envs_per_env_runner=2)
        .training(lr=tune.grid_search([1e-4, 3e-4, 1e-3]), train_batch_size_per_learner=400, minibatch_size=200, num_epochs=1)
    )
    attach(config, found.directory)
    tune.Tuner(
        PPO,
        param_space=with_fault(config, found),
        tune_config=tune.TuneConfig(max_concurrent_trials=2),
        run_config=tune.RunConfig(stop={"training_iteration": found.iterations}, callbacks=[TuneCallback(found.directory)], verbose=0),
    ).fit()
    ray.shutdown()
    sys.exit(max(compare(run.parent).exit_status for run in Path(found.directory).glob("*/run.json")))
