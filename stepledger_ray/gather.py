"""From taps in many processes to one comparison in the driver."""

from __future__ import annotations

import atexit
import contextlib
import functools
import logging
import weakref
from collections.abc import Iterable, Sequence, Set
from pathlib import Path
from typing import Any, NamedTuple

import gymnasium
import ray

from stepledger import Comparison
from stepledger.compare import checked
from stepledger.errors import LedgerError
from stepledger.format import window_of
from stepledger.progress import progress_bar

from .live import Live, Watch, metrics
from .nodes import claim, collect, discard
from .processes import Deadline, ask, learners, name_of, remote_runners, runners, tell
from .run import REMAKES, Run, Settings
from .storage import store, write_report
from .taps import RECORDERS, LearnerTap, episode_space, taps_of
from .tasks import compare_run, with_unknown

__all__ = ["Job", "finish"]

logger = logging.getLogger(__name__)


class Answer(NamedTuple):
    """What a process says when it is told whose taps it has.

    Attributes:
        who: The process.
        node: Its node's id; empty where it records nothing.
        error: Why it can't be recorded.
        spaces: The observation and action space of its episodes.
    """

    who: str
    node: str = ""
    error: str = ""
    spaces: tuple[gymnasium.Space[Any], gymnasium.Space[Any]] | None = None


