"""Files that are right but for what a test changes."""

import pytest

from tests.hostile.subjects import subjects, use

RIGHT = [
    ("recipe", "train.max_steps", 3), ("search", "search.trials", 3),
    ("search", "search.space.*.tied", "train.learning_rate"),
    ("search", "search.space.*.factor", 2.0), ("search", "search.space.*.when", {}),
    ("cluster", "pools.*.memory_gb", 8),
]  # fmt: skip


@pytest.fixture(scope="module")
def files(tmp_path_factory, teacher_folder, student_folder):
    """What a cold machine takes to import what they need is no case's."""
    found = subjects(tmp_path_factory.mktemp("hostile"), teacher_folder, student_folder)
    for kind, path, value in RIGHT:
        use(found[kind], path, value)
    return found
