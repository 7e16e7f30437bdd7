"""What tests share."""

from pathlib import Path

REPOSITORY = Path(__file__).parents[2]
