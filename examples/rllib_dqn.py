"""RLlib's DQN on CartPole with a prioritised replay buffer and 3-step returns, which are computed again to compare them.

    python examples/rllib_dqn.py
    python examples/rllib_dqn.py --fault reward:stale

The fault is made at env 1 of EnvRunner 1, between the ledgers of the taps env and vector.
"""

import sys

from faults_rllib import options, train
from ray.rllib.algorithms.dqn import DQNConfig

if __name__ == "__main__":
    found = options(__doc__, iterations=3)
    config = (
        DQNConfig()
        .environment("CartPole-v1")
        .env_runners(num_env_runners=1, num_envs_per_env_runner=2, rollout_fragment_length=20)
        .training(
            n_step=3,
            train_batch_size_per_learner=32,
            num_steps_sampled_before_learning_starts=100,
            replay_buffer_config={"type": "PrioritizedEpisodeReplayBuffer", "capacity": 10_000},
        )
        .reporting(min_sample_timesteps_per_iteration=200)
        .debugging(seed=0)
    )
    sys.exit(train(config, found))
