"""What is made for KubeRay: valid by its own schemas, with nothing that Kubernetes would drop."""

import base64
import copy
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from cluster.manifests.folder import as_documents
from cluster.manifests.pods import Pods
from cluster.settings import ClusterSettings
from pipeline.plan.graph import build_graph
from pipeline.recipe.read import load_recipe
from stages.credentials import clear_credential
from stages.plain import NO_TEXT
from tests.support import REPOSITORY
from tests.support.recipes import setting
from tests.support.schemas import Schema

# What no setting may hold, so no manifest either
NO_SETTING = "".join(char for char in map(chr, range(128)) if NO_TEXT.search(char))
FULL = {
    "namespace": "ml", "service_account": "sentray", "pull_secrets": ["registry"],
    "secrets": {"s3": ["AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"]}, "token_secret": "ray-token",
    "volumes": {"/mnt/corpora": "corpora"}, "schedule": "0 3 * * 1", "time_zone": "Europe/Berlin",
    "node_selectors": {"gpu": {"cloud.example.com/gpu": "l4"}}, "tls": True,
    "redis": {"address": "redis.ml:6379", "secret": "redis"}, "network_policy": True,
}  # fmt: skip


@pytest.fixture(scope="session")
def schemas():
    """KubeRay's schemas by kind, when they are beside the checkout."""
    folder = REPOSITORY.parent / "shared" / "schemas"
    if not folder.is_dir():
        pytest.skip("no schemas of KubeRay beside the checkout")
    kinds = ("RayCluster", "RayJob", "RayCronJob")
    return {kind: Schema(folder / f"kuberay-{kind.lower()}-v1.json.gz") for kind in kinds}


def made(file):
    return yaml.safe_load(Path("manifests/tiny", file).read_text())


def pods(document):
    """Every pod below a document, and the path to it."""
    if isinstance(document, dict):
        if "containers" in document:
            yield document
        for value in document.values():
            yield from pods(value)
    elif isinstance(document, list):
        for value in document:
            yield from pods(value)


@pytest.mark.parametrize("case", [{}, FULL])
def test_kuberay_takes_all_of_it(manifest, schemas, case):
    manifest("kuberay", "--schedule", "0 3 * * MON", kuberay=case)
    kinds = {"job.yaml": "RayJob", "cron.yaml": "RayCronJob", "cluster.yaml": "RayCluster"}
    for file, kind in kinds.items():
        document = made(file)
        assert document["kind"] == kind
        assert not schemas[kind].problems(document)


def test_the_check_against_the_schemas_sees_mistakes(manifest, schemas):
    manifest("kuberay", kuberay=FULL)
    right = made("job.yaml")
    for path, value, problem in (
        (("spec", "rayClusterSpec", "netPolicy"), {}, "spec.rayClusterSpec.netPolicy: unknown"),
        (("metadata", "lables"), {}, "metadata.lables: unknown"),
        (("spec", "backoffLimit"), "3", "is not of type 'integer'"),
        (("spec", "rayClusterSpec", "authOptions", "mode"), "tokens", "is not one of"),
    ):
        wrong = copy.deepcopy(right)
        place = wrong
        for part in path[:-1]:
            place = place[part]
        place[path[-1]] = value
        assert problem in "\n".join(schemas["RayJob"].problems(wrong))
    container = right["spec"]["rayClusterSpec"]["workerGroupSpecs"][0]["template"]["spec"]
    container["containers"][0]["securityContext"]["readOnlyRootFileSystem"] = True
    assert "readOnlyRootFileSystem: unknown" in schemas["RayJob"].problems(right)[0]


def test_pools_become_worker_groups(manifest):
    manifest("kuberay", kuberay=FULL, stop_seconds=40)
    spec = made("cluster.yaml")["spec"]
    cpu, gpu = spec["workerGroupSpecs"]
    assert (cpu["groupName"], cpu["minReplicas"], cpu["maxReplicas"]) == ("cpu", 1, 8)
    assert gpu["labels"] == {"sentray-pool": "gpu"}
    pod = gpu["template"]["spec"]
    resources = pod["containers"][0]["resources"]
    assert resources["limits"] == {"cpu": "8", "memory": "32500M", "nvidia.com/gpu": "2"}
    assert resources["requests"] == resources["limits"]
    assert pod["nodeSelector"] == {"cloud.example.com/gpu": "l4"}
    assert pod["tolerations"][0]["key"] == "nvidia.com/gpu"
    assert "tolerations" not in cpu["template"]["spec"]
    assert pod["terminationGracePeriodSeconds"] > 40
    assert spec["headGroupSpec"]["rayStartParams"]["num-cpus"] == "0"
    assert spec["enableInTreeAutoscaling"]
    assert spec["gcsFaultToleranceOptions"]["redisAddress"] == "redis.ml:6379"


