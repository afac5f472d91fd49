"""Labels on images, and images side by side."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence

from PIL import Image, ImageDraw, ImageFont

SHADE = (0, 0, 0, 150)
"""Behind the labels, so that they can be read on any image: black, partly transparent."""
TEXT = (255, 255, 255, 255)
LINES_PER_HEIGHT = 19
"""How many lines of text an image's height has room for."""
MIN_TEXT_HEIGHT = 10
"""Pixels below which text cannot be read."""
MAX_WIDTH = 1920
"""Pixels of many images side by side: a screen's."""
MIN_CELL_WIDTH = 160
"""Pixels below which an image among others shows nothing."""


def labelled(image: Image.Image, lines: Sequence[Sequence[str]]) -> Image.Image:
    """Return an image with lines of text along its upper edge.

    Args:
        image: it stays as it is.
        lines: of text in parts, the most important first; those that do not fit are left out.
    """
    size = max(MIN_TEXT_HEIGHT, image.height // LINES_PER_HEIGHT)
    font = _font(size)
    margin = size // 3
    height = round(1.25 * size)
    drawn = image.copy()
    draw = ImageDraw.Draw(drawn, "RGBA")
    draw.rectangle((0, 0, image.width, 2 * margin + height * len(lines)), fill=SHADE)
    for row, parts in enumerate(lines):
        text = parts[0]
        for part in parts[1:]:
            longer = f"{text}   {part}" if part else text
            if font.getlength(longer) <= image.width - 2 * margin:
                text = longer
        draw.text((margin, margin + row * height), text, font=font, fill=TEXT)
    return drawn


@functools.cache
def _font(size: int) -> ImageFont.FreeTypeFont | ImageFont.ImageFont:
    return ImageFont.load_default(size)


class Mosaic:
    """Images of equal size side by side.

    Args:
        num_cells: number of images.
        width: pixels of one of them.
        height: pixels of one of them.
    """

    def __init__(self, num_cells: int, width: int, height: int) -> None:
        square = math.ceil(math.sqrt(num_cells))
        self.columns = min(
            range(square, square + 3), key=lambda columns: (-num_cells % columns, columns)
        )
        self.rows = math.ceil(num_cells / self.columns)
        fitting = max(min(MIN_CELL_WIDTH, width), MAX_WIDTH // self.columns)
        scale = min(1.0, fitting / width)
        self.cell = (_even(width * scale), _even(height * scale))
        """Width and height of an image among the others."""

    def shrunk(self, image: Image.Image) -> Image.Image:
        """Return an image at the size that it has among the others."""
        return image if image.size == self.cell else image.resize(self.cell)

    def joined(self, cells: Sequence[Image.Image]) -> Image.Image:
        """Return one image of all, row by row."""
        width, height = self.cell
        whole = Image.new("RGB", (self.columns * width, self.rows * height))
        for index, cell in enumerate(cells):
            row, column = divmod(index, self.columns)
            whole.paste(cell, (column * width, row * height))
        return whole


def _even(pixels: float) -> int:
    """Return an even number, as the video's format needs it."""
    return max(2, 2 * round(pixels / 2))
