"""The one thing a person adds to an algorithm config."""

from __future__ import annotations

import functools
import logging
import os
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from ray.rllib.algorithms.algorithm_config import AlgorithmConfig
from ray.rllib.callbacks.callbacks import RLlibCallback
from ray.rllib.utils import force_list

from stepledger.errors import LedgerError
from stepledger.recording import OnError

from .gather import Job, check_config
from .live import OnDifference, Retain, Watch
from .run import Settings, place_of
from .taps import RunnerTaps, taps_of

__all__ = ["LedgerCallback", "attach"]

logger = logging.getLogger(__name__)


class LedgerCallback(RLlibCallback):
    """Records every tap of a training job, and compares them when it ends.

    RLlib makes one of these in the driver and one in each EnvRunner. There it puts a `stepledger.LedgerEnv` around each environment and
    a `stepledger.LedgerVectorEnv` around the vector env, and records the episodes that leave the sampler; in the driver it puts a tap
    into each Learner, and at ``algorithm.stop()`` gathers all ledgers, compares them, prints the report and writes ``report.json``.

        config.callbacks(functools.partial(LedgerCallback, "ledger"))

    replaces the callbacks that the config has; `attach` adds to them.

    Args:
        directory: The run directory; a relative one is one of the driver's. Or a URI that pyarrow knows, such as ``s3://bucket/run``: then
            ledgers are recorded below the temporary directory of each node, and stored there by `finish` and at the end.
        resume: Go on with the run that the directory holds, if it holds one, as a new incarnation; otherwise such a directory is refused.
        compare_every: After every so many iterations compare what has been recorded since, and put the numbers into the result dict:
            ``result["stepledger"]["events_compared"]``, ``["differences"]``, and both for each hop. `None`: only at the end.
        on_difference: ``"log"`` prints the first difference when it is found, ``"warn"`` warns of it, ``"stop"`` also sets
            ``result["done"]``, so that Tune stops the trial.
        retain: ``"all"`` keeps the ledgers. ``"differences"`` drops, while it trains, what was compared and is equal, up to a stream's
            first difference, so that a run of any length without one takes bounded space.
        reward_dtype: As in `stepledger.LedgerEnv`; likewise the others.
        keep_values: As there. With a number and ``compare_every``, the values around the differences are stored when those are found, where
            they are among the last ones still: it must be at least the events that an environment has between two comparisons, and 64, and
            as many as are to be seen before a difference.

    Raises:
        LedgerError: An option is unknown. When the algorithm is built, if it can't be recorded: it is on the old API stack, has several
            agents, a space that is not one of Gymnasium's, or another `LedgerCallback`; or the directory can't be written on a node, or
            holds a run.
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        *,
        resume: bool = False,
        compare_every: int | None = None,
        on_difference: OnDifference = "log",
        retain: Retain = "all",
        reward_dtype: npt.DTypeLike = np.float64,
        keep_values: bool | int = False,
        digest: str = "xxh3_64",
        on_error: OnError = "warn",
        flush_every: int | None = None,
        flush_seconds: float | None = None,
    ) -> None:
        super().__init__()
        self._watch = Watch(compare_every, on_difference, retain)
        self._directory = os.fspath(place_of(directory))
        self._resume = resume
        self._settings = Settings(reward_dtype, keep_values, digest, on_error, flush_every, flush_seconds)
        self._taps: list[RunnerTaps] = []
        self._job: Job | None = None

    def on_environment_created(self, *, env_runner: Any, **kwargs: Any) -> None:
        """Put the taps in; raising here would only have the EnvRunner restarted without end, so that errors wait for `Job`."""
        if taps_of(env_runner) is not None:  # those of another LedgerCallback: `Job` refuses that
            return
        try:
            taps = RunnerTaps(env_runner, self._settings)
        except Exception as error:
            env_runner.env.ledger_error = str(error) if isinstance(error, LedgerError) else f"the taps can't be put in: {error!r}."
            return
        if self._taps and self._taps[-1].told is not None:  # a sub-environment has failed, and the vector env was made again
            run, runner, incarnation = self._taps[-1].told
            taps.tell(run, runner, incarnation + 1)
        self._taps.append(taps)

    def on_episode_created(self, *, episode: Any, env_index: int, **kwargs: Any) -> None:
        """Remember where the episode takes place."""
        if self._taps:
            self._taps[-1].created(episode, env_index)

    def on_sample_end(self, *, samples: Sequence[Any], **kwargs: Any) -> None:
        """Record what leaves the sampler."""
        for taps in self._taps:
            try:
                taps.sampled(samples)
            except Exception as error:  # never the run's
                logger.warning("stepledger: what an EnvRunner sampled could not be recorded: %r", error)
        for taps in self._taps[:-1]:  # of a vector env that is not there any more
            taps.each("stop_recording")
        del self._taps[:-1]

    def on_algorithm_init(self, *, algorithm: Any, **kwargs: Any) -> None:
        """Begin the run: its directory, its identity, the taps in the Learners."""
        callbacks = force_list(algorithm.callbacks)
        if sum(isinstance(one, LedgerCallback) for one in callbacks) > 1:
            raise LedgerError("this config has two LedgerCallbacks: leave one of them out.")
        self._job = Job(algorithm, self._directory, self._settings, self._watch, resume=self._resume)

    def on_train_result(self, *, algorithm: Any, result: dict[str, Any], **kwargs: Any) -> None:
        """See to what has changed in the last iteration, and compare what it has brought."""
        if self._job is not None:
            self._job.trained(result)

    def on_env_runners_recreated(
        self, *, env_runner_group: Any, env_runner_indices: Sequence[int], is_evaluation: bool, **kwargs: Any
    ) -> None:
        """Tell restarted EnvRunners what the first ones were told."""
        if self._job is not None:
            self._job.recreated(env_runner_group, env_runner_indices, is_evaluation)

    @property
    def job(self) -> Job | None:
        """In the driver, the job that is recorded."""
        return self._job


def attach(
    config: AlgorithmConfig,
    directory: str | os.PathLike[str],
    *,
    resume: bool = False,
    compare_every: int | None = None,
    on_difference: OnDifference = "log",
    retain: Retain = "all",
    reward_dtype: npt.DTypeLike = np.float64,
    keep_values: bool | int = False,
    digest: str = "xxh3_64",
    on_error: OnError = "warn",
    flush_every: int | None = None,
    flush_seconds: float | None = None,
) -> AlgorithmConfig:
    """Add a `LedgerCallback` to the callbacks that a config has.

    Args:
        config: Any algorithm's config on the new API stack.
        directory: The run directory; a relative one is resolved now. Or a URI, as in `LedgerCallback`.
        resume: As in `LedgerCallback`.
        compare_every: Likewise.
        on_difference: Likewise.
        retain: Likewise.
        reward_dtype: Likewise.
        keep_values: Likewise.
        digest: Likewise.
        on_error: Likewise.
        flush_every: Likewise.
        flush_seconds: Likewise.

    Returns:
        The config.

    Raises:
        LedgerError: The config is on the old API stack, has several agents, has a `LedgerCallback` already, or is an algorithm that is
            already built; or an option is unknown.
    """
    if not isinstance(config, AlgorithmConfig) or config._is_frozen:
        what = "one that was built already" if isinstance(config, AlgorithmConfig) else f"a {type(config).__name__}"
        raise LedgerError(f"attach() takes an algorithm's config, and not {what}: call it before config.build_algo().")
    check_config(config)
    present = [one for one in force_list(config.callbacks_class) if one is not RLlibCallback]
    if any(_makes_ledgers(one) for one in present):
        raise LedgerError("this config has a LedgerCallback already: leave one of them out.")
    place = place_of(directory)
    callback = functools.partial(
        LedgerCallback,
        place if isinstance(place, str) else os.path.abspath(place),
        resume=resume,
        compare_every=compare_every,
        on_difference=on_difference,
        retain=retain,
        reward_dtype=reward_dtype,
        keep_values=keep_values,
        digest=digest,
        on_error=on_error,
        flush_every=flush_every,
        flush_seconds=flush_seconds,
    )
    callback()  # it says what is wrong with the options
    return config.callbacks([*present, callback])


def _makes_ledgers(callback: Any) -> bool:
    made = callback.func if isinstance(callback, functools.partial) else callback
    return isinstance(made, type) and issubclass(made, LedgerCallback)
