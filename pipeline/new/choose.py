"""How many sentences, and how many steps, fit a budget of time. Pure arithmetic.

A run takes a start (Ray, its processes, loading models, the tests at its end), the teacher's pass
over N sentences at e seconds each, and steps of B sentences at s seconds each. What is embedded is
trained on, but for what recipes hold out by themselves: once where embedding a sentence takes no
longer than training on it, else so often that training gets at least as much time as embedding.
"""

import math
from dataclasses import dataclass

from stages.sentences.settings import num_held_out

# Passes over the text beyond which more are not planned, whatever the budget.
MOST_PASSES = 10
# What a training must have where the text has so much: else it is not worth its start.
LEAST_STEPS, LEAST_SENTENCES = 100, 2000
# Share of the budget that is planned: other programs use the machine too.
PLANNED = 0.9


@dataclass(frozen=True)
class Costs:
    """Seconds: of everything beside embedding and training, of embedding a sentence, of a step of
    `batch_size` sentences."""

    start: float
    embed: float
    step: float
    batch_size: int

    def seconds(self, num_sentences: int, num_steps: int) -> float:
        """Of the whole run."""
        return self.start + num_sentences * self.embed + num_steps * self.step


@dataclass(frozen=True)
class Schedule:
    """num_sentences: to embed. num_steps: of training."""

    num_sentences: int
    num_steps: int


@dataclass(frozen=True)
class TooShort:
    """seconds: the least budget that would do."""

    seconds: float


def schedule(costs: Costs, available: int, budget: float) -> Schedule | TooShort:
    """Sentences and steps that fit into `budget` seconds.

    Args:
        available: sentences that the text has, at least a batch.
    """
    batch = costs.batch_size
    least_steps = max(1, min(LEAST_STEPS, MOST_PASSES * num_trained(available) // batch))
    enough = math.ceil(least_steps * batch / MOST_PASSES / 0.9)  # a tenth may be held out
    least = min(available, max(LEAST_SENTENCES, enough))
    train = costs.step / batch
    passes = min(MOST_PASSES, max(1, math.ceil(costs.embed / train)))
    left = PLANNED * budget - costs.start
    wanted = left / (costs.embed + passes * train)
    # never so many that embedding them leaves no time for the least training
    affordable = (left - least_steps * costs.step) / costs.embed
    number = min(available, max(least, int(min(wanted, affordable))))
    # the least, or all that there is, leave time for another number of passes
    seen = min(MOST_PASSES * num_trained(number), (left - number * costs.embed) / train)
    steps = int(seen / batch)
    if steps < least_steps:
        return TooShort(costs.seconds(least, least_steps) / PLANNED)
    return Schedule(number, steps)


def num_trained(num_sentences: int) -> int:
    """Sentences that are left to train on where a recipe does not say how many are held out."""
    return num_sentences - num_held_out(None, num_sentences)


def batch_size(wanted: int, available: int) -> int:
    """A power of two, `wanted` at most, of which the text has eight batches, but 2 at least."""
    return max(2, min(wanted, 1 << int(math.log2(max(1, available // 8)))))
