"""How the states of the ledger are filled, once for all figures, so that a gap looks the same wherever it is seen.

The names are those of patterns in the template of symbols. `passed` alone is plain: the others have a pattern, so that they differ
for people who see no colours, and on paper.
"""

from __future__ import annotations

from collections.abc import Mapping

from bitwitness.store.pages import Cell

FILLS: Mapping[Cell, str] = {
    "passed": "currentColor",
    "partly": "url(#fill-partly)",
    "unverified": "url(#fill-unverified)",
    "failed": "url(#fill-failed)",
    "gap": "url(#fill-gap)",
}
MEANINGS: Mapping[Cell, str] = {
    "passed": "verified",
    "partly": "verified for some of these ranks or steps, a gap for the others",
    "unverified": "looked at, and could not be verified",
    "failed": "did not agree",
    "gap": "nothing is on record: not checked, as far as anybody knows",
}
