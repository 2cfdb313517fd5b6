"""Hooks see the calls of single objects, pass by those that a gate holds back, and leave classes as they were."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import cloudpickle
import pytest

pytest.importorskip("stable_baselines3")

from stepledger.sb3.hooks import Gate, Hooks

pytestmark = pytest.mark.sb3


class Stepped:
    def step(self, action: Any) -> Any:
        return "stepped", action

    def reset(self, **options: Any) -> Any:
        return "reset", options


class Inherits(Stepped):
    pass


def seeing(calls: list[Any]) -> Any:
    def handler(original: Any, *args: Any, **kwargs: Any) -> Any:
        calls.append((args, kwargs))
        return original(*args, **kwargs)

    return handler


@pytest.mark.parametrize("cls", [Stepped, Inherits])
@pytest.mark.parametrize("keyword", [True, False])
def test_a_closed_gate_lets_calls_pass_unseen(cls: type[Stepped], keyword: bool) -> None:
    hooks, gate, calls, one, other = Hooks(), Gate(), [], cls(), cls()
    hooks.add(one, "step", seeing(calls), gate)
    hooks.add(one, "reset", seeing(calls), gate)
    arguments: Any = ((), {"action": 3}) if keyword else ((3,), {})
    for closed in (False, True):
        gate.closed = closed
        for env in (one, other):
            assert env.step(*arguments[0], **arguments[1]) == ("stepped", 3)
            assert env.reset(seed=1) == ("reset", {"seed": 1})
    assert [kwargs or args for args, kwargs in calls] == [(3,), {"seed": 1}]
    hooks.undo()
    assert "step" in vars(Stepped)
    assert "step" not in vars(Inherits)
    assert not hasattr(Stepped.step, "__wrapped__")


@pytest.mark.parametrize("same", [True, False])
def test_of_two_observers_neither_passes_by_what_the_gate_of_the_other_holds_back(same: bool) -> None:
    hooks, gates, calls, envs = [Hooks(), Hooks()], [Gate(), Gate()], [[], []], [Stepped(), Stepped()]
    if same:
        envs[1] = envs[0]
    for one, gate, seen, env in zip(hooks, gates, calls, envs):
        one.add(env, "step", seeing(seen), gate)
    gates[0].closed = True
    envs[1].step(1)
    assert len(calls[1]) == 1
    gates[0].closed, gates[1].closed = False, True
    envs[0].step(1)
    assert len(calls[0]) >= 1
    hooks[0].undo()
    gates[1].closed = False
    envs[1].step(2)
    assert calls[1][-1] == ((2,), {})
    hooks[1].undo()
    assert not hasattr(Stepped.step, "__wrapped__")


def test_a_class_that_is_pickled_by_its_value_takes_no_observer_along() -> None:
    class Own:
        def step(self, action: Any) -> Any:
            return action

    hooks, gate, calls, own = Hooks(), Gate(), [], Own()
    hooks.add(own, "step", seeing(calls), gate)
    copy = cloudpickle.loads(cloudpickle.dumps(own))
    assert copy.step(1) == 1
    assert not calls
    hooks.undo()


def classes() -> tuple[type, type]:
    """One that has the method itself, and one that inherits it."""

    class Own:
        def step(self) -> str:
            return "step"

    class Inherits(Own):
        pass

    return Own, Inherits


def seen(original: Callable[[], str]) -> str:
    return f"seen {original()}"


@pytest.mark.parametrize("which", [0, 1], ids=["own", "inherited"])
def test_a_class_is_as_it_was_when_nobody_looks_any_more(which: int) -> None:
    cls = classes()[which]
    before, one, other = dict(vars(cls)), cls(), cls()
    first, second, gate = Hooks(), Hooks(), Gate()
    first.add(one, "step", seen, gate)
    assert (one.step(), other.step()) == ("seen step", "step")
    gate.closed = True
    assert one.step() == "step"
    second.add(one, "step", seen)
    assert one.step() == "seen seen step"  # several look at their gates themselves
    first.undo()
    assert one.step() == "seen step"
    second.undo()
    assert dict(vars(cls)) == before
    assert not first
    assert not second


@pytest.mark.parametrize("which", [0, 1], ids=["own", "inherited"])
@pytest.mark.parametrize("again", [False, True])
def test_a_patch_that_somebody_else_put_on_top_stays(which: int, again: bool) -> None:
    cls = classes()[which]
    one, hooks = cls(), Hooks()
    hooks.add(one, "step", seen)
    below = cls.step
    cls.step = lambda self: f"theirs, {below(self)}"
    assert one.step() == "theirs, seen step"
    hooks.undo()
    assert one.step() == "theirs, step"
    if again:
        hooks.add(one, "step", seen)
        assert one.step() == "seen theirs, step"
        hooks.undo()
        assert one.step() == "theirs, step"


def test_a_method_that_somebody_else_took_away_is_no_error() -> None:
    _, cls = classes()
    one: Any = cls()
    hooks = Hooks()
    hooks.add(one, "step", seen)
    del cls.step
    hooks.undo()
    assert one.step() == "step"
    assert not hooks
