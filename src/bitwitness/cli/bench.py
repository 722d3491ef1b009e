"""`bitwitness bench`: what the guard costs on this machine, beside what was promised."""

from __future__ import annotations

import importlib.util
from typing import TYPE_CHECKING

import click

from bitwitness.cli.output import console, print_json
from bitwitness.errors import ConfigurationError, MissingExtra

if TYPE_CHECKING:
    from rich.table import Table

    from bitwitness.examples.costs import Cost, ReplayCost, Report


@click.command()
@click.option("--tokens", type=click.IntRange(2, 1 << 20), default=4096, show_default=True, help="Tokens a step.")
@click.option(
    "--context", type=click.IntRange(1, 1 << 14), default=256, show_default=True, help="Length of a sequence."
)
@click.option("--width", type=click.IntRange(2, 1 << 13), default=256, show_default=True, help="Width of the model.")
@click.option("--layers", type=click.IntRange(1, 256), default=4, show_default=True, help="Transformer blocks.")
@click.option("--threads", type=click.IntRange(1, 512), default=2, show_default=True, help="Threads for arithmetic.")
@click.option("--autocast", is_flag=True, help="Train under bfloat16 autocast instead of in float32.")
@click.option(
    "--steps", type=click.IntRange(min=1), help="Guarded steps to measure, in fours; default: as time allows."
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def bench(
    tokens: int, context: int, width: int, layers: int, threads: int, autocast: bool, steps: int | None, as_json: bool
) -> None:
    """Measure what guarding costs on this machine: time and memory.

    A small GPT is trained twice in one process, with a guard and without, step by step in turn. With the default options
    it takes about a minute on two free cores. Whether a target is met is a fact that is printed, and no error.
    """
    for module in ("torch", "numpy"):
        if importlib.util.find_spec(module) is None:
            raise MissingExtra(f"bitwitness bench needs {module}: pip install 'bitwitness[train]'")
    from rich.progress import Progress

    from bitwitness.examples.overhead import Size, measure

    try:
        size = Size(tokens, context, width, layers, threads, autocast)
    except ConfigurationError as error:
        raise click.UsageError(str(error)) from error
    errors = console(stderr=True)
    with Progress(console=errors, transient=True, disable=as_json or not errors.is_terminal) as progress:
        task = progress.add_task("training with and without a guard", total=1.0)
        report = measure(size, steps, lambda fraction: progress.update(task, completed=fraction))
    if as_json:
        print_json(report.to_json())
        return
    screen = console()
    for part in (_head(report), _checks(report), _replays(report), _foot(report)):
        screen.print(part)


def _head(report: Report) -> str:
    machine, model, step = report.machine, report.model, report.step
    kind = "bf16 autocast" if model["autocast"] else "fp32"
    counts = ", ".join(f"{count} {name}" for name, count in report.steps.items())
    return (
        f"Machine: {machine['processor']}, {machine['cores']} cores, {machine['threads']} threads; torch {machine['torch']}, "
        f"Python {machine['python']}; load average before: {machine['load']}\n"
        f"Model: GPT, {model['parameters'] / 1e6:.2f} million parameters in {model['tensors']} tensors (width {model['width']}, "
        f"{model['layers']} layers), {kind}, {model['tokens']} tokens a step, AdamW, DDP of one process\n"
        f"Unguarded step: median {step['median']:.0f} ms, least {step['least']:.0f} ms, of which the gradient norm for "
        f"clipping {step['norm']:.1f} ms\n"
        f"Steps: {counts}; {report.seconds:.0f} s in all\n"
    )


def _checks(report: Report) -> Table:
    """Milliseconds when due; shares amortised over the interval, of the step's time and of its processor time."""
    table = _table("Checks", "every", "ms", "% of step", "% of CPU", "target", "met", "MiB")
    for cost in report.checks:
        target = "" if cost.target is None else f"{cost.target} %"
        table.add_row(*_row(cost), target, _met(cost.met), _mib(cost.peak))
    table.add_section()
    for replay in report.replays:
        table.add_row(*_row(replay), "", "", _mib(replay.peak))
    return table


def _row(cost: Cost | ReplayCost) -> tuple[str, ...]:
    return (
        cost.name,
        str(cost.every),
        f"{cost.milliseconds:.2f}",
        f"{cost.share:.3f}",
        f"{cost.processor_share:.3f}",
    )


def _replays(report: Report) -> Table:
    """Each against what it recomputes."""
    table = _table("Replays", "ms", "against", "ms", "ratio", "of CPU", "target", "met")
    for cost in report.replays:
        table.add_row(
            cost.name,
            f"{cost.milliseconds:.0f}",
            cost.against,
            f"{cost.against_milliseconds:.0f}",
            f"{cost.ratio:.3f}",
            f"{cost.processor_ratio:.3f}",
            f"{cost.target:.2f}",
            _met(cost.met),
        )
    return table


def _foot(report: Report) -> str:
    whole = report.whole_steps
    return (
        "ms: when due. %: of the unguarded step and of its CPU time, spread over the interval. MiB: of its own at "
        f"once; {_recomputed(report)}\n"
        f"Whole steps, guarded less unguarded: {whole['difference']:+.1f} ms (middle half {whole['lower_quartile']:+.1f} to "
        f"{whole['upper_quartile']:+.1f}), CPU time {whole['processor_difference']:+.1f} ms. The parts of a step without replicas "
        f"and replay add up to {whole['sum_of_parts']:.1f} ms, CPU time {whole['processor_sum_of_parts']:.1f} ms.\n"
        f"Both trainings ended with {'equal' if report.equal_bits else 'DIFFERENT'} bits. Collectives: none in one process."
    )


def _recomputed(report: Report) -> str:
    return (
        " and ".join(f"{_mib(cost.against_peak)} for {cost.against}" for cost in report.replays) + " without a guard."
    )


def _table(title: str, *columns: str) -> Table:
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, collapse_padding=True)
    table.add_column(title, no_wrap=True)
    for column in columns:
        table.add_column(column, justify="left" if column == "against" else "right", no_wrap=True)
    return table


def _met(met: bool | None) -> str:
    return "" if met is None else "yes" if met else "no"


def _mib(peak: float | None) -> str:
    return "?" if peak is None else f"{peak:.0f}"
