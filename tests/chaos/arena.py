"""Where schedules are played: a Ray cluster, endpoints, storages, an undisturbed run's results.

The recipe has every kind of stage; its student is trained by two workers too, and searched for. The
cluster's second node may be lost; so may all of it.
"""

import dataclasses
import os
import random
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from pipeline.plan.plan import Plan, make_plan
from pipeline.recipe.read import load_recipe
from pipeline.upkeep.contents import key_of
from tests.chaos.schedule import Schedule, Subject, draw
from tests.chaos.storage import Storage, manifests, storages
from tests.support.chat_server import ChatServer, rewrite_of
from tests.support.command import wait_until
from tests.support.embedding_server import EmbeddingServer
from tests.support.endpoint_server import EndpointServer, Reply
from tests.support.here import make_here
from tests.support.marian import make_pair
from tests.support.models import make_model, make_sentences
from tests.support.recipes import tiny, write_recipe
from tests.support.tokenizers import make_cuttable

NUM_SENTENCES, ROWS_PER_SHARD = 240, 40
# Requests of one endpoint under way, and sentences in one for embeddings
CONCURRENCY, BATCH = 4, 5
# Nodes that ask endpoints
PAID = ("perturb:chat", "endpoint:far")
# How many times as often as others whatever has most to lose is drawn
MANY = 4
# How many workers it has does not tell a training from another
TWO_WORKERS = ("train.num_workers=2", "train.cpus_per_worker=1", "train.max_steps=20")
SEARCH = {
    "space": {"train.learning_rate": {"grid": [3e-3, 2e-3, 5e-4]}},
    "scheduler": "none", "concurrency": 2, "confirm": {"settings": 0},
}  # fmt: skip
# A command that takes so long hangs: on a slow machine all of the recipe took 150
END_SECONDS = 400.0
# Ray's processes that serve it, or wait
NOT_AT_WORK = ("IDLE", "Agent")


class Running:
    """A command in a process of its own; its lines are read as they come."""

    def __init__(self, command: list[str], folder: Path) -> None:
        self.process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=folder
        )
        self.lines: list[str] = []
        self.errors: list[str] = []
        self._readers = [
            threading.Thread(target=self._read, args=(stream, lines), daemon=True)
            for stream, lines in (
                (self.process.stdout, self.lines), (self.process.stderr, self.errors),
            )
        ]  # fmt: skip
        for reader in self._readers:
            reader.start()

    def _read(self, stream: Any, lines: list[str]) -> None:
        for line in stream:
            lines.append(line)

    def said(self, text: str) -> bool:
        return any(text in line for line in list(self.lines))

    @property
    def ended(self) -> bool:
        return self.process.poll() is not None

    def end(self, seconds: float = END_SECONDS) -> int:
        """Its exit code; AssertionError with all that it said where it does not end."""
        try:
            code = self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            self.process.send_signal(signal.SIGCONT)
            self.process.send_signal(signal.SIGABRT)
            raise AssertionError(f"hangs:\n{self.output}") from None
        for reader in self._readers:
            reader.join()
        return code

    @property
    def output(self) -> str:
        return "".join([*self.lines, *self.errors])


