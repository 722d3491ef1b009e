"""What was compared with what in an incident: its observations, put together by the work that several ranks did.

The verdict is decided in `verdict.py`, by rules, and is not decided again here. This is for showing: the command line, the console and
the reports draw the same comparisons, and none of them says more than the observations carry.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

from bitwitness.evidence import NONFINITE


class Seen(Protocol):
    """An observation: `evidence.Observation`, or the same as a database keeps it."""

    @property
    def check(self) -> str:
        """By which check."""

    @property
    def step(self) -> int:
        """In which step."""

    @property
    def rank(self) -> int:
        """Whose device produced the value."""

    @property
    def place(self) -> str:
        """Where the value was seen."""

    @property
    def value(self) -> str:
        """The digest, or `NONFINITE`; "" for none."""

    @property
    def repeats(self) -> tuple[str, ...]:
        """Digests of repetitions of the same work."""

    @property
    def owner(self) -> int | None:
        """Whose micro-batch it was; None where each rank held its own."""

    @property
    def micro(self) -> int | None:
        """Which micro-batch of the step."""

    @property
    def error(self) -> str:
        """Why there is no value."""

    @property
    def detail(self) -> Mapping[str, Any]:
        """What a person needs to see next."""


One = TypeVar("One", bound=Seen)


@dataclass(frozen=True, slots=True)
class Comparison(Generic[One]):
    """Observations of one thing that ought to be equal on all ranks: a micro-batch of an owner, or what each rank held.

    Attributes:
        check, step: by which, and in which step.
        owner, micro: whose micro-batch; None where each rank's own copy was compared.
        place: where the values were seen; "" for a micro-batch.
        seen: in order of rank, the owner first.
    """

    check: str
    step: int
    owner: int | None
    micro: int | None
    place: str
    seen: tuple[One, ...]

    @property
    def values(self) -> tuple[str, ...]:
        """All different results, in the order of their appearance."""
        return tuple(dict.fromkeys(value for one in self.seen for value in runs(one)))

    @property
    def agrees(self) -> bool:
        """Whether every run that there was gave one finite result, and none failed."""
        return len(self.values) < 2 and NONFINITE not in self.values and not any(one.error for one in self.seen)

    def usual(self, node_of: Callable[[int], str]) -> str | None:
        """The value that most nodes produced; None where no value leads, or it is not finite."""
        nodes: dict[str, set[str]] = defaultdict(set)
        for one in self.seen:
            for value in runs(one):
                nodes[value].add(node_of(one.rank))
        counts = Counter({value: len(where) for value, where in nodes.items()}).most_common(2)
        if not counts or (len(counts) == 2 and counts[0][1] == counts[1][1]) or counts[0][0] == NONFINITE:
            return None
        return counts[0][0]


def compared(observations: Iterable[One]) -> list[Comparison[One]]:
    """The comparisons of an incident: what each rank held first, then micro-batches, each in a fixed order."""
    places: dict[tuple[int, str, str], list[One]] = defaultdict(list)
    cases: dict[tuple[int, str, int, int], list[One]] = defaultdict(list)
    for one in observations:
        if one.owner is None:
            places[one.step, one.check, one.place].append(one)
        else:
            cases[one.step, one.check, one.owner, -1 if one.micro is None else one.micro].append(one)
    found = [
        Comparison(check, step, None, None, place, tuple(sorted(group, key=lambda one: one.rank)))
        for (step, check, place), group in sorted(places.items())
    ]
    for (step, check, owner, micro), group in sorted(cases.items()):
        ordered = sorted(group, key=lambda one, owner=owner: (one.rank != owner, one.rank))  # type: ignore[misc]  # a default binds it now
        found.append(Comparison(check, step, owner, None if micro < 0 else micro, "", tuple(ordered)))
    return found


def runs(one: Seen) -> tuple[str, ...]:
    """The value and its repeats: every time this rank did this work."""
    return tuple(value for value in (one.value, *one.repeats) if value)


def differences(seen: Sequence[Seen]) -> Iterator[str]:
    """In what the runs of a micro-batch differ from training: the loss, and which gradients."""
    told = [one.detail for one in seen if one.detail]
    if any(detail.get("loss_differs") for detail in told):
        yield "differs in the loss"
    names = list(dict.fromkeys(name for detail in told for name in tensors(detail)))
    count = max((_whole(detail.get("gradients_differing")) for detail in told), default=0)
    if names:
        yield f"differs in {max(count, len(names))} gradients: {some(names)}"


def about(detail: Mapping[str, Any]) -> str:
    """What is said beside a value that a rank held."""
    names = tensors(detail)
    if names:
        return f"differs in {detail.get('differing', len(names))} tensor(s): {some(names)}"
    return ", ".join(f"{key.replace('_', ' ')} {value}" for key, value in detail.items())


def tensors(detail: Mapping[str, Any]) -> list[str]:
    """Names of the tensors that differ."""
    names = detail.get("differs", ())
    return [str(name) for name in names] if isinstance(names, list | tuple) else []


def some(names: Sequence[str]) -> str:
    """The first of them, and how many more there are."""
    return ", ".join(names[:4]) + (f", and {len(names) - 4} more listed in incident.json" if len(names) > 4 else "")


def _whole(value: Any) -> int:
    return value if isinstance(value, int) else 0
