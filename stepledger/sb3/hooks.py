"""Seeing the calls of methods of single objects, and undoing it: the one place where anything of Stable-Baselines3 is patched.

Classes are patched, never instances: ``model.save``, ``save_replay_buffer`` and a worker's start pickle instances.
Each object of the class that nobody looks at takes one dictionary look-up more, and is otherwise called as ever.
"""

from __future__ import annotations

import functools
import inspect
import threading
from collections.abc import Callable
from typing import Any

__all__ = ["Gate", "Hooks", "unhooked"]

#: ``handler(original, *args, **kwargs)``: called in place of a method, which it calls.
Handler = Callable[..., Any]


class Gate:
    """While it is closed, calls go past the handlers behind it: for methods that are called often, and seldom of interest."""

    closed = False


#: In the place of one where several look.
_OPEN = Gate()


class _Ours(dict[int, Any]):
    """What a patched method knows by the ids of objects; a copy of it elsewhere knows none.

    A class that a script defines is pickled by its value, with the patched method and all that this holds: by `cloudpickle`, which
    ``model.save`` and the start of a worker use.
    """

    def __reduce__(self) -> tuple[Any, ...]:
        return dict, ()


class _Hooked:
    """A method of a class that is patched as long as somebody looks at the calls of one of its objects.

    Args:
        cls: The class.
        name: Of the method.
        gate: Of the observer.
    """

    def __init__(self, cls: type, name: str, gate: Gate | None) -> None:
        self.original: Callable[..., Any] = getattr(cls, name)
        self.handlers = _Ours()  # tuples of handlers
        self._cls, self._name, self._own = cls, name, name in vars(cls)
        original, handlers, only = self.original, self.handlers, gate or _OPEN

        def dispatch(self: Any, *args: Any, **kwargs: Any) -> Any:
            found = handlers.get(id(self))
            if found is None:
                return original(self, *args, **kwargs)
            call = functools.partial(original, self)
            if len(found) > 1:
                for handler in found[:-1]:
                    call = functools.partial(handler, call)
            return found[-1](call, *args, **kwargs)

        def gated(self: Any, *args: Any, **kwargs: Any) -> Any:
            return original(self, *args, **kwargs) if only.closed else dispatch(self, *args, **kwargs)

        def gated_step(self: Any, action: Any) -> Any:  # what is called most of all, with no more than it needs
            return original(self, action) if only.closed else dispatch(self, action)

        def seen_by(other: Gate | None) -> None:
            nonlocal only
            only = only if other is gate else _OPEN

        self.seen_by = seen_by
        patched: Callable[..., Any] = dispatch if gate is None else gated_step if _is_step(original) else gated
        self._ours = functools.wraps(original)(patched)
        setattr(cls, name, self._ours)  # what can't be patched, such as a class of a C extension, says so here

    def undo(self) -> None:
        if vars(self._cls).get(self._name) is not self._ours:
            return  # somebody else's patch is on top by now: it is not ours to take away, and what it calls here passes everything on
        if self._own:
            setattr(self._cls, self._name, self.original)
        else:
            delattr(self._cls, self._name)


_hooked: dict[tuple[type, str], _Hooked] = {}
_lock = threading.RLock()


class Hooks:
    """The calls that one observer looks at."""

    def __init__(self) -> None:
        self._mine: list[tuple[tuple[type, str], Any, Handler]] = []

    def __bool__(self) -> bool:
        return bool(self._mine)

    def add(self, target: Any, name: str, handler: Handler, gate: Gate | None = None) -> None:
        """Have a handler called in place of a method of an object.

        Args:
            target: The object; it is kept alive until `undo`.
            name: Of the method.
            handler: ``handler(original, *args, **kwargs)``.
            gate: Whether it is called, where no other observer looks at objects of this class; else it is called in any case, and looks
                itself.

        Raises:
            TypeError: The class of the object can't be patched.
        """
        key = type(target), name
        with _lock:
            hooked = _hooked.get(key)
            if hooked is None:
                hooked = _hooked[key] = _Hooked(*key, gate)
            hooked.seen_by(gate)
            hooked.handlers[id(target)] = (*hooked.handlers.get(id(target), ()), handler)
        self._mine.append((key, target, handler))

    def undo(self) -> None:
        """Take all handlers away; a class that nobody looks at any more is as it was."""
        with _lock:
            while self._mine:
                key, target, handler = self._mine.pop()
                hooked = _hooked[key]
                found = hooked.handlers[id(target)]
                at = next(at for at, one in enumerate(found) if one is handler)  # once: another observer may have the same function
                if left := found[:at] + found[at + 1 :]:
                    hooked.handlers[id(target)] = left
                else:
                    del hooked.handlers[id(target)]
                if not hooked.handlers:
                    del _hooked[key]
                    hooked.undo()


def _is_step(function: Callable[..., Any]) -> bool:
    """Whether it takes one argument, named as `gymnasium.Env.step` has it, and no other."""
    try:
        parameters = list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError):
        return False
    return [(one.name, one.kind, one.default) for one in parameters[1:]] == [("action", *_POSITIONAL)]


_POSITIONAL = inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.empty


def unhooked(function: Any) -> Any:
    """The function below any hooks."""
    while hasattr(function, "__wrapped__"):
        function = function.__wrapped__
    return function
