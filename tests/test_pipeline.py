"""The whole path on a real two-node Ray cluster: run, plan, rerun, kill, resume, bad input."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import yaml

from tests.conftest import made, make_model, make_sentences

pytestmark = pytest.mark.slow


def student_weights(storage: str) -> bytes:
    (file,) = Path(storage).glob("train/*/files/*/model/model.safetensors")
    return file.read_bytes()


def test_run_makes_everything_once_and_only_what_changed_again(sentray, tiny_recipe):
    recipe = tiny_recipe()
    file = sentray.recipe_file(recipe)
    plan = sentray("plan", file)
    assert "9 of 9 to do" in plan

    out = sentray("run", file)
    assert "student after" in out
    before = made(recipe["storage"])
    assert len([name for name in before if name.endswith("manifest.json")]) == 9

    # a second run does nothing, quickly because neither torch nor Ray is imported
    code = (
        "import sys; from pipeline.cli import main; assert main(['run', sys.argv[1]]) == 0; "
        "assert not {'torch', 'ray', 'transformers'} & set(sys.modules)"
    )
    again = subprocess.run(
        [sys.executable, "-c", code, file], capture_output=True, text=True, check=True,
        cwd=sentray.folder,
    )  # fmt: skip
    assert "nothing to do" in again.stdout
    assert made(recipe["storage"]) == before

    # a teacher's setting: its factors and what follows are stale, sentences and tokens are not
    change = "teachers.0.max_length=24"
    plan = sentray("plan", file, "--set", change)
    assert "stale because teachers[0].max_length was 32 and is 24" in plan
    sentray("run", file, "--set", change)
    kinds = {name.partition("/")[0] for name in made(recipe["storage"]).keys() - before.keys()}
    assert kinds == {"embed", "train", "evaluate", "export", "speed"}
    assert before.items() <= made(recipe["storage"]).items()

    # back to the first variant: nothing to do, and its own student is handed out again
    link = Path(recipe["storage"]) / "students" / "tiny"
    changed = link.resolve()
    assert "nothing to do" in sentray("run", file)
    assert link.resolve() != changed

    # execution settings are not identity: nothing to do
    for change in ("student.tokens_per_batch=64", "train.checkpoint_every_steps=3"):
        assert "nothing to do" in sentray("plan", file, "--set", change)

    shown = sentray("show", "tiny")
    assert "student after" in shown
    for line in shown.splitlines()[1:10]:
        artifact = line.split()[1]
        assert "made " in sentray("show", artifact), artifact


def test_the_exported_student_gives_our_vectors(sentray, tiny_recipe):
    from sentence_transformers import SentenceTransformer

    from stages.encoder.model import load_for_inference
    from stages.encoder.settings import EncoderSettings

    for pooling in ("mean", "cls"):
        recipe = tiny_recipe(student__pooling=pooling, evaluate__speed=False)
        sentray("run", sentray.recipe_file(recipe))
        (model,) = (Path(recipe["storage"]) / "students").glob("tiny")
        theirs = SentenceTransformer(str(model), device="cpu").encode(texts := make_sentences(50))
        ours = load_for_inference(
            EncoderSettings(model=str(model), pooling=pooling, max_length=48, device="cpu")
        ).encode(texts)
        ours /= np.linalg.norm(ours, axis=1, keepdims=True)
        assert (theirs * ours).sum(1).min() > 0.9999
        card = (model / "README.md").read_text()
        assert "student after" in card
        assert "listnet" in card
        assert str(sentray.folder / "sentences.txt") in card


def test_rankencoder_trains_its_own_base_and_is_used_with_ranks(sentray, tiny_recipe, tmp_path):
    """Base recipe -> vectors -> rank factors -> student -> Eq. 7, in one run; then shared."""
    from scipy.stats import spearmanr
    from sentence_transformers import SentenceTransformer

    base = tiny_recipe(name="base", teachers=[], train__objectives={"infonce": {}})
    base.pop("evaluate")
    (tmp_path / "base.yaml").write_text(yaml.safe_dump(base | {"storage": "elsewhere"}))
    teachers = [{"name": "b", "model": "recipe:base.yaml", "similarity": "ranks", "max_length": 32}]
    recipe = tiny_recipe(
        teachers=teachers, ranks={"corpus_size": 100},
        train__objectives={"infonce": {}, "rank_regression": {"weight": 10.0, "low": 0.0}},
        evaluate__speed=False,
        evaluate__geometry={"name": "made-up", "path": str(tmp_path / "sts.tsv"),
                            "positives_above": 0.5},
    )  # fmt: skip
    file = sentray.recipe_file(recipe)
    plan = sentray("plan", file)
    assert "base/train" in plan and "base/sentences" not in plan  # the same sentences: shared
    out = sentray("run", file)
    for title in ("b ", "b + ranks", "student after", "student after + ranks", "uniformity"):
        assert title in out
    root = Path(recipe["storage"])
    assert not (tmp_path / "elsewhere").exists()
    assert len(list(root.glob("train/*/manifest.json"))) == 2
    assert "nothing to do" in sentray("plan", file)

    # who needs the same base finds it trained
    other = sentray("plan", file, "--set", "train.seed=7", "--set", "name=other")
    assert " = base/train" in other and " = ranks:b" in other
    changed = base | {"train": base["train"] | {"seed": 9}}
    (tmp_path / "base.yaml").write_text(yaml.safe_dump(changed))
    plan = sentray("plan", file)
    assert " + base/train" in plan and "teachers[0].model is another student" in plan

    student = root / "students" / "tiny"
    sentences = make_sentences(5, seed=8)
    plain = SentenceTransformer(str(student), device="cpu").encode(sentences)
    corpus = np.load(student / "corpus.npy").astype(np.float32)
    assert corpus.shape == (100, 32)
    rho = spearmanr(plain @ corpus.T, axis=1).statistic
    expected = 0.1 * rho + 0.9 * plain @ plain.T
    found = float(sentray("similarity", student, sentences[0], sentences[1]))
    assert found == pytest.approx(expected[0, 1], abs=2e-3)
    cosine = float(sentray("similarity", student, *sentences[:2], "--rank-weight", "0"))
    assert cosine == pytest.approx((plain @ plain.T)[0, 1], abs=1e-3)
    (tmp_path / "texts.txt").write_text("\n".join(sentences) + "\n")
    sentray("encode", student, tmp_path / "texts.txt", tmp_path / "vectors.npy")
    vectors = np.load(tmp_path / "vectors.npy")
    np.testing.assert_allclose(vectors @ vectors.T, expected, atol=2e-3)
    error = sentray("similarity", student, "a", "b", "--rank-weight", "2", code=2)
    assert "between 0 and 1" in error


def kill_when(process, line, happened):
    """SIGKILL once `line` was printed and `happened()`; fails if the process ends before."""
    for printed in process.stdout:
        if line in printed:
            break
    while not happened():
        assert process.poll() is None, process.stderr.read()
        os.sched_yield()
    process.send_signal(signal.SIGKILL)
    process.communicate()
    assert process.returncode == -signal.SIGKILL


STAGES = {
    "sentences": "",
    "embed:t": "embed/*/shards/*.json",
    "corpus:t": "",
    "ranks:t": "ranks/*/shards/*.json",
    "tokens": "tokens/*/shards/*.json",
    "train": "work/train/*/step-*/complete.json",
    "evaluate:before": "",
    "evaluate:t": "",
    "evaluate:t+ranks": "",
    "corpus:after": "",
    "evaluate:after": "",
    "evaluate:after+ranks": "",
    "export": "",
}
RANKS = dict(
    ranks={"corpus_size": 500, "dimensions": 32},
    train__objectives={"infonce": {}, "listnet": {}, "rank_regression": {"combine": "sum"}},
)  # fmt: skip


def rank_teacher(tiny_recipe):
    return [tiny_recipe()["teachers"][0] | {"similarity": "ranks"}]


def test_a_killed_driver_loses_nothing_that_was_finished(sentray, tiny_recipe, tmp_path):
    """Killed in every stage in turn, then run again; the student equals an undisturbed run's."""
    text = tmp_path / "many.txt"
    text.write_text("\n".join(make_sentences(6000)) + "\n")
    changes = dict(
        sentences__path=str(text), train__max_steps=80, train__checkpoint_every_steps=5,
        evaluate__speed=False, teachers=rank_teacher(tiny_recipe), **RANKS,
    )  # fmt: skip
    recipe = tiny_recipe(**changes)
    file = sentray.recipe_file(recipe)
    root = Path(recipe["storage"])
    for stage, ledger in STAGES.items():
        process = sentray.start("run", file, "--only", stage)
        kill_when(process, f"{stage:<16}  started", lambda: not ledger or list(root.glob(ledger)))  # noqa: B023
        sentray.wait_for_idle()
        finished = made(recipe["storage"])
        kind = stage.partition(":")[0]
        if kind != "evaluate" and stage != "corpus:after":
            assert not [n for n in finished if n.startswith(kind) and n.endswith("manifest.json")]
        if stage in ("embed:t", "ranks:t", "tokens"):
            shards = [name for name in finished if name.startswith(f"{kind}/")]
            assert 0 < len(shards) < 94
            assert f"missing {94 - len(shards)} of 94 shards" in sentray("plan", file)
        if stage == "train":
            assert "continues at its newest checkpoint" in sentray("plan", file)
        sentray("run", file, "--only", stage)
        kept = {name: made(recipe["storage"])[name] for name in finished}
        assert kept == finished  # nothing that was finished was made again
    undisturbed = tiny_recipe(**changes, storage=str(tmp_path / "undisturbed"))
    sentray("run", sentray.recipe_file(undisturbed))
    assert student_weights(recipe["storage"]) == student_weights(undisturbed["storage"])


