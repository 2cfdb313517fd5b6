"""How one value was made of another: rounded, scaled, clipped, turned. Rules over the kept values themselves."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from .result import Explanation

__all__ = ["Cause", "changes", "made"]

Array = npt.NDArray[Any]
#: A rule gives the end of the sentence "obs is ...", or nothing where it does not fit.
_Rule = Callable[[list[tuple[Array, Array]]], str]


class Cause(NamedTuple):
    """What may have become of a value, whatever that is called.

    Attributes:
        code: Of the explanation.
        what: The end of the sentence "obs is ...".
        sure: Whether nothing else that is likely fits as well.
    """

    code: str
    what: str
    sure: bool = True

    def of(self, noun: str) -> Explanation:
        """The explanation of the value with this name."""
        if self.code == "SL101":  # it is zero in any case
            return Explanation(self.code, f"{noun} is {self.what}{'' if self.sure else ', which may be chance'}")
        return Explanation(self.code, f"{noun} {'is' if self.sure else 'may be'} {self.what}")


def changes(noun: str, pairs: Sequence[tuple[Any, Any]]) -> list[Explanation]:
    """What fits, best first, as sentences that begin with a noun; see `made`."""
    return [cause.of(noun) for cause in made(pairs)]


def made(pairs: Sequence[tuple[Any, Any]]) -> list[Cause]:
    """What fits, best first.

    Args:
        pairs: The value that was given and the one that was received, of each leaf of the space in which they differ: arrays of one dtype
            and shape, or texts, which no rule fits.

    Returns:
        A cause for each rule that fits all leaves. Where one pair of numbers is all there is, or a few whole ones, other rules would fit
        them as well, and it is not sure.
    """
    arrays = [(np.asarray(one), np.asarray(other)) for one, other in pairs if not isinstance(one, str) and not isinstance(other, str)]
    if (
        not arrays
        or len(arrays) < len(pairs)
        or not all(one.size for one, _ in arrays)
        or any(one.shape != other.shape or one.dtype.kind in "OUSV" for one, other in arrays)
    ):
        return []
    # Equal numbers of other bits are not rounded, scaled or clipped, and tell nothing of the leaves beside them.
    arrays = [pair for pair in arrays if not _same(*pair)]
    if not arrays:
        return [Cause("SL116", "the same numbers in other bits (-0.0 for 0.0, or another NaN)")]
    with np.errstate(all="ignore"):
        found = [(code, rule(arrays)) for code, rule in _RULES.items()]
        single, few = _single(arrays), _few_whole(arrays)
    weak = {"SL108"} if single else {"SL108", "SL110"} if few else set()
    weak |= {"SL107"} if single and _round(float(single[1]), single[1].dtype.kind) else set()
    weak |= {"SL107"} if few and all(one.dtype.kind != "f" for one, _ in arrays) else set()
    weak |= {"SL104", "SL105", "SL106"} if single and few else set()
    weak |= {"SL111", "SL112", "SL117"} if few else set()
    return [Cause(code, text, code not in weak) for code, text in found if text]


def _single(pairs: list[tuple[Array, Array]]) -> tuple[Any, Any] | None:
    """The number that was given and the one that was received, where all that changed is one such pair, once or again and again."""
    one, other = (np.concatenate([pair[side][_changed(*pair)].astype(np.float64) for pair in pairs]) for side in (0, 1))
    kind = pairs[0][0].dtype.type
    if len(one) and (one == one[0]).all() and (other == other[0]).all():
        return kind(one[0]), kind(other[0])
    return None


#: Whole numbers that changed, from which on they are too many to fit a rule by chance.
_MANY = 8


def _few_whole(pairs: list[tuple[Array, Array]]) -> bool:
    """Whether all that changed are a few whole numbers into others: of small ones, each is some bound, or some factor, of many."""
    numbers = [value[_changed(*pair)].astype(np.float64) for pair in pairs for value in pair]
    return sum(map(len, numbers)) < 2 * _MANY and all(bool((value == np.rint(value)).all()) for value in numbers)


def _each(fits: Callable[[Array, Array], bool], text: str, kinds: str = "fiub") -> _Rule:
    """A rule that looks at each leaf for itself."""
    return lambda pairs: text if all(one.dtype.kind in kinds and fits(one, other) for one, other in pairs) else ""


def _same(one: Array, other: Array) -> bool:
    """The same numbers; NaN is NaN."""
    return bool(np.array_equal(one, other, equal_nan=one.dtype.kind == "f"))


def _as(dtype: Any) -> Callable[[Array, Array], bool]:
    # A dtype that is no coarser changes nothing, so that it explains nothing.
    return lambda one, other: np.dtype(dtype).itemsize < one.dtype.itemsize and _same(one.astype(dtype).astype(one.dtype), other)


def _bfloat16(one: Array, other: Array) -> bool:
    if one.dtype.itemsize < 4:
        return False
    bits = np.ascontiguousarray(one, np.float32).view(np.uint32)
    rounded = bits + np.uint32(0x7FFF) + (bits >> np.uint32(16) & np.uint32(1))
    made = [(some & np.uint32(0xFFFF0000)).view(np.float32).astype(one.dtype) for some in (rounded, bits)]
    return any(_same(np.where(np.isnan(one), one, some), other) for some in made)


def _nan(one: Array, other: Array) -> bool:
    changed = _changed(one, other)
    return bool(np.isnan(other[changed]).all() and not np.isnan(one[changed]).all())


def _changed(one: Array, other: Array) -> npt.NDArray[np.bool_]:
    different: npt.NDArray[np.bool_] = one != other
    if one.dtype.kind == "f":
        different &= ~(np.isnan(one) & np.isnan(other))
    return different


#: Factors that are tried, besides the one that the values themselves say.
_USUAL = (0.5, 2.0, -1.0, 0.1, 10.0, 0.01, 100.0, 1 / 255, 255.0, 0.001, 1000.0)


def _scaled(pairs: list[tuple[Array, Array]]) -> str:
    """One factor for all; of a single number only a round one, since there is always some factor."""
    floats = [pair for pair in pairs if pair[0].dtype.kind == "f"]  # whole numbers tell the factor only roughly
    given, received = (np.concatenate([pair[side].ravel().astype(np.float64) for pair in floats or pairs]) for side in (0, 1))
    real = np.isfinite(given) & np.isfinite(received) & (given != 0)
    if not real.any() or not received[real].any():
        return ""
    largest = int(np.argmax(np.abs(np.where(real, given, 0))))
    factor = float(received[largest] / given[largest])
    near = [usual for usual in _USUAL if abs(factor / usual - 1) < 1e-3 or not floats]
    several = len(np.unique(np.abs(given[real]))) > 1 and bool(floats)
    # Whole and in hundredths, such factors are meant; of others that fit one number nothing follows.
    if not floats and _single(pairs):  # an index, or a count: each is some factor of each
        return ""
    steps = [round(factor, 2), 1 / round(1 / factor)] if abs(factor) > 1e-4 and abs(factor) < 1e4 and round(1 / factor) else []
    rounded = [step for step in steps if step and abs(factor / step - 1) < 1e-6]
    for one in dict.fromkeys([*near, *rounded, *([factor] if several else [])]):
        if one != 1 and all(_times(given_, one, received_) for given_, received_ in pairs):
            return "negated (scaled by -1)" if one == -1 else f"scaled by {one:.6g}"
    return ""


def _times(one: Array, factor: float, other: Array) -> bool:
    if one.dtype.kind == "f":
        return bool(np.allclose(one * one.dtype.type(factor), other, rtol=4 * float(np.finfo(one.dtype).eps), atol=0, equal_nan=True))
    if np.abs(one.astype(np.float64)).max() >= 2.0**53:  # float64 does not tell such numbers from their neighbours
        return False
    exact = one.astype(np.float64) * factor
    return any(_same(some(exact), other.astype(np.float64)) for some in (np.trunc, np.floor, np.rint))


def _clipped(pairs: list[tuple[Array, Array]]) -> str:
    bounds, single = [_bounds(one, other) for one, other in pairs], _single(pairs)
    if any(bound is None for bound in bounds) or (single and not _usual_bound(float(single[0]), float(single[1]), pairs[0][0].dtype.kind)):
        return ""
    lows, highs = ({f"{bound[side]:.6g}" for bound in bounds if bound and bound[side] is not None} for side in (0, 1))
    if len(lows) > 1 or len(highs) > 1:
        return "clipped"
    return "clipped to " + " and ".join([*(f"at least {low}" for low in lows), *(f"at most {high}" for high in highs)])


def _bounds(one: Array, other: Array) -> tuple[Any, Any] | None:
    """The bounds to which a value was clipped, as far as that shows; `None` if it was not."""
    changed = _changed(one, other)
    if one.dtype.kind == "b" or np.isnan(other[changed]).any() or np.isnan(one[changed]).any() or not other.any():
        return None
    found: list[Any] = [None, None]
    for side, mask in enumerate((changed & (one < other), changed & (one > other))):
        if not mask.any():
            continue
        bound = other[mask].flat[0]
        beyond = (one < bound) if side == 0 else (one > bound)
        if not (other[mask] == bound).all() or (beyond & ~mask).any():
            return None
        # One number that is another one now may be anything, but for bounds that people choose.
        if mask.sum() == 1 and not _round(float(bound), one.dtype.kind):
            return None
        found[side] = bound
    return found[0], found[1]


def _usual_bound(given: float, bound: float, kind: str) -> bool:
    """Whether a bound is one that people choose, and brings what was given nearer to zero."""
    if abs(bound) >= abs(given) or given * bound < 0:
        return False
    if kind != "f":  # an index, or a count: a small one is only another one
        return abs(bound) > 1 and _round(bound, kind)
    return not bound or f"{abs(bound):e}".split("e")[0] in ("1.000000", "2.000000", "5.000000")


def _round(number: float, kind: str) -> bool:
    if kind == "f":
        return abs(round(number, 2) - number) <= 1e-6 * abs(number)
    return abs(number) <= 1 or number % 10 == 0 or number in (64, 127, 128, 192, 255)


#: Grids that numbers are quantised to: steps for each unit.
_GRIDS = (*(2.0**k for k in range(-2, 9)), 255.0, 127.0, 127.5)


def _quantised(pairs: list[tuple[Array, Array]]) -> str:
    if all(one.dtype.kind in "iu" and _posterised(one, other) for one, other in pairs):
        return f"quantised, to multiples of {np.gcd.reduce(pairs[0][1], axis=None)}"
    if any(one.dtype.kind != "f" for one, _ in pairs) or max(one.size for one, _ in pairs) < 2:
        return ""
    for grid in _GRIDS:
        if all(_on_grid(one, other, grid) for one, other in pairs):
            return f"quantised to 8 bits, steps of 1/{grid:g}"
    steps = [_shifted_grid(one, other) for one, other in pairs]
    return f"quantised to 8 bits, steps of {steps[0]:.4g}" if all(steps) else ""


def _shifted_grid(one: Array, other: Array) -> float:
    """The step of a grid that lies anywhere, such as over the range of the space, if numbers off it have come to lie on it; else 0."""
    given, values = (value.astype(np.float64).ravel() for value in (one, other))
    distinct = np.unique(values)
    if len(distinct) < _MANY or not np.isfinite(given).all() or not np.isfinite(values).all():
        return 0.0
    span, moved = float(np.ptp(distinct)), np.abs(given - values)
    nearest, least = float(np.diff(distinct).min()), max(span / 255.5, float(moved.max()) * 0.999)
    for parts in range(1, 256):
        if nearest / parts < least:
            break
        step = span / round(span / (nearest / parts))  # the least distance alone is too coarse
        if not _off((distinct - distinct[0]) / step).any():
            return step if _off((given - distinct[0]) / step)[moved > 0].mean() > 0.5 else 0.0
    return 0.0


def _off(steps: npt.NDArray[np.float64]) -> npt.NDArray[np.bool_]:
    """Which numbers are not whole, as far as float32 can tell."""
    return np.asarray(np.abs(steps - np.rint(steps)) >= 0.02)


def _posterised(one: Array, other: Array) -> bool:
    """Whole numbers, as of an image, of which only multiples of one that is greater than 1 are left."""
    if len(np.unique(other)) < 3 or one.size < _MANY:
        return False
    given, values = one.astype(np.int64), other.astype(np.int64)
    step = int(np.gcd.reduce(values, axis=None))
    return step > 1 and (np.array_equal(given // step * step, values) or int(np.abs(given - values).max()) * 2 <= step)


def _on_grid(one: Array, other: Array, grid: float) -> bool:
    given, steps = (value.astype(np.float64) * grid for value in (one, other))
    if not np.isfinite(steps).all() or np.abs(steps - np.rint(steps)).max() > 1e-4 or np.ptp(steps) > 255.5 or not steps.any():
        return False
    inner = (steps != steps.max()) & (steps != steps.min())  # what is beyond the last step is at it
    off = np.abs(given - np.rint(given)) > 1e-4
    # What was at a step before stays there: whole numbers that are others now are not quantised.
    near = np.abs(given - steps) <= np.where(off, 1.001, 1e-3)
    return bool(near[inner].all() and (off[inner].any() or int((off & near).sum()) > 2))


def _channel_axis(one: Array) -> int | None:
    """Which axis of an image its channels are in, counted from the end: the last one, else the first of the last three."""
    return next((axis for axis in (-1, -3) if one.ndim >= 3 and one.shape[axis] in (3, 4)), None)


def _channels(one: Array, other: Array) -> bool:
    axis = _channel_axis(one)
    if axis is None:
        return False
    orders = [[2, 1, 0], [2, 1, 0, 3], [3, 2, 1, 0]]  # the fourth is alpha, which stays where it is, or does not
    return any(_same(one.take(order, axis), other) for order in orders if len(order) == one.shape[axis])


def _mirrored(pairs: list[tuple[Array, Array]]) -> str:
    """Of a stack of frames along the last three axes, which are the image's; the channels are another rule's."""
    if len({one.ndim for one, _ in pairs}) > 1:
        return ""
    for axes in ((-1,), (-2,), (-3,), (-2, -1), (-3, -2), (-3, -1), (-3, -2, -1)):
        if all(_is_mirrored(one, other, axes) for one, other in pairs):
            names = [str(axis + pairs[0][0].ndim) for axis in axes]
            along = f"axis {names[0]}" if len(names) == 1 else f"axes {', '.join(names[:-1])} and {names[-1]}"
            return f"the same numbers in reverse order along {along}"
    return ""


def _is_mirrored(one: Array, other: Array, axes: tuple[int, ...]) -> bool:
    return one.ndim >= 2 and -axes[0] <= one.ndim and axes != (_channel_axis(one),) and _same(np.flip(one, axes), other)


def _axes(one: Array, other: Array) -> bool:
    if one.ndim < 2:
        return False
    # Of a stack of frames the last three axes are the image's.
    fixed, turned = tuple(range(max(0, one.ndim - 3))), range(max(0, one.ndim - 3), one.ndim)
    orders = [(*fixed, *order) for order in itertools.permutations(turned)]
    return any(_same(one.transpose(order).reshape(one.shape), other) for order in orders)


#: Codes and their rules, the most telling first.
_RULES: dict[str, _Rule] = {
    "SL101": _each(lambda one, other: not other.any(), "zero"),
    "SL109": _each(_nan, "NaN", "f"),
    "SL104": _each(_as(np.float16), "rounded to float16", "f"),
    "SL105": _each(_bfloat16, "rounded to bfloat16", "f"),
    "SL106": _each(_as(np.float32), "rounded to float32", "f"),
    "SL107": _scaled,
    "SL108": _clipped,
    "SL110": _quantised,
    "SL111": _each(_channels, "the same image with its channels reversed"),
    "SL112": _each(_axes, "the same numbers with their axes in another order"),
    "SL117": _mirrored,
}
