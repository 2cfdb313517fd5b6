"""The catalogue of explanations: a code for each kind of fault, what it means, and what to check.

Codes are stable: one that was given once keeps its meaning. ``SL1..`` are wrong values, ``SL2..`` wrong end flags, ``SL3..`` events that
are missing, too many or in another order, ``SL5..`` what is learned from, ``SL6..`` warnings about one ledger.
"""

from __future__ import annotations

from typing import NamedTuple

from .lints import LINTS

__all__ = ["CATALOGUE", "Code"]


class Code(NamedTuple):
    """One kind of fault.

    Attributes:
        title: What happened to a field or an event, so that "obs " or "reward " may stand in front of an ``SL1..``.
        faults: Ids of the faults that it names, as the fault table of the docs has them.
        meaning: What it is, and how it was recognised.
        check: Where to look first.
    """

    title: str
    faults: tuple[str, ...]
    meaning: str
    check: str


def _values(how: str, *more: str, final: bool = True, action: bool = True, reward: bool = True) -> tuple[str, ...]:
    names = ["obs", *(["final_obs"] if final else []), *(["action"] if action else []), *(["reward"] if reward else [])]
    return (*(f"{name}:{how}" for name in names), *more)


CATALOGUE: dict[str, Code] = {
    "SL101": Code(
        "replaced by zeros",
        _values("zero"),
        "One side has a value, the other has zeros of the same shape. Known from the digest alone, which is that of zeros in this space, "
        "and of one part of a Dict or a Tuple from its values. Where zeros are given around there anyway, the sentence says that it may be "
        "chance.",
        "A buffer that is allocated with zeros and read before it was filled; a reader that takes a field by a wrong name or from a wrong "
        "place and falls back to a default; a mask that is multiplied in.",
    ),
    "SL102": Code(
        "taken from an earlier step",
        _values("stale"),
        "The value is one that the same environment had some steps before. Known from digests: the one that was delivered is among the "
        "last that were given. With keep_values on both sides it is also found of one part of a Dict or a Tuple. An action that was sent "
        "for an automatic reset is not recorded with next-step autoreset; that it is this one is only a possibility. "
        'So is any other where the sentence says "may be": values that come often are among the last ones by chance. Where each value is '
        "late from one step on, that is one difference, and the sentence says from where to where.",
        "Whether a reply is waited for before the next request is sent; a cache that is not invalidated; a buffer that is handed over "
        "before it is written; frame skipping or an action repeat on the wrong side of the ledger.",
    ),
    "SL103": Code(
        "taken from another env",
        _values("swap"),
        "The value is the one that another environment of the same vector env had in the same call; with keep_values on both sides also "
        "one part of a Dict or a Tuple. Where that is so of each value from one step on, it is one difference, of all environments that "
        "have each other's values.",
        "The order in which workers' results are put together; an index that is computed from a list which changes (workers that are "
        "restarted, environments that are done); rows that are written into one shared array.",
    ),
    "SL104": Code(
        "rounded to float16",
        _values("f16"),
        "Each number is the nearest float16 of the one that was given. Recognised from the values: those of rewards are always recorded, "
        "those of observations and actions with keep_values.",
        "Mixed-precision settings, a compressed transport or replay buffer, a dtype that is declared in another place than the space.",
    ),
    "SL105": Code(
        "rounded to bfloat16",
        _values("bf16"),
        "Each number is the one that was given, rounded or cut to bfloat16: 8 significant bits. Recognised from the values.",
        "Mixed-precision settings on the way to the trainer: tensors that are moved with the model's dtype.",
    ),
    "SL106": Code(
        "rounded to float32",
        (),
        "The space declares float64, and each number is the nearest float32 of the one that was given. Recognised from the values.",
        "Libraries that keep float32 whatever the space says (torch's default, many replay buffers); declare float32 if that is meant.",
    ),
    "SL107": Code(
        "scaled",
        _values("scale"),
        "All numbers are the given ones times one factor, which the sentence names. Recognised from the values.",
        "A wrapper that normalises or scales rewards or observations inside the ledger on one side only; one that is applied twice; "
        "pixels that are divided by 255; units.",
    ),
    "SL108": Code(
        "clipped",
        _values("clip"),
        "Numbers beyond a bound, which the sentence names, arrive as that bound; the others arrive as they are. Recognised from the "
        "values. Of a single number only for bounds that people choose, nearer to zero than what was given.",
        "Reward clipping and action clipping: whether both sides of the ledger are on the same side of it; bounds of the declared space "
        "that are narrower than what the environment gives.",
    ),
    "SL109": Code(
        "replaced by NaN",
        _values("nan"),
        "What was a number arrives as NaN.",
        "A division by a standard deviation of zero; an inverse of something empty; a placeholder for missing data that was never filled.",
    ),
    "SL110": Code(
        "quantised",
        ("obs:uint8",),
        "The numbers are the given ones on a grid of at most 256 steps, which the sentence names: one through zero, one that lies over "
        "their range, or, of whole numbers, the multiples of one that is greater than 1. Recognised from the values; a grid over the "
        "range from eight numbers on.",
        "Observations that are stored or sent as uint8 and turned back; image compression; a replay buffer that saves memory.",
    ),
    "SL111": Code(
        "with its channels reversed",
        ("obs:bgr",),
        "It is the image that was given with its colour channels in the reverse order: its last axis, or else the first one of an image, "
        "where that has 3 or 4 elements. Recognised from the values.",
        "OpenCV reads and writes BGR: whether each image is converted exactly once.",
    ),
    "SL112": Code(
        "with its axes in another order",
        ("obs:transpose",),
        "The same numbers with axes exchanged, or in another shape. Recognised from the values.",
        "Channels first or last (HWC, CHW): a transposing wrapper that is applied on one side, twice, or by reshape instead of transpose.",
    ),
    "SL113": Code(
        "taken from a later step",
        ("obs:aliased", "action:aliased"),
        "The value is one that the environment gives, or the trainer sends, only later: it was changed after it was handed over. Somebody "
        "keeps the array itself, and somebody else writes the next value into it. Or, of what is learned from, the next observation was "
        "put in the place of the one before too early.",
        "Whether arrays that are kept are copied: a vector env with copy=False or shared memory, an environment that returns its own "
        "buffer, a caller that fills one array of actions again and again. In a loop of one's own, whether ``obs = next_obs`` comes before "
        "the transition is stored.",
    ),
    "SL114": Code(
        "replaced by the reset observation of the next episode",
        ("final_obs:reset_obs", "info:aliased"),
        "At an episode's end the observation is the first of the next episode, and not the last of this one. A value that is "
        'bootstrapped from it is that of another state. The sides differ in what is in ``info["final_obs"]``, or '
        '``info["terminal_observation"]``.',
        "Whether the final observation is taken before the reset, and copied: an environment that reuses its buffer overwrites what was "
        "put into info.",
    ),
    "SL115": Code(
        "not delivered",
        ("final_obs:missing",),
        "An episode ended with an observation that is not there on the other side.",
        'Whether a wrapper or a client drops the info dict, or an entry of it: ``info["final_obs"]``, ``info["terminal_observation"]``.',
    ),
    "SL116": Code(
        "equal in numbers, not in bits",
        (),
        "The numbers are equal, and their bits are not: -0.0 beside 0.0, or a NaN beside another one. Harmless, but where bits decide: in "
        "a hash, in the sign of 1/x, in a run that is to be repeated exactly.",
        "A multiplication by -1 or by a mask, or a conversion to text and back, on one side only.",
    ),
    "SL117": Code(
        "in reverse order",
        (),
        "The same numbers in the reverse order along one axis or several of an array that has two or more, which the sentence names: an "
        "image upside down, mirrored, or turned by half. Recognised from the values.",
        "Origins at the top or at the bottom: renderers such as OpenGL give the lowest row first. Augmentations on one side only.",
    ),
    "SL201": Code(
        "terminated set where the episode goes on",
        ("terminated:spurious",),
        "The environment said that the episode goes on, and the trainer was told that it terminated: it learns that nothing comes after.",
        "A wrapper that ends episodes inside the trainer's tap; an inverted test of a discount or of a done flag.",
    ),
    "SL202": Code(
        "terminated lost",
        ("terminated:drop",),
        "The environment terminated, and the trainer was told that the episode goes on.",
        "A reader that takes the flag by a wrong name and falls back to False; a flag that is read from the wrong row.",
    ),
    "SL203": Code(
        "terminated delivered as truncated",
        ("terminated:as_truncated",),
        "The environment terminated, and the trainer was told of a time limit: it bootstraps from a state after which nothing comes.",
        "An adapter that derives one flag from the other, from a discount, or from the number of steps.",
    ),
    "SL204": Code(
        "truncated set where the episode goes on",
        ("truncated:spurious",),
        "The environment said that the episode goes on, and the trainer was told of a time limit.",
        "A second time limit, inside the trainer's tap.",
    ),
    "SL205": Code(
        "truncated lost",
        ("truncated:drop",),
        "The environment truncated the episode, and the trainer was told that it goes on.",
        "Code from before Gymnasium 0.26, with one flag; a client that does not know truncated.",
    ),
    "SL206": Code(
        "truncated delivered as terminated",
        ("truncated:as_terminated",),
        "A time limit arrived as a termination: the trainer learns that nothing comes after, and values near time limits are too low.",
        'Adapters with one done flag; ``info["TimeLimit.truncated"]`` that is lost on the way.',
    ),
    "SL207": Code(
        "both flags delivered as terminated alone",
        ("both:as_terminated",),
        "Both flags were set on one step, and only terminated arrived. Harmless where time limits are not used, else a difference.",
        "Adapters that keep one flag: which of the two they keep.",
    ),
    "SL208": Code(
        "both flags delivered as truncated alone",
        ("both:as_truncated",),
        "Both flags were set on one step, and only truncated arrived: the trainer bootstraps from a state after which nothing comes.",
        "Adapters that keep one flag: terminated must win.",
    ),
    "SL209": Code(
        "both flags delivered where one was set",
        (),
        "One of the two flags was set, and both arrived.",
        "A done flag that is copied to both.",
    ),
    "SL301": Code(
        "step lost",
        ("step:lost",),
        "The environment made a step of which the trainer never heard. The step after it begins from an observation that the policy has "
        "not seen.",
        "A retry that sends an action twice; frame skipping outside the environment's tap; a queue that drops what is old.",
    ),
    "SL302": Code(
        "step repeated",
        ("step:repeated",),
        "The trainer was given the same reply twice, and the environment was not stepped in between.",
        "A retry or a cache that answers with the last reply; a timeout after which the old result is used.",
    ),
    "SL303": Code(
        "step filled in",
        ("step:filled",),
        "The trainer was given a step that the environment never made: the last observation, no reward, no end.",
        "Error handling that invents a result when a worker or a server does not answer.",
    ),
    "SL304": Code(
        "reset lost",
        ("reset:lost",),
        "The environment was reset, and the trainer was not told: for it the episode goes on.",
        "A watchdog, a crash handler or a callback that resets environments; a wrapper that resets at an end of its own.",
    ),
    "SL305": Code(
        "reset that the environment never made",
        ("reset:extra",),
        "The trainer was told of a reset, and the environment went on where it was.",
        "A client that answers a reset from its cache; a reset that is skipped where the environment is taken to be fresh.",
    ),
    "SL306": Code(
        "reset hidden in a step",
        ("reset:hidden",),
        "The environment was reset where the trainer was told of a step: the transition joins two episodes.",
        "Automatic resets inside the environment (a wrapper, a server) beside those of the vector env; an autoreset flag that a manual "
        "reset did not clear.",
    ),
    "SL307": Code(
        "replies shifted",
        ("reply:shifted",),
        "From one step on, each reply (observation, reward and flags; or the first two of them) is the one before it: the policy acts on "
        "the past. This is one difference, over ends and resets; the sentence says from where to where.",
        "A reply that came after its timeout and is still in the socket; a queue whose first entry was never taken; a pipelined client "
        "that reads before it writes.",
    ),
    "SL308": Code(
        "streams swapped",
        ("streams:swapped",),
        "One environment's replies arrive as another's: of two or more that are exchanged from one step on, this is one difference.",
        "Workers that were restarted in another order; results that are collected in the order in which they come.",
    ),
    "SL309": Code(
        "all envs reset when one is done",
        (),
        "Whenever one environment ended its episode, the others were reset too, and the trainer was told of the one alone.",
        "A collector, or a vector env of one's own, that calls reset() of all environments, where it should reset those that are done.",
    ),
    "SL310": Code(
        "step delivered as a reset",
        (),
        "The environment made a step where the trainer was told of a reset.",
        "An autoreset mode that the vector env does not have; a wrapper that begins an episode without resetting the environment.",
    ),
    "SL311": Code(
        "event that nobody gave",
        (),
        "The trainer was given an event that the environment never made, and it is neither the last one again nor one without a reward.",
        "Data of another environment or of an earlier run in the way of this one.",
    ),
    "SL501": Code(
        "env called by somebody else",
        (),
        "Between two calls of the trainer somebody reset or stepped the training env, so that a stored transition joins two states which "
        "do not follow each other.",
        "The place that the sentence names: evaluation, video and logging callbacks need an environment of their own.",
    ),
    "SL502": Code(
        "transition across two episodes",
        ("transition:crosses_reset",),
        "The next observation of a transition belongs to another episode than its observation.",
        "How chunks of episodes are cut and put together; a reset that is stored as a step (next-step autoreset); a buffer's wrap-around.",
    ),
    "SL503": Code(
        "transition with a stale observation",
        ("transition:stale_obs",),
        "The observation is that of another step than the one in which the action was chosen.",
        "A buffer that stores the last observation before or after it is updated; an observation that is kept without a copy.",
    ),
    "SL504": Code(
        "transition with a wrong successor",
        ("transition:wrong_successor",),
        "The next observation is that of another step than the one that followed.",
        "Index arithmetic of the buffer: next observations that are taken from the next row, whatever that is (optimize_memory_usage).",
    ),
    "SL505": Code(
        "transition learned from more than once",
        ("transition:duplicated",),
        "The algorithm promises to learn from each step once, and this one came again.",
        "Retries; chunks that overlap; an episode that is handed over again when it goes on.",
    ),
    "SL506": Code(
        "transition that was never sampled",
        ("transition:never_sampled",),
        "A transition was learned from that no environment of this run gave.",
        "Data of an earlier run in the buffer; rows that were never filled; changes to observation and action together.",
    ),
    "SL507": Code(
        "transitions dropped",
        ("chunk:dropped",),
        "The algorithm promises to learn from each step once, and these never came.",
        "A full queue; a batch that is cut to size; an exception that is swallowed.",
    ),
    "SL508": Code(
        "transitions repeated",
        ("chunk:repeated",),
        "The algorithm promises to learn from each step once, and these came again, several in a row.",
        "Retries of a batch; a chunk that is handed over by two ways.",
    ),
    "SL509": Code(
        "reset stored as a transition",
        (),
        "The transition leads from an episode's last observation to the next one's first, which is no step of the environment.",
        "Next-step autoreset: the step after an end is a reset, and must not be stored.",
    ),
    **{code: Code(lint.title, (), lint.meaning, lint.check) for code, lint in LINTS.items()},
}
