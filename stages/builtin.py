"""Sentray's own parts: the lists that a new stage, objective, test, ... joins with one line.

Objectives, tests and sources of rewrites have a field each in `Objectives` (stages/train/settings),
`EvaluateSettings` (stages/evaluate/settings) and `PerturbSettings` (stages/rewrite/settings);
searchers are in tune/searchers.py, which knows Optuna.
"""

from stages import teachers
from stages.embed.basis import Basis
from stages.embed.endpoint import AskedVectors
from stages.embed.given import GivenVectors
from stages.embed.stage import Embed, cosine_factors
from stages.evaluate import speed
from stages.evaluate import stage as evaluate
from stages.export import stage as export
from stages.export import variant
from stages.plugins import Extensions
from stages.ranks import stage as ranks
from stages.rewrite import stage as rewrite
from stages.rewrite.back_translation import Translate
from stages.sentences import stage as sentences
from stages.tokens import stage as tokens
from stages.train import stage as train
from stages.vocabulary import stage as vocabulary

BUILTIN = Extensions(
    stages=(
        sentences.Sentences,
        Translate,
        rewrite.Rewrites,
        Basis,
        Embed,
        GivenVectors,
        AskedVectors,
        ranks.Corpus,
        ranks.Ranks,
        vocabulary.TokenCounts,
        vocabulary.Vocabulary,
        vocabulary.Reading,
        tokens.Tokens,
        train.Train,
        evaluate.Evaluate,
        export.Export,
        variant.Variant,
        speed.Speed,
    ),
    # what a recipe becomes, inputs before those who read them
    plans=(
        sentences.plan,
        teachers.plan,
        rewrite.plan,
        vocabulary.plan,
        tokens.plan,
        train.plan,
        ranks.plan_student,
        evaluate.plan,
        export.plan,
        variant.plan,
        speed.plan,
    ),
    similarities={
        "cosine": teachers.TeacherSource(cosine_factors),
        "ranks": teachers.TeacherSource(ranks.rank_factors),
    },
)
