"""Artifacts are published whole or not at all, read by number, and what is gone is said."""

import json
import time
from dataclasses import asdict, replace

import numpy as np
import pyarrow as pa
import pytest
import yaml

from pipeline.plan.graph import build_graph
from pipeline.plan.plan import make_plan, plan_text
from pipeline.recipe.read import load_recipe
from pipeline.run.runner import check_undamaged, choose, record_start
from pipeline.run.work import begun, works_of
from pipeline.store.artifacts import MANIFEST, ArtifactStore
from pipeline.store.leases import Leases, run_lease
from pipeline.store.manifest import Shards, new_manifest
from pipeline.upkeep.clearing import clear, garbage
from stages.errors import StorageError, UserError
from stages.files import Root
from stages.rewrite.rewrites import REWRITES
from stages.rows import npy_bytes
from stages.sentences.build import parquet_bytes
from stages.sentences.texts import texts_of_rows
from stages.train.run import training_data
from tests.support.recipes import setting


@pytest.fixture
def prepared(tmp_path, tiny_recipe):
    """A recipe whose 300 sentences are published in 5 shards, and a way to get a node's job."""
    (tmp_path / "p.tsv").write_text("sentence1\tsentence2\n")
    pairs = {"name": "p", "pairs": {"path": str(tmp_path / "p.tsv")}}
    file = tmp_path / "recipe.yaml"
    file.write_text(
        yaml.safe_dump(tiny_recipe("sentences.rows_per_shard=64", setting("perturb", [pairs])))
    )
    recipe = load_recipe(str(file))
    store, nodes = ArtifactStore(recipe.storage), build_graph(recipe).nodes

    def job(name):
        folders = {n: store.folder(node.kind, node.title, node.fingerprint)
                   for n, node in nodes.items()}  # fmt: skip
        return works_of([nodes[name]], recipe.storage, folders)[name]

    make(job("sentences"))
    return recipe, store, job


def make(work):
    work.node.stage.make(work, None)


def rows_of(store, job):
    return {s.number: s.num_rows for s in store.open(job.inputs["sentences"]).manifest.shards}


def put(store, job, numbers, plus=0):
    rows = rows_of(store, job)
    for number in numbers:
        vectors = np.full((rows[number], 4), number + plus, dtype=np.float16)
        store.put_shard(job.folder, number, {"factors.npy": npy_bytes(vectors)}, rows[number])


def test_a_run_whose_shards_another_one_forced_away_publishes_nothing(prepared):
    """B makes shards 0 and 1, A does --force, B makes the rest and wants to publish."""
    _, store, job = prepared
    b = job("embed:t")
    put(store, b, [0, 1])
    b.begin_again()
    put(store, b, [2, 3, 4])
    with pytest.raises(UserError, match=r"not published, since it lacks shards 0, 1 of 5"):
        b.publish({})
    assert store.manifest(b.folder) is None
    assert b.missing_shards() == [0, 1]  # the next run makes them
    put(store, b, [0, 1])
    b.publish({})
    read = [np.load(path)[0, 0] for path in store.open(b.folder).shard_paths("factors.npy")]
    assert read == [0, 1, 2, 3, 4]


def state_of(recipe):
    """What a plan says of the teacher's factors."""
    one = make_plan(recipe).nodes["embed:t"]
    return one.done, one.reason.partition(",")[0]


