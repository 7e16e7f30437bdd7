"""Prompts of queries and documents: the same vectors as encode_query and encode_document."""

import io
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

from stages.contract import EncoderLabel
from stages.embed.embedder import Embedder
from stages.encoder.model import Encoder, load_for_inference
from stages.encoder.pipeline import PipelineEncoder
from stages.encoder.prompts import kind_prompts, prompts_left_out, with_kind_prompts
from stages.encoder.settings import EncoderSettings
from stages.encoder.source import EncoderSource
from stages.encoder.tokenizer import load_tokenizer
from stages.errors import UserError
from stages.evaluate.mteb_tasks import MtebTest
from stages.evaluate.retrieval import RetrievalSettings
from stages.evaluate.size import Size
from stages.evaluate.stage import Evaluate
from stages.rows import unit_rows
from stages.tokens.stage import Tokens
from stages.tokens.texts import Texts
from stages.train.student_settings import StudentSettings
from tests.support.models import make_model, make_sentences
from tests.support.pipelines import make_pipeline, make_router, pooling

TEXTS = make_sentences(30)
KINDS = ["document" if i % 3 else "query" for i in range(30)]
PROMPTS = {"query": "the old man sees ", "passage": "a red house: ", "topic": "the city: "}
WHOLE = {"query": "the old man sees ", "document": "a red house: "}


def settings_of(folder, **options):
    return EncoderSettings(
        model=str(folder), max_length=12, tokens_per_batch=64, device="cpu", **options
    )


def theirs(folder, kinds=KINDS, **prompts):
    """Slow twin: one text at a time, in sentence-transformers."""
    from sentence_transformers import SentenceTransformer

    model = SentenceTransformer(str(folder), device="cpu")
    model.max_seq_length = 12
    ways = {"query": model.encode_query, "document": model.encode_document}
    options = {kind: {"prompt": prompts[kind]} if kind in prompts else {} for kind in ways}
    rows = [ways[k]([text], **options[k])[0] for text, k in zip(TEXTS, kinds, strict=True)]
    return unit_rows(np.stack(rows))


@pytest.mark.parametrize(
    ("modules", "kind"),
    [
        ([pooling("mean")], Encoder),
        ([pooling("cls")], Encoder),
        ([pooling("mean", include_prompt=False)], PipelineEncoder),
        ([pooling("max")], PipelineEncoder),
    ],
    ids=["mean", "cls", "without the prompt's tokens", "max"],
)
def test_mixed_kinds_have_the_vectors_of_encode_query_and_encode_document(tmp_path, modules, kind):
    folder = make_pipeline(tmp_path, *modules, prompts=PROMPTS)
    encoder = load_for_inference(with_kind_prompts(settings_of(folder)))
    assert isinstance(encoder, kind)
    expected = theirs(folder, **WHOLE)
    np.testing.assert_allclose(encoder.encode_unit(TEXTS, KINDS), expected, atol=1e-5)
    queries = encoder.encode_unit(TEXTS[:3], "query")
    np.testing.assert_allclose(queries, theirs(folder, ["query"] * 30)[:3], atol=1e-5)
    plain = encoder.encode_unit(TEXTS)  # of no kind: no prompt
    assert np.abs(plain - expected).max(1).min() > 1e-3
    factors = Embedder(with_kind_prompts(settings_of(folder)))(TEXTS, KINDS)["factors.npy"]
    np.testing.assert_allclose(np.load(io.BytesIO(factors)), expected, atol=1e-3)


