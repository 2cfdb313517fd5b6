"""Image observations as pictures: the pixels that were recorded, and where they differ."""

from __future__ import annotations

import base64
import io

import numpy as np
import pytest

from stepledger.report.pictures import data_uri, difference, is_image, picture


@pytest.mark.parametrize(
    ("shape", "dtype", "is_one"),
    [
        ((84, 84), "u1", True),
        ((84, 84, 1), "u1", True),
        ((84, 84, 3), "u1", True),
        ((84, 84, 4), "u1", True),
        ((3, 84, 84), "u1", True),
        ((4, 84, 84), "u1", True),
        ((84, 84, 3), "f4", False),
        ((84, 84, 7), "u1", False),
        ((84,), "u1", False),
        ((4, 3), "u1", False),
        ((2, 84, 84, 3), "u1", False),
    ],
)
def test_what_an_image_is(shape: tuple[int, ...], dtype: str, is_one: bool) -> None:
    assert is_image(np.zeros(shape, dtype)) == is_one


def test_a_picture_holds_the_pixels_that_were_recorded() -> None:
    image = pytest.importorskip("PIL.Image")
    pixels = np.random.default_rng(0).integers(0, 256, (20, 30, 3)).astype(np.uint8)
    shown, apart = picture(pixels)
    data = base64.b64decode(data_uri(shown).removeprefix("data:image/png;base64,"))
    assert np.array_equal(np.asarray(image.open(io.BytesIO(data))), pixels)
    assert apart == 1
    assert np.array_equal(picture(np.moveaxis(pixels, -1, 0))[0], pixels)  # channels first
    grey, _ = picture(pixels[..., 0])
    assert np.array_equal(grey[..., 2], pixels[..., 0])


def test_stacked_frames_are_beside_each_other_and_large_images_are_thinned() -> None:
    stack = np.random.default_rng(0).integers(0, 256, (20, 30, 4)).astype(np.uint8)
    shown, _ = picture(stack)
    assert shown.shape == (20, 120, 3)
    assert np.array_equal(shown[:, 30:60, 0], stack[..., 1])
    shown, apart = picture(np.zeros((480, 640, 3), np.uint8))
    assert (shown.shape, apart) == ((120, 160, 3), 4)


def test_unequal_pixels_are_red_and_equal_ones_are_not() -> None:
    first = np.full((10, 12, 3), 200, np.uint8)
    second = first.copy()
    second[3, 4, 1] += 1
    second[5, 6] = 0
    shown = difference(first, second)
    red = shown[..., 0].astype(int) - shown[..., 1]
    assert np.argwhere(red > 50).tolist() == [[3, 4], [5, 6]]
    assert red[5, 6] > red[3, 4]  # the more, the brighter
