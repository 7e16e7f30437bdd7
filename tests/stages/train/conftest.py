"""Models that several methods' tests share."""

import pytest

from tests.support.models import make_model


@pytest.fixture(scope="package")
def models(tmp_path_factory):
    """Tiny models with masked-language heads: by kind, and a generator of another shape."""
    folder = tmp_path_factory.mktemp("heads")
    made = {kind: make_model(folder / kind, kind=kind, head="ForMaskedLM", seed=4)
            for kind in ("Bert", "Roberta")}  # fmt: skip
    made["generator"] = make_model(folder / "generator", layers=1, head="ForMaskedLM", seed=5)
    return {name: str(path) for name, path in made.items()}