def trained(recipe, keys):
    """Figures of every metric row under `keys`, and weights by name.

    Key biases are left out: attention does not depend on them, so their gradient is rounding
    noise, which AdamW scales up to full steps.
    """
    from safetensors.numpy import load

    (lines,) = Path(recipe["storage"]).glob("train/*/files/*/metrics/metrics.jsonl")
    rows = [json.loads(line) for line in lines.read_text().splitlines()]
    figures = [row[key] for row in rows for key in keys if key in row]
    weights = load(student_weights(recipe["storage"]))
    return figures, {n: x for n, x in weights.items() if not n.endswith("key.bias")}


def test_workers_and_zero_stages_agree_with_the_plain_engine(sentray, tiny_recipe, student_folder):
    """Two teachers, dropout off: same losses, gradient norms, dev scores and weights to 1e-5."""
    second = {"name": "second", "model": str(student_folder), "pooling": "cls", "max_length": 32}
    recipe = tiny_recipe(
        student__dropout=0.0,
        teachers=[*tiny_recipe()["teachers"], second | {"weight": 2.0}],
        train__log_every_steps=1,
        train__max_steps=6,
        evaluate__speed=False,
        train__dev__every_steps=3,
    )
    file = sentray.recipe_file(recipe)
    sentray("run", file, "--set", "train.engine=plain")

    keys = ("loss", "gradient_norm", "dev_spearman", "listnet", "consistency")
    expected, weights = trained(recipe, keys)
    for workers, stage in [(1, 0), (2, 0), (2, 1), (2, 2), (2, 3)]:
        sentray(
            "run", file, "--only", "train", "--force", "train",
            "--set", "train.engine=deepspeed", "--set", f"train.num_workers={workers}",
            "--set", f"train.zero_stage={stage}", "--set", "train.cpus_per_worker=1",
        )  # fmt: skip
        figures, found = trained(recipe, keys)
        np.testing.assert_allclose(figures, expected, rtol=1e-5, atol=1e-5)
        for name in weights:
            np.testing.assert_allclose(found[name], weights[name], atol=1e-5, err_msg=name)


