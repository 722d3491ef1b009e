"""The container file, as far as it can be told without building it: there is no registry where tests run."""

from __future__ import annotations

import re
import shlex
import tomllib
from importlib.metadata import entry_points

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.deploy.manifests import ROOT, pods, rendered, the

FOLDER = ROOT / "deploy" / "container"
TEXT = (FOLDER / "Containerfile").read_text(encoding="utf-8")
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]


def steps() -> list[tuple[str, str, str]]:
    """Stage, instruction and the rest of it, in order."""
    joined = re.sub(r"\\\n\s*", "", "\n".join(line for line in TEXT.splitlines() if not line.startswith("#")))
    found, stage = [], ""
    for line in filter(None, (one.strip() for one in joined.splitlines())):
        word, _, rest = line.partition(" ")
        assert word in {"ARG", "FROM", "WORKDIR", "COPY", "RUN", "ENV", "USER", "ENTRYPOINT", "CMD"}, line
        if word == "FROM":
            stage = rest.rpartition(" AS ")[2]
        found.append((stage, word, rest))
    return found


def of(stage: str, word: str) -> list[str]:
    return [rest for where, one, rest in steps() if (where, one) == (stage, word)]


def pinned() -> dict[str, str]:
    lines = [line for line in (FOLDER / "constraints.txt").read_text(encoding="utf-8").splitlines() if line[:1] != "#"]
    assert all(re.fullmatch(r"[a-z0-9-]+==[A-Za-z0-9.+]+", line) for line in lines)
    return dict(line.split("==") for line in lines)


def test_extras_are_those_of_the_package() -> None:
    (install,) = [step for step in of("build", "RUN") if "bitwitness[" in step]
    extras = re.findall(r"bitwitness\[([a-z,]+)\]", install)[0].split(",")
    assert extras == ["fleet", "kubernetes", "aws", "nvsentinel", "gpu"]
    assert set(extras) <= set(PROJECT["optional-dependencies"])
    assert "--constraint constraints.txt" in install


def test_all_that_is_asked_for_is_pinned_to_a_version_that_will_do() -> None:
    versions = pinned()
    asked = list(PROJECT["dependencies"])
    for extra in ("fleet", "kubernetes", "aws", "nvsentinel", "gpu"):
        asked += PROJECT["optional-dependencies"][extra]
    for text in asked:
        one = Requirement(text)
        if canonicalize_name(one.name) != "bitwitness":
            assert one.specifier.contains(versions[canonicalize_name(one.name)]), text
    assert not {"torch", "numpy"} & set(versions), "neither the controller nor the agent trains"


def test_what_is_copied_exists() -> None:
    for stage in ("build", "fleet", "agent"):
        for step in of(stage, "COPY"):
            if not step.startswith("--from="):
                *sources, _ = shlex.split(step)
                assert all((ROOT / source).exists() for source in sources), step
    needed = {PROJECT["readme"], *PROJECT["license-files"], "pyproject.toml", "src"}
    copied = {word for step in of("build", "COPY") for word in shlex.split(step)}
    assert needed <= copied, "else the wheel cannot be built"


def test_the_command_exists_and_gets_signals() -> None:
    (entry,) = of("fleet", "ENTRYPOINT")
    assert entry == '["bitwitness"]', "without a shell: a signal reaches the program itself"
    assert "bitwitness" in {one.name for one in entry_points(group="console_scripts")}
    (path,) = [step for step in of("fleet", "ENV") if step.startswith("PATH=")]
    assert path.startswith("PATH=/opt/bitwitness/bin:")


def test_nobody_is_root_and_the_user_is_that_of_the_manifest() -> None:
    for stage in ("fleet", "agent"):
        assert of(stage, "USER")[-1] == "65532:65532"
    pod = next(pods(the(rendered("base"), "Deployment", "bitwitness-fleet")))
    assert (pod["securityContext"]["runAsUser"], pod["securityContext"]["runAsGroup"]) == (65532, 65532)


def test_the_base_is_public_pinned_and_can_be_changed() -> None:
    ((_, _, base),) = [step for step in steps() if step[1] == "ARG"]
    assert re.fullmatch(r"PYTHON=docker\.io/library/python:3\.1[1-3]\.\d+-slim-[a-z]+", base)
    assert [rest for _, word, rest in steps() if word == "FROM"] == [
        "${PYTHON} AS build", "${PYTHON} AS fleet", "fleet AS agent",
    ]  # fmt: skip


def test_images_of_the_manifests_are_targets() -> None:
    targets = {"registry.example/bitwitness": "fleet", "registry.example/bitwitness-agent": "agent"}
    used = {
        container["image"].rpartition(":")[0]
        for one in rendered("overlays/default")
        for pod in pods(one)
        for container in pod["containers"]
    }
    assert used == set(targets)
    stages = {stage for stage, _, _ in steps()}
    for image, stage in targets.items():
        assert stage in stages
        assert f"--target {stage} --tag {image}:" in TEXT
