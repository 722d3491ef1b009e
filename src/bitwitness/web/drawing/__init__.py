"""Where everything in a figure lies, as numbers: what the templates draw and the tests measure. No markup, no colour, no I/O.

Geometry lies apart from the templates because a figure that lies is worse than none: that a gap is never drawn as passed, and that a
rank is drawn once, can be tested here over any input.
"""

from __future__ import annotations

from bitwitness.web.drawing.bars import Bar, bar
from bitwitness.web.drawing.chart import Chart, axis, chart
from bitwitness.web.drawing.fills import FILLS, MEANINGS
from bitwitness.web.drawing.ledger import Ledger, ledger
from bitwitness.web.drawing.lifeline import Lifeline, lifeline
from bitwitness.web.drawing.ring import Ring, ring

__all__ = [
    "FILLS",
    "MEANINGS",
    "Bar",
    "Chart",
    "Ledger",
    "Lifeline",
    "Ring",
    "axis",
    "bar",
    "chart",
    "ledger",
    "lifeline",
    "ring",
]
