"""What is seen of a run while it runs and afterwards: metrics, a log for machines, what it took."""

import json
import re
import uuid
from urllib.request import urlopen

import pytest
import ray

from pipeline.run.board import poster, start_board
from pipeline.run.metrics import COUNTERS, FIGURE
from pipeline.store.artifacts import ArtifactStore
from tests.support import REPOSITORY
from tests.support.command import Sentray, wait_until
from tests.support.recipes import overridden, setting, tiny

SAMPLE = re.compile(r"^ray_(sentray_\w+)\{(.*)\} (\S+)$")
LABEL = re.compile(r'(\w+)="([^"]*)"')


def exported():
    """Sentray's metrics on all machines: {(name, recipe, stage, figure): value}."""
    found = {}
    for node in ray.nodes():
        if not node["Alive"]:
            continue
        address = f"http://{node['NodeManagerAddress']}:{node['MetricsExportPort']}/metrics"
        with urlopen(address) as answer:
            lines = answer.read().decode().splitlines()
        for match in filter(None, map(SAMPLE.match, lines)):
            labels = dict(LABEL.findall(match[2]))
            key = (match[1], labels["recipe"], labels["stage"], labels.get("figure"))
            found[key] = found.get(key, 0) + float(match[3])
    return found


class Seen:
    """A finished run of a recipe with a name of its own."""

    def __init__(self, recipe):
        self.name = recipe["name"]
        self.store = ArtifactStore(recipe["storage"])
        (time,) = self.store.root.list(f"history/{self.name}")
        self.record = f"history/{self.name}/{time}"

    @property
    def made(self):
        nodes = json.loads(self.store.root.read(f"{self.record}/run.json"))
        return {name: self.store.open(entry["folder"]) for name, entry in nodes.items()}

    def usage(self, node):
        return self.made[node].manifest.usage

    def metrics(self):
        """All that is exported, once this run is; Ray does it every ten seconds."""
        wait_until(lambda: ("sentray_cpu_seconds_total", self.name, "train", None) in exported())
        return exported()

    def log(self):
        folder = f"{self.record}/log"
        files = [self.store.root.read(f"{folder}/{name}") for name in self.store.root.list(folder)]
        return [json.loads(line) for file in files for line in file.decode().splitlines()]


@pytest.fixture(scope="module")
def run(ray_cluster, teacher_folder, student_folder, tmp_path_factory):
    folder = tmp_path_factory.mktemp("seen")
    sentray = Sentray(folder, ray_cluster)
    file = sentray.recipe_file(tiny(folder, teacher_folder, student_folder))
    # metrics of other tests' runs are exported too
    name = setting("name", f"seen-{uuid.uuid4().hex[:8]}")
    recipe = overridden(file, (name, "evaluate.speed=false", "train.max_steps=4"))
    sentray("run", sentray.recipe_file(recipe))
    return Seen(recipe)


def test_what_actors_of_shards_say_is_in_the_log(run):
    said = [one["text"] for one in run.log() if one["stage"] == "embed:t"]
    assert len([text for text in said if "linear layers" in text]) == 1


def test_what_each_of_several_actors_says_is_told_once(ray_cluster):
    board = start_board()
    for say in (poster("a", board, once=True), poster("a", board, once=True)):
        say("slow", important=True)
    poster("b", board, once=True)("slow")
    poster("b", board)("slow")
    for rows in (1, 2):
        poster("b", board, once=True)("slow", figures={"rows": rows})
    news = ray.get(board.take.remote())
    assert [(one[0], one[2], one[3]) for one in news] == [
        ("a", True, {}), ("b", False, {}), ("b", False, {}), ("b", False, {"rows": 1}),
        ("b", False, {"rows": 2}),
    ]  # fmt: skip


def test_metrics_say_what_was_made_and_what_it_took(run):
    found = run.metrics()
    assert {key[0] for key in found} == {*COUNTERS, FIGURE}
    for node in ("embed:t", "tokens"):
        assert found["sentray_rows_total", run.name, node, None] == run.made[node].num_rows
        shards = run.made[node].shard_numbers
        assert found["sentray_shards_total", run.name, node, None] == len(shards)
    usage = run.usage("embed:t")
    assert found["sentray_tokens_total", run.name, "embed:t", None] == usage.tokens > 0
    assert found["sentray_positions_total", run.name, "embed:t", None] == usage.positions
    for kind in ("core", "cpu"):
        seconds = found[f"sentray_{kind}_seconds_total", run.name, "embed:t", None]
        assert seconds == pytest.approx(getattr(usage, f"{kind}_seconds"))
    rows = run.made["train"].file_path("metrics/metrics.jsonl").read_text().splitlines()
    loss = json.loads(rows[-1])["loss"]
    assert found[FIGURE, run.name, "train", "loss"] == pytest.approx(loss)


def test_the_dashboard_and_the_docs_name_metrics_that_there_are(run):
    keys = run.metrics()
    names, figures = {key[0] for key in keys}, {key[3] for key in keys}
    dashboard = json.loads((REPOSITORY / "cluster/grafana.json").read_text())
    asked = [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]]
    assert {m for expr in asked for m in re.findall(r"ray_(sentray_\w+)", expr)} <= names
    of_others = {"dev_spearman", "best_score"}  # which this recipe has not
    assert {f for expr in asked for f in re.findall(r'figure="(\w+)"', expr)} <= figures | of_others
    documented = (REPOSITORY / "docs/cluster.md").read_text()
    assert all(f"`ray_{metric}`" in documented for metric in names)


def test_the_log_tells_every_node_from_start_to_end(run):
    lines = run.log()
    assert [line["time"] for line in lines] == sorted(line["time"] for line in lines)
    for node in run.made:
        events = [line["event"] for line in lines if line["stage"] == node]
        assert (events[0], events[-1], events.count("done")) == ("started", "done", 1)
    losses = [line["figures"]["loss"] for line in lines if "loss" in line.get("figures", ())]
    assert len(losses) == 2


def test_a_failed_run_says_so_in_its_log(sentray, tiny_recipe):
    recipe = tiny_recipe("train.learning_rate=1e30", "train.precision=float32")
    sentray("run", sentray.recipe_file(recipe), code=2)
    last = Seen(recipe).log()[-1]
    assert (last["stage"], last["event"]) == ("", "failed")
    assert "Lower train.learning_rate" in last["text"]


def test_what_making_took_is_kept_and_shown(run, sentray):
    embed, train = run.usage("embed:t"), run.usage("train")
    assert 0 < embed.tokens < embed.positions
    assert embed.cpu_seconds > 0
    assert embed.seconds == pytest.approx(embed.core_seconds)  # a core for each process
    assert 0 < train.tokens <= train.positions
    shown = sentray("show", run.name, "--storage", run.store.root.base)
    assert f"padding {100 * embed.padding_share:.1f}%" in shown
    assert f"log: {run.store.root.base}/{run.record}/log" in shown
