"""Soft negatives by rule: which rule applies, what it writes, and that the rest stays."""

import pytest

from stages.errors import UserError
from stages.tokens.negation import Negator
from tests.support.models import make_sentences


@pytest.fixture(scope="module")
def negator() -> Negator:
    return Negator()


RULES = {
    "deletes not": [
        ("He was not elected.", "He was elected."),
        ("She does not know why it is not here.", "She does know why it is not here."),
        ("I think not.", "I think."),
        ("Not all birds can fly.", "All birds can fly."),
        ("He said it was (not fair).", "He said it was (fair)."),
        ("It was fair, if not, good.", "It was fair, if, good."),
        ("He was late (not).", "He was late ()."),
        ("AI not seen in the wild.", "AI seen in the wild."),
    ],
    "deletes n't": [
        ("This isn't true.", "This is true."),
        ("I can't go there.", "I can go there."),
        ("I cannot go there.", "I can go there."),
        ("They won't come, she can't.", "They will come, she can't."),
        ("Won’t you come?", "Will you come?"),
        ("You ca n't eat it.", "You can eat it."),
        ("They don’t know.", "They do know."),
        ("They dont know.", "They do know."),
    ],
    "keeps not inside a word": [
        ("It is a not-for-profit firm.", "It is not a not-for-profit firm."),
    ],
    "auxiliary before the root": [
        ("The dog will eat the fish.", "The dog will not eat the fish."),
        ("The city was founded in 1850.", "The city was not founded in 1850."),
        ("He has been elected twice.", "He has not been elected twice."),
        ("She's running home.", "She's not running home."),
        ("The man who has won ate the fish.", "The man who has not won ate the fish."),
        ("She could've won.", "She could not've won."),
        ("They couldve won.", "They could not ve won."),
    ],
    "copula or modal as the root": [
        ("The river is long.", "The river is not long."),
        ("It's late.", "It's not late."),
        ("Yes, we can.", "Yes, we can not."),
        ("He ought to sleep.", "He ought not to sleep."),
        ("He was happy and was loved.", "He was not happy and was loved."),
    ],
    "present or past form as the root": [
        ("They eat fish.", "They do not eat fish."),
        ("The dog runs home.", "The dog does not run home."),
        ("Hydrogen has one electron.", "Hydrogen does not have one electron."),
        ("The king went to Rome in 1850.", "The king did not go to Rome in 1850."),
    ],
    "not in front": [
        ("The end of the road.", "Not the end of the road."),
        ("London in the rain.", "Not London in the rain."),
        ("I, the king of England.", "Not I, the king of England."),
        ("UN forces in the city.", "Not UN forces in the city."),
        ("DNA in the cell.", "Not DNA in the cell."),
        ("  The end of the road.", "  Not the end of the road."),
        ("", "Not"),
    ],
}
CASES = [(rule, *case) for rule, cases in RULES.items() for case in cases]


@pytest.mark.parametrize(("rule", "text", "expected"), CASES, ids=lambda value: repr(value))
def test_a_sentence_is_negated_by_the_first_rule_that_applies(negator, rule, text, expected):
    assert negator([text]) == [expected], rule


def test_spacing_and_punctuation_around_the_edit_stay(negator):
    texts = [
        '  He  is "here" ,  now !!\t',
        'The  man was not  "here" , (now) .',
        "A\u00a0dog ran .",
    ]
    assert negator(texts) == [
        '  He  is not "here" ,  now !!\t',
        'The  man was  "here" , (now) .',
        "A\u00a0dog did not run .",
    ]


def test_each_text_has_its_negation_at_its_place_whatever_stands_around_it(negator):
    texts = [text for _, text, _ in CASES] + make_sentences(100)
    negations = negator(texts)
    assert negations == negator(texts)
    assert negator(texts[::-1]) == negations[::-1]
    assert [negator([text])[0] for text in texts] == negations
    assert negator([]) == []


def test_real_sentences_all_change_and_few_need_the_last_rule(negator, data_folder):
    import gzip
    from itertools import islice

    with gzip.open(data_folder / "wiki" / "wiki1m_sentences.txt.gz", "rt") as file:
        texts = [line.rstrip("\n") for line in islice(file, 200)]
    negations = negator(texts)
    assert [text for text, negation in zip(texts, negations, strict=True) if text == negation] == []
    in_front = sum(negation.startswith("Not ") for negation in negations)
    assert in_front < 0.08 * len(texts)


def test_without_the_parser_the_message_says_what_to_install(monkeypatch):
    monkeypatch.setattr("stages.tokens.negation.PARSER", "no-such-parser")
    with pytest.raises(UserError, match=r"pip install 'sentray\[negation\]'"):
        Negator()
