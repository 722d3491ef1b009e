"""What the controller keeps of devices: their serial numbers and slices, which were taken out, and which came back.

Apart from the rest of what is kept because it is about silicon, which outlives incidents, nodes and names.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from bitwitness.fleet.decision import Proposal
from bitwitness.fleet.identity import Condemned, Return
from bitwitness.fleet.state import State


class Devices:
    """The records of devices in a state."""

    def __init__(self, state: State) -> None:
        self.state = state

    def add_serials(self, serials: Mapping[str, str]) -> None:
        """Note which serial number a device has."""
        for device, serial in serials.items():
            self.state.write("INSERT OR REPLACE INTO serials VALUES (?, ?)", (device, serial))

    def serials(self) -> dict[str, str]:
        """Which serial number each device has, as far as a signal has told."""
        return dict(self.state.read("SELECT device, serial FROM serials"))

    def add_aliases(self, aliases: Mapping[str, str]) -> None:
        """Note which slice is of which device."""
        for alias, device in aliases.items():
            self.state.write("INSERT OR REPLACE INTO aliases VALUES (?, ?)", (alias, device))

    def kin(self) -> Callable[[str], tuple[str, ...]]:
        """A function that says which other names the silicon of a device has: the device of a slice, and all its slices."""
        parents = dict(self.state.read("SELECT alias, device FROM aliases ORDER BY alias"))

        def of(device: str) -> tuple[str, ...]:
            parent = parents.get(device, device)
            names = (parent, *(alias for alias, one in parents.items() if one == parent))
            return tuple(name for name in names if name != device)

        return of

    def condemn(self, proposal: Proposal) -> None:
        """Its devices were taken out: they are recognised when they come back. A processor cannot be, it has no identity."""
        kin, serials = self.kin(), self.serials()
        for device in proposal.devices:
            if "/cpu-" not in device:
                serial = next((serials[name] for name in (device, *kin(device)) if name in serials), "")
                row = (device, serial, proposal.node, proposal.incident, self.state.stamp())
                self.state.write("INSERT OR REPLACE INTO condemned VALUES (?, ?, ?, ?, ?)", row)

    def condemned(self) -> list[Condemned]:
        """Devices that were taken out and that nobody has cleared."""
        rows = self.state.read("SELECT device, serial, node, incident, time FROM condemned ORDER BY time, device")
        kin = self.kin()
        return [Condemned(device, serial, node, by, at, kin(device)) for device, serial, node, by, at in rows]

    def add_return(self, back: Return) -> bool:
        """A condemned device was seen again; whether that is new."""
        was, seen = back.condemned, back.sighting
        row = (was.device, was.incident, seen.node, was.time, self.state.stamp(), back.text)
        return self.state.write("INSERT OR IGNORE INTO returns VALUES (?, ?, ?, ?, ?, ?)", row) > 0

    def returns(self) -> list[dict[str, str]]:
        """Devices that came back and that nobody has cleared."""
        names = ("device", "incident", "node", "since", "time", "text")
        rows = self.state.read("SELECT device, incident, node, since, time, text FROM returns ORDER BY time")
        return [dict(zip(names, row, strict=True)) for row in rows]

    def forget(self, node: str, devices: Iterable[str]) -> None:
        """A person has cleared a node: its strikes count no more, and its devices may come back."""
        names = set(devices)
        names |= {row[0] for row in self.state.read("SELECT device FROM condemned WHERE node = ?", (node,))}
        names |= {row[0] for row in self.state.read("SELECT device FROM returns WHERE node = ?", (node,))}
        now = self.state.stamp()
        self.state.write("UPDATE namings SET cleared = ? WHERE node = ? AND cleared IS NULL", (now, node))
        for device in names:
            self.state.write("UPDATE namings SET cleared = ? WHERE device = ? AND cleared IS NULL", (now, device))
            self.state.write("DELETE FROM condemned WHERE device = ?", (device,))
            self.state.write("DELETE FROM returns WHERE device = ?", (device,))
