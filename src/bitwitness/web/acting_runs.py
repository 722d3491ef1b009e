"""Acts on a run: clearing its quarantine, and saying what an incident was. They change files of the run and ask no cluster."""

from __future__ import annotations

import json
import shlex
from dataclasses import dataclass
from pathlib import Path

from bitwitness.errors import ConfigurationError, NotFound, RunFilesError
from bitwitness.fleet.asking import digest_of
from bitwitness.runfiles import Quarantine, RunFiles, read_incident
from bitwitness.runfiles.judging import JUDGED, JUDGEMENTS, last_judgement, note_judgement, said
from bitwitness.web import links
from bitwitness.web.acting_offers import Choice, Done, Offer, Sent, sentence, writable

_SHOWN = 200


def run_of(path: Path, name: str, runs: tuple[Path, ...], parents: tuple[Path, ...]) -> RunFiles:
    """The files of a run on which this console may act: one that it was started with, and still the same run.

    Raises:
        ConfigurationError: it was not started with it.
        NotFound: another run lies there, or none.
    """
    real = path.resolve()
    folders = {one.resolve() for one in parents}
    # The importer finds runs up to two levels below a folder of runs.
    if real not in {one.resolve() for one in runs} and not {real.parent, real.parent.parent} & folders:
        raise ConfigurationError(
            f"this console was not started with {path}: it acts on runs of its own machine only, `bitwitness serve RUN_DIR --allow-actions`"
        )
    files = RunFiles(path)
    if not path.is_dir() or path.is_symlink():
        raise NotFound(f"{path} is no directory any more")
    if name:
        try:
            there = str(files.read_run().get("run", ""))
        except RunFilesError as error:
            raise NotFound(f"{path} cannot be read: {error}") from error
        if there != name:
            raise NotFound(f"another run lies at {path} now: nothing is done to that")
    return files


@dataclass(frozen=True, slots=True)
class Clearing:
    """Take devices and nodes out of the quarantine of a run.

    Attributes:
        files: of the run.
        key: of the run in the database.
    """

    files: RunFiles
    key: int

    def offer(self) -> Offer:
        """Who is in quarantine, to be chosen from."""
        held = self.files.quarantine.read()
        names = held.names()
        if not names:
            raise ConfigurationError(f"nobody is in the quarantine of {self.files.path}: nothing is to be cleared")
        words = ("bitwitness", "quarantine", "clear", str(self.files.path), "NAME...", "--reason", "...")
        more = (
            (f"{len(names) - _SHOWN} more are in quarantine: clear them on the command line.",)
            if len(names) > _SHOWN
            else ()
        )
        return Offer(
            title="Clear a quarantine",
            verb="Clear what is chosen",
            text="Devices and nodes that are chosen may join the run again, and their strikes are forgotten. A node is not cleared with its devices.",
            back=links.run(self.key),
            digest=digest_of((), str(self.files.path), json.dumps({**held.to_json(), "log": []}, sort_keys=True)),
            checks=(writable(self.files.quarantine.path, "the quarantine"),),
            calls=(shlex.join(words),),
            caller="This console does what this command does, now. No cluster is asked.",
            facts=(("Run", str(self.files.path)),),
            told=("Nobody is told by a message; the log of the quarantine has it.",),
            warnings=more,
            choices=tuple(Choice("name", name, _about(held, name), many=True) for name in names[:_SHOWN]),
            command=shlex.join(words),
        )

    def do(self, offer: Offer, sent: Sent, who: str) -> Done:
        """Clear what was chosen."""
        chosen, offered = sent.chosen.get("name", ()), {one.value for one in offer.choices}
        if not chosen or not set(chosen) <= offered:
            raise ConfigurationError("choose who may join again")
        entries = self.files.quarantine.clear(chosen, who=who, reason=sent.why)
        named = ", ".join(str(one["name"]) for one in entries)
        return Done(200, "Cleared", f"{named}: may join again, and no strikes are left", "yes", offer.back)


def _about(held: Quarantine, name: str) -> str:
    """What a quarantine holds of a name."""
    parts = [
        f"denied as a {kind} since {one.since} ({one.reason})"
        for kind, one in (("node", held.denied_nodes.get(name)), ("device", held.denied_devices.get(name)))
        if one is not None
    ]
    strikes = len(held.strikes.get(name, ()))
    parts += [f"{strikes} strike{'s' if strikes > 1 else ''}"] if strikes else []
    return f"{name}: {', '.join(parts)}"


@dataclass(frozen=True, slots=True)
class Judging:
    """Say what an incident was.

    Attributes:
        files: of the run.
        key: of the run in the database.
        incident: its id.
    """

    files: RunFiles
    key: int
    incident: str

    def offer(self) -> Offer:
        """What was found, and what has been said of it."""
        folder = self.files.path / "incidents" / self.incident
        if folder not in self.files.incidents():
            raise NotFound(f"{self.files.path} has no incident {self.incident[:60]!r}")
        found = read_incident(folder)
        last = last_judgement(self.files.actions(self.incident))
        before = (
            f"{last['judgement']}, by {last.get('who', '?')} at {last.get('time', '?')}: {last.get('why', '')}"
            if last
            else "nobody has"
        )
        words = ("bitwitness", "incident", "judge", str(self.files.path), self.incident, "--as", "...", "--why", "...")
        line = {"action": JUDGED, "judgement": "...", "who": "you", "why": "..."}
        return Offer(
            title=f"Judge incident {self.incident}",
            verb="Keep this judgement",
            text=_JUDGING,
            back=links.incident(self.key, self.incident),
            digest=digest_of((), str(folder), json.dumps(dict(last or {}), sort_keys=True, default=str)),
            checks=(writable(folder / "actions.jsonl", "beside the incident"),),
            calls=(f"{folder / 'actions.jsonl'} << {json.dumps(line)}",),
            caller="This console writes this line, now. No cluster is asked.",
            facts=(("Found", found.verdict.headline()), ("Judged before", before), ("Run", str(self.files.path))),
            told=("Nobody is told by a message.",),
            choices=tuple(Choice("judgement", word, _MEANS[word]) for word in JUDGEMENTS),
            command=shlex.join(words),
        )

    def do(self, offer: Offer, sent: Sent, who: str) -> Done:
        """Note it."""
        chosen = sent.chosen.get("judgement", ())
        if len(chosen) != 1:
            raise ConfigurationError("choose what it was")
        # Records have `false alarm`, command lines `false-alarm`: a program may send either.
        done = note_judgement(self.files, self.incident, said(chosen[0].replace(" ", "-")), sent.why, who)
        return Done(200, "Judged", sentence(done.text), "yes" if done.new else "no", offer.back)


_JUDGING = (
    "It is kept beside the incident with your name, and changes nothing of what was found. The last word counts. By a false alarm or a drill "
    "a controller of the fleet that watches this run ends what it has proposed and not begun, and counts no strike; a node that is out "
    "already stays out until a person returns it."
)
_MEANS = {
    "confirmed": "confirmed: a test, a repair or the vendor has shown that it was so",
    "false-alarm": "a false alarm: nothing was wrong with the hardware",
    "drill": "a drill: somebody has injected a fault",
}
