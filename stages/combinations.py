"""Settings of a recipe that are right by themselves and do not go together, or have no effect so.

What one section can tell by itself is checked there.
"""

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from stages.train.settings import DevSettings

if TYPE_CHECKING:
    from stages.recipe import Recipe


def check_combinations(recipe: "Recipe") -> None:
    """Raises ValueError: what does not go together, and how to mend it."""
    _check_objectives(recipe)
    if recipe.student.is_static and recipe.export:
        raise ValueError(
            "export.variants are of a transformer, and student.layers: 0 has none; leave "
            "`export` out"
        )
    if recipe.student.aligned:
        _check_aligned(recipe)
    _check_ranks(recipe)
    _check_rewrites(recipe)
    _check_baselines(recipe)
    _check_retrieval(recipe)
    _check_kinds(recipe)
    _check_choosing(recipe)


def _check_objectives(recipe: "Recipe") -> None:
    objectives, student = recipe.train.objectives, recipe.student
    if objectives.needs_teacher and not recipe.teachers:
        wanting = [name for name, one in objectives.chosen.items() if one.needs_teacher]
        raise ValueError(
            f"objectives that need a teacher ({', '.join(wanting)}): add one under `teachers`"
        )
    ranked = _teachers_of_ranks(recipe)
    if objectives.vector_regression and ranked:
        raise ValueError(
            f"vector_regression needs its teachers' vectors, and '{ranked[0]}' teaches ranks: "
            "use similarity_regression"
        )
    deep = [name for name, one in objectives.chosen.items() if one.needs_layers]
    if student.is_static and deep:
        raise ValueError(
            f"{deep[0]} reads states of the student's layers, and student.layers: 0 has none"
        )
    if student.vocabulary and objectives.replaced_token:
        raise ValueError(
            "replaced_token: its generator has the whole vocabulary of the student's model; "
            "leave student.vocabulary out"
        )


def _check_aligned(recipe: "Recipe") -> None:
    regression = recipe.train.objectives.vector_regression
    if regression is None:
        raise ValueError("student.aligned needs train.objectives.vector_regression")
    if len(recipe.teachers) > 1:
        raise ValueError(
            f"student.aligned: a student lives in one teacher's space, and there are "
            f"{len(recipe.teachers)} teachers; keep one"
        )
    width = recipe.teachers[0].factor_width
    if width is not None:
        raise ValueError(
            "student.aligned: the student lives in its teacher's space, and "
            f"teachers[0].factor_width keeps {width} dimensions of it; leave one of them out"
        )
    if regression.projection == "learned":
        raise ValueError(
            "vector_regression.projection: learned is dropped after training, and "
            "student.aligned keeps its map; leave one of them out"
        )


def _check_ranks(recipe: "Recipe") -> None:
    ranks, limit = recipe.ranks, recipe.sentences.limit
    if ranks is None and _teachers_of_ranks(recipe):
        raise ValueError(
            "a teacher with similarity: ranks needs a corpus: add `ranks: {corpus_size: 10000}`"
        )
    if ranks is not None and limit is not None and ranks.corpus_size > limit:
        raise ValueError(
            f"ranks.corpus_size {ranks.corpus_size} is more than sentences.limit {limit}; "
            "lower it or raise the limit"
        )


def _check_rewrites(recipe: "Recipe") -> None:
    objectives = recipe.train.objectives
    if objectives.needs_negatives and not (
        recipe.perturb and all(source.gives_negatives for source in recipe.perturb)
    ):
        raise ValueError(
            "infonce.hard_negatives needs rewrites that come with negatives: `rewriting` with "
            "a negative_field, or `pairs` with a negative_column, in all of `perturb`"
        )
    taken = {view.name for view in objectives.views}
    for source in recipe.perturb:
        if source.name in taken:
            raise ValueError(
                f"rewrites are called '{source.name}' like a view of an objective; rename them"
            )


def _check_baselines(recipe: "Recipe") -> None:
    baselines = [one.name for one in recipe.evaluate.baselines]
    names = [*baselines, *(teacher.name for teacher in recipe.teachers)]
    for name in baselines:
        if names.count(name) > 1 or name.partition("+")[0] in ("before", "after"):
            raise ValueError(f"the name '{name}' of a baseline is taken; choose another")


def _check_retrieval(recipe: "Recipe") -> None:
    """Whether the held-out pairs are there, and are of the kind that the test is for."""
    retrieval, sentences = recipe.evaluate.retrieval, recipe.sentences
    if not retrieval:
        return
    if not sentences.holdout_pairs:
        raise ValueError(
            "evaluate.retrieval needs held-out pairs: set sentences.holdout_pairs, with "
            "sentences.source: python-docs, sentences.columns or sentences.split_sentences"
        )
    kind = "python-docs"
    if sentences.holds_out_pairs:
        kind = "columns" if sentences.columns else "first-sentence"
    if retrieval.kind != kind:
        pairs = {"python-docs": "documented functions", "columns": "pairs of a table",
                 "first-sentence": "texts with their first sentences"}[kind]  # fmt: skip
        raise ValueError(
            f"evaluate.retrieval.kind is {retrieval.kind}, but what `sentences` holds out is "
            f"{pairs}: set kind: {kind}"
        )