class Arena:
    def __init__(self, folder: Path, kinds: dict[str, Storage]) -> None:
        self.folder = folder
        self.storages = kinds
        self.may_answer = threading.Event()
        self.may_answer.set()
        self.endpoints: list[EndpointServer] = [
            ChatServer(lambda text, *_: Reply(rewrite_of(text), hold=self.may_answer)),
            EmbeddingServer(lambda *_: Reply(hold=self.may_answer)),
        ]
        # how long a driver asks for a cluster that is gone (60 s)
        os.environ.setdefault("RAY_gcs_rpc_server_reconnect_timeout_s", "5")
        # how often a head asks a machine whether it lives (3 s)
        os.environ.setdefault("RAY_health_check_period_ms", "1000")
        os.environ["XDG_CACHE_HOME"] = str(folder / "cache")
        self._clock = folder / "clock"
        self.move_clock(0)
        self._cluster: Any = None
        self.start_cluster()
        self._recipe = self._build()
        self.reference = folder / "reference" / "runs"
        self._file, self._search = folder / "recipe.yaml", folder / "search.yaml"
        self.prepare(str(self.reference))
        make_here(load_recipe(str(self._file)))
        plan = self._plan()
        assert not [name for name, one in plan.nodes.items() if one.to_do]
        self._root, self._start = plan.store.root, frozenset(plan.folders.values())
        self.subjects = self._subjects(plan)
        self.made = manifests(self._root)

    def _plan(self, *settings: str) -> Plan:
        return make_plan(load_recipe(str(self._file), settings))

    def _subjects(self, plan: Plan) -> dict[str, Subject]:
        """What the search makes is known once it has been made: see `know`."""
        found: dict[str, Subject] = {}
        alike: set[str] = set()  # two teachers' factors may be the same artifact
        for name in (name for name, one in plan.nodes.items() if not one.spare):
            key = key_of(plan.folders[name])
            if key in alike:
                continue
            alike.add(key)
            lacking = {name}
            for one in plan.graph.values():
                if lacking.intersection(one.inputs.values()):
                    lacking.add(one.name)
            folders = frozenset(plan.folders[one] for one in lacking)
            made = frozenset((plan.folders[name],))
            weight = MANY if name in ("train", *PAID) else 1
            found[name] = Subject(f"{name:<16}  started", made, folders, name, weight=weight)

        made = frozenset((self._plan(*TWO_WORKERS).folders["train"],))
        found["train by two"] = dataclasses.replace(
            found["train"], made=made, lacking=made, settings=TWO_WORKERS
        )
        found["search"] = Subject("starting Ray", frozenset(), frozenset(), weight=MANY)
        return found

    def _build(self) -> dict[str, Any]:
        place = self.folder
        make_model(place / "teacher", layers=3, width=48, seed=1)
        make_cuttable(place / "student", "WordPiece")
        there, back = make_pair(place / "marian", train_steps=150)
        recipe = tiny(place, place / "teacher", place / "student")
        text = place / "sentences.txt"
        text.write_text("\n".join(make_sentences(NUM_SENTENCES)) + "\n")
        vectors = place / "vectors.npy"
        np.save(vectors, np.random.default_rng(0).standard_normal((NUM_SENTENCES, 24)))
        chat, embeddings = (server.url for server in self.endpoints)
        asked = {"model": "m", "key_variable": None, "concurrency": CONCURRENCY}
        recipe["sentences"]["rows_per_shard"] = ROWS_PER_SHARD
        recipe["perturb"] = [
            {"name": "chat", "rewriting": asked | {"base_url": chat}},
            {
                "name": "pivot",
                "backtranslation": {
                    "to_pivot": {"model": str(there)}, "from_pivot": {"model": str(back)},
                    "num_beams": 1, "rows_per_unit": 8,
                },
                "filters": {
                    "min_growth": 0.0, "max_growth": 1000.0, "max_repeats": 1000, "script": None,
                },
            },
        ]  # fmt: skip
        (known,) = recipe["teachers"]
        recipe["teachers"] = [
            known,
            known | {"name": "ranked", "similarity": "ranks"},
            known | {"name": "narrow", "factor_width": 16},
            {"name": "given", "vectors": {"path": str(vectors), "sentences": str(text)}},
            {"name": "far", "endpoint": asked | {"base_url": embeddings, "batch_size": BATCH}},
        ]
        recipe["ranks"] = {"corpus_size": 100, "dimensions": 32}
        recipe["student"] |= {"vocabulary": {"min_count": 1}}
        recipe["train"] |= {
            "objectives": {"infonce": {}, "listnet": {}},
            "max_steps": 24, "checkpoint_every_steps": 2,
        }  # fmt: skip
        recipe["export"] = {"variants": ["bf16"], "gate": {"cosine": 0.9}}
        return recipe

    def prepare(self, storage: str) -> None:
        write_recipe(self._file, self._recipe | {"storage": storage})
        write_recipe(self._search, {"recipe": self._file.name, "search": SEARCH})

    def start(self, *arguments: object) -> Running:
        """A command of its own process."""
        command = [sys.executable, "-m", "tests.chaos.driver", str(self._clock)]
        command += map(str, arguments)
        command += ["--address", self._cluster.address]
        return Running(command, Path.cwd())

    def run(self, subject: Subject, whole: bool, again: bool) -> Running:
        """Makes it, and with `whole` what depends on it; with `again` although it is there."""
        if not subject.node:
            return self.start("tune", self._search)
        options = [] if whole else ["--only", subject.node]
        options += ["--force", subject.node] * again
        for setting in subject.settings:
            options += ["--set", setting]
        return self.start("run", self._file, *options)

    def know(self, name: str) -> Subject:
        """A subject by its name; what an undisturbed run makes of it is made, if it was not yet:
        by a search, and with other settings than the recipe's."""
        subject = self.subjects[name]
        if (subject.node and not subject.settings) or subject.made & self.made.keys():
            return subject
        self.prepare(str(self.reference))
        _undisturbed(self.run(subject, whole=False, again=False))
        before, self.made = self.made, manifests(self._root)
        made = frozenset(self.made.keys() - before.keys())
        subject = self.subjects[name] = dataclasses.replace(subject, made=made)
        return subject

    def begin(self, storage: Storage, without: frozenset[str]) -> None:
        """A storage with the recipe's artifacts as the undisturbed run made them, but for some.

        Answers of endpoints are not there: with them nothing would be asked.
        """
        aside = self.folder / "start"
        shutil.rmtree(aside, ignore_errors=True)
        lacking = {key_of(folder) for folder in without}
        for folder in sorted(self._start):
            if key_of(folder) not in lacking and (self.reference / folder).exists():
                shutil.copytree(self.reference / folder, aside / folder)
        storage.begin(aside)
        self.prepare(storage.uri)
        for server in self.endpoints:
            server.answered.clear()

    def quiesce(self, storage: Storage) -> None:
        """Endpoints give no more answers; waits until those that were given are written down, or
        for a while."""
        self.may_answer.clear()
        end = time.monotonic() + 5.0
        while self.paid() > storage.answers() and time.monotonic() < end:
            time.sleep(0.05)

    def resume(self) -> None:
        """Once whoever was killed is gone, endpoints answer again."""
        self.may_answer.clear()
        wait_until(lambda: not any(server.in_flight_now for server in self.endpoints))
        self.may_answer.set()

    def under_way(self) -> int:
        """Answers that requests on their way ask for."""
        chat, embeddings = (server.in_flight_now for server in self.endpoints)
        return chat + BATCH * embeddings

    def paid(self) -> int:
        return sum(sum(server.answered.values()) for server in self.endpoints)

    def move_clock(self, seconds: int) -> None:
        self._clock.write_text(str(seconds))

    def start_cluster(self) -> None:
        from ray.cluster_utils import Cluster

        self._cluster = Cluster(
            initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False}
        )
        self._second = self._cluster.add_node(num_cpus=1)

    def lose_node(self) -> None:
        """Takes the second node away as a power cut does, and adds another."""
        _kill(self._second)
        self._second = self._cluster.add_node(num_cpus=1, wait=False)

    def lose_cluster(self) -> None:
        """Takes all of it away, and starts another."""
        self.stop_cluster()
        self.start_cluster()

    def stop_cluster(self) -> None:
        """Without its own way of ending, which asks whom it has ended (60 s)."""
        for node in (self._second, self._cluster.head_node):
            _kill(node)

    def workers(self) -> list[int]:
        """Processes of this cluster that are at work."""
        found = []
        for node in (self._cluster.head_node, self._second):
            for started in node.all_processes["raylet"]:
                with suppress(psutil.Error):  # it has just been killed
                    for one in psutil.Process(started.process.pid).children(recursive=True):
                        title = " ".join(one.cmdline()).strip()
                        if title.startswith("ray::") and not title.endswith(NOT_AT_WORK):
                            found.append(one.pid)
        return sorted(found)

    def a_worker(self, draws: random.Random) -> int | None:
        found = self.workers()
        return draws.choice(found) if found else None

    def num_writes(self, subject: Subject) -> int:
        """Files that making it wrote."""
        return sum(len(self._root.sizes(folder)) for folder in subject.made)

    def draw(self, seed: int) -> Schedule:
        can_mount = not self.storages["disk"].why_not
        return draw(seed, self.subjects, list(self.storages), can_mount)

    def restart(self) -> None:
        """A cluster without whatever a failed schedule left behind."""
        self.may_answer.set()
        self.move_clock(0)
        self.lose_cluster()

    def stop(self) -> None:
        for server in self.endpoints:
            server.stop()
        self.stop_cluster()


def _undisturbed(running: Running) -> None:
    assert running.end() == 0, running.output


def _kill(node: Any) -> None:
    for processes in node.all_processes.values():
        for one in processes:
            one.process.kill()
            one.process.wait()


@contextmanager
def arena_in(folder: Path) -> Iterator[Arena]:
    with storages(folder) as kinds:
        arena = Arena(folder, kinds)
        try:
            yield arena
        finally:
            arena.stop()
