"""Cut models: they give the vectors of the whole one, and what is made of them is used as ever."""

import json

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from safetensors.torch import load_file
from sentence_transformers import SentenceTransformer
from transformers import AutoModelForMaskedLM

from stages.encoder.dense import Dense
from stages.encoder.model import load_encoder, load_for_inference
from stages.encoder.settings import EncoderSettings
from stages.encoder.tokenizer import load_tokenizer
from stages.errors import UserError
from stages.export.folder import export_static, export_student
from stages.train.engine import cpu_copy
from stages.train.student import save_encoder
from stages.train.student_settings import StudentSettings
from stages.vocabulary import cutting
from stages.vocabulary.settings import VocabularySettings
from tests.support.heads import FIRST
from tests.support.models import make_sentences
from tests.support.tokenizers import KINDS, make_cuttable

TEXTS = [*make_sentences(80, seed=3), "naïve cat", "12.5% of the dogs"]


class OneShard:
    """An artifact with one shard, as far as it is read here."""

    def __init__(self, folder):
        self._folder = folder
        folder.mkdir(parents=True)
        self.shard_numbers = [0]

    def shard_path(self, number, name):
        return self._folder / name


def cut_one(folder, settings, texts=TEXTS, **wanted):
    """A model cut to `texts`: its settings, the old ids, and what was found."""
    sentences, counts = OneShard(folder / "sentences"), OneShard(folder / "counts")
    pq.write_table(pa.table({"text": texts}), sentences.shard_path(0, "rows.parquet"))
    for name, array in zip(("ids", "counts"), cutting.Counter(settings)(texts), strict=True):
        np.save(counts.shard_path(0, f"{name}.npy"), array)
    target = folder / "cut"
    kept, found = cutting.cut_student(
        settings, VocabularySettings(**wanted), [counts], sentences, target
    )
    return settings.model_copy(update={"model": str(target)}), kept, found


@pytest.fixture(scope="module", params=KINDS)
def whole(request, tmp_path_factory):
    folder = make_cuttable(tmp_path_factory.mktemp("models") / request.param, request.param)
    return StudentSettings(model=str(folder), pooling="mean", max_length=24, device="cpu")


@pytest.fixture(scope="module")
def cut(whole, tmp_path_factory):
    return cut_one(tmp_path_factory.mktemp("cut"), whole)


def test_vectors_of_the_corpus_stay(whole, cut):
    settings, kept, found = cut
    assert len(kept) < 0.8 * found.tokens[0]
    before, after = (load_encoder(one) for one in (whole, settings))
    np.testing.assert_allclose(after.encode(TEXTS), before.encode(TEXTS), atol=1e-6)
    assert found.cosine > 0.999999 and not found.warning and not found.corpus.changed
    assert found.corpus.texts == len(TEXTS) and found.corpus.tokens[0] == found.corpus.tokens[1]
    assert found.parameters == (before.num_parameters, after.num_parameters)
    rows = before.backbone.get_input_embeddings().num_embeddings
    assert found.embeddings == (rows * 32, len(kept) * 32)
    assert f"{found.tokens[0]:,} -> {len(kept):,} tokens" in found.told()


def test_numbers_in_the_files_are_the_new_ones(whole, cut):
    settings, kept, _ = cut
    config = json.loads((cutting.Path(settings.model) / "config.json").read_text())
    tokenizer, old = load_tokenizer(settings).pretrained, load_tokenizer(whole).pretrained
    assert config["vocab_size"] == len(tokenizer) == len(kept)
    assert config["pad_token_id"] == tokenizer.pad_token_id
    for name in ("pad", "unk", "cls", "sep", "mask"):
        number = getattr(tokenizer, f"{name}_token_id")
        assert kept[number] == getattr(old, f"{name}_token_id")
    names = {file.name for file in cutting.Path(settings.model).iterdir()}
    assert not names & {"vocab.txt", "vocab.json", "merges.txt"}


