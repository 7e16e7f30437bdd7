"""What follows training: rank corpora, evaluations, the export and the comparison of speed."""

import json
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from pipeline.artifacts import ArtifactStore
from pipeline.job import Job, Say, TextRows, corpus_arrays, read_texts
from pipeline.recipe import public_recipe
from pipeline.table import results_table


def make_corpus(job: Job, say: Say) -> None:
    """Corpus vectors of one encoder, and the basis of compressed ranks with its error."""
    from stages.ranks.corpus import band_error, corpus_files
    from stages.rows import FactorRows

    ranks = job.recipe.ranks
    assert ranks is not None
    sentences = job.input("sentences")
    rows_per_shard = job.recipe.sentences.rows_per_shard
    say(f"{ranks.corpus_size:,} corpus sentences")
    vectors_of: Callable[[np.ndarray], np.ndarray]
    if job.who == "after":
        from stages.encoder.model import load_for_inference

        encoder, texts = load_for_inference(job.encoder("after")), TextRows(sentences)

        def vectors_of(rows: np.ndarray) -> np.ndarray:
            return encoder.encode_unit(texts.take(rows))
    else:
        embedded = job.input(f"embed:{job.who}")
        paths = embedded.shard_paths("factors.npy")
        vectors_of = FactorRows(paths, rows_per_shard, renormalise=False).take
    files, stats = corpus_files(vectors_of, sentences.manifest.num_rows, ranks, job.who)
    if stats["duplicate_vectors"] > ranks.corpus_size // 100:
        say(
            f"WARNING: {stats['duplicate_vectors']:,} corpus vectors equal another one; their "
            "ranks are in corpus order, not in order of meaning",
            important=True,
        )
    if "error" in stats:
        error, regression = stats["error"], job.recipe.train.objectives.rank_regression
        line = f"{ranks.dimensions} dimensions: rmse {error['rmse']:.4f}, max {error['max']:.3f}"
        if regression is not None:
            pairs, inside = band_error(error, regression.low, regression.high)
            line += f", {inside:.4f} on {pairs:,} pairs in [{regression.low}, {regression.high}]"
        say(f"{line}; spread of exact rank similarities {error['spread']:.3f}", important=True)
    with tempfile.TemporaryDirectory() as local:
        for name, data in files.items():
            (Path(local) / name).write_bytes(data)
        job.publish(stats, job.store.put_files(job.folder, Path(local)))


def make_evaluation(job: Job, say: Say) -> None:
    """Scores one encoder on the recipe's STS sets and retrieval pairs, with or without ranks."""
    import pyarrow.parquet as pq

    from stages.encoder.model import load_for_inference
    from stages.evaluate.geometry import score_geometry
    from stages.evaluate.retrieval import score_retrieval
    from stages.evaluate.speed import size_of
    from stages.evaluate.sts import load_sts, score_sts
    from stages.ranks.similarity import RankAwareEncoder

    evaluate = job.recipe.evaluate
    sets = [load_sts(one) for one in evaluate.sts]
    settings = job.encoder(job.who).model_copy(update={"max_length": evaluate.max_length})
    encoder = load_for_inference(settings)
    encode = encoder.encode_unit
    if job.node.name.endswith("+ranks"):
        weight = job.node.settings["ranks.inference_weight"]
        corpus = corpus_arrays(job.input(f"corpus:{job.who}"))
        encode = RankAwareEncoder(encoder, *corpus, weight).encode
    result: dict[str, Any] = {"size": size_of(encoder), "sts": {}}
    for pairs in sets:
        say(f"{pairs.name}: {len(pairs.gold):,} pairs")
        result["sts"][pairs.name] = score_sts(pairs, encode, evaluate.num_bootstrap)
    if evaluate.geometry:
        result["geometry"] = score_geometry(evaluate.geometry, encode)
    if evaluate.retrieval:
        held_out = pq.read_table(job.input("sentences").file_path("holdout.parquet"))
        rows = held_out.slice(0, evaluate.retrieval.num_pairs).to_pydict()
        say(f"retrieval: {len(rows['summary']):,} pairs")
        result["retrieval"] = score_retrieval(rows["summary"], rows["description"], encode)
    job.publish(result)


def evaluations(folders: dict[str, str], store: ArtifactStore) -> dict[str, Any]:
    """Published evaluation results by encoder: before, after, each teacher, and those with ranks.

    Args:
        folders: artifacts by node; other kinds are passed over.
    """
    found = {}
    for name, folder in folders.items():
        if name.startswith("evaluate:"):
            manifest = store.manifest(folder)
            if manifest is not None:
                found[name.partition(":")[2]] = manifest.stats
    return found


def make_export(job: Job, say: Say) -> None:
    """Writes the sentence-transformers folder and its card, and the corpus of its ranks."""
    from stages.encoder.tokenizer import load_tokenizer
    from stages.export import export_student, model_card

    settings = job.encoder("after")
    tokenizer = load_tokenizer(settings)
    table = results_table(evaluations(job.inputs, job.store), None)
    sentences = job.input("sentences").manifest
    ranks = "corpus:after" in job.inputs
    card = model_card(job.recipe.name, public_recipe(job.recipe), sentences.stats, table, ranks)
    with tempfile.TemporaryDirectory() as local:
        target = Path(local) / "model"
        export_student(Path(settings.model), tokenizer, settings.max_length, card, target)
        if ranks:
            corpus = job.input("corpus:after")
            for name in corpus.manifest.files:
                shutil.copy(corpus.file_path(name), target / name)
            about = {"inference_weight": job.node.settings["ranks.inference_weight"]}
            (target / "ranks.json").write_text(json.dumps(about) + "\n")
        job.publish({}, job.store.put_files(job.folder, Path(local)))


def make_speed(job: Job, say: Say) -> None:
    """Times student and teachers on the first sentences of the corpus, all in float32."""
    from stages.encoder.model import load_for_inference
    from stages.evaluate.speed import compare_speed

    texts = read_texts(job.input("sentences"), 0)[:512]
    alike = {"max_length": job.recipe.evaluate.max_length, "precision": "float32"}
    student = load_for_inference(job.encoder("after"))
    teachers = {
        teacher.name: load_for_inference(job.encoder(teacher.name).model_copy(update=alike))
        for teacher in job.recipe.teachers
    }
    say(f"{len(texts)} sentences, student and {len(teachers)} teacher(s) in turn")
    job.publish(compare_speed(student, teachers, texts))