def _check_kinds(recipe: "Recipe") -> None:
    """What sentences of one kind have no use for, and what does not work with two."""
    if recipe.sentences.columns is None:
        places: list[tuple[str, Any]] = [("student", recipe.student)]
        for number, teacher in enumerate(recipe.teachers):
            where = f"teachers[{number}]"
            places += [(where, teacher), (f"{where}.endpoint", teacher.endpoint)]
        for where, settings in places:
            for name in ("prompts", "prompt_names"):
                if getattr(settings, name, None):
                    raise ValueError(
                        f"{where}.{name} is for sentences of two kinds, and these are of one: "
                        "set sentences.columns, or leave it out and set prompt"
                    )
        return
    by_text = [f"teacher '{t.name}'" for t in recipe.teachers
               if t.vectors is not None and t.vectors.sentence_column]  # fmt: skip
    by_text += [f"perturb '{source.name}'" for source in recipe.perturb
                if source.pairs is not None and source.pairs.sentence_column]  # fmt: skip
    if by_text:
        raise ValueError(
            f"{by_text[0]} is joined to the sentences by their text, and with "
            "sentences.columns a text may be there as a query and as a document: set id_column "
            "instead of sentence_column"
        )


def _check_choosing(recipe: "Recipe") -> None:
    """Whether there is something to choose the checkpoint on, and to judge variants by."""
    train, holdout = recipe.train, recipe.sentences.holdout
    if recipe.dev is None and train.dev not in (None, DevSettings()):
        instead = "" if train.objectives.needs_teacher else ", and no objective reads a teacher"
        raise ValueError(
            "train.dev has nothing to choose the checkpoint on: name sets with labels under "
            f"train.dev.sts or transfer, or hold sentences out (sentences.holdout is "
            f"{holdout or 'null'}{instead})"
        )
    gate = recipe.export.gate if recipe.export else None
    tested = any(not test.reads_model for test in recipe.evaluate.tests) or recipe.holdout != 0
    if gate and gate.points is not None and not tested:
        raise ValueError(
            "export.gate.points needs tests on which points can be lost: add some under "
            "`evaluate`, or leave it out"
        )


def _teachers_of_ranks(recipe: "Recipe") -> list[str]:
    return [teacher.name for teacher in recipe.teachers if teacher.similarity == "ranks"]


def without_effect(recipe: "Recipe") -> Iterator[str]:
    """Settings that have no effect together, said whenever the recipe is planned or run."""
    student, train = recipe.student, recipe.train
    rewritten = recipe.perturb and train.rewritten_view != "none"
    objectives = train.objectives
    if not (student.views_differ or rewritten):
        why = "student.layers: 0 has no dropout" if student.is_static else "student.dropout is 0"
        then = ["train.objectives.consistency is exactly 0"] * bool(objectives.consistency)
        then += ["infonce only spreads vectors apart"] * bool(objectives.infonce)
        if then:
            alike = "so both views of a sentence are the same vector"
            yield f"{why}, {alike}: {', and '.join(then)}"
    if objectives.vector_regression and student.head != "none":
        yield (
            f"student.head: {student.head} is between the student and its teachers' vectors "
            "(train.objectives.vector_regression), and is dropped after training; use none"
        )
    if rewritten and train.rewritten_view == "second" and not objectives.needs_second:
        yield (
            "perturb has no effect but to choose sentences: the objectives read one view; set "
            "train.rewritten_view: first, or name another objective"
        )
    if student.second_template and not (objectives.needs_second or objectives.needs_negatives):
        yield "student.second_template has no effect: the objectives read one view; leave it out"
    if recipe.sentences.holdout and not objectives.needs_teacher:
        yield (
            "sentences.holdout has no effect: agreement is measured with teachers that an "
            "objective reads, and there is none"
        )
    if train.rewritten_view == "first" and not recipe.perturb:
        yield "train.rewritten_view has no effect: there are no rewrites (`perturb`)"
    if not objectives.needs_teacher and any(t.factor_width for t in recipe.teachers):
        yield "factor_width has no effect: no objective reads a teacher's vectors"
    ranks = recipe.ranks
    if ranks and ranks.inference_weight is None and not _teachers_of_ranks(recipe):
        yield (
            "ranks has no effect: no teacher has similarity: ranks, and ranks.inference_weight "
            "is null"
        )