def test_the_head_over_the_vocabulary_is_cut_too(whole, cut):
    settings, kept, _ = cut
    before, after = (AutoModelForMaskedLM.from_pretrained(one.model) for one in (whole, settings))
    (ids,) = load_tokenizer(settings)(TEXTS[:1])
    with torch.no_grad():
        was = before(torch.tensor(kept[ids][None].astype(np.int64))).logits[..., kept]
        now = after(torch.tensor(ids[None].astype(np.int64))).logits
    np.testing.assert_allclose(now, was, atol=1e-6)


def test_other_tensors_with_as_many_rows_stay(tmp_path):
    """Positions here number as many as tokens."""
    folder = make_cuttable(tmp_path / "bert", "WordPiece")
    rows = json.loads((folder / "config.json").read_text())["vocab_size"]
    folder = make_cuttable(tmp_path / "same", "WordPiece", max_position_embeddings=rows)
    whole = StudentSettings(model=str(folder), pooling="cls", max_length=24, device="cpu")
    settings, kept, _ = cut_one(tmp_path / "made", whole)
    shapes = {len(x) for name, x in load_file(f"{settings.model}/model.safetensors").items()
              if "embeddings.position" in name}  # fmt: skip
    assert shapes == {rows} and len(kept) < rows


@pytest.mark.parametrize("template", [None, FIRST])
def test_an_exported_student_gives_the_same_vectors_everywhere(whole, cut, tmp_path, template):
    settings = cut[0]
    if template:
        settings = settings.model_copy(update={"template": template, "pooling": "mask"})
        more = whole.model_copy(update={"template": template, "pooling": "mask"})
        settings, _, _ = cut_one(tmp_path / "with template", more)
    encoder = load_encoder(settings)
    save_encoder(encoder, cpu_copy(encoder), tmp_path / "trained")
    ours = EncoderSettings(model=str(tmp_path / "trained"), max_length=24, device="cpu")
    export_student(tmp_path / "trained", load_tokenizer(ours), 24, "card", tmp_path / "student")
    about = json.loads((tmp_path / "student" / "tokenizer_config.json").read_text())
    assert about["tokenizer_class"] == "PreTrainedTokenizerFast"
    expected = load_for_inference(ours).encode_unit(TEXTS)
    np.testing.assert_allclose(expected, encoder.encode_unit(TEXTS), atol=1e-5)
    theirs = SentenceTransformer(str(tmp_path / "student"), device="cpu")
    np.testing.assert_allclose(theirs.encode(TEXTS), expected, atol=1e-5)
    again = EncoderSettings(model=str(tmp_path / "student"), max_length=24, device="cpu")
    np.testing.assert_allclose(load_for_inference(again).encode_unit(TEXTS), expected, atol=1e-5)