def test_tests_have_prompts_of_kinds_whatever_the_sentences_are(tmp_path):
    """A corpus has queries and documents also where sentences are trained on that are neither."""
    folder = make_pipeline(tmp_path, pooling("mean"), prompts=PROMPTS)
    source, label = EncoderSource(settings_of(folder)), EncoderLabel("teacher", "t")
    size, test = (Evaluate(one, source, label, 12) for one in (Size(), RetrievalSettings()))
    found = test.load(SimpleNamespace(say=lambda *a, **b: None)).encode(TEXTS, KINDS)
    np.testing.assert_allclose(found, theirs(folder, **WHOLE), atol=1e-5)
    assert test.identity({})["encoder.kind_prompts"] == WHOLE
    assert "encoder.kind_prompts" not in size.identity({})
    assert MtebTest(task="any").has_kinds
    # a model on the hub is judged before it can be looked at
    there = EncoderSettings(model="org/thing", revision="a" * 40, pooling="auto")
    on_hub = replace(test, encoder=EncoderSource(there)).identity({})
    assert on_hub["encoder.kind_prompts"] == "the model's"
    # the student of a recipe: its prompts are in what it makes, and tests once left them out
    made = {"m": SimpleNamespace(fingerprint="f")}
    for has_kinds in (True, False):
        training = SimpleNamespace(student=EncoderSource(settings_of(folder), has_kinds=has_kinds))
        student = EncoderSource(settings_of("m"), training, "train")
        identity = replace(test, encoder=student).identity(made)
        assert ("encoder.kind_prompts" in identity) == has_kinds


def test_windows_of_many_texts_keep_their_kinds(tmp_path, monkeypatch):
    folder = make_pipeline(tmp_path, pooling("mean"), prompts=PROMPTS)
    encoder = load_for_inference(with_kind_prompts(settings_of(folder)))
    whole = encoder.encode(TEXTS, KINDS)
    monkeypatch.setattr("stages.encoder.model.WINDOW_ROWS", 7)
    np.testing.assert_allclose(encoder.encode(TEXTS, KINDS), whole, atol=1e-6)
    np.testing.assert_allclose(
        encoder.encode(TEXTS, "query")[:3], encoder.encode(TEXTS[:3], "query"), atol=1e-6
    )


def test_a_model_with_two_ways_goes_the_way_of_the_kind(tmp_path):
    folder = make_router(tmp_path)
    encoder = load_for_inference(with_kind_prompts(settings_of(folder)))
    assert isinstance(encoder, PipelineEncoder)
    np.testing.assert_allclose(encoder.encode_unit(TEXTS, KINDS), theirs(folder), atol=1e-5)
    told = settings_of(folder, encode_arguments={"task": "document"})
    found = load_for_inference(with_kind_prompts(told)).encode_unit(TEXTS, KINDS)
    np.testing.assert_allclose(found, theirs(folder, ["document"] * 30), atol=1e-5)


@pytest.mark.parametrize(
    ("declared", "options", "expected"),
    [
        ({}, {}, {}),
        (PROMPTS, {}, WHOLE),
        (PROMPTS, {"pooling": "mean"}, {}),
        (PROMPTS, {"prompt": ""}, {}),
        (PROMPTS, {"prompt": "x "}, {"query": "x ", "document": "x "}),
        (PROMPTS, {"prompts": {"query": "q "}}, {"query": "q ", "document": ""}),
        (PROMPTS, {"prompts": {"query": "q "}, "prompt": "x "}, {"query": "q ", "document": "x "}),
        (PROMPTS, {"prompts": {"query": ""}}, {}),
        (PROMPTS, {"prompt_names": {"query": "topic"}}, {"query": "the city: ", "document": ""}),
        (PROMPTS, {"prompt_names": {"document": "passage"}, "pooling": "mean"},
         {"query": "", "document": "a red house: "}),
        ({"query": "q ", "document": "d ", "passage": "p "}, {}, {"query": "q ", "document": "d "}),
        (PROMPTS, {"template": "the {sentence}", "pooling": "mean"}, {}),
        (PROMPTS, {"layers": 0}, {}),
    ],
)  # fmt: skip
def test_where_prompts_come_from(tmp_path, declared, options, expected):
    folder = make_pipeline(tmp_path, pooling("mean"), prompts=declared)
    assert kind_prompts(settings_of(folder, **options)) == expected