class Job:
    """The recording of one algorithm, on the driver.

    Args:
        algorithm: The algorithm, just built.
        directory: As given to `LedgerCallback`.
        settings: How the taps record.
        watch: When it is compared while it trains.
        resume: As given to `LedgerCallback`.

    Raises:
        LedgerError: This algorithm can't be recorded.
    """

    def __init__(self, algorithm: Any, directory: str, settings: Settings, watch: Watch, *, resume: bool = False) -> None:
        check_config(algorithm.config)
        self._algorithm = weakref.proxy(algorithm)
        self._watch = watch
        self._incarnations: dict[tuple[bool, int], int] = {}
        self._asked: list[Any] = []
        self._ended = False
        self._nodes: dict[str, set[str]] = {}
        self._untold: dict[str, Any] = {}
        self._lost: tuple[str, ...] = ()
        self.run = Run.begin(directory, algorithm, settings, resume=resume)
        try:
            self._put_taps()
            self.run.publish()
        except BaseException:
            self.run.withdraw()  # else the corrected build would be refused, since its directory holds a run
            raise
        self._live = None if watch.compare_every is None else Live(self.run, watch)
        self._hook(algorithm)
        taps = "env, vector, episode and learner" if self.run.has_learner_tap else "env, vector and episode"
        taps += " of the evaluation" if self.run.offline else ""
        stored = f", to be stored at {self.run.uri}" if self.run.uri else ""
        print(f"stepledger: recording the taps {taps} into {self.run.directory}{stored}", flush=True)

    def _put_taps(self) -> None:
        """Tell the taps in the EnvRunners whose they are, and put those of the Learners in."""
        spaces = self._tell_runners(runners(self._algorithm))
        if spaces is None:
            if self._untold:
                raise LedgerError(f"{', '.join(self._untold)} gave no answer in time: see why, and build again.")
            raise LedgerError(
                "no EnvRunner of this algorithm has an environment, so that there is nothing to record: "
                + ("give it an evaluation (config.evaluation(...))." if self.run.offline else "give it one (config.environment(...)).")
            )
        self._learner_options: dict[str, Any] = {
            "run": self.run,
            "observation_space": spaces[0],
            "action_space": spaces[1],
            "runners": list(range(1, self._algorithm.config.num_env_runners + 1)) or [0],
        }
        if self.run.has_learner_tap:
            self._put_learner_taps()

    def _tell_runners(self, found: dict[str, Any]) -> tuple[gymnasium.Space[Any], gymnasium.Space[Any]] | None:
        """Tell EnvRunners whose taps they have; the spaces of their episodes, or `None` if none of them has an environment."""
        tell = functools.partial(_tell, run=self.run, incarnations=dict(self._incarnations))
        answers, late = ask({name: (one, tell) for name, one in found.items()}, Deadline())
        self._untold = {name: reference for name, reference in self._untold.items() if name not in answers} | late
        if late:
            logger.warning("stepledger: %s gave no answer in time, and will not be recorded until there is one.", ", ".join(late))
        self._heard(answers.values())
        return next((answers[name].spaces for name in found if name in answers and answers[name].spaces is not None), None)

    def _hear_late(self) -> None:
        """Hear those that gave no answer when they were told where to record, and have one now."""
        for name, reference in list(self._untold.items()):
            if ray.wait([reference], timeout=0)[0]:
                del self._untold[name]
                try:
                    self._heard([ray.get(reference)])
                except (ray.exceptions.RayError, LedgerError) as error:
                    self._lost += (f"what {name} sampled ({str(error).partition(chr(10))[0]})",)

    def _heard(self, answers: Iterable[Answer]) -> None:
        """Remember where processes record, and raise what they can't do."""
        for answer in answers:
            if answer.error:
                raise LedgerError(answer.error)
            if answer.node:
                self._nodes.setdefault(answer.node, set()).add(answer.who)

    def _put_learner_taps(self) -> None:
        """Put taps into the pipelines that make train batches: those of the aggregators where there are any, else the Learners' own."""
        calls = {}
        for index, (name, one) in enumerate(learners(self._algorithm).items()):
            options = {**self._learner_options, "index": index, "incarnation": self.run.incarnation}
            calls[name] = one, functools.partial(_put_learner_tap, **options)
        answers, _ = ask(calls, Deadline())
        for name in calls.keys() - answers.keys():
            raise LedgerError(f"{name} gave no answer in time, so that its tap is missing: see why, and build again.")
        self._heard(answers.values())

    def trained(self, result: dict[str, Any]) -> None:
        """After each training iteration: see to restarted aggregators, and compare what is due."""
        self._ask_aggregators()
        every = self._watch.compare_every
        if self._live is None or every is None or self._algorithm.iteration % every:
            return
        try:
            self._everywhere("write_journal")
            comparison, drop = self._live.compare(self._nodes)
            result["stepledger"] = metrics(comparison)
            if self._live.tell(comparison):
                result["done"] = True
            if window_of({"keep_values": self.run.settings.keep_values}) and (differing := self._live.differing()):
                self._everywhere("save_values", differing)
            if drop:
                self._everywhere("forget", drop)
        except Exception as error:  # whatever is wrong with the cluster: the run goes on
            self._lose_live(error)

    def _lose_live(self, error: Exception) -> None:
        """Compare at the end only."""
        logger.warning("stepledger: comparing while it trains has ended, the ledgers are compared at the end: %s", error)
        self._end_live()
        if self._watch.retain == "differences":
            self._lost = ("what was compared and dropped while it trained, since the process that compared it has failed",)

    def _end_live(self) -> None:
        if self._live is not None and ray.is_initialized():
            self._live.close()
        self._live = None

    def _ask_aggregators(self) -> None:
        """An aggregator that was restarted has no tap. Asks without waiting, and hears the next time."""
        manager = getattr(self._algorithm, "_aggregator_actor_manager", None)
        if manager is None:
            return
        heard, self._asked = ray.wait(self._asked, num_returns=len(self._asked), timeout=0) if self._asked else ([], [])
        for reference in heard:
            try:
                self._heard([ray.get(reference)])
            except (ray.exceptions.RayError, LedgerError) as error:
                logger.debug("stepledger: an aggregator gave no answer, and is asked again: %s", error)
        if not self._asked:
            incarnation = self.run.incarnation + self._algorithm.iteration + 1
            for index, actor in manager.actors().items():
                options = {**self._learner_options, "index": index, "incarnation": incarnation}
                self._asked.append(actor.apply.remote(functools.partial(_put_learner_tap, **options)))

    def _hook(self, algorithm: Any) -> None:
        """Compare when the algorithm stops, before its EnvRunners and Learners are gone, and have the taps remember where it was saved.

        RLlib has callbacks for neither (ray 2.60).
        """
        job, cleanup = self, algorithm.cleanup

        def compare_and_clean_up() -> None:
            for name, ours in (("cleanup", compare_and_clean_up), ("save_to_path", save_and_remember)):
                if vars(algorithm).get(name) is ours:  # and not somebody else's, put on top since
                    delattr(algorithm, name)  # the class's own again
            try:
                job.end()
            finally:
                cleanup()

        algorithm.cleanup = compare_and_clean_up
        save = algorithm.save_to_path

        @functools.wraps(save)
        def save_and_remember(*args: Any, **kwargs: Any) -> Any:
            path = save(*args, **kwargs)
            with contextlib.suppress(Exception):  # for a mark in a report, the run is not to fail
                tell(runners(algorithm).values(), _remember_checkpoint)
            return path

        algorithm.save_to_path = save_and_remember
        # A script may end without algorithm.stop(). Ray's own exit handler was registered before this one, so it runs after it.
        atexit.register(_end_at_exit, weakref.ref(self))

    def recreated(self, group: Any, indices: Sequence[int], is_evaluation: bool) -> None:
        """Tell restarted EnvRunners whose taps they have."""
        for index in indices:
            key = (is_evaluation, index)
            self._incarnations[key] = self._incarnations.get(key, 0) + REMAKES
        try:
            self._tell_runners(remote_runners(group, is_evaluation, indices))
        except Exception as error:
            logger.warning("stepledger: restarted EnvRunners %s are not recorded: %s", list(indices), error)

    def _everywhere(self, method: str, *args: Any) -> Set[str]:
        """Call a method of all ledgers; the names of the processes that gave no answer."""
        self._hear_late()
        at_learner, at_runner = (functools.partial(at, method=method, args=args) for at in (_at_learner, _at_runner))
        calls = {name: (one, at_learner) for name, one in learners(self._algorithm).items()}
        return ask(calls | {name: (one, at_runner) for name, one in runners(self._algorithm).items()}, Deadline())[1].keys()

    def compare(self, stop: bool = False) -> Comparison:
        """Have all ledgers written, and compare them.

        Args:
            stop: Recording ends.

        Raises:
            LedgerError: They can't be compared.
        """
        problems: dict[str, str] = {}
        late: Set[str] = set()
        if not self._ended and ray.is_initialized():  # not where a script has called ray.shutdown() first
            late = self._everywhere("stop_recording" if stop else "flush")
            with progress_bar("gathering") as progress:
                problems = collect(self.run, self._nodes, progress)
        comparison = self._compared(stop)
        if stop and self.run.uri and ray.is_initialized():
            discard(self.run, self._nodes.keys() - problems.keys())
        missing = [f"what {name} sampled, which never answered when it was told where to record" for name in self._untold]
        missing += [f"what {name} recorded last, which gave no answer in time" for name in sorted(late - self._untold.keys())]
        return with_unknown(comparison, [*missing, *problems.values(), *self._lost])

    def _compared(self, stop: bool) -> Comparison:
        """The comparison of all that was recorded: from the ledgers, or as it was found on the way where they hold only a part."""
        if self._watch.retain == "differences" and self._live is not None and not self._ended:
            try:
                return checked(self._live.compare(self._nodes, end=stop)[0])
            except Exception as error:
                self._lose_live(error)
        with progress_bar("comparing") as progress:
            return compare_run(self.run.held, progress)

    def end(self) -> None:
        """Compare for the last time, print the report and write ``report.json``; never raises."""
        if self._ended:
            return
        compared = False
        try:
            comparison = self.compare(stop=True)
            print(comparison, flush=True)
            compared = True
            write_report(self.run, comparison)
        except LedgerError as error:
            sampled = any(Path(self.run.directory).rglob("runner-*"))
            print(f"stepledger: {error if sampled else 'nothing was sampled, so that there is nothing to compare.'}", flush=True)
        except Exception as error:  # whatever is wrong with the cluster: the algorithm must be able to stop
            what = "report.json could not be written to" if compared else "the ledgers could not be gathered into"
            logger.warning("stepledger: %s %s: %r", what, self.run.directory, error)
        finally:
            self._ended = True
            self._end_live()
        place = store(self.run, last=True)
        if compared:
            print(f"stepledger: compare again with: stepledger compare {place}", flush=True)


