"""Answers of chat models: read in spite of their deviations, rejected with a reason."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stages.endpoint.journal import request_key
from stages.rewrite.chat import Answer, payload, read_answer
from stages.rewrite.rewrites import Outcome
from tests.support.chat_client import settings_of


@pytest.mark.parametrize(
    ("answer", "rewrite", "negative"),
    [
        ('{"sentence1": "A.", "sentence2": "B."}', "A.", "B."),
        ('```json\n{"sentence1": "A.", "sentence2": "B."}\n```', "A.", "B."),
        ('Sure! Here it is:\n{"sentence1": "A.", "sentence2": "B."}\nAnything else?', "A.", "B."),
        ('{"sentence1": "A.", "sentence2": "B.",}', "A.", "B."),
        ("{'sentence1': 'A isn\\'t.', 'sentence2': \"B's.\"}", "A isn't.", "B's."),
        ("{“sentence1”: “A.”, “sentence2”: “B.”}", "A.", "B."),
        ('{"Sentence 1": "A.", "SENTENCE_2": "B."}', "A.", "B."),
        ('[{"sentence1": "A.", "sentence2": "B."}]', "A.", "B."),
        ('{"thought": "hm"} {"sentence1": "A.", "sentence2": "B."}', "A.", "B."),
        ('{"sentence1": "A {very} odd one.", "sentence2": "B}."}', "A {very} odd one.", "B}."),
        ('{"sentence1": "A\nline.", "sentence2": "B."}', "A\nline.", "B."),
        ('{"sentence1": "A.", "sentence2": "B and then', "A.", None),
        ('{"sentence1": " A. ", "sentence2": ""}', "A.", None),
        ('{"sentence1": "A.", "sentence2": null}', "A.", None),
        ('{"sentence1": "A."}', "A.", None),
        ('{"sentence1": "Gr\\u00fc\\u00dfe.", "sentence2": "B."}', "Grüße.", "B."),
        ('{{"sentence1": "A.", "sentence2": "B."}}', "A.", "B."),  # as the prompt shows it
        ('<think>So {"sentence1": "..."}?</think>{"sentence1": "A."}', "A.", None),
        ('{"sentence1": "draft"}\n</thinking>\n\n{"sentence1": "A."}', "A.", None),
        ('{"sentence1": "A </think> tag.", "sentence2": "B."}', "A </think> tag.", "B."),
        (
            '<think>{"sentence1": "draft"}</think>{"sentence1": "A </think> tag."}',
            "A </think> tag.",
            None,
        ),
        ('<think>\n{"sentence1": "A."}', "A.", None),  # it ended, and is all there is
    ],
)
def test_answers_are_read_in_spite_of_common_deviations(answer, rewrite, negative):
    found = read_answer(settings_of(), Answer(answer, "stop", 1, 1))
    assert found == Outcome(rewrite, negative)


@pytest.mark.parametrize(
    ("answer", "finish", "reason"),
    [
        ("", "stop", "empty_answer"),
        (" \n", "stop", "empty_answer"),
        ("I cannot do that.", "stop", "not_json"),
        ('<think>\n{"sentence1": "draft"} or', "length", "truncated"),
        ('<think>\n{"sentence1": "draft"} or', "", "truncated"),
        ('<think>{"sentence1": "draft"}</think>', "stop", "empty_answer"),
        ('{"sentence1": "draft"}</think>', "stop", "empty_answer"),
        ('<think>{"sentence1": "draft"}</think>I cannot.', "stop", "not_json"),
        ('{"sentence1": ', "length", "truncated"),
        ('{"sentence1": "A and then', "length", "truncated"),
        ('{"sentence1": "A and then', "stop", "not_json"),
        ('{"paraphrase": "A.", "sentence2": "B."}', "stop", "missing_field"),
        ('{"sentence1": ["A."], "sentence2": "B."}', "stop", "missing_field"),
        ('{"sentence1": "  ", "sentence2": "B."}', "stop", "missing_field"),
        ("{__import__('os').getcwd(): 1}", "stop", "not_json"),
        ("{" * 5000, "stop", "not_json"),
        ('{"sentence1": ' + "9" * 5000 + "}", "stop", "not_json"),
        ("{{'a': 1}}", "stop", "missing_field"),
    ],
)
def test_what_cannot_be_read_has_a_reason_and_is_kept(answer, finish, reason):
    found = read_answer(settings_of(), Answer(answer, finish, 1, 1))
    assert found == Outcome(answer if answer.strip() else "", reason=reason)


@given(st.text(max_size=60))
def test_no_answer_breaks_the_reader(text):
    read_answer(settings_of(), Answer(text, "stop", 0, 0))


@given(st.text(min_size=1, max_size=40).filter(str.strip))
def test_any_text_comes_through_strict_json(text):
    answer = json.dumps({"sentence1": text, "sentence2": text})
    found = read_answer(settings_of(), Answer(f"Well: {answer}", "stop", 0, 0))
    assert found == Outcome(text.strip(), text.strip())


def test_a_second_try_is_another_request():
    first = payload(settings_of(), "A cat.", [])
    second = payload(settings_of(), "A cat.", [("no", "not_json")])
    assert first["messages"][0]["content"].endswith("Sentence: A cat.")
    assert [one["role"] for one in second["messages"]] == ["user", "assistant", "user"]
    assert request_key(first) != request_key(second)
    empty = payload(settings_of(), "A cat.", [("", "empty_answer")])
    assert [one["role"] for one in empty["messages"]] == ["user", "user"]
