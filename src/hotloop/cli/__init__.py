"""The command line; and for a program of your own: a `Command` of `option`s, and `run_program`. No jax."""

from hotloop.cli.command import Command, Context
from hotloop.cli.main import run_program
from hotloop.options import option

__all__ = ["Command", "Context", "option", "run_program"]