def check_config(config: Any) -> None:
    """Refuse a config whose algorithm can't be recorded.

    Raises:
        LedgerError: It is on the old API stack, or has several agents.
    """
    if not (config.enable_env_runner_and_connector_v2 and config.enable_rl_module_and_learner):
        raise LedgerError(
            "stepledger_ray records RLlib's new API stack only: remove config.api_stack(...) from the script, or record with "
            "stepledger.LedgerEnv and stepledger.LedgerVectorEnv there."
        )
    if config.is_multi_agent:
        raise LedgerError("stepledger_ray records one agent per environment so far: use it with a single-agent config.")


def _end_at_exit(reference: weakref.ref[Job]) -> None:
    job = reference()
    if job is not None:
        with contextlib.suppress(ReferenceError):  # the algorithm is gone
            job.end()


def finish(algorithm: Any) -> Comparison:
    """Gather all ledgers of a running algorithm and compare them now; recording goes on.

    Args:
        algorithm: An algorithm whose config has a `LedgerCallback`. After ``algorithm.stop()``, the ledgers are compared as they are.

    Returns:
        The comparison.

    Raises:
        LedgerError: The algorithm isn't recorded, or its ledgers can't be compared.
    """
    for callback in algorithm.callbacks if isinstance(algorithm.callbacks, list) else [algorithm.callbacks]:
        job = getattr(callback, "job", None)
        if isinstance(job, Job):
            comparison = job.compare()
            store(job.run)
            return comparison
    raise LedgerError("this algorithm has no ledgers: add a LedgerCallback to its config, or stepledger_ray.attach(config, directory).")


