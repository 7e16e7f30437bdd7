"""What the trials of a search read (sentences, factors, tokens): made once, before the first."""

from pipeline.plan.graph import build_graph
from pipeline.plan.plan import make_plan
from pipeline.run.commits import commits_for
from stages.errors import UserError
from stages.recipe import Recipe
from tune.definition import Search
from tune.searchers import listed_configurations
from tune.settings import Dimension
from tune.space import Configuration, Space


def preparations(search: Search) -> list[Recipe]:
    """Recipes whose trainings together need all inputs that any trial will need.

    Raises:
        UserError: a range of numbers changes what must be prepared.
    """
    recipes: dict[tuple[str, ...], Recipe] = {}
    for values in _preparing(search):
        try:
            recipe = search.recipe_of(values, search.seeds[0])
        except UserError:
            continue  # becomes a failed trial, with this reason
        recipes.setdefault(_inputs(recipe), recipe)
    return list(recipes.values())


def commits_of(search: Search) -> dict[str, str]:
    """`commits_for` whatever any trial will read; the recipe's own artifacts count first.

    Raises:
        UserError: as `preparations`, or a model is not to be had.
    """
    found: dict[str, str] = {}
    for recipe in (search.recipe, *preparations(search)):
        plan = make_plan(recipe)
        read = [one.node for one in plan.nodes.values() if one.to_do or one.node.name == "train"]
        found = commits_for(plan, read) | found
    return found


def _preparing(search: Search) -> list[Configuration]:
    """Configurations that have all inputs between them."""
    waiting = [name for name in search.space.dimensions if _changes_inputs(search, name)]
    if search.settings.lists_configurations and search.settings.scheduler != "population":
        every = listed_configurations(search.settings, search.space)  # refused if it is too large
        if waiting:
            return every
    # settings that are chosen while it runs: those that change the inputs must be listed, and so
    # must those that they depend on
    needed: dict[str, Dimension] = {}
    while waiting:
        name = waiting.pop()
        dimension = search.space.dimensions[name]
        if dimension.bounds is not None:
            raise UserError(
                f"search.space.{name} changes what is made before training (the inputs of "
                "`train`), so its values must be a list: use grid or choice"
            )
        if name not in needed:
            needed[name] = dimension
            waiting += search.space.depends_on(name)
    return list(Space(needed).grid())


def _changes_inputs(search: Search, name: str) -> bool:
    """Whether a searched setting changes what is made before training."""
    ends = [search.space.example(name, last) for last in (False, True)]
    listed = search.space.dimensions[name].values or []
    inputs = set()
    for values in [*ends, *({**ends[0], name: value} for value in listed)]:
        try:
            inputs.add(_inputs(search.recipe_of(values, search.seeds[0])))
        except UserError:
            continue  # other settings of the trial may go with this value
    return len(inputs) > 1


def _inputs(recipe: Recipe) -> tuple[str, ...]:
    nodes = build_graph(recipe).nodes
    return tuple(nodes[name].fingerprint for name in nodes["train"].inputs.values())
