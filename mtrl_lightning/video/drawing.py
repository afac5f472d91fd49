"""Labels on images, and images side by side."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence

from PIL import Image, ImageDraw, ImageFont

SHADE = (0, 0, 0, 150)
"""Background of labels, for readability on any image: semi-transparent black."""
LINES_PER_HEIGHT = 19
"""Number of text lines that fit into the height of an image."""
MIN_TEXT_HEIGHT = 10
"""Minimum font size in pixels for readable text."""
MAX_WIDTH = 1920
"""Largest width in pixels of images side by side."""


def labelled(image: Image.Image, lines: Sequence[str]) -> Image.Image:
    """Return a copy of an image with lines of text along its upper edge."""
    size = max(MIN_TEXT_HEIGHT, image.height // LINES_PER_HEIGHT)
    margin, height = size // 3, round(1.25 * size)
    drawn = image.copy()
    draw = ImageDraw.Draw(drawn, "RGBA")
    draw.rectangle((0, 0, image.width, 2 * margin + height * len(lines)), fill=SHADE)
    for row, text in enumerate(lines):
        draw.text((margin, margin + row * height), text, font=_font(size), fill="white")
    return drawn


@functools.cache
def _font(size: int) -> ImageFont.FreeTypeFont | ImageFont.ImageFont:
    return ImageFont.load_default(size)


class Mosaic:
    """Images of equal size side by side.

    Args:
        num_cells: number of images.
        width: width of an image in pixels.
        height: height of an image in pixels.
    """

    def __init__(self, num_cells: int, width: int, height: int) -> None:
        self.columns = math.ceil(math.sqrt(num_cells))
        self.rows = math.ceil(num_cells / self.columns)
        scale = min(1.0, MAX_WIDTH / (self.columns * width))
        # the video format requires even sizes
        self.cell = (2 * round(scale * width / 2), 2 * round(scale * height / 2))
        """Width and height of an image in the mosaic."""

    def joined(self, cells: Sequence[Image.Image]) -> Image.Image:
        """Return all images as one, row by row."""
        width, height = self.cell
        image = Image.new("RGB", (self.columns * width, self.rows * height))
        for index, cell in enumerate(cells):
            row, column = divmod(index, self.columns)
            image.paste(cell, (column * width, row * height))
        return image