def _tell(env_runner: Any, run: Run, incarnations: dict[tuple[bool, int], int]) -> Answer:
    """In an EnvRunner: tell its taps."""
    index, evaluation = env_runner.worker_index or 0, bool(env_runner.config.in_evaluation)
    who = name_of(index, evaluation)
    if env_runner.env is None:
        return Answer(who)
    error = getattr(env_runner.env, "ledger_error", None)
    taps = taps_of(env_runner)
    if error is not None or taps is None:
        return Answer(who, error=error or "an EnvRunner has no LedgerCallback: set the callback in the algorithm's own config.")
    try:
        node = claim(run)
    except LedgerError as problem:
        return Answer(who, error=str(problem))
    taps.tell(run, index, run.incarnation + incarnations.get((evaluation, index), 0))
    return Answer(who, node, spaces=(episode_space(env_runner)[0], taps.action_space))


def _put_learner_tap(learner: Any, run: Run, index: int, **options: Any) -> Answer:
    """In a Learner or aggregator: record what arrives before any other piece of its pipeline has changed it."""
    pipeline, who = learner._learner_connector, f"Learner {index}"
    if pipeline is None or any(isinstance(piece, LearnerTap) for piece in pipeline.connectors):
        return Answer(who)
    try:
        node = claim(run)
    except LedgerError as problem:
        return Answer(who, error=str(problem))
    own = [name for piece in pipeline.connectors if not type(piece).__module__.startswith("ray.") and (name := type(piece).__name__)]
    pipeline.prepend(LearnerTap(run, index, **options, changed_by=own))
    return Answer(who, node)


def _at_runner(env_runner: Any, method: str, args: tuple[Any, ...]) -> None:
    """In an EnvRunner: call a method of its ledgers."""
    taps = taps_of(env_runner) if env_runner.env is not None else None
    if taps is not None:
        taps.each(method, *args)


def _remember_checkpoint(env_runner: Any) -> None:
    """In an EnvRunner: a checkpoint was saved."""
    taps = taps_of(env_runner) if env_runner.env is not None else None
    if taps is not None:
        taps.saved()


def _at_learner(learner: Any, method: str, args: tuple[Any, ...]) -> None:
    """In a Learner or aggregator: likewise."""
    pipeline = learner._learner_connector
    for piece in [] if pipeline is None else pipeline.connectors:
        if isinstance(piece, LearnerTap):
            getattr(piece.recorder, RECORDERS[method])(*args)
