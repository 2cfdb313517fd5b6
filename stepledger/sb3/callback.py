"""The learner tap: a callback that records what a Stable-Baselines3 algorithm stores to learn from, and compares it."""

from __future__ import annotations

import contextlib
import os
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.vec_env import VecEnv

from ..compare import compare
from ..digest import DIGESTS
from ..errors import LedgerError
from ..flush import Flush
from ..pairs import counted
from ..recording import OnError, check_on_error, warn
from ..result import Comparison
from ..strays import crossed, joins, overwritten
from .callers import Callers, begins_anew, outermost
from .handed import HandedStep, StrayCalls, innermost
from .hooks import Hooks
from .stored import StoredRows, buffer_of, episode_starts
from .vecenv import LedgerVecEnv
from .watch import VectorWatch

__all__ = ["LedgerCallback"]

OnDifference = Literal["log", "warn", "stop"]

#: Methods of an algorithm that ``learn()`` calls: if one of them raises, there is no end of training to undo things at.
_GUARDED = ("collect_rollouts", "train", "dump_logs", "_dump_logs", "_update_current_progress_remaining")


class LedgerCallback(BaseCallback):
    """Records what goes into the rollout or replay buffer, and compares it with what the VecEnv gave.

    Pass it to ``model.learn(callback=...)``, alone or in a list, in any place there. It writes ``vector.npz``, what the innermost VecEnv
    gave, and ``learner.npz``, what was stored, into a run directory, which may hold the ledgers of `stepledger.LedgerEnv` too. Rows are
    compared as they are stored; at the end of ``learn()`` the ledgers are compared once more, and the report is printed:
    ``stepledger compare DIRECTORY`` gives it again.

    Where somebody other than the trainer resets or steps the training env, the report names the file and line.

    Nothing of the run changes: classes are patched from the beginning of ``learn()`` to its end, also if that is an exception, and
    nothing else is.

    Args:
        path: The run directory; made if it isn't there.
        on_difference: What to do at the first difference, when it is stored: ``"log"`` prints it, ``"warn"`` warns, ``"stop"`` warns and
            ends ``learn()`` at the next step. All are counted as ``stepledger/differences`` in the logger of the algorithm.
        digest: ``"xxh3_64"`` or ``"blake2b"``; the same as that of a `LedgerEnv`.
        on_error: As in `LedgerEnv`.
        flush_every: As there, of each of its ledgers; the last step of all environments is lost in any case.
        flush_seconds: As there.
        verbose: As in every callback; 0 and 1 make no difference.

    Attributes:
        comparison: The result, from the end of ``learn()`` on; `None` before, and where nothing could be compared.
        differences: Number of differences found so far at the learner.

    Raises:
        LedgerError: A setting is unknown.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        on_difference: OnDifference = "log",
        digest: str = "xxh3_64",
        on_error: OnError = "warn",
        flush_every: int | None = None,
        flush_seconds: float | None = None,
        verbose: int = 0,
    ) -> None:
        super().__init__(verbose)
        if on_difference not in ("log", "warn", "stop"):
            raise LedgerError(f"on_difference={on_difference!r} is unknown: use 'log', 'warn' or 'stop'.")
        if digest not in DIGESTS:
            raise LedgerError(f"digest {digest!r} is unknown: use one of {', '.join(DIGESTS)}.")
        check_on_error(on_error)
        self._flushing = Flush.of(flush_every, flush_seconds)
        self._directory = Path(path).absolute()
        if self._directory.suffix == ".npz" or self._directory.is_file():
            raise LedgerError(f"{path} names a file: LedgerCallback takes the run directory, in which it writes several.")
        self._on_difference, self._digest, self._on_error = on_difference, digest, on_error
        self.comparison: Comparison | None = None
        self.differences = 0
        self._watch: VectorWatch | None = None
        self._rows: StoredRows | None = None
        self._hooks = Hooks()
        self._learning: Any = None  # the model of the ledgers
        self._told: set[str] = set()
        self._values: list[Any] = []
        self._before = 0  # differences of earlier calls of learn()

    # The life of one learn().

    def _init_callback(self) -> None:
        try:
            self._attach()
        except LedgerError as error:
            self._detach()
            self._say(f"{error} This run is not recorded.")
        except Exception as error:
            self._fail(error)

    def _attach(self) -> None:
        model = self.model
        self._detach()
        self.comparison = None
        if buffer_of(model) is None:
            self._say(f"{type(model).__name__} has no rollout or replay buffer: there is nothing that a learner tap could record.")
            return
        if self._is_another(model):
            self._say("this LedgerCallback recorded another model, and this one is not recorded: make a LedgerCallback for each.")
            return
        env: Any = model.env
        if type(env).step is not VecEnv.step:
            raise LedgerError(f"{type(env).__name__} has a step() of its own, and only step_async() and step_wait() are recorded.")
        self._refuse_second_tap(env)
        self._take_directory()
        watch, rows, self._before = self._watch, self._rows, self.differences
        if watch is not None and not watch.recorder.recording:
            self._say(f"recording into {self._directory} has ended, this run is not recorded: make another LedgerCallback.")
            return
        if watch is None or rows is None:
            options: dict[str, Any] = {"digest": self._digest, "on_error": self._on_error, "flush": self._flushing}
            watch = self._watch = VectorWatch(model, self._directory / "vector.npz", **options, fail=self._fail)
            rows = self._rows = StoredRows(model, self._directory / "learner.npz", **options)
        elif not watch.fits(model):
            self._say("the VecEnv was replaced by one with other spaces or another number of environments: what comes now is not recorded.")
            return
        if getattr(innermost(env), "waiting", False):
            self._say(
                "a step was sent to the SubprocVecEnv, and its replies were never received: replies may come a step late from here on, "
                "so make the VecEnv again."
            )
        else:  # what is asked now would get one of those replies
            self._miss_env_side(rows)
        fresh = self._was_reset(model)
        self._learning = model
        rows.attach(model)
        if not rows.known and watch.on_stray is None:
            self._only_strays("is no buffer that this version knows")
        self._callers = Callers(model)
        watch.attach(model, self._hooks, fresh)
        self._hook_buffer(rows)
        self._hooks.add(model, "save", self._on_save)
        for name in _GUARDED:
            if hasattr(model, name):
                own = {"collect_rollouts": self._around_rollout, "dump_logs": self._around_log, "_dump_logs": self._around_log}
                self._hooks.add(model, name, own.get(name, self._guard))
        top = outermost(self)
        self._hooks.add(top, "on_training_start", self._guard)
        self._hooks.add(top, "on_training_end", self._around_end)
        for other in _family(top):
            if other is not self:
                self._hooks.add(other, "init_callback", self._guard)

    def _miss_env_side(self, rows: StoredRows) -> None:
        """Have the ledgers of environments missed that record nothing, since nobody could tell their `LedgerEnv` its position in time."""
        with contextlib.suppress(Exception):  # a VecEnv of one's own may lack these calls
            inner: VecEnv = innermost(self.model.env)  # type: ignore[arg-type]
            if inner.has_attr("ledger_place") and None in inner.get_attr("ledger_place"):
                rows.recorder.final["taps"] = ["env", *rows.recorder.meta["taps"]]
                self._say("a LedgerEnv in the VecEnv does not know its position and records nothing: pass it as index=.")

    def _only_strays(self, why: str) -> None:
        """Go on without the rows of a buffer that can't be read."""
        assert self._watch is not None
        assert self._rows is not None
        self._rows.known, self._watch.on_stray = False, self._judge_call
        self._say(
            f"{type(self._rows.buffer).__name__} {why}: what it stores is not compared, only calls of the training env that are not "
            "the trainer's are looked for."
        )

    def _take_directory(self) -> None:
        """Have the callback that wrote there before close its ledgers, which are then set aside."""
        other = _open.get(self._directory)
        if other is not None and other is not self:
            if other._hooks:
                raise LedgerError(f"another LedgerCallback is recording into {self._directory}: give each a directory of its own.")
            other.close()
        _open[self._directory] = self

    def _is_another(self, model: Any) -> bool:
        """Whether this is not the model of the ledgers, nor that model loaded again, as far as its updates and weights tell."""
        known = self._learning
        if known is None or model is known:
            return False
        if type(model) is not type(known) or model._n_updates > known._n_updates:
            return True
        if model._n_updates < known._n_updates:
            return not model._n_updates  # else it was saved under way
        own, others = model.policy.state_dict(), known.policy.state_dict()
        return own.keys() != others.keys() or not all(torch.equal(own[name], others[name]) for name in own)

    def _refuse_second_tap(self, env: Any) -> None:
        while hasattr(env, "venv"):
            if isinstance(env, LedgerVecEnv) and (path := env._rows.recorder.path) is not None and path.is_relative_to(self._directory):
                raise LedgerError(
                    f"LedgerCallback records what LedgerVecEnv does, and both would write into {self._directory}: take LedgerVecEnv out."
                )
            env = env.venv

    def _was_reset(self, model: Any) -> bool:
        """Whether ``learn()`` has just reset the env."""
        if begins_anew(model):
            return True
        assert self._watch is not None
        if self._watch.begun:
            return not self._watch.goes_on(model)
        return bool(np.all(episode_starts(model)))

    def _hook_buffer(self, rows: StoredRows) -> None:
        if rows.known:
            self._hooks.add(rows.buffer, "add", self._on_add)
        if hasattr(self.model.policy, "predict_values"):
            self._hooks.add(self.model.policy, "predict_values", self._on_value)

    def _guard(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """What raises ends the recording of this ``learn()``: it won't come to its end."""
        try:
            return original(*args, **kwargs)
        except BaseException as error:
            told = not self._hooks
            self._interrupted()
            if not told:
                what = f"learn() ended with {type(error).__name__}; compare what was recorded until then with"
                print(f"stepledger: {what}: stepledger compare {self._directory}", flush=True)
            raise

    def _around_rollout(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        self._look_for_replacements()
        result = self._guard(original, *args, **kwargs)
        if self._watch is not None and self._hooks:
            self._watch.stopped()
        return result

    def _around_log(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        self.logger.record("stepledger/differences", self.differences)  # each dump empties the logger
        return self._guard(original, *args, **kwargs)

    def _look_for_replacements(self) -> None:
        """Notice an env or a buffer that was put in the place of another while learning goes on."""
        watch, rows, model = self._watch, self._rows, self.model
        if not self._hooks or watch is None or rows is None:
            return
        if model.env is not watch.outer:
            self._end_recording(
                f"the VecEnv of the model was replaced under way, after call {watch.calls:,}: what comes from here on is not recorded. Use "
                "set_env between two calls of learn()"
            )
        elif buffer_of(model) is not rows.buffer:
            rows.attach(model)
            self._hook_buffer(rows)

    def _around_end(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        self._guard(original, *args, **kwargs)
        self._finish()

    def _interrupted(self) -> None:
        if self._watch is not None and self._hooks:
            self._watch.stopped()
            self._watch.left()
        self._detach()
        self._flush()

    def _finish(self) -> None:
        if self._hooks:
            self._interrupted()
            self._report()

    def _report(self) -> None:
        """Compare the whole run so far, and print it."""
        self._flush_env_side()
        assert self._rows is not None
        if not self._rows.known:
            return  # that was said
        try:
            self.comparison = compare(self._directory)
        except LedgerError as error:
            self._say(str(error))
        except Exception as error:  # the run itself has come to its end, and must not fail by this
            self._say(f"{self._directory} could not be compared: {type(error).__name__}: {error}")
        else:
            print(f"{self.comparison}\nstepledger: compare again with: stepledger compare {self._directory}", flush=True)

    def _flush_env_side(self) -> None:
        """Have the environments' own ledgers written, if there are any: they stay open."""
        assert self._watch is not None
        try:
            if self._watch.inner.has_attr("ledger_place"):
                self._watch.inner.env_method("flush")
        except Exception as error:  # without them, what they have written so far is compared
            self._say(f"the ledgers of the environments could not be written ({error}).")

    def _detach(self) -> None:
        self._hooks.undo()

    def _flush(self) -> None:
        if self._watch is not None:
            self._watch.recorder.flush()
        if self._rows is not None and self._rows.known:
            self._rows.recorder.begin()  # there is a ledger even if nothing was stored
            self._rows.recorder.flush()

    def close(self) -> None:
        """Write the ledgers and record no more; they are written at the end of each ``learn()`` too."""
        self._detach()
        if self._watch is not None:
            self._watch.recorder.close()
        if self._rows is not None:
            self._rows.recorder.close()

    def _fail(self, error: BaseException) -> None:
        """Recording failed: that ends it, and the run goes on."""
        if self._watch is None or self._rows is None:
            self._detach()
            self._say(f"recording to {self._directory} could not begin, training goes on: {type(error).__name__}: {error}")
            return
        self._detach()
        self._rows.recorder.fail(error)
        self._watch.recorder.recording = self._rows.recorder.recording

    def _end_recording(self, why: str) -> None:
        assert self._watch is not None
        assert self._rows is not None
        self._watch.stopped()
        self._detach()
        for recorder in (self._watch.recorder, self._rows.recorder):
            recorder.final["stopped"] = why
        self._flush()
        self._say(f"{why}.")
        self._report()  # at the end of learn() nobody looks any more

    def _on_save(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        result = original(*args, **kwargs)
        if self._watch is not None:
            self._watch.saved()
        return result

    # What is stored, and what is found.

    def _on_value(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """What the policy answers when it is asked for values: asking it again might change it."""
        value = original(*args, **kwargs)
        if self._watch is not None and self._watch.pending is not None:
            self._values.append(value)
        return value

    def _on_add(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        watch, rows = self._watch, self._rows
        assert watch is not None
        assert rows is not None
        try:
            at = rows.position()
            stranger = self._callers.stranger()
        except Exception as error:
            self._fail(error)
            return original(*args, **kwargs)
        result = original(*args, **kwargs)
        values, self._values = self._values, []
        if not rows.recorder.recording:
            return result
        try:
            step = watch.pending
            added = rows.added(at[0])
            if not rows.known:
                watch.stored()
            elif stranger is not None or step is None:
                rows.count("rows were added to the buffer outside of a step, and not compared")
            elif added:
                differs, marked = rows.record(at, step, values)
                watch.stored()
                self._judge(step, differs, marked)
                if added > 1:
                    rows.count("rows were added to the buffer beside those of the trainer's steps, and not compared", added - 1)
            elif not rows.begun:
                watch.stored()
                self._only_strays("stores no row when one is added, as one does that joins several first")
            else:
                watch.stored()
                self._judge_lost(len(step.done))
        except Exception as error:
            self._fail(error)
        return result

    def _judge(self, step: HandedStep, differs: dict[str, Any], marked: bool) -> None:
        """Count the differences of a row, and say what the first is."""
        stray = step.stray
        if not differs and stray is None:
            return
        wrong = np.logical_or.reduce(list(differs.values())) if differs else np.zeros(len(step.done), bool)
        count = int(wrong.sum())
        if stray is not None and not stray.calls.handed_over and not marked:
            count += int((stray.envs & ~stray.shown & ~wrong).sum())
        for one in (stray, self._watch.stray if self._watch is not None else None):
            if one is not None:
                one.shown |= wrong
        self.differences += count
        if count and self._on_difference_once():
            self._tell(self._sentence(step, wrong, list(differs)))

    def _judge_lost(self, envs: int) -> None:
        self.differences += envs
        if self._on_difference_once():
            self._tell(f"call {self._watch.calls:,}: the buffer stored no row of it, in {counted(envs, 'env')}")  # type: ignore[union-attr]

    def _judge_call(self, stray: StrayCalls) -> None:
        """What can be said where the buffer isn't known: that there was a stray call."""
        self.differences += int(stray.envs.sum())
        if self._on_difference_once():
            self._tell(f"{stray.calls}; what it means for what is stored is not known")

    def _on_difference_once(self) -> bool:
        first = "difference" not in self._told
        self._told.add("difference")
        return first

    def _sentence(self, step: HandedStep, wrong: Any, fields: list[str]) -> str:
        assert self._watch is not None
        rows, stray = int(wrong.sum()), step.stray or self._watch.stray
        if stray is None:
            env = int(np.argmax(wrong))
            what = f"{', '.join(fields)} differ{'s' if len(fields) == 1 else ''} from what the trainer was given"
            return f"call {self._watch.calls:,}: {what}, in the transitions of {counted(rows, 'env')} (env {env} first)"
        env = int(np.argmax(wrong if rows else stray.envs))
        before = int(stray.before[0][env]), int(stray.before[1][env])
        if step.stray is None:
            what = overwritten(env, before)
        else:
            what = joins(env, before, (int(stray.after[0][env]), int(stray.after[1][env]) + 1))
        return f"{stray.calls}; {what}; {crossed(rows, stray.calls)}"

    def _tell(self, text: str) -> None:
        if self._on_difference == "log":
            print(f"stepledger: {text}", flush=True)
        else:
            warn(text)

    def _say(self, sentence: str) -> None:
        """One warning of each kind."""
        if sentence not in self._told:
            self._told.add(sentence)
            warn(sentence)

    def _on_step(self) -> bool:
        stop = self._on_difference == "stop" and self.differences > self._before
        return not (stop and self._hooks)  # what is not recorded is not stopped either

    def __reduce__(self) -> tuple[Any, ...]:
        # Not refused: what is beside it, such as another callback, is pickled with it when a worker is started.
        return LedgerCallbackCopy, ()


class LedgerCallbackCopy(BaseCallback):
    """What a pickled or copied `LedgerCallback` is: that one belongs to its run, and a copy records nothing."""

    def _init_callback(self) -> None:
        warn("this is a copy of a LedgerCallback and records nothing: make another LedgerCallback.")

    def _on_step(self) -> bool:
        return True


#: Who has ledgers open in a directory.
_open: weakref.WeakValueDictionary[Path, LedgerCallback] = weakref.WeakValueDictionary()


def _family(callback: Any) -> Iterator[Any]:
    """A callback and those inside it."""
    yield callback
    for child in [*getattr(callback, "callbacks", []), *([callback.callback] if getattr(callback, "callback", None) is not None else [])]:
        if isinstance(child, BaseCallback):
            yield from _family(child)
