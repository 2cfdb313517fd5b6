"""Checksums (CRC-32, as in zip files) of parts, put together to that of the whole."""

from __future__ import annotations

from functools import cache

__all__ = ["crc32_joined"]

#: zlib's polynomial, its lowest bit the highest power.
_POLYNOMIAL = 0xEDB88320


def crc32_joined(first: int, second: int, length: int) -> int:
    """The CRC-32 of two pieces of data, the one behind the other.

    Args:
        first: Of the one.
        second: Of the other.
        length: Bytes of the other.
    """
    # Appending a byte of zeros is a linear map over GF(2) of the 32 bits, so that appending many is a power of it.
    bit = 0
    while length:
        if length & 1:
            first = _times(_zeros(bit), first)
        length, bit = length >> 1, bit + 1
    return first ^ second


@cache
def _zeros(bit: int) -> tuple[int, ...]:
    """The matrix, as the images of the 32 bits, that appends ``1 << bit`` bytes of zeros."""
    if bit == 0:
        matrix = tuple(_POLYNOMIAL if one == 0 else 1 << (one - 1) for one in range(32))  # a bit of zeros
        for _ in range(3):
            matrix = _squared(matrix)
        return matrix
    return _squared(_zeros(bit - 1))


def _squared(matrix: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(_times(matrix, column) for column in matrix)


def _times(matrix: tuple[int, ...], vector: int) -> int:
    result = 0
    for column in matrix:
        if vector & 1:
            result ^= column
        vector >>= 1
    return result
