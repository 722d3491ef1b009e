"""What a word of bits is as a number, without torch and numpy: a report is judged again where neither is installed."""

from __future__ import annotations

import math
import struct
from bisect import bisect_right

from bitwitness.compare.records import DECADES

_WIDTHS = {
    "bool": 8,
    "uint8": 8,
    "int8": 8,
    "int16": 16,
    "uint16": 16,
    "int32": 32,
    "uint32": 32,
    "int64": 64,
    "uint64": 64,
    "float8_e4m3fn": 8,
    "float8_e5m2": 8,
    "float16": 16,
    "bfloat16": 16,
    "float32": 32,
    "float64": 64,
}
_MANTISSAS = {"float8_e4m3fn": 3, "float8_e5m2": 2, "float16": 10, "bfloat16": 7, "float32": 23, "float64": 52}


def width(dtype: str) -> int:
    """Bits of an element; 64 of a dtype that is not known."""
    return _WIDTHS.get(dtype, 64)


def mantissa(dtype: str) -> int:
    """Bits of the mantissa, which are the lowest; 0 of what has none."""
    return _MANTISSAS.get(dtype, 0)


def magnitude(word: int, dtype: str) -> float | None:
    """The absolute value of the number with these bits; None of a dtype that is not known."""
    match dtype:
        case "bfloat16":
            found = _float(word << 16, "<I", "<f")
        case "float16":
            found = _float(word, "<H", "<e")
        case "float8_e5m2":
            found = _float(word << 8, "<H", "<e")
        case "float32":
            found = _float(word, "<I", "<f")
        case "float64":
            found = _float(word, "<Q", "<d")
        case "float8_e4m3fn":
            found = _e4m3(word & 0x7F)
        case "bool" | "uint8" | "uint16" | "uint32" | "uint64":
            found = float(word)
        case "int8" | "int16" | "int32" | "int64":
            top = 1 << (width(dtype) - 1)
            found = float(word - 2 * top if word & top else word)
        case _:
            return None
    return abs(found)


def range_of(size: float) -> int:
    """The number of the range of `records.DECADES` in which a magnitude lies."""
    if size == 0:
        return 0
    return len(DECADES) - 1 if math.isnan(size) else bisect_right(DECADES, size, lo=2) - 1


def _float(word: int, integer: str, real: str) -> float:
    try:
        (found,) = struct.unpack(real, struct.pack(integer, word))
    except struct.error:  # more bits than the dtype has: a damaged record
        return math.nan
    return float(found)


def _e4m3(word: int) -> float:
    exponent, fraction = word >> 3, word & 7
    if word == 0x7F:
        return math.nan
    return math.ldexp(fraction / 8, -6) if exponent == 0 else math.ldexp(1 + fraction / 8, exponent - 7)
