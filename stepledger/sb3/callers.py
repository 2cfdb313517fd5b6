"""Who calls, as the stack tells it: the training env's trainer or somebody else, and from where; and what ``learn()`` was called with."""

from __future__ import annotations

import os
import sys
from types import CodeType, FrameType
from typing import Any, NamedTuple

from stable_baselines3.common.callbacks import BaseCallback

from .hooks import unhooked

__all__ = ["Caller", "Callers", "begins_anew", "outermost"]

#: Methods of a callback that the trainer calls; what is called below one of them is not the trainer's.
_CALLBACK_METHODS = (
    "init_callback",
    "on_training_start",
    "on_rollout_start",
    "on_step",
    "on_rollout_end",
    "on_training_end",
    "update_locals",
)
#: Methods of an algorithm below which it steps its env, and one below which it doesn't.
_TRAINER_METHODS = ("collect_rollouts", "learn")
_UPDATE = ("train",)

#: Packages whose lines say less than the line that called them.
_LIBRARIES = ("stable_baselines3", "sb3_contrib", "stepledger", "gymnasium")


class Caller(NamedTuple):
    """Where a call that is not the trainer's comes from.

    Attributes:
        who: ``"a callback"``, or what else it is.
        place: File and line.
    """

    who: str
    place: str


class Callers:
    """Tells the calls of a model's trainer from others by the stack.

    Args:
        model: The algorithm.
    """

    def __init__(self, model: Any) -> None:
        # By their ids: a code object's hash looks at all of it, each time.
        strangers = {
            **dict.fromkeys(_codes(BaseCallback, _CALLBACK_METHODS), "a callback"),
            **dict.fromkeys(_codes(type(model), _UPDATE), "train()"),
        }
        trainer = _codes(type(model), _TRAINER_METHODS)
        self._alive = strangers, trainer
        self._strangers, self._trainer = {id(code): who for code, who in strangers.items()}, set(map(id, trainer))

    def stranger(self) -> Caller | None:
        """Who makes the call that is under way; `None` if it is the trainer."""
        start = frame = sys._getframe(3)  # behind the handler and the hook that asks
        while frame is not None:
            code = id(frame.f_code)
            if code in self._strangers:
                return Caller(self._strangers[code], _place(start, frame))
            if code in self._trainer:
                return None
            frame = frame.f_back  # type: ignore[assignment]
        return Caller("a call from outside of the trainer", _place(start, None))


def _codes(cls: type, names: tuple[str, ...]) -> set[CodeType]:
    functions = [unhooked(vars(base)[name]) for base in cls.__mro__ for name in names if name in vars(base)]
    return {function.__code__ for function in functions if hasattr(function, "__code__")}


def begins_anew(model: Any) -> bool:
    """Whether ``learn()``, from which this is called, resets its env in any case."""
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        if frame.f_code.co_name == "_setup_learn" and frame.f_locals.get("self") is model:
            return bool(frame.f_locals.get("reset_num_timesteps", True))
        frame = frame.f_back
    return False


def outermost(callback: BaseCallback) -> BaseCallback:
    """The callback that ``learn()`` itself calls, from which this is called."""
    top, frame = callback, sys._getframe()
    while frame is not None:
        if frame.f_code.co_name == "init_callback" and isinstance(frame.f_locals.get("self"), BaseCallback):
            top = frame.f_locals["self"]
        frame = frame.f_back  # type: ignore[assignment]
    return top


def _place(frame: FrameType | None, end: FrameType | None) -> str:
    """File and line of the innermost frame that is nobody's library; else of the callback, and of the script that started training."""
    last: FrameType | None = None
    while frame is not None and frame is not end:
        if not _is_library(frame):
            return _line(frame)
        last, frame = frame, frame.f_back
    if last is None:
        return "an unknown place"
    inside = f"{_line(last)} in {_owner(last)}"
    while frame is not None and _is_library(frame):
        frame = frame.f_back
    return inside if frame is None else f"{inside}, training started from {_line(frame)}"


def _owner(frame: FrameType) -> str:
    owner = frame.f_locals.get("self")
    return frame.f_code.co_name if owner is None else f"{type(owner).__name__}.{frame.f_code.co_name}"


def _is_library(frame: FrameType) -> bool:
    return str(frame.f_globals.get("__name__", "")).partition(".")[0] in _LIBRARIES


def _line(frame: FrameType) -> str:
    return f"{os.path.basename(frame.f_code.co_filename)}:{frame.f_lineno}"