def write_pairs(file, sentences):
    """Two made-up rewrites and a negative for each sentence, as an entry of `perturb`."""
    made_up = make_sentences(3 * len(sentences), seed=4)
    lines = ["sentence1\tsentence2\tnegative"]
    for number, sentence in enumerate(sentences):
        first, second, negative = made_up[3 * number : 3 * number + 3]
        lines += [f"{sentence}\t{first}\t{negative}", f"{sentence}\t{second}\t{negative}"]
    file.write_text("\n".join(lines) + "\n")
    return {"name": "mine", "pairs": {"path": str(file), "negative_column": "negative"},
            "filters": {"min_growth": 0.0, "max_growth": 100.0, "max_repeats": 100}}  # fmt: skip


def test_two_workers_train_every_method_as_one_does(sentray, tiny_recipe, tmp_path):
    """Ranks, soft and hard negatives, rewrites, prompts, batch norm, all auxiliary losses."""
    quiet = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    model = make_model(tmp_path / "student", head="ForMaskedLM", seed=6, **quiet)
    generator = make_model(tmp_path / "generator", head="ForMaskedLM", layers=1, seed=7, **quiet)
    template = 'The book : "{sentence}" means{mask}.'
    recipe = tiny_recipe(
        student={"model": str(model), "pooling": "mask", "template": template, "dropout": 0.0,
                 "second_template": "A red {sentence} means {mask}.", "max_length": 24,
                 "template_denoising": True, "head": "batchnorm", "final_period": "promptbert"},
        teachers=rank_teacher(tiny_recipe), ranks={"corpus_size": 100},
        perturb=[write_pairs(tmp_path / "pairs.tsv", make_sentences(300)[::2])],
        train__objectives={
            "infonce": {"hard_negatives": True}, "masked_language": {},
            "rank_regression": {"low": 0.0, "combine": "sum"}, "soft_negative": {"weight": 0.5},
            "denoising": {"layers": 1, "noise": 0.0, "dropout": 0.0, "target": "memory"},
            "replaced_token": {"weight": 0.1, "generator": {"model": str(generator)}},
        },
        train__log_every_steps=1, train__max_steps=4, train__learning_rate=1e-4,
        train__dev__every_steps=2, evaluate__speed=False,
    )  # fmt: skip
    file = sentray.recipe_file(recipe)
    sentray("run", file)

    keys = ("loss", "infonce", "rank_regression", "soft_negative", "masked_language",
            "replaced_token", "denoising", "gradient_norm", "dev_spearman")  # fmt: skip
    expected, weights = trained(recipe, keys)
    for stage in (0, 3):
        sentray(
            "run", file, "--only", "train", "--force", "train", "--set", "train.num_workers=2",
            "--set", f"train.zero_stage={stage}", "--set", "train.cpus_per_worker=1",
        )  # fmt: skip
        figures, found = trained(recipe, keys)
        np.testing.assert_allclose(figures, expected, rtol=2e-4, atol=2e-4)
        for name in weights:
            np.testing.assert_allclose(found[name], weights[name], atol=2e-5, err_msg=name)


