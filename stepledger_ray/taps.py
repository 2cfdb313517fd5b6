"""The taps that a run puts into EnvRunners and Learners."""

from __future__ import annotations

import contextlib
import ctypes
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, cast

import gymnasium
import numpy as np
import numpy.typing as npt
import tree
import xxhash
from gymnasium.vector import AsyncVectorEnv, SyncVectorEnv, VectorWrapper
from ray.rllib.connectors.connector_v2 import ConnectorV2
from ray.rllib.connectors.module_to_env.normalize_and_clip_actions import NormalizeAndClipActions
from ray.rllib.env.single_agent_episode import SingleAgentEpisode
from ray.rllib.utils.spaces.space_utils import clip_action, get_base_struct_from_space, unsquash_action

from stepledger import LedgerEnv, LedgerVectorEnv
from stepledger.digest import SpaceDigest
from stepledger.errors import LedgerError
from stepledger.format import RESET, STEP, TRANSITION, Place, StreamKey
from stepledger.recorder import BatchRecorder, describe, reward_bits

from .run import Run, Settings

__all__ = ["RECORDERS", "LearnerTap", "RunnerTaps", "taps_of"]

#: RLlib's own pieces of an env-to-module pipeline, none of which changes an episode. Any other piece may write into it.
_READ_ONLY = {
    "AddIsFirstsToBatch",
    "AddObservationsFromEpisodesToBatch",
    "AddStatesFromEpisodesToBatch",
    "AddTimeDimToBatchAndZeroPad",
    "AgentToModuleMapping",
    "BatchIndividualItems",
    "NumpyToTensor",
}


#: Likewise of a module-to-env pipeline; what NormalizeAndClipActions does to actions is done again before they are compared.
_KNOWN_ACTION_PIECES = {
    "GetActions",
    "ListifyDataForVectorEnv",
    "ModuleToAgentUnmapping",
    "NormalizeAndClipActions",
    "RemoveSingleTsTimeRankFromBatch",
    "TensorToNumpy",
    "UnBatchToIndividualItems",
}

#: A method of the wrappers -> that of their recorders.
RECORDERS = {"write_journal": "write", "save_values": "save_values", "forget": "forget", "flush": "flush", "stop_recording": "close"}

#: How often an algorithm learns from each sampled step, where it promises something; asynchronous learners drop what is too old.
EACH_STEP = {"PPO": "once", "APPO": "at most once", "IMPALA": "at most once"}


class RunnerTaps:
    """The taps of one vector env of an EnvRunner: ``env``, ``vector`` and ``episode``.

    Args:
        env_runner: A `ray.rllib.env.single_agent_env_runner.SingleAgentEnvRunner` that has just made its vector env, which is taken
            apart and put together again with the taps in it.
        settings: How to record.

    Raises:
        LedgerError: A space can't be recorded, or the workers of the vector env let no ledger in; nothing was changed.
    """

    def __init__(self, env_runner: Any, settings: Settings) -> None:
        outer = env_runner.env
        self.observation_space: gymnasium.Space[Any] = outer.single_observation_space
        self.action_space: gymnasium.Space[Any] = outer.single_action_space
        self._actions = SpaceDigest(self.action_space, settings.digest)
        SpaceDigest(self.observation_space, settings.digest)
        self._settings = settings
        self._env_runner = env_runner
        self._env_side, self.vector = _install(outer, settings)
        self._has_env_side = self._env_side is not None or isinstance(self.vector.unwrapped, (SyncVectorEnv, AsyncVectorEnv))
        self.vector.taps = self
        self._stream_of: dict[str, int] = {}
        self._episodes: _EpisodeRecorder | None = None
        self._place: Place | None = None
        self.told: tuple[Run, int, int] | None = None

    def tell(self, run: Run, runner: int, incarnation: int) -> None:
        """Say whose taps these are and where they write."""
        self.told = (run, runner, incarnation)
        group = "evaluation" if self._env_runner.config.in_evaluation else ""
        taps = (*(["env"] if self._has_env_side else []), "vector", "episode", *(["learner"] if run.has_learner_tap and not group else []))
        place = Place(run.directory, StreamKey(runner=runner, incarnation=incarnation), run.id, group, self._settings.options(), taps)
        self._place = place
        self.vector.ledger_place = place
        if self._env_side is not None:
            self._env_side.ledger_place = place
        if self._episodes is not None:
            self._episodes.tell(place, run.notes)

    def created(self, episode: SingleAgentEpisode, env: int) -> None:
        """Remember in which environment an episode takes place: what leaves the sampler doesn't say."""
        self._stream_of[episode.id_] = env

    def sampled(self, episodes: Sequence[SingleAgentEpisode]) -> None:
        """Record what leaves the sampler and was sampled here: other taps were in their place before a sub-environment failed."""
        episodes = [episode for episode in episodes if episode.id_ in self._stream_of]
        if not episodes:
            return
        if self._episodes is None:
            # Now, and not at the taps' making, the connector pipelines are there.
            self._episodes = _EpisodeRecorder(self._env_runner, self.action_space, self._actions, self._settings, self.vector.num_envs)
            if self._place is not None and self.told is not None:
                self._episodes.tell(self._place, self.told[0].notes)
        self._episodes.record(episodes, self._stream_of)
        # Of each environment, only the episode that goes on is asked for again.
        self._stream_of = {id_: env for env, id_ in {env: id_ for id_, env in self._stream_of.items()}.items()}

    def saved(self) -> None:
        """A checkpoint was saved: remember where."""
        if self._episodes is not None:
            self._episodes.saved()

    def each(self, method: str, *args: Any) -> None:
        """Call a method of all ledgers of these taps, one of `RECORDERS`."""
        base = self.vector.unwrapped
        if self._env_side is not None:
            getattr(self._env_side, method)(*args)
        elif self._has_env_side and not base.closed:
            base.call(method, *args)
        getattr(self.vector, method)(*args)
        if self._episodes is not None:
            getattr(self._episodes.recorder, RECORDERS[method])(*args)


