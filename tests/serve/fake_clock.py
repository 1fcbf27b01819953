"""An event loop whose time passes only by waiting for it: a test of seconds takes none, and is exact."""

import asyncio


class FakeClockLoop(asyncio.SelectorEventLoop):
    """Where nothing is ready, time jumps to the next timer."""

    def __init__(self):
        super().__init__()
        self.now = 0.0
        real = self._selector.select

        def select(timeout=None):
            ready = real(0)
            if not ready and timeout is None:
                raise RuntimeError("everybody waits, and no timer is set")
            if not ready:
                self.now += timeout
            return ready

        self._selector.select = select

    def time(self):
        return self.now


def run(coroutine):
    """The result of a coroutine under the fake clock."""
    with asyncio.Runner(loop_factory=FakeClockLoop) as runner:
        return runner.run(coroutine)
