"""Closed forms: the only texts that go into a report without names, and how each is told from everything else.

Taking names out of free text cannot be made safe: a host has a short name, a long one and those of its links, a path may begin or end
anyhow, and what a person writes is anything at all. So nothing is taken out. A text goes in only where it has a form that holds no
name, e.g. that of a time, a digest, the identity of a device, or a word of ours; whatever has not is left out.
"""

from __future__ import annotations

import builtins
import re
from collections.abc import Iterable, Mapping
from typing import Any, get_args

from bitwitness.evidence import NONFINITE, CheckName, Persistence, Place
from bitwitness.evidence import Kind as VerdictKind
from bitwitness.fleet.budget import HoldReason
from bitwitness.fleet.clusters.base import ActKind
from bitwitness.fleet.decision import Action, Confidence
from bitwitness.fleet.kept import Status
from bitwitness.fleet.signals.record import Weight
from bitwitness.store.pages import IncidentStatus, Judgement, RunState

LEFT_OUT = "[left out]"

CHECKS = frozenset(get_args(CheckName))
KINDS = frozenset(get_args(VerdictKind))
PERSISTENCES = frozenset(get_args(Persistence))
PLACES = frozenset(get_args(Place))
STATUSES = frozenset(get_args(IncidentStatus))
JUDGEMENTS = frozenset(get_args(Judgement))
STATES = frozenset(get_args(RunState))
ACTIONS = frozenset(get_args(Action))
ACTS = frozenset(get_args(ActKind))
CONFIDENCES = frozenset(get_args(Confidence))
STANDS = frozenset(get_args(Status))
HOLDS = frozenset(get_args(HoldReason))
OUTCOMES = frozenset({"caught", "caught, unattributed", "named wrongly", "missed", "unclear"})
SOURCES = frozenset({"fleet", "quarantine", "incident", "console"})
PROGRAMS = frozenset({"controller", "guard", "supervisor"})
DEEDS = frozenset(
    {
        "judged",
        "retried",
        "skipped",
        "strike",
        "quarantined",
        "restarted",
        "stopped",
        "settled at the next start",
    }  # in a run
    | {"deny device", "deny node", "clear"}  # in its quarantine
    | {
        "incident",
        "proposed",
        "asked",
        "approved",
        "rejected",
        "withdrawn",
        "intent",
        "reconsidered",
        "over",
        "given up",
    }
    | {"returned", "cleared", "clear failed", "health check", "health check failed", "health check asked for"}
    | {"started", "stands by", "trouble"}
    | STANDS
    | {f"fleet {act}" for act in ACTS}
)
"""What is done about an incident, as our own programs call it."""

_ERRORS = frozenset(
    {name for name, value in vars(builtins).items() if isinstance(value, type) and issubclass(value, BaseException)}
    | {"OutOfMemoryError", "AcceleratorError", "DistBackendError", "DistNetworkError", "DistStoreError"}
)
_TOLD = ("kernel", "nvml", "dcgm", "dcgm-diag", "edac", "rasdaemon", "mce", "amd-smi", "ascend-dmi")
_CODES = (*_TOLD, "xid", "sxid", "aer", "nvme", "identity")

