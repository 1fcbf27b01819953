"""Validation between calls, in the process that trains, which waits meanwhile; the other way is `beside`."""

from collections.abc import Callable
from typing import Any

from hotloop.engine.run import Run
from hotloop.families.recommender.beside import clear, weights_file
from hotloop.families.recommender.validations import Figures, Validations, name_figures
from hotloop.families.recommender.validator import read_weights
from hotloop.families.recommender.work import Work


class InlineValidation:
    """Validates a state when it is handed one, and remembers."""

    def __init__(self, run: Run, work: Work, answers: Validations):
        self._run, self._work, self._answers = run, work, answers

    def __call__(self, state: Any) -> Figures:
        """The figures of this state, which the caller records."""
        return self._figures(int(state["update"]), state["params"])

    def ask(self, step: int) -> None:
        """Validate weights that a run left waiting which validated beside its training."""
        path = weights_file(self._run.path, step)
        figures = self._figures(step, read_weights(path, self._work.job))
        self._run.event("validation", update=step, epoch=self._work.epoch(step), **figures)
        path.unlink()

    def _figures(self, step: int, params: Any) -> Figures:
        with self._work.console.progress("validating"):
            figures = name_figures(self._work.validation_errors({"params": params}))
        self._answers.figures[step] = figures
        return figures

    def finish(self, say: Callable[[str], None]) -> None:
        """Nothing waits here."""
        clear(self._run.path)