def taps_of(env_runner: Any) -> RunnerTaps | None:
    """The taps that were put into an EnvRunner; `None` where there are none (a local EnvRunner without environments)."""
    env = env_runner.env
    while env is not None:
        if isinstance(env, LedgerVectorEnv):
            return cast("RunnerTaps | None", getattr(env, "taps", None))
        env = getattr(env, "env", None)
    return None


def _install(outer: VectorWrapper, settings: Settings) -> tuple[LedgerVectorEnv | None, Any]:
    """Put the env side into the vector env inside RLlib's ``DictInfoToList``, which must stay outermost, and the vector side around it.

    A vector env that was made by a ``vector_entry_point`` steps its environments itself: it is the env side as a whole, where something
    stands between it and the vector side, with which it would be compared for nothing otherwise.

    Returns:
        The env side where it is around the whole vector env; the vector side.
    """
    parent = outer
    while isinstance(parent.env, VectorWrapper):
        parent = parent.env
    base, env_side = parent.env, None
    if isinstance(base, SyncVectorEnv):
        base.envs = [_with_ledger(env, settings) for env in base.envs]
    elif isinstance(base, AsyncVectorEnv):
        if not all(base.call("has_wrapper_attr", _LedgerInWorker(settings))):
            raise LedgerError(
                "the workers of this AsyncVectorEnv are not Gymnasium's own, and let no ledger in: return "
                "stepledger.LedgerEnv(env, None) from the environment's creator."
            )
    elif parent is not outer:  # RLlib relies on next-step autoreset
        parent.env = env_side = LedgerVectorEnv(base, None, tap="env", autoreset_mode="NextStep", **settings.options())
    outer.env = LedgerVectorEnv(outer.env, None, autoreset_mode="NextStep", **settings.options())
    return env_side, outer.env


def _with_ledger(env: gymnasium.Env[Any, Any], settings: Settings) -> gymnasium.Env[Any, Any]:
    """The environment with a ledger: its own, if its creator gave it one, which is told where and how to record."""
    return env if _has_ledger(env) else LedgerEnv(env, None, **settings.options())


def _has_ledger(env: gymnasium.Env[Any, Any]) -> bool:
    """Whether there is a `LedgerEnv` among the wrappers of an environment."""
    return isinstance(env, gymnasium.Wrapper) and env.has_wrapper_attr("ledger_place")


class _LedgerInWorker:
    """Puts a ledger around the environment in a worker of an `AsyncVectorEnv`, by being unpickled there.

    A worker takes no wrapper once it runs. To make the vector env again with other makers would lose what callbacks have set in its
    environments, and leave those that come after with a closed one: RLlib hands the same object to all of them (ray 2.60).
    """

    def __init__(self, settings: Settings) -> None:
        self._settings = settings

    def __reduce__(self) -> tuple[Callable[[Settings], str], tuple[Settings]]:
        return _enter, (self._settings,)


