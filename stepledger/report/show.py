"""The sides around one place, as text: what ``stepledger show`` prints."""

from __future__ import annotations

from ..errors import LedgerError
from ..format import StreamKey
from ..pairs import stream_name
from .beside import beside
from .context import AROUND, Context, Recorded
from .info import ranges
from .visible import visible

__all__ = ["show"]


def show(
    recorded: Recorded,
    env: int,
    episode: int,
    step: int,
    *,
    runner: int | None = None,
    agent: str | None = None,
    around: int = AROUND,
    width: int = 120,
) -> str:
    """What all taps have at a place and around it, beside each other.

    Args:
        recorded: The ledgers.
        env: Position of the environment in its vector env.
        episode: Counted from 0 at the first reset, as the tap nearest to the environment has it.
        step: 0 is the reset.
        runner: The EnvRunner's index, where several have such an environment.
        agent: The agent, likewise.
        around: Steps before and after the place.
        width: Characters in a line, where that is possible.

    Raises:
        LedgerError: There is no such place.
    """
    found: list[tuple[str, StreamKey, Context]] = []
    streams: list[tuple[str, StreamKey]] = []
    for group in recorded.groups():
        for key in recorded.keys(group):
            if key.env == env and runner in (None, key.runner) and agent in (None, key.agent):
                streams.append((group, key))
                context = recorded.at(key, episode, step, around, group)
                found += [(group, key, context)] if context is not None else []
    if not streams:
        raise LedgerError(f"there is no {_asked(env, runner, agent)}: {_envs(recorded)}.")
    if not found:
        there = _episodes(recorded, *streams[-1], episode)
        raise LedgerError(f"{_asked(env, runner, agent)} has no episode {episode} with a step {step}: {there}.")
    return "\n\n".join("\n".join(map(visible, _lines(*one, episode, step, width))) for one in found)


def _lines(group: str, key: StreamKey, context: Context, episode: int, step: int, width: int) -> list[str]:
    name = f"{group}: {stream_name(key)}" if group else stream_name(key)
    restarted = f" (process {key.incarnation})" if key.incarnation else ""
    here = context.here
    differ = f"; {', '.join(sorted(here.differ))} differ{'s' if len(here.differ) == 1 else ''} there" if here and here.differ else ""
    return [f"{name}{restarted}, episode {episode}, step {step}{differ}", *beside(context, width)]


def _asked(env: int, runner: int | None, agent: str | None) -> str:
    return stream_name(StreamKey(runner or 0, env, agent or ""))


def _envs(recorded: Recorded) -> str:
    keys = [key for group in recorded.groups() for key in recorded.keys(group)]
    envs, runners = ranges([key.env for key in keys]), ranges([key.runner for key in keys])
    agents = sorted({key.agent for key in keys} - {""})
    which = [f"the envs {envs}" if envs else "no envs", f"of the runners {runners}" if runners not in ("", "0") else ""]
    return "the ledgers have " + " ".join(filter(None, which)) + (f" and the agents {', '.join(agents)}" if agents else "")


def _episodes(recorded: Recorded, group: str, key: StreamKey, episode: int) -> str:
    tap = recorded.taps(key, group)[0]
    episodes, steps = tap.stream.columns["episode"], tap.stream.columns["step"]
    if not len(episodes):
        return "nothing was recorded of it"
    if (episodes == episode).any():
        there = steps[episodes == episode]
        return f"its steps are {there.min()} to {there.max()}"
    return f"its episodes are {episodes.min()} to {episodes.max()}"