def test_who_reads_what_is_made_again_reads_it_as_it_was(prepared):
    """Until the new one is whole, which then takes its place; what only the old one had can go."""
    recipe, store, job = prepared
    embed = job("embed:t")
    put(store, embed, range(5))
    embed.publish({})
    old = store.open(embed.folder)
    paths = old.shard_paths("factors.npy")[:2]  # the others are opened later
    embed.begin_again()
    assert state_of(recipe) == (False, "being made again: begun")
    put(store, embed, [0, 1], plus=10)
    assert state_of(recipe) == (False, "being made again: missing 3 of 5 shards")
    assert store.open(embed.folder).manifest == old.manifest
    with pytest.raises(UserError, match="lacks shards 2, 3, 4"):
        embed.publish({})
    put(store, embed, [2, 3, 4], plus=10)
    job("embed:t").publish({})
    assert state_of(recipe) == (True, "done")
    first = [np.load(path)[0, 0] for path in (*paths, *old.shard_paths("factors.npy"))]
    assert first == [0, 1, 0, 1, 2, 3, 4]
    new = [np.load(path)[0, 0] for path in store.open(embed.folder).shard_paths("factors.npy")]
    assert new == [10, 11, 12, 13, 14]
    record = record_start(make_plan(recipe))
    gone = {one.path.removeprefix(f"{embed.folder}/") for one in garbage(recipe.storage)[1]}
    manifest = next(one for one in gone if one.startswith("manifest-"))
    assert gone == {manifest, *(shard.files["factors.npy"].path for shard in old.shards)}
    with Leases(store.root, pytest.fail) as leases:  # somebody may have opened the old one
        leases.hold(run_lease(record), str)
        assert not garbage(recipe.storage)[1]
    clear(recipe.storage, [], delete=True)
    assert not make_plan(recipe).nodes["embed:t"].damage
    with pytest.raises(StorageError, match="is gone"):
        old.shard_paths("factors.npy")


def published_inputs(store, work):
    """The work, as if it read nothing that is not made here."""
    there = {name: folder for name, folder in work.inputs.items() if store.manifest(folder)}
    return replace(work, inputs=there)


def test_processes_of_a_node_read_one_generation_of_what_is_made_again_meanwhile(prepared):
    """Also those that open it later, as a worker that takes a lost one's place."""
    recipe, store, job = prepared
    embed = job("embed:t")
    put(store, embed, range(5))
    embed.publish({})
    train = published_inputs(store, job("train"))
    (early,) = begun([train])

    def values(work):
        return [np.load(path)[0, 0] for path in work.input("embed:t").shard_paths("factors.npy")]

    embed.begin_again()
    put(store, embed, range(5))
    embed.publish({})
    assert values(early) == [0, 1, 2, 3, 4]  # it came out the same
    embed.begin_again()
    put(store, embed, range(5), plus=10)
    assert values(early) == [0, 1, 2, 3, 4]
    embed.publish({})
    assert values(early) == [0, 1, 2, 3, 4]
    assert values(train) == [10, 11, 12, 13, 14]
    record_start(make_plan(recipe))
    clear(recipe.storage, [], delete=True)
    with pytest.raises(UserError, match="was made again .*run again to read the new one"):
        early.input("embed:t")
    assert values(train) == [10, 11, 12, 13, 14]


def test_unfinished_rows_of_another_generation_are_made_again(prepared):
    """A training goes on with it, and says so."""
    _, store, job = prepared
    embed, told = job("embed:t"), []
    put(store, embed, range(5))
    embed.publish({})
    train, tokens = published_inputs(store, job("train")), job("tokens")

    def claim(work):
        begun([work])[0].claim(lambda text, important: told.append(text))

    put(store, tokens, [0, 1])
    for work in (train, tokens):  # as when it was killed, with a half of a shard there
        claim(work)
        store.root.write(f"{work.scratch}/half", b"")
        claim(work)
    assert not told and len(tokens.missing_shards()) == 3
    for work, node in ((train, "embed:t"), (tokens, "sentences")):
        again = job(node)
        rows = [(s.number, s.num_rows) for s in store.open(again.folder).manifest.shards]
        again.begin_again()
        for number, count in rows:
            store.put_shard(again.folder, number, {"factors.npy": b"%d" % number}, count)
        again.publish({}, rows=dict(rows))
        claim(work)
        claim(work)
    warned, begins = told
    assert "WARNING: what it reads was made again" in warned and "begins again" in begins
    assert len(tokens.missing_shards()) == 5
    assert "half" in store.root.list(train.scratch)
    assert "half" not in store.root.list(tokens.scratch)


