"""What is installed in a cluster: right by the published schemas, with no more rights than it needs, and harmless at first."""

from __future__ import annotations

import copy
import json
import re
import shlex
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import pytest
import yaml

from bitwitness._version import __version__
from bitwitness.cli.fleet_watch import STATE
from bitwitness.cli.main import cli
from bitwitness.fleet.clusters import hyperpod_words
from bitwitness.fleet.clusters.kubernetes_lease import DURATION
from bitwitness.fleet.clusters.settings import cluster_of
from bitwitness.fleet.exposition import health
from bitwitness.fleet.policy import FleetPolicy
from tests.deploy import manifests, published
from tests.deploy.manifests import FOLDER, INSTALLS, Manifest, everything, of_kind, pods, rendered, the
from tests.deploy.security import beyond_restricted

ALL = everything()
IDS = [f"{where}-{one['kind']}-{one['metadata']['name']}-{number}" for number, (where, one) in enumerate(ALL)]
CONTROLLER = the(rendered("base"), "Deployment", "bitwitness-fleet")
POD = CONTROLLER["spec"]["template"]["spec"]
"""Of the controller."""


def parsed(words: list[str]) -> tuple[click.Command, click.Context]:
    """The command that a command line names, and what it was understood as; as the program itself does it."""
    command: click.Command = cli
    context = click.Context(cli, info_name="bitwitness")
    while isinstance(command, click.Group):
        found = command.get_command(context, words[0])
        assert found is not None, f"there is no command {words[0]}"
        command, words = found, words[1:]
    return command, command.make_context(command.name or "", words, parent=context)


# By the schemas -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("version", [published.OLDEST, published.NEWEST])
@pytest.mark.parametrize(("where", "manifest"), ALL, ids=IDS)
def test_schemas(where: str, manifest: Manifest, version: str) -> None:
    assert published.wrong(manifest, version) == []


