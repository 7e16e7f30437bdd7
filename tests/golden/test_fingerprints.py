"""Finished work is found again after the code has grown: no fingerprint changes unnoticed."""

import json

import pytest

from stages.settings import Settings, added, execution
from tests.golden.fingerprints import (
    FIRST,
    GOLDEN,
    added_fields,
    fingerprints,
    identity_defaults,
    state,
    versions,
)

# What the mended bugs of 0.2 compute anew: trainings (version 4), what is made with students that
# recipes train, and tokens of byte-level tokenizers with a space before the sentence; and what the
# quickstart makes, which reads paragraphs instead of sentences.
TRAINED_BASES = ("embed:base", "corpus:base", "ranks:base", "corpus:after")
MADE_ANEW = {
    # since what a reasoning model says before its answer is left out
    ("denosent-llm-bert-base", "perturb:gpt"), ("denosent-llm-bert-base", "tokens:gpt"),
    ("promptbert-roberta-base", "tokens"),
    *(("quickstart", name) for name in ("sentences", "tokens", "embed:minilm")),
    *((f"sncse-roberta-{size}", f"tokens{view}") for size in ("base", "large")
      for view in ("", ":negated")),
    *(("wiki-ranks", name) for name in ("embed:simcse", "corpus:simcse", "ranks:simcse",
                                        "corpus:after")),
    *((f"rankencoder-{kind}-{base}-bert-base", name) for name in TRAINED_BASES
      for kind, base in (("paper", "promptbert"), ("paper", "simcse"), ("paper", "simcse-mlm"),
                         ("paper", "sncse"), ("released", "promptbert"), ("released", "simcse"),
                         ("released", "sncse"))),
}  # fmt: skip


def what_changed(golden, now, added_now):
    """Reasons for another fingerprint, in the order in which one should look at them."""
    found = []
    for kind, version in now["versions"].items():
        if golden["versions"].get(kind, version) != version:
            found.append(f"stage {kind}: version {golden['versions'][kind]} is now {version}")
    for name, fields in now["defaults"].items():
        known = golden["defaults"].get(name)
        for field, default in fields.items():
            if known is None or field not in known:
                if known is not None and (name, field) not in added_now:
                    found.append(
                        f"{name}.{field}: a setting was added; declare it with `added(...)`, so "
                        "that its default changes no fingerprint"
                    )
            elif known[field] != default:
                found.append(
                    f"{name}.{field}: its default was {known[field]!r} and is {default!r}; bump "
                    "the version of the stages that read it"
                )
        for field in (known or {}).keys() - fields.keys():
            found.append(f"{name}.{field}: the setting is gone, or is no identity any more")
    return found


def test_fingerprints_of_all_recipes_are_as_recorded():
    golden, now = json.loads(GOLDEN.read_text()), state()
    reasons = what_changed(golden, json.loads(json.dumps(now)), added_fields())
    stale = [
        f"{recipe}: {node}"
        for recipe, nodes in golden["fingerprints"].items()
        for node, value in nodes.items()
        if now["fingerprints"].get(recipe, {}).get(node) != value
    ]
    advice = "after reading this, write it anew with: python -m tests.golden.fingerprints"
    assert not reasons and not stale, "\n".join([*reasons, *stale, advice])


def test_what_the_first_version_made_is_found():
    first, now = json.loads(FIRST.read_text()), fingerprints()
    lost = {
        (recipe, node)
        for recipe, nodes in first.items()
        for node, value in nodes.items()
        if value not in now[recipe].values()
    }
    assert lost == MADE_ANEW


class Grown(Settings):
    old: int = 1
    new: int | None = added(None, description="Came later.")
    place: str = execution("here", description="No identity.")


def test_an_added_setting_counts_only_when_it_is_set():
    assert Grown().identity() == {"old": 1}
    assert Grown(new=3).identity() == {"old": 1, "new": 3}


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda s: s["defaults"]["stages.train.settings.TrainSettings"].update(swirl=None),
         "TrainSettings.swirl: a setting was added; declare it"),
        (lambda s: s["defaults"]["stages.train.settings.TrainSettings"].update(batch_size=64),
         "TrainSettings.batch_size: its default was 128 and is 64; bump"),
        (lambda s: s["versions"].update(train=99), "stage train: version 6 is now 99"),
        (lambda s: s["defaults"]["stages.train.settings.TrainSettings"].pop("epochs"),
         "TrainSettings.epochs: the setting is gone"),
    ],
)  # fmt: skip
def test_the_golden_test_says_which_of_the_two_happened(change, reason):
    golden = json.loads(GOLDEN.read_text())
    now = json.loads(json.dumps({"versions": versions(), "defaults": identity_defaults()}))
    change(now)
    (found,) = what_changed(golden, now, set())
    assert reason in found


def test_an_added_setting_may_join_and_its_default_may_not_change():
    golden = json.loads(GOLDEN.read_text())
    name = "stages.train.settings.TrainSettings"
    now = json.loads(json.dumps({"versions": versions(), "defaults": identity_defaults()}))
    now["defaults"][name]["swirl"] = 1
    assert what_changed(golden, now, {(name, "swirl")}) == []
    golden["defaults"][name]["swirl"] = 0
    (found,) = what_changed(golden, now, {(name, "swirl")})
    assert "its default was 0 and is 1" in found