def test_whoever_is_killed_while_it_forgets_has_forgotten_nothing_by_halves(prepared, monkeypatch):
    _, store, job = prepared
    embed = job("embed:t")
    put(store, embed, range(5))
    embed.publish({})
    with monkeypatch.context() as killed:
        killed.setattr(
            Root, "delete_all", lambda root, names: root.delete(next(iter(names))) or 1 / 0
        )
        with pytest.raises(ZeroDivisionError):
            embed.begin_again()
    assert len(embed.missing_shards()) == 1 and not store.is_made(embed.folder)
    assert store.begun_again(embed.folder)  # so whoever goes on forgets the rest
    embed.begin_again()
    assert len(embed.missing_shards()) == 5 and not store.begun_again(embed.folder)


def test_what_was_published_again_is_made_although_its_note_is_still_there(prepared, monkeypatch):
    recipe, store, job = prepared
    embed = job("embed:t")
    put(store, embed, range(5))
    embed.publish({})
    embed.begin_again()
    put(store, embed, range(5), plus=10)
    with monkeypatch.context() as killed:
        killed.setattr(Root, "delete", lambda root, name: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            embed.publish({})
    assert store.root.exists(f"{embed.folder}/again.json")
    assert store.is_made(embed.folder) and state_of(recipe) == (True, "done")


def test_a_shard_with_another_number_of_rows_is_not_published_but_made_again(prepared):
    _, store, job = prepared
    embed = job("embed:t")
    put(store, embed, range(5))
    store.put_shard(embed.folder, 1, {"factors.npy": b"x"}, 63)
    with pytest.raises(UserError, match="shard 1 has 63 rows and should have 64"):
        embed.publish({})
    assert embed.missing_shards() == [1]


def test_a_record_without_its_data_is_not_a_finished_shard(prepared):
    _, store, job = prepared
    embed = job("embed:t")
    put(store, embed, range(5))
    lost = store.finished_shards(embed.folder)[3].files["factors.npy"].path
    store.root.delete(f"{embed.folder}/{lost}")
    assert embed.missing_shards() == [3]
    with pytest.raises(UserError, match="lacks shard 3 of 5"):
        embed.publish({})


def test_files_that_went_between_ledger_and_manifest_stop_the_publication(prepared):
    _, store, job = prepared
    embed = job("embed:t")
    put(store, embed, range(5))
    embed.publish({})
    manifest = store.manifest(embed.folder)
    store.root.delete(f"{embed.folder}/{MANIFEST}")
    store.root.delete(f"{embed.folder}/{manifest.shards[2].files['factors.npy'].path}")
    with pytest.raises(UserError, match=r"shards/00002.* is gone"):
        store.publish(embed.folder, manifest, rows_of(store, embed))
    assert store.manifest(embed.folder) is None


def test_sentences_publish_what_they_made_and_no_more(prepared):
    _, store, job = prepared
    sentences = job("sentences")
    store.remove(sentences.folder)
    store.put_shard(sentences.folder, 9, {"rows.parquet": b""}, 64)  # of an earlier attempt
    make(sentences)
    rows = {s.number: s.num_rows for s in store.manifest(sentences.folder).shards}
    assert rows == {0: 64, 1: 64, 2: 64, 3: 64, 4: 44}


def test_a_stage_that_makes_its_shards_itself_writes_segments_too(prepared, monkeypatch):
    """So whoever reads the ledger asks for fewer files than there are shards."""
    monkeypatch.setattr("pipeline.run.work.SHARDS_IN_SEGMENT", 3)
    monkeypatch.setattr("pipeline.run.work.FEWEST_IN_SEGMENT", 2)
    _, store, job = prepared
    sentences = job("sentences")
    store.remove(sentences.folder)
    make(sentences)
    segments = [name for name in store.root.names(sentences.folder) if "ledger-" in name]
    lines = [store.root.read(f"{sentences.folder}/{name}").splitlines() for name in segments]
    assert sorted(map(len, lines)) == [2, 3]
    asked = []
    read_all = store.root.read_all
    monkeypatch.setattr(
        type(store.root), "read_all", lambda _, paths: asked.extend(paths) or read_all(paths)
    )
    assert sorted(store.finished_shards(sentences.folder)) == [0, 1, 2, 3, 4] and len(asked) == 2


def test_rewrites_are_neither_counted_nor_published_with_a_gap(prepared):
    _, store, job = prepared
    perturb = job("perturb:p")
    stats = {"rewrites": 1, "negatives": 0, "sentences_with_rewrite": 1, "rejected": {}}
    for number, count in rows_of(store, perturb).items():
        if number != 1:
            files = {"stats.json": json.dumps(stats).encode()}
            store.put_shard(perturb.folder, number, files, count)
    with pytest.raises(UserError, match="lacks shard 1 of 5"):
        perturb.node.stage.publish(perturb)
    assert len(store.finished_shards(perturb.folder)) == 4
    assert store.manifest(perturb.folder) is None


def test_tokens_of_rewrites_have_as_many_rows_as_there_are_rewrites(prepared):
    _, store, job = prepared
    perturb = job("perturb:p")
    for number, count in rows_of(store, perturb).items():
        table = pa.Table.from_pylist([{"row": 0, "text": "x", "negative": None}] * number, REWRITES)
        stats = {"rewrites": number, "negatives": 0, "sentences_with_rewrite": 0, "rejected": {}}
        files = {"rewrites.parquet": parquet_bytes(table), "stats.json": json.dumps(stats).encode()}
        store.put_shard(perturb.folder, number, files, count)
    perturb.publish({})
    tokens = job("tokens:p")
    assert tokens.expected_rows() == {number: number for number in range(5)}


def with_gap(store, folder):
    """An artifact as an earlier version published it: records of shards, and none of shard 1."""
    manifest = store.manifest(folder)
    gap = [asdict(shard) for shard in manifest.shards if shard.number != 1]
    text = json.dumps(asdict(manifest) | {"shards": gap})
    store.root.write(f"{folder}/{MANIFEST}", text.encode())


def test_a_gap_is_never_read_by_place(prepared):
    _, store, job = prepared
    embed = job("embed:t")
    put(store, embed, range(5))
    embed.publish({})
    with_gap(store, embed.folder)
    with_gap(store, embed.inputs["sentences"])
    found = store.open(embed.folder)
    assert np.load(found.shard_path(2, "factors.npy"))[0, 0] == 2
    for read in (lambda: found.shard_path(1, "factors.npy"),
                 lambda: found.shard_paths("factors.npy"),
                 lambda: texts_of_rows(embed.input("sentences"), [70]),
                 lambda: job("tokens").missing_shards()):  # fmt: skip
        with pytest.raises(UserError, match="lacks shard 1"):
            read()


def test_owners_of_rewrites_are_numbered_by_shard(prepared):
    """Training pairs rewrite and sentence by the shard's number, whatever the manifest's order."""
    _, store, job = prepared
    train = job("train")
    numbers = [4, 3, 2, 1, 0]
    for name in ("tokens", "tokens:p", "embed:t"):
        node = job(name)
        rows = rows_of(store, job("tokens"))
        for number in numbers:
            count = rows[number]
            ids, offsets = np.full(count, number), np.arange(count + 1)
            files = {"ids.npy": ids, "offsets.npy": offsets, "owners.npy": np.arange(count),
                     "factors.npy": np.full((count, 4), number, dtype=np.float16)}  # fmt: skip
            store.put_shard(
                node.folder, number, {key: npy_bytes(v) for key, v in files.items()}, count
            )
        shards = store.whole_shards(node.folder, rows)
        publish_reversed(store, node, shards, rows)
    data = training_data(train.node.stage, train)
    sentence = np.array([64 * 3 + 5])
    assert data.tokens.take(sentence)[0].tolist() == [3]
    assert data.rewrites.take(sentence, np.array([0.5]))[0].tolist() == [3]
    assert data.factors[0].take(sentence)[0, 0] == 3


def publish_reversed(store, job, shards, rows):
    manifest = new_manifest(
        job.node, recipe="r", inputs={}, shards=shards, files={}, stats={}, started=time.time(),
    )  # fmt: skip
    store.publish(job.folder, replace(manifest, shards=Shards.of(shards[::-1])), rows)


@pytest.mark.parametrize("damage", ["gone", "unlisted"])
def test_the_plan_says_what_is_gone_and_how_to_mend_it(prepared, damage):
    recipe, store, job = prepared
    embed = job("embed:t")
    put(store, embed, range(5))
    embed.publish({})
    if damage == "gone":
        store.open(embed.folder).shard_path(3, "factors.npy").unlink()
    else:
        with_gap(store, embed.folder)
    plan = make_plan(recipe)
    text = plan_text(plan)
    (line,) = [line for line in text.splitlines() if " embed:t " in line and "damaged" in line]
    what = "lacks shard 1" if damage == "unlisted" else "shards/00003.factors"
    assert line.startswith(" ! embed:t") and what in line and "--force embed:t" in line
    assert text.splitlines()[-1].endswith("to do, 1 damaged")
    wanted, again = choose(plan, None, None, [])
    with pytest.raises(UserError, match=r"damaged: .*--force embed:t"):  # training reads it
        check_undamaged(plan, wanted, again)
    wanted, again = choose(plan, None, None, ["embed:t"])
    check_undamaged(plan, wanted, again)
    wanted, again = choose(plan, None, "evaluate:before", [])
    check_undamaged(plan, wanted, again)  # it does not read it


def test_a_hint_names_the_node_as_this_recipe_calls_it(prepared):
    """The maker's name for it (here another teacher's) may be no node of the recipe at hand."""
    _, store, job = prepared
    embed = job("embed:t")
    put(store, embed, range(5))
    replace(embed, node=replace(embed.node, name="embed:somebody-elses")).publish({})
    store.open(embed.folder).shard_path(0, "factors.npy").unlink()
    with pytest.raises(UserError, match="--force embed:t") as caught:
        job("train").input("embed:t").shard_paths("factors.npy")
    assert "somebody" not in str(caught.value)
    with pytest.raises(UserError, match="delete .*embed/t-") as caught:
        store.open(embed.folder).shard_paths("factors.npy")
    assert "--force" not in str(caught.value)


def test_the_plan_lists_a_folder_once_and_reads_no_data(prepared, monkeypatch):
    recipe, store, job = prepared
    embed = job("embed:t")
    put(store, embed, range(5))
    embed.publish({})
    listed, read = [], []
    root = type(store.root)
    names, content = root.names, root.read
    monkeypatch.setattr(root, "names", lambda s, f: listed.append(f) or names(s, f))
    monkeypatch.setattr(root, "read", lambda s, f: read.append(f) or content(s, f))
    make_plan(recipe)
    assert listed.count(embed.folder) == 1
    assert not [name for name in read if "/shards/" in name]


def test_a_shard_is_finished_with_its_record_and_its_data(prepared):
    _, store, job = prepared
    embed = job("embed:t")
    put(store, embed, [1])
    assert embed.finished_shard(0) is None
    record = embed.finished_shard(1)
    assert record == store.finished_shards(embed.folder)[1]
    store.root.delete(f"{embed.folder}/{record.files['factors.npy'].path}")
    assert embed.finished_shard(1) is None
