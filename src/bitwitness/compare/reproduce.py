"""Whether a device still gives the wrong answer that is recorded beside this file. Needs torch, and nothing else.

    python reproduce.py [--device cuda:0] [--times 1000]

Exit status: 0 not reproduced, 1 reproduced, 2 it could not be run, 3 nothing follows: this device is of another kind, and its right
answer may be another one. Nothing but an answer that was compared and is wrong ends with 1, not even an error of Python. Whoever reads this in a bundle needs nothing of the project that wrote it: in the project, this same file
computes the operation while it is being made smaller, so that what a vendor runs is what was seen.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

try:
    import torch
    from torch import Tensor
except BaseException as error:
    if __name__ != "__main__" or isinstance(error, KeyboardInterrupt):
        raise
    # Python itself would end with 1, which says here that a device is wrong.
    sys.stdout.write(f"could not be run: torch cannot be imported: {type(error).__name__}: {error}\n")
    sys.exit(2)

CODES: Mapping[str, int] = {"not reproduced": 0, "reproduced": 1, "nothing follows": 3}


def operation(name: str) -> Any:
    """The operation of a name like `aten.addmm.default`.

    Raises:
        ValueError: this torch has none of that name.
    """
    found: Any = torch.ops
    for part in name.split("."):
        found = getattr(found, part, None)
        if found is None:
            raise ValueError(f"torch {torch.__version__} has no operation {name}")
    return found


def placed(value: Any, device: torch.device) -> Any:
    """An operand on a device: tensors are copied, so that what an operation writes over is there again the next time."""
    if isinstance(value, Tensor):
        return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=device).copy_(value)
    if isinstance(value, Mapping):
        return device if "device" in value else getattr(torch, str(value["torch"]))
    if isinstance(value, list | tuple):
        return [placed(one, device) for one in value]
    return value


def written(called: Any, args: Any, kwargs: Any, result: Any) -> list[Tensor]:
    """The tensors that an operation gives out or, where it gives nothing, those that it has written over."""
    found = list(tensors_of(result))
    if not found and called._schema.is_mutable:
        named = [one.name for one in called._schema.arguments]
        given = dict(zip(named, args, strict=False)) | dict(kwargs)
        for one in called._schema.arguments:
            if one.alias_info is not None and one.alias_info.is_write:
                found += tensors_of(given.get(one.name))
    return found


def tensors_of(value: Any) -> Iterator[Tensor]:
    """The tensors in nested lists and tuples, in order."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for one in value:
            yield from tensors_of(one)


def computed(name: str, args: Sequence[Any], kwargs: Mapping[str, Any], device: torch.device) -> list[Tensor]:
    """Compute an operation once; its outputs, in memory of the host."""
    called = operation(name)
    here_args = placed(list(args), device)
    here_kwargs = {key: placed(value, device) for key, value in kwargs.items()}
    with torch.no_grad():
        result = called(*here_args, **here_kwargs)
    return [one.detach().to("cpu") for one in written(called, here_args, here_kwargs, result)]


def bits(outputs: Sequence[Tensor]) -> list[bytes]:
    """The bits of tensors, in logical order."""
    plain = (one.resolve_conj().resolve_neg().contiguous().reshape(-1) for one in outputs)
    return [one.view(torch.uint8).numpy().tobytes() if one.numel() else b"" for one in plain]


def kind(device: torch.device) -> dict[str, str]:
    """What must be equal, at the least, for equal right answers."""
    found: dict[str, str] = {"torch": str(torch.__version__)}
    if device.type == "cuda":
        found |= {"device": torch.cuda.get_device_name(device), "cuda": str(torch.version.cuda or torch.version.hip)}
    else:
        found["device"] = f"{device.type} {torch.backends.cpu.get_cpu_capability()}"
    return found


def settings() -> dict[str, Any]:
    """What the process has set that changes bits."""
    return {
        "threads": torch.get_num_threads(),
        "float32_matmul_precision": torch.get_float32_matmul_precision(),
        "deterministic": torch.get_deterministic_debug_mode(),
        "cudnn_benchmark": torch.backends.cudnn.benchmark,
        "fill": torch.utils.deterministic.fill_uninitialized_memory,  # type: ignore[attr-defined]
        "cublas_workspace": os.environ.get("CUBLAS_WORKSPACE_CONFIG", ""),
    }


@contextmanager
def settled(wanted: Mapping[str, Any]) -> Iterator[None]:
    """Inside, the process has these settings."""
    before = settings()
    _set(wanted)
    try:
        yield
    finally:
        _set(before)