def test_pools_of_one_size_need_no_autoscaler(manifest):
    manifest("kuberay", pools={"cpu": {"cpus": 4, "memory_gb": 16, "nodes": [2, 2]}})
    spec = made("cluster.yaml")["spec"]
    assert "enableInTreeAutoscaling" not in spec
    assert not spec["headGroupSpec"]["template"]["spec"]["automountServiceAccountToken"]


def test_copies_of_artifacts_fit_into_the_volume(manifest):
    manifest("kuberay", kuberay=FULL | {"scratch_gb": 30})
    (pod, *_) = pods(made("cluster.yaml"))
    limits = [one["value"] for one in pod["containers"][0]["env"] if "CACHE_GB" in one["name"]]
    assert limits == ["15"]
    assert {"sizeLimit": "30G"} in [volume.get("emptyDir") for volume in pod["volumes"]]


def test_no_container_is_root_or_writes_outside_of_a_volume(manifest):
    manifest("kuberay", kuberay=FULL)
    documents = [made(file) for file in ("job.yaml", "cron.yaml", "cluster.yaml")]
    found = [pod for document in documents for pod in pods(document)]
    assert len(found) == 4 + 4 + 3
    for pod in found:
        (container,) = pod["containers"]
        security = container["securityContext"]
        assert security["runAsNonRoot"] and security["runAsUser"] > 0
        assert security["readOnlyRootFilesystem"] and not security["allowPrivilegeEscalation"]
        assert security["capabilities"] == {"drop": ["ALL"]}
        mounts = {mount["mountPath"]: mount["name"] for mount in container["volumeMounts"]}
        assert len(mounts) == len(container["volumeMounts"])
        assert set(mounts.values()) == {volume["name"] for volume in pod["volumes"]}
        home = next(one["value"] for one in container["env"] if one["name"] == "HOME")
        assert home in mounts
        assert pod["serviceAccountName"] == "sentray"


def test_secrets_are_references(manifest, monkeypatch):
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "value-of-the-key")
    manifest("kuberay", kuberay=FULL, pass_variables=["AWS_SECRET_ACCESS_KEY"])
    for file in Path("manifests/tiny").iterdir():
        assert "value-of-the-key" not in file.read_text()
    for pod in pods(made("cluster.yaml")):
        reference = next(
            one for one in pod["containers"][0]["env"] if one["name"] == "AWS_SECRET_ACCESS_KEY"
        )
        key = {"name": "s3", "key": "AWS_SECRET_ACCESS_KEY"}
        assert reference["valueFrom"] == {"secretKeyRef": key}
    out = manifest("kuberay", pass_variables=["HF_TOKEN"], code=2)
    assert "nobody passes HF_TOKEN" in out and "{SECRET: [HF_TOKEN]}" in out


def mounted(folder):
    """The package as the pods of a job see it, at the place where the volume puts each file."""
    config = made("recipe.yaml")
    job = made("job.yaml")
    for pod in pods(job["spec"]["rayClusterSpec"]):
        volume = next(one for one in pod["volumes"] if one["name"] == "package")["configMap"]
        assert volume["name"] == config["metadata"]["name"]
        for item in volume["items"]:
            file = folder / item["path"]
            file.parent.mkdir(parents=True, exist_ok=True)
            if item["key"] in config["data"]:
                file.write_bytes(config["data"][item["key"]].encode())
            else:
                file.write_bytes(base64.b64decode(config["binaryData"][item["key"]]))
    return folder


def test_the_recipe_gets_there_with_its_files(manifest, tiny_recipe, tmp_path, monkeypatch):
    """Also from a file whose name needs quoting everywhere, and one that is no text."""
    (tmp_path / "a: \"b\" $(c) 'd' \u00e9 -- .txt").write_bytes(b"\xff\xfe no UTF-8\r\n\x85")
    recipe = tiny_recipe(
        setting("sentences.path", str(tmp_path / "a: \"b\" $(c) 'd' \u00e9 -- .txt")),
        setting("sentences.column", "- $(touch x)\n: 'é\u2028\u0085'\t#\n"),
    )
    (tmp_path / "here.yaml").write_text(yaml.safe_dump(recipe))
    manifest("kuberay", recipe=recipe)
    here = build_graph(load_recipe("here.yaml")).nodes["sentences"].fingerprint
    monkeypatch.chdir(mounted(tmp_path / "there"))
    there = load_recipe("recipes/tiny.yaml")
    assert build_graph(there).nodes["sentences"].fingerprint == here
    assert there.storage == "s3://bucket/lab"


