"""How many tests `bitwitness find-bad` takes, beside what any search would need: simulated nodes, every number from a seed.

    python benchmarks/find_bad.py [--nodes 1000] [--trials 20] [--seed 0] [--confidence 0.99] [--rows REGEX] [--json]

Columns: mean tests; the bound, and the mean as its multiple; the counting bound alone, which knows neither controls nor certificates,
and the multiple of that; mean rounds; how many of all bad ones were found; how many others were accused, in all trials. Where the rate is below 0.1
it is given (`--rate`), as a user must, and there are three trials at most. `k of k` says that --max-bad was given, `trusted` that --trust-test was: the
bound is then the counting bound, as nobody need be told from a test that fails by itself. See bitwitness.scan.groups.bound for what is proven.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from bitwitness.scan.groups.bound import bound
from bitwitness.scan.groups.planning import Planner, Settings
from bitwitness.scan.groups.simulated import FakeGroups

RATES = (1.0, 0.5, 0.1, 0.01, 0.001)
COUNTS = (1, 2, 3, 5)
_RARE_TRIALS = 3  # each of thousands of tests


@dataclass(frozen=True)
class Row:
    """One kind of trial."""

    name: str
    nodes: int
    faults: Callable[[random.Random, int], dict[str, Any]]
    bad: int = 0
    lowest: float = 1.0
    settings: Mapping[str, Any] | None = None


def bad_nodes(count: int, *rates: float) -> Callable[[random.Random, int], dict[str, Any]]:
    """So many bad nodes, each with one of these rates."""
    return lambda rng, size: {"bad": {node: rng.choice(rates) for node in rng.sample(range(size), count)}}


def bad_link(rate: float) -> Callable[[random.Random, int], dict[str, Any]]:
    """One bad link."""
    return lambda rng, size: {"links": {tuple(sorted(rng.sample(range(size), 2))): rate}}


def by_itself(rate: float) -> Callable[[random.Random, int], dict[str, Any]]:
    """A workload that fails at this rate whatever the group."""
    return lambda *_: {"by_itself": rate}


def no_faults(*_: Any) -> dict[str, Any]:
    """Healthy nodes."""
    return {}


def rows(size: int) -> Iterator[Row]:
    """The trials of the table."""
    yield Row("healthy", size, no_faults)
    for rate in RATES:
        given = {"rate": rate} if rate < 0.1 else {}
        for count in COUNTS:
            for trusted in (False, True):
                for known in (True, False):
                    yield Row(
                        f"{f'{count} of {count}' if known else count} bad q={rate:g}{' trusted' if trusted else ''}",
                        size,
                        bad_nodes(count, rate),
                        count,
                        rate,
                        {**given, "trust_test": trusted, **({"max_bad": count} if known else {})},
                    )
    yield Row("3 bad q mixed 0.01 to 1", size, bad_nodes(3, 1.0, 0.1, 0.01), 3, 0.01, {"rate": 0.01})
    for rate in (1.0, 0.3):
        yield Row(f"bad link q={rate:g}", size, bad_link(rate), 1, rate)
    for rate in (1.0, 0.9, 0.5, 0.1):
        yield Row(f"fails by itself r={rate:g}", size, by_itself(rate))
    for design in ("pairs", "grid"):
        yield Row(f"2 bad q=1 {design}", size, bad_nodes(2, 1.0), 2, 1.0, {"design": design})


def measured(row: Row, trials: int, confidence: float, seed: int) -> dict[str, Any]:
    """The trials of one row."""
    tests = rounds = right = accused = bad = 0
    trials = trials if row.lowest >= 0.1 else min(trials, _RARE_TRIALS)
    began = time.process_time()
    for trial in range(trials):
        given = row.faults(random.Random(f"{seed}/{trial}/faults"), row.nodes)
        planner = Planner(Settings(row.nodes, confidence, seed=seed + trial, **(row.settings or {})))
        fake = FakeGroups(seed=seed * 1_000_003 + trial, **given)
        fake.search(planner)
        found = {tuple(planner.nodes_of(fault.nodes)) for fault in planner.found}
        truth = {(node,) for node in given.get("bad", ())} | set(given.get("links", ()))
        tests, rounds = tests + planner.tests, rounds + fake.rounds
        right += len(found & truth)
        bad += len(truth)
        accused += len(found - truth)
    settings = row.settings or {}
    certify = None if "max_bad" in settings else settings.get("rate", row.lowest if row.bad else 0.1)
    need = bound(row.nodes, row.bad, row.lowest, confidence, certify)
    mean = tests / trials
    least = max(need.counting, need.certifying)
    needed = least if settings.get("trust_test") else need.tests
    return {
        "trial": row.name,
        "trials": trials,
        "tests": round(mean, 1),
        "bound": round(needed, 1),
        "ratio": round(mean / needed, 2),
        "counting": round(least, 1),
        "ratio_counting": round(mean / least, 2),
        "rounds": round(rounds / trials, 1),
        "found": right,
        "bad": bad,
        "accused": accused,
        "seconds": round((time.process_time() - began) / trials, 2),
    }


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nodes", type=int, default=1000)
    parser.add_argument("--trials", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--confidence", type=float, default=0.99)
    parser.add_argument("--rows", default="", help="only rows whose name this finds")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    out = sys.stdout
    if not args.json:
        out.write(f"{args.nodes} nodes, {args.trials} trials a row, confidence {args.confidence:g}, seed {args.seed}\n")
        out.write(
            f"{'':26}{'tests':>10}{'bound':>10}{'ratio':>7}{'counting':>10}{'ratio':>7}{'rounds':>9}{'found':>8}{'accused':>9}\n"
        )
    for row in rows(args.nodes):
        if not re.search(args.rows, row.name):
            continue
        got = measured(row, args.trials, args.confidence, args.seed)
        found = f"{got['found']}/{got['bad']}"
        if args.json:
            out.write(json.dumps(got) + "\n")
        else:
            out.write(
                f"{got['trial']:26}{got['tests']:>10}{got['bound']:>10}{got['ratio']:>7}{got['counting']:>10}"
                f"{got['ratio_counting']:>7}{got['rounds']:>9}{found:>8}{got['accused']:>9}\n"
            )
        out.flush()


if __name__ == "__main__":
    main()