MOMENT = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(\.\d{1,6})?(Z|\+00:00)", re.ASCII)
IDENTIFIER = re.compile(r"\d{8}T\d{6}Z-[0-9a-f]{6}", re.ASCII)
"""Of an incident or a run."""
DIGEST = re.compile(r"[0-9a-f]{16,128}", re.ASCII)
_UUID = r"[0-9A-Fa-f]{8}(-[0-9A-Fa-f]{4}){3}-[0-9A-Fa-f]{12}"
DEVICE = re.compile(
    rf"(GPU|MIG)-{_UUID}|MIG-GPU-{_UUID}/\d{{1,3}}/\d{{1,3}}|[0-9A-Fa-f]{{4,8}}(:[0-9A-Fa-f]{{2}}){{2}}(\.[0-7])?",
    re.ASCII,
)
PROCESSOR = re.compile(r"(?P<node>.+)/(?P<slot>cpu-\d{1,4})", re.ASCII | re.DOTALL)
SERIAL = re.compile(r"(?=(?:[A-Z]*\d){4})[0-9A-Z]{4,24}", re.ASCII)
EVIDENCE = re.compile(r"incident\.json|actions\.jsonl|micro-batches-rank-\d{5,7}\.pt", re.ASCII)
_VERSION = (
    r"\d{1,5}(\.\d{1,5}){0,3}((a|b|rc|\.dev|\.post)\d{1,8}){0,2}"
    r"(\+(cpu|cu\d{2,4}|rocm\d[\d.]{0,8}|xpu|(git|g)?[0-9a-f]{7,40}(\.nv\d\d\.\d\d)?))?"
)
VERSION = re.compile(_VERSION, re.ASCII)
_BOOLS = r"\((True|False)(, (True|False)){0,7}\)"
_CLAUSE = re.compile(
    rf"(torch|bitwitness|CUDA|ROCm|HIP|NCCL|driver|Python) {_VERSION}|cuDNN (\d{{3,6}}|None|{_BOOLS})|attention kernels {_BOOLS}"
    r"|float32 matmul precision (highest|high|medium)|threads \d{1,5}|oneDNN (True|False)|CUDA None|torch",
    re.ASCII,
)
"""What `guard.start` says of the software of a rank, between commas."""
_BETWEEN = re.compile(r", (?![^(]*\))|; ")
_MAKER = re.compile(
    r"NVIDIA|AMD|Intel(\(R\))?|Tesla|Quadro|GeForce|Instinct|Ampere|AWS|Huawei|Ascend|device|cpu|x86_64|aarch64|arm64",
    re.ASCII,
)
_PRODUCT = re.compile(
    r"A\d{1,3}|[HBLVTP]\d{1,3}[A-Z]?|G[BH]\d{3}|MI\d{2,3}[AXP]?|RTX|GTX|GRID|DGX|HGX|Graphics|Device|Ada|Hopper|Blackwell|Grace|Generation"
    r"|EPYC|Ryzen|Threadripper|PRO|Xeon\(R\)|Core\(TM\)|Platinum|Gold|Silver|Bronze|Max|Ultra|Gaudi\d?|Neoverse|[NV]\d|Graviton\d|Altra"
    r"|Processor|CPU|@|Core|\d{1,5}[A-Z]{0,2}\+?|\d{1,4}([GM]i?B)|HBM\d?[eE]?|PCIe|PCI|E|SXM\d?|NVL\d{0,3}|OAM|MIG|\dg\.\d{1,3}gb"
    r"|\d{1,2}(\.\d{1,3})?GHz|Ti|SUPER|Laptop|Server|Edition|Workstation|\((AVX\d{0,3}|AVX512_\w{4}|NO|DEFAULT|SVE\d{0,3}|NEON|VSX)( AVX)?\)",
    re.ASCII,
)
_LEAF = re.compile(
    r"((q|k|v|in|out|up|down|gate)_)?(proj_)?(weight|bias)(_(g|v|ih|hh)(_l\d{1,2})?)?|gamma|beta|scale|running_(mean|var)"
    r"|num_batches_tracked|pos_embed(ding)?|cls_token|exp_avg(_sq)?|max_exp_avg_sq|momentum_buffer|step|square_avg|A_log|original[01]",
    re.ASCII,
)
_PART = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,63}|\d{1,6}", re.ASCII)
_SIGNAL = re.compile(
    r"(?P<code>[a-z-]{2,20}:[A-Za-z0-9_.-]{1,40})(?: on (?P<device>\S+))?(?: at (?P<time>\S+))?(?:, (?P<count>\d{1,12}) times)? "
    r"\((?P<source>[a-z-]{2,20}), (?P<weight>[a-z]+)\): .*",
    re.ASCII | re.DOTALL,
)