def test_a_killed_training_worker_is_replaced_and_changes_nothing(sentray, tiny_recipe, tmp_path):
    """Two DeepSpeed workers; one dies by SIGKILL once a checkpoint is there."""
    import psutil

    changes = dict(
        train__num_workers=2, train__max_steps=40, train__checkpoint_every_steps=4,
        train__cpus_per_worker=1, train__zero_stage=2, evaluate__speed=False,
    )  # fmt: skip
    recipe = tiny_recipe(**changes)
    root = Path(recipe["storage"])
    process = sentray.start("run", sentray.recipe_file(recipe))
    victims = []

    def kill_one():
        if not list(root.glob("work/train/*/step-*/complete.json")):
            return
        for one in psutil.process_iter(["cmdline"]):
            title = " ".join(one.info["cmdline"] or [])
            if title.startswith("ray::") and "RayTrainWorker" in title:
                one.kill()
                victims.append(one.pid)
                return

    while process.poll() is None and not victims:
        kill_one()
    out, err = process.communicate(timeout=400)
    assert process.returncode == 0, out + err
    assert victims
    undisturbed = tiny_recipe(**changes, storage=str(tmp_path / "undisturbed"))
    sentray("run", sentray.recipe_file(undisturbed))
    assert student_weights(recipe["storage"]) == student_weights(undisturbed["storage"])


