"""A console for tests: it keeps what is said, and may act on it."""

from contextlib import contextmanager

from hotloop.engine.progress import Progress


class Listener:
    """Keeps what is said, and may act on it."""

    def __init__(self, act=lambda text: None):
        self.lines, self.warnings, self.bars, self.act = [], [], [], act

    def say(self, text):
        self.lines.append(text)
        self.act(text)

    def warn(self, text):
        self.warnings.append(text)

    def table(self, columns, rows):
        self.lines += [columns, *rows]

    @contextmanager
    def progress(self, description, total=None):
        """`bars` holds those that are open, the innermost last."""
        self.bars.append(description)
        try:
            yield Progress()
        finally:
            self.bars.remove(description)