def closed(text: object, words: Iterable[str], otherwise: str = LEFT_OUT) -> str:
    """A word of ours; nothing stays nothing, and whatever else it is is left out."""
    return text if isinstance(text, str) and (text in words or not text) else otherwise


def formed(text: object, form: re.Pattern[str], otherwise: str = LEFT_OUT) -> str:
    """A text of this form; nothing stays nothing, and whatever else it is is left out."""
    return text if isinstance(text, str) and (not text or form.fullmatch(text)) else otherwise


def standing(text: str) -> bool:
    """Whether it says in a few words of ours what is done about an incident, and where that stands."""
    words = DEEDS | ACTS | ACTIONS | {"waits for approval"}
    return not text or all(part in words for part in text.split(": "))


def model(text: str) -> str:
    """What kind of device: words that makers use, each of them."""
    first, *others = re.split(r"[ -]+(?![^(]*\))", text)
    known = bool(_MAKER.fullmatch(first)) and all(_MAKER.fullmatch(word) or _PRODUCT.fullmatch(word) for word in others)
    return text if known or not text else LEFT_OUT


def software(text: str) -> str:
    """What a rank ran with; the parts that guards write themselves."""
    parts = [part if _CLAUSE.fullmatch(part) else LEFT_OUT for part in _BETWEEN.split(text)] if text else []
    return ", ".join(dict.fromkeys(parts))


def tensor(name: str) -> bool:
    """Whether a name is that of a parameter or of a state of it: dotted, and of a well-known end."""
    *path, leaf = name.split(".")
    return len(name) <= 300 and bool(_LEAF.fullmatch(leaf)) and all(_PART.fullmatch(part) for part in path)


def detail(found: Mapping[str, Any]) -> dict[str, Any]:
    """What is said beside a value: numbers under names of ours, and names of tensors."""
    kept: dict[str, Any] = {}
    for key in ("loss_differs", "gradients_differing", "differing", "compared_unequal"):
        if isinstance(found.get(key), bool | int):
            kept[key] = found[key]
    for key in ("largest_local", "norm_reduced"):
        if key in found:
            kept[key] = formed(str(found[key]), re.compile(r"[0-9.e+-]{1,30}|inf|-inf|nan", re.ASCII))
    names = found.get("differs")
    if isinstance(names, list | tuple):
        told = [name if isinstance(name, str) and tensor(name) else LEFT_OUT for name in names]
        kept["differs"] = list(dict.fromkeys(told))
    return kept


def error(text: str) -> str:
    """Why there is no value: the class of the exception, where it is one that everybody has."""
    kind = text.partition(":")[0].rpartition(".")[2]
    return f"{kind}: {LEFT_OUT}" if kind in _ERRORS else LEFT_OUT if text else ""


def value(text: str) -> bool:
    """Whether it is what observations hold: a digest, nothing, or not finite."""
    return text in ("", NONFINITE) or bool(DIGEST.fullmatch(text))


def signal(text: str) -> tuple[str, str, str, str]:
    """Of what the hardware said: its device, and the words before and after that; all of them empty where it is no such sentence.

    Of a code only its number is told, of which the maker has a table; its reason may quote a line of a log.
    """
    found = _SIGNAL.fullmatch(text)
    if found is None or found["source"] not in _TOLD or found["weight"] not in get_args(Weight):
        return "", "", "", ""
    kind, _, number = found["code"].partition(":")
    code = "" if kind not in _CODES else f"{kind}:{number}" if number.isdecimal() else kind
    when = f" at {found['time']}" if found["time"] and MOMENT.fullmatch(found["time"]) else ""
    often = f", {found['count']} times" if found["count"] else ""
    return code or "something", found["device"] or "", f"{when}{often}", f" ({found['source']}, {found['weight']})"
