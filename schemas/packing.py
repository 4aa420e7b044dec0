"""The compression of long texts in the database, since most outputs of programs are repetitive."""

import base64
import binascii
import zlib
from typing import Any

from sqlalchemy import Text
from sqlalchemy.types import TypeDecorator

LONG = 4096
"""Texts of at least this many characters are compressed."""
MARK = "\x01z:"
"""The beginning of a compressed text."""
PIECE = 3 << 19
"""Characters or bytes that are encoded in one step, during which no other thread runs. The number is divisible by three
because base64 encodes three bytes at a time. Much smaller pieces would fragment the heap."""


class Packed(TypeDecorator[str]):
    """A column of text that stores long values compressed."""

    impl = Text
    cache_ok = True

    def process_bind_param(self, value: str | None, _dialect: Any) -> str | None:
        """Compress a text on its way into the database."""
        return None if value is None else pack(value)

    def process_result_value(self, value: str | None, _dialect: Any) -> str | None:
        """Decompress a text on its way out of the database."""
        return None if value is None else unpack(value)


def pack(text: str) -> str:
    """The text as it is stored. A text that begins with the mark is always packed, so that `unpack` restores it."""
    marked = text.startswith(MARK)
    if len(text) < LONG and not marked:
        return text
    compressor, size, pieces = zlib.compressobj(1), 0, []
    for start in range(0, len(text), PIECE):
        piece = text[start : start + PIECE].encode()
        size += len(piece)
        pieces.append(compressor.compress(piece))
    data = b"".join([*pieces, compressor.flush()])
    if not marked and 4 * len(data) > 3 * size:  # as base64 it would be longer than the text
        return text
    encoded = (base64.b64encode(data[start : start + PIECE]).decode() for start in range(0, len(data), PIECE))
    return "".join([MARK, *encoded])


def unpack(stored: str) -> str:
    """The text that `pack` was given."""
    if not stored.startswith(MARK):
        return stored
    try:
        return zlib.decompress(base64.b64decode(stored[len(MARK) :], validate=True)).decode()
    except (binascii.Error, zlib.error, UnicodeDecodeError):  # a row of an older version may begin with the mark
        return stored
