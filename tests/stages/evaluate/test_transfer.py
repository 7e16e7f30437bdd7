"""Transfer tasks against SentEval's procedure, one classifier after another."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from stages.contract import Figure
from stages.errors import UserError
from stages.evaluate import base, transfer
from stages.evaluate.classifiers import FAST, FULL, Fold, fit
from stages.evaluate.tables import Labelled
from stages.evaluate.transfer import TransferTest, dev_accuracy, learned, score_transfer
from tests.support import senteval


def examples(count, num_labels, seed, width=60, noise=40, spread=5):
    """Vectors around a centre of each label, and texts that name them.

    So long and blurred that the penalty changes what is right (with the fast protocol).
    """
    random = np.random.default_rng(seed)
    centres = spread * np.random.default_rng(99).standard_normal((num_labels, width))
    labels = random.integers(0, num_labels, count)
    vectors = (centres[labels] + noise * random.standard_normal((count, width))).astype("float32")
    texts = [(f"{seed} {row}",) for row in range(count)]
    return Labelled(texts, labels, [str(label) for label in range(num_labels)]), vectors


def encoder(*parts):
    """An encoder that knows these texts."""
    vector_of = {
        text: vector
        for one, vectors in parts
        for (text,), vector in zip(one.texts, vectors, strict=True)
    }
    return lambda texts, kinds=None: np.stack([vector_of[text] for text in texts])


def tensors(part):
    return torch.from_numpy(part[1]), torch.from_numpy(part[0].labels)


def accuracies(schedule, **splits):
    """Of the tested rows with its interval, and of those by which penalties are chosen."""
    found = {name: part[0] for name, part in splits.items()}
    (figure,) = score_transfer("x", found, encoder(*splits.values()), schedule).figures
    known = [part for name, part in splits.items() if name != "test" or "train" not in splits]
    return figure, dev_accuracy(learned(found), encoder(*known), schedule)


@pytest.mark.parametrize("protocol", ["FULL", "FAST"])
def test_every_protocol_equals_sentevals(protocol):
    schedule = {"FULL": FULL, "FAST": FAST}[protocol]
    config = getattr(senteval, protocol)
    # 130 rows: inner folds of one outer fold have one and two batches of 64
    whole = examples(145 if protocol == "FULL" else 202, 2, 1)
    train, dev, test = examples(150, 3, 2), examples(60, 3, 3), examples(200, 3, 4)
    for splits, expected in (
        ({"test": whole}, senteval.nested(*tensors(whole), config)),
        ({"test": test, "train": train},
         senteval.folds_then_test(*tensors(train), tensors(test), config)),
        ({"test": test, "train": train, "dev": dev},
         senteval.dev_then_test(*tensors(train), tensors(dev), tensors(test), config)),
    ):  # fmt: skip
        figure, chosen_by = accuracies(schedule, **splits)
        assert figure.value == pytest.approx(expected.tested, abs=1e-9)
        assert chosen_by == pytest.approx(expected.dev, abs=1e-9)
        assert figure.interval[0] < figure.value < figure.interval[1]


@pytest.mark.parametrize(("schedule", "config"), [(FULL, senteval.FULL), (FAST, senteval.FAST)])
def test_weights_are_sentevals_after_hundreds_of_steps(schedule, config):
    found, vectors = examples(
        129, 2, 5, width=6, noise=1.5, spread=1
    )  # two and three batches an epoch of 64
    x, y = torch.from_numpy(vectors), torch.from_numpy(found.labels)
    rows = np.arange(129)
    folds = [Fold(rows[:100], rows[100:]), Fold(rows[1:], rows[:1]), Fold(rows, rows[:9])]
    penalties = np.tile([1e-5, 1e-2], (3, 1))
    fitted = fit(x, y, folds, penalties, schedule)
    for place, fold in enumerate(folds):
        for column, penalty in enumerate((1e-5, 1e-2)):
            twin = senteval.Classifier(6, 2, penalty, config)
            best = twin.fit(x[fold.train], y[fold.train], dev=(x[fold.held], y[fold.held]))
            layer = twin.model[0]
            weights = fitted.weights[place, column]
            np.testing.assert_allclose(weights[:-1], layer.weight.detach().T, atol=2e-4)
            np.testing.assert_allclose(weights[-1], layer.bias.detach(), atol=2e-4)
            assert fitted.accuracy[place, column] == pytest.approx(best)


def test_of_two_sentences_difference_and_product_are_seen():
    pairs = Labelled([("a", "b"), ("b", "c")], np.array([0, 1]), ["0", "1"])
    places = {"a": [1.0, 2.0], "b": [3.0, -1.0], "c": [0.0, 1.0]}
    from stages.evaluate.transfer import features

    encode = lambda texts, kinds=None: np.array([places[text] for text in texts])  # noqa: E731
    found = features({"test": pairs}, encode)["test"]
    np.testing.assert_allclose(found, [[2, 3, 3, -2], [3, 2, 0, -1]])


@pytest.mark.parametrize(
    ("name", "protocol", "accuracy", "told"),
    [
        ("MR", "full", 99.0, []),
        ("MR", "fast", 99.0, ["MR: SimCSE's dev mode"]),
        ("SUBJ", "full", 99.0, ["SUBJ: above 98"]),
        ("SUBJ", "full", 97.0, []),
    ],
)
def test_the_table_says_which_figures_are_not_the_papers(
    tmp_path, monkeypatch, name, protocol, accuracy, told
):
    file = tmp_path / "task.tsv"
    file.write_text("label\ttext\n" + "1\tgood\n0\tbad\n" * 30)
    scored = base.Result([Figure(name, accuracy)], ("Transfer: accuracy.",))
    seen = []
    monkeypatch.setattr(transfer, "score_transfer", lambda *given: seen.append(given) or scored)
    test = TransferTest(name=name, path=str(file), protocol=protocol)
    tested = base.Tested("of length 1", None, pooled="as pooled")
    notes = test.score(tested, SimpleNamespace(say=lambda line: None)).notes[1:]
    assert seen[0][2] == "as pooled"
    assert [note[: len(start)] for note, start in zip(notes, told, strict=True)] == told


def test_a_data_set_is_read_with_the_splits_that_it_has(tmp_path):
    for split, count in (("train", 15), ("test", 3)):
        lines = ["text,label", *[f"{split} {i},{i % 2}" for i in range(2 * count)]]
        (tmp_path / f"{split}.csv").write_text("\n".join(lines) + "\n")
    test = TransferTest(name="x", dataset=str(tmp_path))
    test.check()
    found = test.load()  # no dev
    assert {split: len(one.labels) for split, one in found.items()} == {"test": 6, "train": 30}
    (tmp_path / "train.csv").unlink()
    with pytest.raises(UserError, match="only 3 rows have the label '0'"):
        test.load()
    (tmp_path / "test.csv").unlink()
    with pytest.raises(UserError, match="cannot be read"):
        test.load()


def test_sentevals_folders_are_read_as_sentevals_reads_them(tmp_path):
    folder = tmp_path / "MR"
    folder.mkdir()
    (folder / "rt-polarity.pos").write_bytes(b"a caf\xe9 here\nso good\n" + b"good\n\n" * 20)
    with pytest.raises(UserError, match="rt-polarity.neg: missing"):
        TransferTest(name="x", path=str(folder)).check()
    (folder / "rt-polarity.neg").write_bytes(b"so bad\n" * 20)
    found = TransferTest(name="x", path=str(folder)).load()["test"]
    words = [(text, found.names[label]) for (text,), label in zip(found.texts, found.labels)]  # noqa: B905
    assert words[:20] == [(".", "1")] * 20  # empty lines; all by words, then label
    rest = [("good", "1")] * 20 + [("so bad", "0")] * 20
    assert words[20:] == [*rest, ("so good", "1"), ("a caf\xe9 here", "1")]

    trec = tmp_path / "TREC"
    trec.mkdir()
    (trec / "train_5500.label").write_text("DESC:manner How so ?\nHUM:ind Who ?\n" * 12)
    (trec / "TREC_10.label").write_text("HUM:ind Who was it ?\n")
    found = TransferTest(name="x", path=str(trec)).load()
    assert found["test"].texts == [("Who was it ?",)] and found["test"].names == ["DESC", "HUM"]
    assert found["train"].texts[0] == ("Who ?",) and len(found["train"].texts) == 24

    mrpc = tmp_path / "MRPC"
    mrpc.mkdir()
    lines = ["Quality\t#1 ID\t#2 ID\t#1 String\t#2 String"]
    lines += [f"{i % 2}\t1\t2\ta {i}\tb" for i in range(40)]
    for split in ("train", "test"):
        (mrpc / f"msr_paraphrase_{split}.txt").write_text("\n".join(lines) + "\n")
    found = TransferTest(name="x", path=str(mrpc)).load()
    assert found["train"].texts[0] == ("a 0", "b") and len(found["test"].labels) == 40

    sst = tmp_path / "SST"
    sst.mkdir()
    for split in ("train", "dev", "test"):
        (sst / f"sentiment-{split}").write_text("fine\t1\nnot fine\t0\n" * 12)
    found = TransferTest(name="x", path=str(sst)).load()
    assert set(found) == {"train", "dev", "test"} and found["dev"].texts[-1] == ("not fine",)
    with pytest.raises(UserError, match="none of SentEval's transfer tasks"):
        TransferTest(name="x", path=str(tmp_path)).check()


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        (["label\ttext", *["1\tgood"] * 30], "all rows have the label '1'"),
        (["label\ttext", *["1\tgood"] * 30, *["0\tbad"] * 11], "only 11 rows .* takes 12"),
        (["label\ttext\tsplit", *["1\ta\ttrain"] * 20, "0\tb\ttest"], "'0' is not in the split tr"),
        (["label\ttext\tsplit", *["1\ta\tvalid", "0\tb\tvalid"] * 20], "split 'test'.*are: valid"),
        (["label\ttext\tsplit", *["1\ta\tdev", "0\tb\ttest"] * 20], "split dev and no train"),
        (["label\ttext\tsplit", *["1\ta\ttrain", "0\tb\ttrain"] * 10, "1\ta\ttest"], "only 20"),
        (["label\tsentence", "1\tgood"], "neither a column 'text' nor 'sentence1'"),
        (["text", "good"], "no column 'label'; it has text"),
        (["label\ttext", "1\t "], "row 1: 'text' is empty"),
    ],
)  # fmt: skip
def test_tables_that_no_classifier_can_be_trained_on(tmp_path, rows, message):
    (tmp_path / "task.tsv").write_text("\n".join(rows) + "\n")
    with pytest.raises(UserError, match=message):
        TransferTest(name="x", path=str(tmp_path / "task.tsv")).check()