def test_a_kind_without_a_prompt_has_the_models_default_one(tmp_path):
    folder = make_pipeline(
        tmp_path, pooling("mean"), prompts={"topic": "the city: "}, default_prompt_name="topic"
    )
    # sentence-transformers saves empty prompts `query` and `document`: then those are declared
    (folder / "config_sentence_transformers.json").write_text(
        '{"prompts": {"topic": "the city: ", "query": "q "}, "default_prompt_name": "topic"}'
    )
    assert kind_prompts(settings_of(folder)) == {"query": "q ", "document": "the city: "}


def test_a_prompt_with_a_name_that_the_model_lacks(tmp_path):
    folder = make_pipeline(tmp_path, pooling("mean"), prompts=PROMPTS)
    settings = settings_of(folder, prompt_names={"query": "qery"})
    with pytest.raises(UserError, match="no prompt 'qery'; it has: .*topic"):
        kind_prompts(settings)


def test_prompts_that_are_left_out_are_said_unless_that_was_asked_for(tmp_path):
    folder = make_pipeline(tmp_path / "a", pooling("mean"), prompts=PROMPTS)
    said = prompts_left_out(settings_of(folder, pooling="cls"))
    assert said.startswith("WARNING") and "the old man sees" in said and "pooling: cls" in said
    assert prompts_left_out(settings_of(folder)) == ""
    assert prompts_left_out(settings_of(folder, pooling="cls", prompt="")) == ""
    bare = make_model(tmp_path / "b")
    assert prompts_left_out(settings_of(bare, pooling="cls")) == ""


@pytest.mark.parametrize("more", [{}, {"prompts": {"query": "the city: "}}])
def test_a_student_that_leaves_its_models_prompts_out_is_told_so(tmp_path, more):
    folder = make_pipeline(tmp_path, pooling("mean"), prompts=PROMPTS)
    student = StudentSettings(model=str(folder), pooling="mean", max_length=12, **more)
    said = []
    work = SimpleNamespace(
        say=lambda text, important=False: said.append((text, important)),
        input=lambda name: None,
        input_names=("sentences",),
    )
    Tokens(EncoderSource(student, has_kinds=True), Texts()).open(work)
    assert [important for _, important in said] == ([] if more else [True])
    assert all(text.startswith("WARNING: model") for text, _ in said)


def test_a_prompt_that_leaves_no_room(tmp_path):
    folder = make_pipeline(tmp_path, pooling("mean"), prompts={"query": "the " * 10})
    with pytest.raises(UserError, match="takes 10 tokens, which leaves none of max_length=12"):
        load_tokenizer(with_kind_prompts(settings_of(folder)))
    load_tokenizer(settings_of(folder))  # nobody asks for it


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"prompts": {"query": "q"}, "prompt_names": {"query": "q"}}, "leave one out"),
        ({"prompts": {"query": "q"}, "template": "a {sentence}"}, "prompts and template both"),
        ({"prompt_names": {"query": "q"}, "layers": 0}, "leave prompt_names out"),
        ({"prompts": {"passage": "q"}}, "'query' or 'document'"),
    ],
)
def test_settings_that_do_not_go_together(options, message):
    with pytest.raises(ValueError, match=message):
        EncoderSettings(model="a", **options)
    with pytest.raises(ValueError, match="of a recipe:... is that recipe's"):
        EncoderSettings(model="recipe:a.yaml", prompts={"query": "q"})


def test_the_models_own_prompts_are_part_of_what_an_encoder_is(tmp_path):
    """Where sentences have kinds; without kinds they are put nowhere."""
    folder = make_pipeline(tmp_path, pooling("mean"), prompts=PROMPTS)
    for settings, differs in (
        ({}, True),
        ({"prompt_names": {"query": "topic"}}, True),
        ({"prompts": {"query": "Q: "}}, False),  # it is there
        ({"prompt": "x "}, False),  # of all sentences
    ):
        encoder = settings_of(folder, pooling="auto", **settings)
        plain, kinds = (EncoderSource(encoder, has_kinds=has).identity({}) for has in (False, True))
        assert (plain != kinds) == differs