def _enter(settings: Settings) -> str:
    """In a worker, called from within its loop: from now on, what the loop calls ``env`` is the environment with a ledger.

    Returns:
        The name of an attribute that the environment has if that went well.
    """
    with contextlib.suppress(Exception):  # it would end the worker
        frame: Any = sys._getframe()
        while not isinstance(frame.f_locals.get("env"), gymnasium.Env):
            frame = frame.f_back
        frame.f_locals["env"] = _with_ledger(frame.f_locals["env"], settings)
        if sys.version_info < (3, 13):  # where f_locals is a copy still (PEP 667)
            ctypes.pythonapi.PyFrame_LocalsToFast(ctypes.py_object(frame), ctypes.c_int(0))
    return "ledger_place"


class _EpisodeRecorder:
    """The ``episode`` tap."""

    def __init__(self, env_runner: Any, action_space: gymnasium.Space[Any], actions: SpaceDigest, settings: Settings, n: int) -> None:
        space, rewritten_by = episode_space(env_runner)
        self._observations = SpaceDigest(space, settings.digest)
        self._actions = actions
        self._sent, action = _as_sent(env_runner, action_space)
        fields = {"action": action}
        if rewritten_by:
            fields["obs"] = {"skip": f"rewritten by {', '.join(rewritten_by)}"}
        meta = describe(
            "episode",
            self._observations,
            self._actions,
            [StreamKey(env=env) for env in range(n)],
            reward_dtype=settings.reward_dtype,
            digest=settings.digest,
            columns={"h_sent": "<u8", "h_id": "<u8", "t": "<i8"},
            fields=fields,
            whole_episodes=bool(env_runner._needs_initial_reset),  # set by a sample() of so many episodes, which has just ended
        )
        self._n = n
        self._counts = [0] * n
        self._reward_dtype: str = meta["reward_dtype"]
        self.recorder = BatchRecorder(None, meta, on_error=settings.on_error, flush=settings.flush)

    def tell(self, place: Place, notes: Sequence[str]) -> None:
        self.recorder.place(place.path("episode"), **place.meta(self._n), notes=list(notes))

    def record(self, episodes: Sequence[SingleAgentEpisode], stream_of: dict[str, int]) -> None:
        if not self.recorder.recording:
            return
        try:
            for episode in episodes:
                if len(episode):
                    events = self._events(episode, stream := stream_of[episode.id_])
                    self.recorder.append(events)
                    self._counts[stream] += len(events)
        except BaseException as error:
            self.recorder.fail(error)

    def saved(self) -> None:
        self.recorder.final.setdefault("checkpoints", []).append(list(self._counts))

    def _events(self, episode: SingleAgentEpisode, stream: int) -> npt.NDArray[Any]:
        """The chunk as events: a reset if the episode begins with it, then its steps."""
        begins = episode.t_started == 0
        obs = digests(self._observations, episode.get_observations())
        actions = episode.get_actions()
        events = np.zeros(len(episode) + begins, self.recorder.dtype)
        events["stream"] = stream
        events["kind"] = STEP
        events["kind"][:begins] = RESET
        events["h_obs"] = obs[not begins :]
        events["h_id"] = identity(episode)
        events["t"] = np.arange(len(events)) + (episode.t_started + (not begins))
        steps = events[int(begins) :]
        steps["h_act"] = digests(self._actions, actions)
        steps["h_sent"] = digests(self._actions, self._sent(actions))
        _outcomes(steps, episode, self._reward_dtype)
        return events


def episode_space(env_runner: Any) -> tuple[gymnasium.Space[Any], list[str]]:
    """The space of the observations in an EnvRunner's episodes, and the names of the connector pieces that may have rewritten them."""
    pipeline = env_runner._env_to_module
    names = [] if pipeline is None else [type(piece).__name__ for piece in pipeline.connectors]
    rewritten_by = [name for name in names if name not in _READ_ONLY]
    return (pipeline.observation_space if rewritten_by else env_runner.env.single_observation_space), rewritten_by


def _as_sent(env_runner: Any, space: gymnasium.Space[Any]) -> tuple[Callable[[Any], Any], dict[str, str]]:
    """The function that RLlib takes an episode's actions through before it sends them, and what the ledger says about it."""
    pieces = [] if env_runner._module_to_env is None else env_runner._module_to_env.connectors
    foreign = [name for piece in pieces if (name := type(piece).__name__) not in _KNOWN_ACTION_PIECES]
    if foreign:
        return lambda actions: actions, {"skip": f"changed by {', '.join(foreign)}"}
    piece = next((piece for piece in pieces if isinstance(piece, NormalizeAndClipActions)), None)
    struct = get_base_struct_from_space(space)
    boxes = any(isinstance(part, gymnasium.spaces.Box) for part in tree.flatten(struct))
    if piece is None or not boxes or not (piece.normalize_actions or piece.clip_actions):
        return lambda actions: actions, {"column": "h_sent"}
    apply = unsquash_action if piece.normalize_actions else clip_action

    def sent(actions: Any) -> Any:
        if isinstance(actions, list):  # of an episode that was not made into arrays
            return [apply(action, struct) for action in actions]
        return apply(actions, struct)

    return sent, {"column": "h_sent", "note": f"after RLlib's own {'unsquashing' if piece.normalize_actions else 'clipping'}"}


