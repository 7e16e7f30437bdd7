"""The loss of a global batch: the recipe's objectives, weighted and combined."""

import torch
from torch import Tensor

from stages.train.objectives.base import Scores
from stages.train.settings import Objectives


def total_loss(
    scores: Scores | None, objectives: Objectives, auxiliary: dict[str, Tensor]
) -> tuple[Tensor, dict[str, Tensor]]:
    """The objectives combined, and each unweighted (detached) part.

    All are summed with their weights, except that one may take the maximum with the contrastive
    part (RankEncoder Eq. 5); everything else is added after it, as in the released code.

    Args:
        scores: None where no objective reads them.
        auxiliary: values of the objectives that have modules of their own, by name.
    """
    chosen = objectives.chosen
    values = dict(auxiliary)
    if scores is None:
        missing = chosen.keys() - values.keys()
        assert not missing, f"{missing} need no second view, so `build` must return a module"
    else:
        values |= {name: one.value(scores) for name, one in chosen.items() if name not in values}
    weighted = {name: chosen[name].weight * value for name, value in values.items()}
    for name in [name for name, one in chosen.items() if one.replaces_contrastive]:
        contrastive = [other for other in weighted if chosen[other].contrastive]
        larger, rest = weighted[name], _sum([weighted.pop(other) for other in contrastive])
        # gradient flows through the larger one only
        weighted[name] = torch.where(larger > rest, larger, rest)
    return _sum(list(weighted.values())), {name: value.detach() for name, value in values.items()}


def _sum(values: list[Tensor]) -> Tensor:
    return torch.stack(values).sum()
