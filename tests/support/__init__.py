"""What tests share. Importing it sets their environment: numpy and torch read it once."""

from pathlib import Path

from tests.support.environment import set_environment

REPOSITORY = Path(__file__).parents[2]

set_environment()
