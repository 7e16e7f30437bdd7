"""Licences on the model card: as the models' own cards state them, or said to be unknown."""

import pytest

from stages.contract import StudentPart
from stages.encoder.settings import EncoderSettings
from stages.encoder.source import EncoderSource
from stages.export.card import model_card
from stages.export.licence import Origin, front_matter, licences, origin
from tests.support.models import make_model

DATA = {"kept": 3, "read": 4, "rejected": {}}


def card_of(folder, text):
    (folder / "README.md").write_text(text)
    return Origin("base model", EncoderSettings(model=str(folder)))


def test_a_known_licence_is_in_the_text_and_in_the_front_matter(tmp_path):
    base = card_of(make_model(tmp_path / "base"), "---\nlicense: apache-2.0\n---\n# base\n")
    teacher = Origin("teacher t", EncoderSettings(model=str(make_model(tmp_path / "bare"))))
    given, asked = Origin("teacher large", None), Origin("teacher far", None, "m of an endpoint")
    card = model_card("tiny", "name: tiny", DATA, False, licences((base, teacher, given, asked)))
    assert front_matter(card)["license"] == "apache-2.0"
    assert front_matter(card)["library_name"] == "sentence-transformers"
    assert "- base model (base): apache-2.0\n" in card
    assert "- teacher t (bare): unknown: no card that states one was found\n" in card
    assert "- teacher large (vectors only): unknown" in card
    assert "- teacher far (m of an endpoint): unknown" in card
    assert str(tmp_path) not in card


def test_the_front_matter_says_the_base_models_licence_only(tmp_path):
    base = Origin("base model", EncoderSettings(model=str(make_model(tmp_path / "base"))))
    teacher = card_of(make_model(tmp_path / "t"), "---\nlicense: mit\n---\n")
    card = model_card("tiny", "name: tiny", DATA, False, licences((base, teacher)))
    assert "license" not in front_matter(card)
    assert "- base model (base): unknown" in card


def test_several_licences_and_a_byte_order_mark(tmp_path):
    text = "\ufeff---\nlicense: [mit, apache-2.0]\n---\n"
    (stated,) = licences((card_of(make_model(tmp_path / "base"), text),))
    assert stated["license"] == "mit, apache-2.0"


def test_another_licence_is_named_and_linked(tmp_path):
    text = "---\nlicense: other\nlicense_name: mine\nlicense_link: LICENSE.md\n---\n"
    stated = licences((card_of(make_model(tmp_path / "base"), text),))
    card = model_card("tiny", "name: tiny", DATA, False, stated)
    assert "- base model (base): other, mine, LICENSE.md\n" in card
    assert front_matter(card)["license_link"] == "LICENSE.md"


@pytest.mark.parametrize(
    "text",
    [
        "",
        "# No front matter\nlicense: mit\n",
        "---\nlicense: mit\n",
        "---\nlicense: [mit\n---\n",
        "---\n- license: mit\n---\n",
        "---\ntags: [x]\nlicense_name: mine\n---\n",
    ],
)
def test_a_card_that_states_none_is_unknown(tmp_path, text):
    (found,) = licences((card_of(make_model(tmp_path / "base"), text),))
    assert found == {"what": "base model", "model": "base"}


def test_a_licence_cannot_add_to_the_front_matter(tmp_path):
    text = '---\nlicense: "mit\\n---\\npipeline_tag: x"\n---\n'
    card = model_card(
        "tiny", "name: tiny", DATA, False,
        licences((card_of(make_model(tmp_path / "base"), text),)),
    )  # fmt: skip
    assert front_matter(card)["pipeline_tag"] == "sentence-similarity"


def test_a_recipes_student_has_the_licence_of_its_own_base():
    class Training:
        student = EncoderSource(EncoderSettings(model="package:base"))

    student = EncoderSource(EncoderSettings(model="recipe:x.yaml"), Training(), "x/train")
    assert origin("base model", student).settings.model == "package:base"


def test_the_card_shows_how_published_variants_are_loaded():
    parts = [StudentPart("bf16", "Load(bf16)"), StudentPart("onnx", "Load(onnx)", "refused")]
    card = model_card("tiny", "name: tiny", DATA, False, parts=parts)
    assert "Load(bf16)  # bf16" in card
    assert "Load(onnx)" not in card
    assert "## Variants" not in model_card("tiny", "name: tiny", DATA, False, parts=parts[1:])
    assert "## Licence" not in card  # of an export by an older version