def digests(space: SpaceDigest, batch: Any) -> npt.NDArray[np.uint64]:
    """The digests of an episode's values as integers: a list of them where it was not made into arrays."""
    return np.frombuffer(b"".join(space.each(batch) if isinstance(batch, list) else space.rows(batch)), ">u8").astype(np.uint64)


def identity(episode: SingleAgentEpisode) -> int:
    """The episode's id in 64 bits."""
    return xxhash.xxh3_64_intdigest(str(episode.id_).encode())


def _outcomes(steps: npt.NDArray[Any], episode: SingleAgentEpisode, reward_dtype: str) -> None:
    """Fill in rewards and flags of all steps of an episode chunk."""
    steps["h_rew"] = reward_bits(np.asarray(episode.get_rewards(), np.float64), reward_dtype)
    steps["terminated"][-1:] = episode.is_terminated
    steps["truncated"][-1:] = episode.is_truncated


class LearnerTap(ConnectorV2):
    """The ``learner`` tap: the first piece of a Learner's connector pipeline, where the sampled episodes arrive untouched.

    Args:
        run: The run it belongs to.
        index: Of the Learner, or of the aggregator that makes its batches.
        observation_space: Of the observations in the episodes.
        action_space: Of the actions in the episodes.
        incarnation: Counts the Learners that had this index.
        runners: Indices of the EnvRunners that sample for it.
        changed_by: The names of the pieces behind it that are not RLlib's: the report says that what they do is not compared.
    """

    def __init__(
        self,
        run: Run,
        index: int,
        observation_space: gymnasium.Space[Any],
        action_space: gymnasium.Space[Any],
        incarnation: int,
        runners: Sequence[int],
        changed_by: Sequence[str],
    ) -> None:
        super().__init__()
        settings = run.settings
        self._observations = SpaceDigest(observation_space, settings.digest)
        self._actions = SpaceDigest(action_space, settings.digest)
        meta = describe(
            "learner",
            self._observations,
            self._actions,
            [StreamKey(env=index, incarnation=incarnation)],
            reward_dtype=settings.reward_dtype,
            digest=settings.digest,
            columns={"h_next": "<u8", "h_id": "<u8", "t": "<i8", "n": "<i8"},
            gamma=run.gamma,
            each_step=EACH_STEP.get(run.algorithm, ""),
            # A replay buffer joins an episode's chunks by SingleAgentEpisode.concat_episode(), which keeps one end flag (ray 2.60).
            flags="exclusive" if run.replays else "both",
            replays=run.replays,
            capacity=run.capacity,
            horizon=run.horizon,
            run=run.id,
            taps=["learner"],
            runners=list(runners),
            notes=[f"what the learner connector {name} makes of the episodes is not compared" for name in changed_by],
        )
        self._reward_dtype: str = meta["reward_dtype"]
        path = Path(run.directory) / f"learner-{index}.{incarnation}.npz"
        self.recorder = BatchRecorder(path, meta, on_error=settings.on_error, flush=settings.flush)
        self.recorder.begin()

    def __call__(self, *, rl_module: Any, batch: Any, episodes: Sequence[Any], **kwargs: Any) -> Any:
        """Record the transitions of the episodes; the batch goes on as it came."""
        if self.recorder.recording:
            try:
                for episode in episodes:
                    if len(episode):
                        self.recorder.append(self._transitions(episode))
            except BaseException as error:
                self.recorder.fail(error)
        return batch

    def _transitions(self, episode: SingleAgentEpisode) -> npt.NDArray[Any]:
        obs = digests(self._observations, episode.get_observations())
        steps = np.zeros(len(episode), self.recorder.dtype)
        steps["kind"] = TRANSITION
        steps["h_obs"], steps["h_next"] = obs[:-1], obs[1:]
        steps["h_act"] = digests(self._actions, episode.get_actions())
        steps["h_id"] = identity(episode)
        steps["t"] = np.arange(len(episode)) + (episode.t_started + 1)
        steps["n"] = episode.get_extra_model_outputs("n_step") if "n_step" in episode.extra_model_outputs else 1
        _outcomes(steps, episode, self._reward_dtype)
        return steps