def _set(wanted: Mapping[str, Any]) -> None:
    if wanted["cublas_workspace"]:
        os.environ["CUBLAS_WORKSPACE_CONFIG"] = str(wanted["cublas_workspace"])
    if torch.get_num_threads() != wanted["threads"]:
        torch.set_num_threads(int(wanted["threads"]))
    torch.set_float32_matmul_precision(str(wanted["float32_matmul_precision"]))
    if torch.get_deterministic_debug_mode() != wanted["deterministic"]:
        torch.set_deterministic_debug_mode(int(wanted["deterministic"]))  # 2: an error where there is no such algorithm
    torch.backends.cudnn.benchmark = bool(wanted["cudnn_benchmark"])
    torch.utils.deterministic.fill_uninitialized_memory = bool(wanted["fill"])  # type: ignore[attr-defined]


def tried(operands: Mapping[str, Any], device: torch.device, times: int) -> dict[str, int]:
    """Compute it so often: how many answers were right, the recorded wrong one, and wrong otherwise."""
    expected, observed = bits(operands["expected"]), bits(operands["observed"])
    counts = {"right": 0, "recorded": 0, "other": 0}
    for _ in range(times):
        answer = bits(computed(str(operands["operation"]), operands["args"], operands["kwargs"], device))
        counts["right" if answer == expected else "recorded" if answer == observed else "other"] += 1
    return counts


def concluded(counts: Mapping[str, int], alike: bool) -> str:
    """What follows: on a device of another kind, only the recorded wrong answer itself says something."""
    if counts["recorded"] or (alike and counts["other"]):
        return "reproduced"
    return "nothing follows" if counts["other"] else "not reproduced"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run it; the exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--device", default="cuda:0" if torch.cuda.is_available() else "cpu", help="as torch names it")
    parser.add_argument("--times", type=int, default=0, help="how often; by default as often as the bundle says")
    parser.add_argument("--operands", default="operands.pt", help="operands.pt, the smallest; or original.pt, as found")
    parser.add_argument("--bundle", type=Path, default=Path(__file__).resolve().parent, help="the folder")
    asked = parser.parse_args(arguments)
    try:
        record, counts, here = _measured(asked)
        outcome = _told(asked, record, counts, here)
    except Exception as error:  # noqa: BLE001  (whatever it is: a status of Python's own would accuse the device)
        _say(f"could not be run: {type(error).__name__}: {error}")
        return 2
    return CODES[outcome]


def _measured(asked: argparse.Namespace) -> tuple[dict[str, Any], dict[str, int], dict[str, str]]:
    """What the bundle says, what came out, and the kind of this device."""
    record = json.loads((asked.bundle / "bundle.json").read_text(encoding="utf-8"))
    wanted = record["reproduce"]
    operands = torch.load(asked.bundle / asked.operands, weights_only=True)
    device = torch.device(asked.device)
    asked.times = asked.times if asked.times > 0 else int(wanted["times"])
    if asked.times < 1 or not bits(operands["expected"]):
        raise ValueError(f"nothing to compare: {asked.times} times, {len(operands['expected'])} outputs")
    here = kind(device)
    with settled(wanted["settings"]):
        counts = tried(operands, device, asked.times)
    return record, counts, here


def _told(
    asked: argparse.Namespace, record: Mapping[str, Any], counts: Mapping[str, int], here: Mapping[str, str]
) -> str:
    """Say what came out; the outcome."""
    there = record["reproduce"]["kind"]
    if record["drill"]:
        _say(f"DRILL: the fault was played on purpose ({record['drill']}); no device is accused")
    outcome = concluded(counts, here == there)
    _say(f"{record['operation']} on {asked.device} ({here['device']}), {asked.times} times: {counts['right']} right,")
    _say(f"{counts['recorded']} with the recorded wrong bits, {counts['other']} wrong otherwise")
    for name in sorted({*here, *there}):
        if here.get(name) != there.get(name):
            _say(f"another kind: {name} is {here.get(name)} here, {there.get(name)} there")
    _say(outcome)
    return outcome


def _say(text: str) -> None:
    sys.stdout.write(text + "\n")


def _ended() -> int:
    """The exit status of the program, whatever happens to it."""
    try:
        status = main()
        sys.stdout.flush()
    except Exception as error:  # noqa: BLE001  (see above)
        # Nobody reads what is written any more, or there is no memory for a sentence: the status is what remains.
        with suppress(Exception):
            sys.stderr.write(f"could not be run: {type(error).__name__}: {error}\n")
        sys.stdout = Path(os.devnull).open("w")  # noqa: SIM115  (Python flushes it at the end, and would fail again)
        return 2
    return status


if __name__ == "__main__":
    sys.exit(_ended())