def test_a_static_student_begins_from_the_cut_model(whole, cut, tmp_path):
    """Each of its rows points where the whole model's does: only their lengths follow the rank."""
    settings, kept, _ = cut
    tables = [load_encoder(one.model_copy(update={"layers": 0})) for one in (whole, settings)]
    before, after = (one.backbone.embedding.weight.detach() for one in tables)
    assert after.shape == (len(kept), 32)
    cosines = torch.nn.functional.cosine_similarity(before[kept], after)
    np.testing.assert_allclose(cosines, 1, atol=1e-5)
    save_encoder(tables[1], cpu_copy(tables[1]), tmp_path / "trained")
    export_static(tmp_path / "trained", "card", tmp_path / "student")
    theirs = SentenceTransformer(str(tmp_path / "student"), device="cpu").encode(TEXTS)
    np.testing.assert_allclose(theirs, tables[1].encode_unit(TEXTS), atol=1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_tokens_of_a_template_stay(tmp_path, kind):
    folder = make_cuttable(tmp_path / "bert", kind)
    template = 'sleepsing "{sentence}" unman {mask}.'
    whole = StudentSettings(
        model=str(folder), pooling="mask", template=template, max_length=24, device="cpu"
    )
    settings, _, _ = cut_one(tmp_path / "made", whole)
    before, after = (load_tokenizer(one) for one in (whole, settings))
    old, new = (one.pretrained.convert_ids_to_tokens(one.prefix + one.suffix)
                for one in (before, after))  # fmt: skip
    assert new == old and len(old) < 15
    encoders = [load_encoder(one) for one in (whole, settings)]
    np.testing.assert_allclose(*(one.encode(TEXTS) for one in encoders), atol=1e-6)


def test_tokens_of_prompts_stay(tmp_path, whole):
    given = {"prompt": "unman: ", "prompts": {"query": "sleepsing: "}}
    settings, _, _ = cut_one(tmp_path, whole.model_copy(update=given))
    before, after = (load_tokenizer(one).pretrained for one in (whole, settings))
    for text in ("unman: ", "sleepsing: "):
        assert after.tokenize(text) == before.tokenize(text)


def test_dense_modules_of_a_student_go_with_it(tmp_path, whole):
    encoder = load_encoder(whole)
    encoder.dense.append(Dense(torch.nn.Linear(32, 8)))
    save_encoder(encoder, cpu_copy(encoder), tmp_path / "trained")
    trained = StudentSettings(model=str(tmp_path / "trained"), max_length=24, device="cpu")
    settings, _, _ = cut_one(tmp_path, trained)
    vectors = [load_encoder(one).encode(TEXTS) for one in (trained, settings)]
    assert vectors[0].shape[1] == 8
    np.testing.assert_allclose(*vectors, atol=1e-6)


def test_fewer_tokens_are_said_to_change_sentences(whole, tmp_path):
    _, _, found = cut_one(tmp_path, whole, min_count=20)
    assert 0 < found.corpus.changed <= len(TEXTS) and not found.warning
    assert found.corpus.tokens[1] > found.corpus.tokens[0]
    assert f"{found.corpus.changed:,} of {len(TEXTS)} sentences have other tokens" in found.told()


def test_a_table_without_rows_for_its_tokens(tmp_path):
    folder = make_cuttable(tmp_path / "bert", "WordPiece", vocab_size=100)
    whole = StudentSettings(model=str(folder), pooling="mean", max_length=24, device="cpu")
    with pytest.raises(UserError, match="its table of embeddings only 100 rows; they do not bel"):
        cut_one(tmp_path / "made", whole)


def test_a_model_that_computes_something_else_is_refused(whole, cut, tmp_path):
    weights = load_file(f"{cut[0].model}/model.safetensors")
    other = make_cuttable(tmp_path / "other", "WordPiece", seed=5)
    assert weights
    with pytest.raises(UserError, match=r"gives other vectors for the same tokens \(cosine"):
        cutting._computed(whole, whole.model_copy(update={"model": str(other)}), TEXTS[:9])


def test_what_is_kept_is_in_the_order_of_the_whole(cut):
    _, kept, _ = cut
    assert kept.dtype == np.int32 and (np.diff(kept) > 0).all()


def test_all_blocks_and_all_shards_are_counted(whole, tmp_path, monkeypatch):
    count = cutting.Counter(whole)
    ids, counts = count(TEXTS)
    monkeypatch.setattr(cutting, "BLOCK", 7)
    for once, in_blocks in zip((ids, counts), count(TEXTS), strict=True):
        np.testing.assert_array_equal(once, in_blocks)
    shards = [OneShard(tmp_path / name) for name in "ab"]
    for shard, ids, counts in zip(shards, ([1, 2], [2]), ([3, 4], [5]), strict=True):
        np.save(shard.shard_path(0, "ids.npy"), ids)
        np.save(shard.shard_path(0, "counts.npy"), counts)
    assert cutting._added_up(shards, 4).tolist() == [0, 3, 9, 0]
