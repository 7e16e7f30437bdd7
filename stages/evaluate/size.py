"""How large an encoder is."""

from stages.contract import Figure, Work
from stages.evaluate.base import Evaluation, Result, Tested


class Size(Evaluation):
    """Layers, and megabytes of the weights in float32. Part of every table."""

    @property
    def title(self) -> str:
        return "size"

    @property
    def reads_model(self) -> bool:
        return True

    def score(self, tested: Tested, work: Work) -> Result:
        assert tested.model is not None
        number = tested.model.num_parameters
        figures = [
            Figure("layers", tested.model.num_layers, "neither", decimals=0),
            Figure("MB", 4 * number / 1e6, "lower", decimals=0),
        ]
        return Result(figures, facts={"parameters": number})