def test_what_the_job_runs_finds_its_recipe_from_anywhere(manifest, tmp_path):
    """The entrypoint for real, with `plan` for `run`, in a folder that is not the package's."""
    runs = str(tmp_path / "runs")
    manifest("kuberay", storage=runs, kuberay={"volumes": {str(tmp_path): "claim"}})
    assert made("job.yaml")["spec"]["entrypoint"] == "python /sentray/start.py"
    there = mounted(tmp_path / "there")
    job = json.loads((there / "job.json").read_text())
    assert job["arguments"] == ["run", "recipes/tiny.yaml", "--pools=pools.yaml"]
    (there / "job.json").write_text(json.dumps(job | {"arguments": ["plan", "recipes/tiny.yaml"]}))
    done = subprocess.run(
        [sys.executable, there / "start.py"],
        cwd="/", capture_output=True, text=True, env=os.environ | {"PYTHONPATH": str(REPOSITORY)},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "train" in done.stdout


def test_a_recipe_that_changed_is_another_config_map(manifest):
    """Running pods keep the one that they started with."""
    manifest("kuberay")
    first = made("recipe.yaml")
    manifest("kuberay")
    assert made("recipe.yaml") == first
    manifest("kuberay", "--set", "train.seed=7")
    assert made("recipe.yaml")["metadata"]["name"] != first["metadata"]["name"]
    assert first["immutable"]


def test_what_is_too_large_for_a_config_map(manifest, tiny_recipe, tmp_path):
    (tmp_path / "large.txt").write_bytes(b"A line of text that is long enough.\n" * 40_000)
    recipe = tiny_recipe(f"sentences.path={tmp_path}/large.txt")
    out = manifest("kuberay", recipe=recipe, code=2)
    assert "files/1/large.txt 1.4 MB" in out and "manifest.kuberay.volumes" in out
    assert not Path("manifests").exists()
    manifest("kuberay", recipe=recipe, shared=[str(tmp_path)],
             kuberay={"volumes": {str(tmp_path): "claim"}})  # fmt: skip


def expanded(value):
    """A variable's value as Kubernetes hands it to the container: $(NAME) filled in, $$ as $."""
    parts = value.split("$$")
    assert "$(" not in "".join(parts)
    return "$".join(parts)


class Yaml12(yaml.SafeLoader):
    """Reads 1e3 as a number, as YAML 1.2 and what Kubernetes uses do."""


Yaml12.yaml_implicit_resolvers = {
    first: [*found, ("tag:yaml.org,2002:float", re.compile(r"^[-+]?\d+[eE][-+]?\d+$"))]
    for first, found in yaml.SafeLoader.yaml_implicit_resolvers.items()
    if first
}
HOSTILE = [
    "", " ", "1e3", "0x1F", "012", "1:30", "yes", "null", "~", "=", "<<", "- a", "a: b", "#", "'",
    '"', "\n", "a\nb", "a\n\n", " a\n b", "\ta\n", "a\r\nb", "$(HOME)", "$$(HOME)", "$", "$$",
    "\u0085", "`id`", "*a", "&a", "!a", "|", ">", "%", "@", "{a}", "[a]", "--flag",
    "\u00e9\u0085\u2028\ufeff\U0001f600",
]  # fmt: skip


@settings(max_examples=60, deadline=None)
@given(
    st.lists(
        st.text(st.characters(exclude_categories=["Cs"], exclude_characters=NO_SETTING)), max_size=5
    )
)
def test_any_text_comes_out_as_it_went_in(texts):
    values = {f"V{number}": text for number, text in enumerate(HOSTILE + texts)}
    assume(not clear_credential(values))
    cluster = ClusterSettings.model_validate(
        {"storage": "s3://b", "variables": values, "manifest": {"kuberay": {"image": "i"}}}
    )
    pod = Pods(cluster, cluster.manifest.kuberay).head(autoscaled=False)
    text = as_documents(pod).decode()
    for loader in (yaml.SafeLoader, Yaml12):
        read = yaml.load(text, loader)["spec"]["containers"][0]["env"]
        found = {one["name"]: expanded(one["value"]) for one in read}
        assert {name: found[name] for name in values} == values
