"""The command `sentray manifest`: what it refuses, and how it writes."""

import re
import textwrap
from pathlib import Path

import pytest
import yaml

from cluster.manifests.cron import checked_schedule
from cluster.manifests.pods import PACKAGE, USER
from cluster.manifests.settings import TAKEN
from pipeline.cli import main
from tests.support import REPOSITORY
from tests.support.recipes import setting

CPU = {"cpus": 4, "memory_gb": 16}
# place, what the cluster's file says, what is said to the user
WRONG = {
    "no section": ("slurm", {"slurm": None}, "no section `manifest.slurm` in its file"),
    "no pools": ("kuberay", {"pools": {}}, "there are no `pools`"),
    "no image": ("kuberay", {"kuberay": {"image": None}}, "manifest.kuberay.image: Input should"),
    "two words": ("kuberay", {"kuberay": {"image": "a b"}}, "manifest.kuberay.image: String"),
    "no memory": ("kuberay", {"pools": {"cpu": {"cpus": 4}}}, "pools.cpu.memory_gb: this setting"),
    "a pool's name": ("kuberay", {"pools": {"4 gpus": CPU}}, "'4 gpus' cannot be a name"),
    "one pool twice": ("kuberay", {"pools": {"a_b": CPU, "a.b": CPU}}, "two of them are 'a-b'"),
    "a label": ("slurm", {"pools": {"a": CPU | {"labels": {"kind": "x,y=z"}}}}, "'kind: x,y=z'"),
    "no such pool": ("kuberay", {"kuberay": {"node_selectors": {"tpu": {}}}}, "no pool 'tpu'"),
    "a namespace": ("kuberay", {"kuberay": {"namespace": "My.Space"}}, "namespace: String should"),
    "a Secret's name": ("kuberay", {"kuberay": {"secrets": {"S3": []}}}, "'S3' cannot be a name"),
    "a secret": (
        "kuberay", {"kuberay": {"secrets": {"s3": ["AWS_KEY=abc123"]}}}, "values belong into",
    ),
    "a variable twice": (
        "kuberay", {"kuberay": {"secrets": {"s3": ["A"]}}, "variables": {"A": "b"}},
        "A comes from a Secret too",
    ),
    "storage on no volume": ("kuberay", {"storage": "/shared/runs"}, "does not see the folder"),
    "shared on no volume": ("kuberay", {"shared": ["/mnt/c"]}, "shared: a pod does not see"),
    "a volume over ours": ("kuberay", {"kuberay": {"volumes": {"/tmp/": "c"}}}, "'/tmp/' is not"),
    "a schedule": ("kuberay", {"kuberay": {"schedule": "@weekly"}}, "has 1 fields"),
    "a partition": ("slurm", {"slurm": {"partition": "a\n#SBATCH --wrap=x"}}, "partition: String"),
    "a time": ("slurm", {"slurm": {"time": 86400}}, "write it in quotes"),
    "machines of no pool": ("ray-up", {"ray_up": {"machines": {"tpu": {}}}}, "names tpu, and the"),
    "a secret of a provider": (
        "ray-up", {"ray_up": {"provider": {"type": "aws", "secret_key": "abc123"}}},
        "secret_key looks like a secret",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", WRONG)
def test_what_is_wrong_is_said_and_nothing_is_written(manifest, case):
    place, settings, message = WRONG[case]
    out = manifest(place, code=2, **settings)
    assert message in out
    assert "abc123" not in out
    assert not Path("manifests").exists()


def test_names_that_kubernetes_takes(manifest, tiny_recipe):
    manifest("kuberay", recipe=tiny_recipe(setting("name", "my_model.v2")))
    assert "name: my-model-v2\n" in Path("manifests/my_model.v2/job.yaml").read_text()
    out = manifest("kuberay", recipe=tiny_recipe(setting("name", "2nd")), code=2)
    assert "'2nd' cannot be a name in Kubernetes" in out and "--set name=" in out
    assert "cannot be a name" in manifest(
        "kuberay", recipe=tiny_recipe(setting("name", "a" * 42)), code=2
    )


def test_options_and_words_in_any_order(manifest):
    out = manifest("kuberay", "--schedule", "0 3 * * 1", "run", "--from=train", "--to", "there")
    assert "warning: each start after a failure, 3 at most, begins --from=train again" in out
    assert '"--from=train"' in Path("there/recipe.yaml").read_text()
    assert 'schedule: "0 3 * * 1"' in Path("there/cron.yaml").read_text()
    out = manifest("kuberay", "tune", "--only", "embed", code=2)
    assert "manifest ... tune: --only=embed is an option of `run`" in out
    out = manifest("slurm", "run", "--force", "embed", code=2)  # at each end of its time
    assert "--force=embed: SLURM starts the same line again" in out
    assert "--schedule goes with" in manifest("slurm", "--schedule", "0 3 * * 1", code=2)
    assert "--schedule '0 3' has 2" in manifest("kuberay", "--schedule", "0 3", code=2)


def test_only_generated_files_are_replaced(manifest):
    manifest("kuberay", "--schedule", "0 3 * * 1")
    folder = Path("manifests/tiny")
    (folder / "notes.txt").write_text("mine")
    before = {file.name: file.read_text() for file in folder.iterdir()}
    (folder / "cluster.yaml").write_text("kind: mine\n")
    out = manifest("kuberay", "--set", "train.seed=7", code=2)
    assert "manifests/tiny/cluster.yaml: was not written by" in out
    now = {file.name: file.read_text() for file in folder.iterdir()}
    assert now == before | {"cluster.yaml": "kind: mine\n"}
    (folder / "cluster.yaml").unlink()
    manifest("kuberay", "--set", "train.seed=7")
    # cron.yaml would run the recipe as it was
    assert {file.name for file in folder.iterdir()} == before.keys() - {"cron.yaml"}
    assert (folder / "recipe.yaml").read_text() != before["recipe.yaml"]
    Path("file").write_text("mine")
    assert "file: is in the way" in manifest("kuberay", "--to", "file", code=2)


def test_a_package_is_replaced_and_a_zip_file_of_yours_is_not(manifest):
    manifest("slurm", pools={"cpu": CPU})
    (package,) = Path("manifests/tiny").glob("*.zip")
    manifest("slurm", pools={"cpu": CPU})
    package.write_bytes(b"PK mine")
    assert "was not written by" in manifest("slurm", pools={"cpu": CPU}, code=2)


@pytest.mark.parametrize(
    "schedule", ["* * * * *", "*/15 0-6/2 1,15 JAN-mar SUN", "59 23 31 12 6", "0  3 * * mon-fri"]
)
def test_schedules(schedule):
    assert checked_schedule(schedule) == " ".join(schedule.split())


@pytest.mark.parametrize(
    "schedule",
    ["", "0 3 * *", "0 3 * * 1 2026", "60 * * * *", "* 24 * * *", "* * 0 * *", "* * * 13 *",
     "* * * * 7", "*/0 * * * *", "5-1 * * * *", "a * * * *", "-1 * * * *", "1, * * * *",
     "² * * * *", "*-3 * * * *", "TZ=UTC * * * * *"],
)  # fmt: skip
def test_what_is_no_schedule(schedule):
    with pytest.raises(ValueError, match="fields|write"):
        checked_schedule(schedule)


@pytest.mark.parametrize("kind", ["cpu", "gpu"])
def test_images_are_those_that_the_rest_takes_them_for(kind):
    """No image is built here. User, torch and files are what pods, Makefile and repository say."""
    text = (REPOSITORY / "cluster/images" / f"{kind}.Dockerfile").read_text()
    assert re.search(r"^USER (\d+)$", text, re.M)[1] == str(USER)
    assert f"--uid {USER} " in text
    torch = re.search(r"^TORCH_CPU := (.*)$", (REPOSITORY / "Makefile").read_text(), re.M)[1]
    assert re.search(r"^ARG TORCH=(.*)$", text, re.M)[1] == torch + "+cpu" * (kind == "cpu")
    assert "-c constraints.txt '.[all]'" in text
    copied = [name for line in re.findall(r"^COPY (.*) \S+$", text, re.M) for name in line.split()]
    assert {"stages", "pipeline", "tune", "cluster", "constraints.txt"} <= set(copied)
    assert all((REPOSITORY / name).exists() for name in copied)


def test_no_volume_hides_the_package():
    assert PACKAGE in TAKEN


def documented():
    """The cluster's files of docs/cluster.md that have a section `manifest`, by place."""
    text = (REPOSITORY / "docs/cluster.md").read_text()
    blocks = [
        yaml.safe_load(textwrap.dedent(block))
        for block in re.findall(r"^ *```yaml\n(.*?)^ *```", text, re.M | re.S)
    ]
    pools = next(block for block in blocks if {"storage", "pools"} <= block.keys())
    found = {}
    for block in blocks:
        for place in block.get("manifest", {}):
            found[place.replace("_", "-")] = pools | block
    return found


@pytest.mark.parametrize("place", ["kuberay", "slurm", "ray-up"])
def test_what_the_documentation_shows_works(manifest, cluster_file, place):
    manifest("kuberay", "--to", "else")  # writes recipe.yaml
    settings = documented()[place]
    cluster_file(**settings)
    assert main(["manifest", "--for", place, "recipe.yaml", "--cluster", "lab"]) == 0
