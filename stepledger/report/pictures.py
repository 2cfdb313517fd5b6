"""Image observations as pictures."""

from __future__ import annotations

import base64
import struct
import zlib
from typing import Any, TypeGuard

import numpy as np
import numpy.typing as npt

__all__ = ["data_uri", "difference", "is_image", "picture"]

#: Longest side of a picture; of a larger image every so many pixels are shown.
_LONGEST = 160

Pixels = npt.NDArray[np.uint8]


def is_image(value: Any) -> TypeGuard[Pixels]:
    """Whether a kept value is an image: uint8, ``(H, W)``, ``(H, W, C)`` or ``(C, H, W)`` with 1, 3 or 4 channels, of 8 by 8 or more."""
    if not isinstance(value, np.ndarray) or value.dtype != np.uint8 or value.ndim not in (2, 3):
        return False
    if value.ndim == 3 and value.shape[-1] not in (1, 3, 4) and value.shape[0] not in (1, 3, 4):
        return False
    height, width = _channels_last(value).shape[:2]
    return bool(min(height, width) >= 8)


def picture(value: npt.NDArray[np.uint8]) -> tuple[Pixels, int]:
    """An image as ``(H, W, 3)``, small enough for a page; and the distance of its pixels in the image.

    Four channels are four frames beside each other, as wrappers stack them.
    """
    image = _channels_last(value)
    apart = -(-max(image.shape[:2]) // _LONGEST)
    image = image[::apart, ::apart]
    if image.shape[2] == 4:
        image = np.concatenate([image[..., number : number + 1] for number in range(4)], axis=1)
    if image.shape[2] == 1:
        image = np.repeat(image, 3, axis=2)
    return np.ascontiguousarray(image), apart


def difference(first: npt.NDArray[np.uint8], second: npt.NDArray[np.uint8]) -> Pixels:
    """Where two images of one shape differ, ``(H, W, 3)``: red, the more the brighter, on a faint first image."""
    one, other = (picture(value)[0].astype(np.int16) for value in (first, second))
    distance = np.abs(one - other).max(axis=2)
    faint = (one.mean(axis=2) * 0.3).astype(np.uint8)
    shown = np.repeat(faint[..., None], 3, axis=2)
    unequal = distance > 0
    shown[unequal] = np.stack([np.clip(110 + distance, 0, 255), 30 + distance // 8, 30 + distance // 8], axis=2)[unequal]
    return shown


def data_uri(pixels: Pixels) -> str:
    """A picture, ``(H, W, 3)``, as the URI of a PNG that holds it."""
    height, width, _ = pixels.shape
    above = np.concatenate([np.zeros_like(pixels[:1]), pixels[:-1]])
    rows = np.concatenate([np.full((height, 1), 2, np.uint8), (pixels - above).reshape(height, -1)], axis=1)  # filter 2: less than above
    parts = [
        _chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)),
        _chunk(b"IDAT", zlib.compress(rows.tobytes(), 9)),
        _chunk(b"IEND", b""),
    ]
    return "data:image/png;base64," + base64.b64encode(b"\x89PNG\r\n\x1a\n" + b"".join(parts)).decode()


def _chunk(name: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))


def _channels_last(value: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint8]:
    if value.ndim == 2:
        return value[..., None]
    return value if value.shape[-1] in (1, 3, 4) else np.moveaxis(value, 0, -1)