def test_the_schemas_are_strict() -> None:
    """The checker must be able to fail."""
    spoilt = json.loads(json.dumps(CONTROLLER))
    spoilt["spec"]["template"]["spec"]["containers"][0]["readinesProbe"] = {}
    assert published.wrong(spoilt, published.NEWEST)
    jobset = manifests.documents(FOLDER / "examples" / "jobset.yaml")[0]
    jobset["spec"]["failurePolicy"]["maxRestart"] = 3
    jobset["spec"]["replicatedJobs"][0]["replicas"] = True
    jobset["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]["containers"][0]["argss"] = []
    found = published.wrong(jobset, published.NEWEST)
    assert len(found) == 3, found


@pytest.mark.skipif(shutil.which("kubectl") is None, reason="kubectl is not installed")
@pytest.mark.parametrize("folder", INSTALLS)
def test_kubectl_reads_the_same(folder: str) -> None:
    done = subprocess.run(
        ["kubectl", "kustomize", str(FOLDER / folder)], capture_output=True, text=True, check=False, timeout=60
    )
    assert done.returncode == 0, done.stderr
    plain = re.sub(r"(bitwitness-policy)-[a-z0-9]{10}\b", r"\1", done.stdout)
    theirs = list(yaml.safe_load_all(plain))
    for one in theirs:
        one["metadata"].pop("annotations", None) if not one["metadata"].get("annotations") else None
    assert manifests.canonical(theirs) == manifests.canonical(rendered(folder))


def test_nothing_is_named_twice() -> None:
    for folder in INSTALLS:
        names = [(one["kind"], one["metadata"].get("namespace"), one["metadata"]["name"]) for one in rendered(folder)]
        assert len(set(names)) == len(names)


# What may be harmful --------------------------------------------------------------------------------------------------


def texts(value: Any) -> Iterator[str]:
    if isinstance(value, dict):
        for key, one in value.items():
            yield str(key)
            yield from texts(one)
    elif isinstance(value, list):
        for one in value:
            yield from texts(one)
    else:
        yield str(value)


@pytest.mark.parametrize(("where", "manifest"), ALL, ids=IDS)
def test_no_secret_and_no_moving_image(where: str, manifest: Manifest) -> None:
    assert manifest["kind"] != "Secret"
    assert not [text for text in texts(manifest) if re.search(r"AKIA[0-9A-Z]{16}|BEGIN [A-Z ]*PRIVATE KEY", text)]
    for pod in pods(manifest):
        for container in pod["containers"]:
            image, _, tag = container["image"].rpartition(":")
            assert image.startswith("registry.example/")
            assert tag == __version__
            assert not container.get("securityContext", {}).get("privileged")


def test_images_have_the_version_of_the_package() -> None:
    assert {container["image"] for _, one in ALL for pod in pods(one) for container in pod["containers"]} == {
        f"registry.example/{name}:{__version__}" for name in ("bitwitness", "bitwitness-agent", "train")
    }


@pytest.mark.parametrize("folder", INSTALLS)
def test_pod_security(folder: str) -> None:
    made = rendered(folder)
    assert beyond_restricted(next(pods(the(made, "Deployment", "bitwitness-fleet")))) == set()
    agents = [beyond_restricted(next(pods(one))) for one in of_kind(made, "DaemonSet")]
    assert agents == ([{"hostPath", "may be root"}] if folder != "base" else [])
    level = the(made, "Namespace", "bitwitness")["metadata"]["labels"]["pod-security.kubernetes.io/enforce"]
    assert level == ("restricted" if folder == "base" else "privileged"), (
        "what the strictest level allows is not let go"
    )


def test_the_check_of_pod_security_can_fail() -> None:
    worst = {
        "hostNetwork": True,
        "volumes": [{"name": "a", "hostPath": {}}],
        "containers": [{"ports": [{"hostPort": 1}]}],
    }
    assert beyond_restricted(worst) == {
        "hostNetwork", "hostPath", "may gain privileges", "capabilities", "may be root", "seccomp", "hostPort",
    }  # fmt: skip


def test_what_the_agent_needs_beyond_is_said() -> None:
    said = (FOLDER / "components" / "agent" / "agent.yaml").read_text(encoding="utf-8")
    for word in ("hostPath volumes:", "user 0:", "restricted"):
        assert word in said
    (agent,) = pods(the(rendered("overlays/default"), "DaemonSet", "bitwitness-agent"))
    mounted = {one["name"]: one.get("readOnly", False) for one in agent["containers"][0]["volumeMounts"]}
    assert all(mounted[one["name"]] for one in agent["volumes"] if "hostPath" in one), "it may only read its node"
    assert agent["tolerations"] == [{"operator": "Exists"}], "it runs on nodes that were taken out as well"
    assert agent["automountServiceAccountToken"] is False


def test_every_container_is_bounded_and_cannot_write_where_it_should_not() -> None:
    for folder in INSTALLS:
        for one in rendered(folder):
            for pod in pods(one):
                for container in pod["containers"]:
                    assert set(container["resources"]["limits"]) == {"cpu", "memory"}
                    assert container["securityContext"]["readOnlyRootFilesystem"]
                    mounts = {mount["name"] for mount in container["volumeMounts"]}
                    assert mounts == {volume["name"] for volume in pod["volumes"]}


# Commands, probes, network --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("folder", [*INSTALLS, "shared-runs"])
def test_our_own_program_understands_every_command(folder: str) -> None:
    made = rendered("base", "shared-runs") if folder == "shared-runs" else rendered(folder)
    seen = []
    for one in made:
        for pod in pods(one):
            for container in pod["containers"]:
                assert container["command"] == ["bitwitness"]
                command, context = parsed(container["args"])
                seen.append((command.name, context.params))
                probe = container.get("readinessProbe", {}).get("exec", {}).get("command")
                if probe:
                    assert probe[0] == "bitwitness"
                    assert "$(" not in " ".join(probe), "no variable is filled in here"
                    checked = parsed(probe[1:])[1].params
                    own = context.params
                    assert checked["check"]
                    assert {**checked, "check": False} == own, "the probe asks about another agent than this one"
    watch = next(params for name, params in seen if name == "watch")
    assert watch["listen"] == ("0.0.0.0", 9470)
    assert watch["state"] == STATE, "then a person's commands in the pod need not name it"
    assert not watch["act"], "whether it acts stands in the policy, where people look for it"
    assert watch["parents"] == ((Path("/runs"),) if folder == "shared-runs" else ())


def test_files_that_commands_name_are_mounted() -> None:
    for folder in INSTALLS:
        for one in rendered(folder):
            for pod in pods(one):
                for container in pod["containers"]:
                    mounts = [mount["mountPath"] for mount in container["volumeMounts"]]
                    named = [word for word in container["args"] if word.startswith("/")]
                    assert all(any(word == m or word.startswith(f"{m}/") for m in mounts) for word in named), named


def test_the_token_can_be_read_by_a_user_that_is_not_root() -> None:
    """Kubernetes gives the files of a secret to root and the group; the program takes that only from this folder."""
    (container,) = POD["containers"]
    environment = {one["name"]: one.get("value") for one in container["env"]}
    token = container["args"][container["args"].index("--token-file") + 1]
    assert environment["CREDENTIALS_DIRECTORY"] == str(Path(token).parent)
    (secret,) = [one["secret"] for one in POD["volumes"] if "secret" in one]
    assert secret["defaultMode"] == 0o440
    assert POD["securityContext"]["fsGroup"] == POD["securityContext"]["runAsGroup"]


def test_two_controllers_do_not_overlap() -> None:
    assert CONTROLLER["spec"]["replicas"] == 1
    assert CONTROLLER["spec"]["strategy"]["type"] == "Recreate"
    names = {one["name"]: one["valueFrom"]["fieldRef"]["fieldPath"] for one in POD["containers"][0]["env"][:2]}
    assert names == {"POD_NAME": "metadata.name", "POD_NAMESPACE": "metadata.namespace"}
    assert POD["terminationGracePeriodSeconds"] > DURATION
    lease = the(rendered("base"), "Role", "bitwitness-fleet-lease")
    assert {name for rule in lease["rules"] for name in rule.get("resourceNames", ())} == {"bitwitness-fleet"}


def test_probes_ask_what_the_server_answers() -> None:
    source = Path(health.__code__.co_filename).parent.joinpath("inbox.py").read_text(encoding="utf-8")
    for name in ("startupProbe", "readinessProbe", "livenessProbe"):
        ask = POD["containers"][0][name]["httpGet"]
        assert f'Route("{ask["path"]}"' in source
        assert ask["port"] == "http"
    alive = POD["containers"][0]["livenessProbe"]
    assert alive["periodSeconds"] * alive["failureThreshold"] >= 120


def test_ports_agree() -> None:
    made = rendered("base")
    (port,) = POD["containers"][0]["ports"]
    (service,) = the(made, "Service", "bitwitness-fleet")["spec"]["ports"]
    policy = the(made, "NetworkPolicy", "bitwitness-fleet")["spec"]
    assert port["containerPort"] == service["port"] == 9470
    assert service["targetPort"] == port["name"]
    assert policy["ingress"][0]["ports"] == [{"protocol": "TCP", "port": 9470}]
    labels = CONTROLLER["spec"]["template"]["metadata"]["labels"]
    for selector in (
        policy["podSelector"]["matchLabels"],
        the(made, "Service", "bitwitness-fleet")["spec"]["selector"],
        CONTROLLER["spec"]["selector"]["matchLabels"],
    ):
        assert selector.items() <= labels.items()


@pytest.mark.parametrize("folder", INSTALLS)
def test_what_is_not_named_is_denied(folder: str) -> None:
    made = rendered(folder)
    deny = the(made, "NetworkPolicy", "bitwitness-default-deny")["spec"]
    assert deny == {"podSelector": {}, "policyTypes": ["Ingress", "Egress"]}
    for agent in (
        one["spec"] for one in of_kind(made, "NetworkPolicy") if one["metadata"]["name"] == "bitwitness-agent"
    ):
        assert agent["ingress"] == []
        assert bool(agent["egress"]) == (folder == "overlays/nvsentinel")
    for one in of_kind(made, "NetworkPolicy"):
        assert all(rule.get("from") and rule.get("ports") for rule in one["spec"].get("ingress", ())), "open to anybody"
        assert all(rule.get("ports") for rule in one["spec"].get("egress", ())), "may reach everything"


def test_names_are_found_through_a_cache_on_the_node_too() -> None:
    for folder in INSTALLS:
        for one in of_kind(rendered(folder), "NetworkPolicy"):
            dns = [rule for rule in one["spec"].get("egress", ()) if any(each["port"] == 53 for each in rule["ports"])]
            assert all({"ipBlock": {"cidr": "169.254.20.10/32"}} in rule["to"] for rule in dns)


def test_hyperpod_needs_nothing_that_it_does_not_bring() -> None:
    """Its chart installs NVIDIA's device plugin, and neither the GPU operator's runtime class nor its labels."""
    made = rendered("overlays/hyperpod-eks")
    agent = next(pods(the(made, "DaemonSet", "bitwitness-agent")))
    assert "runtimeClassName" not in agent
    assert agent["nodeSelector"] == {"sagemaker.amazonaws.com/compute-type": "hyperpod"}
    with_operator = copy.deepcopy(made)
    manifests._apply(FOLDER / "components" / "nvidia", with_operator)
    assert next(pods(the(with_operator, "DaemonSet", "bitwitness-agent")))["runtimeClassName"] == "nvidia"
    policy = the(made, "NetworkPolicy", "bitwitness-fleet-pod-identity")["spec"]
    assert policy["podSelector"]["matchLabels"].items() <= CONTROLLER["spec"]["template"]["metadata"]["labels"].items()
    (rule,) = policy["egress"]
    assert rule["ports"] == [{"protocol": "TCP", "port": 80}]
    assert [one["ipBlock"]["cidr"] for one in rule["to"]] == ["169.254.170.23/32", "fd00:ec2::23/128"]


# Policies -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("folder", INSTALLS)
def test_policies_only_observe(folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "fleet.toml"
    file.write_text(the(rendered(folder), "ConfigMap", "bitwitness-policy")["data"]["fleet.toml"], encoding="utf-8")
    policy = FleetPolicy.load(file)
    assert policy.act is False
    assert policy.may == {"drain"}
    config: dict[str, Any] = {
        "apiVersion": "v1",
        "kind": "Config",
        "current-context": "c",
        "contexts": [{"name": "c", "context": {"cluster": "c", "user": "u"}}],
        "users": [{"name": "u", "user": {}}],
        "clusters": [{"name": "c", "cluster": {"server": "http://127.0.0.1:1"}}],
    }
    kubeconfig = tmp_path / "config"
    kubeconfig.write_text(json.dumps(config), encoding="utf-8")
    settings = dict(policy.cluster)
    inner = settings if settings["kind"] == "kubernetes" else settings.setdefault("kubernetes", {})
    inner["kubeconfig"] = str(kubeconfig)
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "test")
    file.write_text(
        f"[cluster]\n{_toml(settings)}", encoding="utf-8"
    )  # every setting is one that the cluster knows, and no cluster is asked
    assert cluster_of(FleetPolicy.load(file), []).scheduler == "kubernetes"
    mounted = [
        m["mountPath"]
        for m in next(pods(the(rendered(folder), "Deployment", "bitwitness-fleet")))["containers"][0]["volumeMounts"]
    ]
    for pattern in policy.logs:
        assert str(Path(pattern).parent) in mounted
        assert Path(pattern).name == "{node}.json", "as the agent calls its files"


def _toml(table: dict[str, Any]) -> str:
    plain = [f"{key} = {json.dumps(value)}\n" for key, value in table.items() if not isinstance(value, dict)]
    inner = [f"[cluster.{key}]\n{_toml(value)}" for key, value in table.items() if isinstance(value, dict)]
    return "".join(plain + inner)


# Rights in AWS --------------------------------------------------------------------------------------------------------


def test_the_role_of_hyperpod_may_do_what_the_adapter_does() -> None:
    policy = json.loads((FOLDER / "overlays" / "hyperpod-eks" / "iam-policy.json").read_text(encoding="utf-8"))
    allowed = {action for one in policy["Statement"] for action in one["Action"]}
    needed = {*hyperpod_words.READ_ACTIONS, *hyperpod_words.ACT_ACTIONS.values(), hyperpod_words.SIMULATE}
    assert allowed == needed - {"sts:GetCallerIdentity"}, "which AWS grants to everybody"
    account = the(rendered("overlays/hyperpod-eks"), "ServiceAccount", "bitwitness-fleet")
    assert "eks.amazonaws.com/role-arn" in account["metadata"]["annotations"]


# The guide ------------------------------------------------------------------------------------------------------------

GUIDE = (FOLDER.parents[1] / "docs" / "deploying.md").read_text(encoding="utf-8")


def test_the_guide_names_what_there_is() -> None:
    named = set(re.findall(r"\b(?:overlays|components)/[a-z-]+", GUIDE)) | {"base"}
    there = {str(file.parent.relative_to(FOLDER)) for file in FOLDER.rglob("kustomization.yaml")}
    assert there == named, "what it names is there, and all else is named"
    files = {file.name for file in (FOLDER / "examples").glob("*.yaml")}
    assert files <= set(re.findall(r"[a-z-]+\.yaml", GUIDE))


def test_our_own_program_understands_the_commands_of_the_guide() -> None:
    found = re.findall(r"bitwitness (fleet (?:rehearse|status|clear)|incident show)((?: [^`\n|]*)?)", GUIDE)
    whole = [one for one in found if one[1] or one[0] == "fleet status"]
    assert len(whole) >= 4
    for command, rest in whole:
        parsed([*command.split(), *shlex.split(rest)])