def test_one_stage_at_a_time_with_relative_paths(sentray, tiny_recipe, tmp_path):
    """Paths are relative to the command's folder, where the cluster's workers do not run."""
    tiny_recipe()
    relative = dict(storage="runs", sentences__path="sentences.txt")
    recipe = tiny_recipe(evaluate__speed=False, **relative)
    file = sentray.recipe_file(recipe)
    recipe["storage"] = str(tmp_path / "runs")
    error = sentray("run", file, "--only", "train", code=2)
    assert "reads tokens, embed:t, which must be made first" in error
    assert "no stage 'trane'" in sentray("run", file, "--force", "trane", code=2)
    sentray("run", file, "--only", "sentences")
    assert {n.partition("/")[0] for n in made(recipe["storage"])} == {"sentences"}
    sentray("run", file)
    before = made(recipe["storage"])
    sentray("run", file, "--from", "train")
    after = made(recipe["storage"])
    assert before.keys() == after.keys()
    again = {name.partition("/")[0] for name in before if before[name] != after[name]}
    assert again == {"train", "evaluate", "export"}


def damaged_weights(tmp_path):
    folder = make_model(tmp_path / "damaged")
    (folder / "model.safetensors").write_bytes(b"\x00" * 100)
    return str(folder)


# one for each way in which an error travels: Ray Data actor, Ray task, Ray Train, none of them
BAD = {
    "damaged weights": (
        lambda tmp: {"teachers__0__model": damaged_weights(tmp)}, "cannot be loaded"),
    "a file of blanks": (lambda tmp: {"sentences__min_chars": 900}, "nothing is left of 300 texts"),
    "a loss that becomes NaN": (lambda tmp: {"train__learning_rate": 1e30}, "became nan"),
    "the same under Ray Train": (
        lambda tmp: {"train__learning_rate": 1e30, "train__num_workers": 2},
        "became nan",
    ),
    "a rank corpus larger than the text": (
        lambda tmp: {"ranks": {"corpus_size": 5000}}, "only 300 sentences"),
    "a batch larger than the corpus": (
        lambda tmp: {"train__batch_size": 4096}, "only 300 sentences"),
    "more workers than the cluster has": (
        lambda tmp: {"train__num_workers": 16, "train__cpus_per_worker": 2},
        "do not fit into this cluster"),
}  # fmt: skip


def test_errors_of_workers_reach_the_user_as_one_message(sentray, tiny_recipe, tmp_path):
    for make, expected in BAD.values():
        recipe = tiny_recipe(evaluate__speed=False, **make(tmp_path))
        error = sentray("run", sentray.recipe_file(recipe), code=2)
        assert expected in error
        assert "Traceback" not in error
        assert error.count("sentray:") == 1
        assert not list(Path(recipe["storage"]).glob("export/*/manifest.json"))


def test_a_shard_changed_on_disk_stops_training_and_force_mends_it(sentray, tiny_recipe):
    recipe = tiny_recipe(evaluate__speed=False)
    file = sentray.recipe_file(recipe)
    for stage in ("sentences", "tokens", "embed"):
        sentray("run", file, "--only", stage)
    shard = next(Path(recipe["storage"]).glob("embed/*/shards/00002.factors.*.npy"))
    content = bytearray(shard.read_bytes())
    content[-1] ^= 1
    shard.write_bytes(content)
    error = sentray("run", file, "--only", "train", code=2)
    assert "has changed since it was published. Make it again with --force embed:t" in error
    sentray("run", file, "--only", "embed:t", "--force", "embed:t")
    sentray("run", file, "--only", "train")


def test_an_address_where_nobody_is(sentray, tiny_recipe):
    sentray.address = "127.0.0.1:1"
    error = sentray("run", sentray.recipe_file(tiny_recipe()), code=2)
    assert "no Ray cluster can be joined there" in error
