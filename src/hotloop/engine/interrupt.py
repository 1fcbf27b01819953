"""Ctrl-C and SIGTERM as a request: finish the running piece and save; a second one leaves at once.

Signals are read by a thread, because Python's own handlers wait until the main thread comes back from the
compiled call or the compiler, and "at once" must not. It must not know what is being interrupted.
"""

import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

EXIT_STATUS = 130
SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Interrupted(KeyboardInterrupt):
    """The run was asked to stop and did, at an update from which it can go on; the message says how."""

    exit_status = EXIT_STATUS

    def __init__(self, message: str, update: int):
        super().__init__(message)
        self.update = update


class Request:
    """Has somebody asked to stop?"""

    def __init__(self, say: Callable[[str], None]):
        self.made = False
        self._say = say

    def receive(self, signal_number: int) -> None:
        """Note the first request; leave at the second."""
        if self.made:
            os._exit(EXIT_STATUS)  # the main thread may be inside compiled code: nothing gentler reaches it
        self.made = True
        name = "Ctrl-C" if signal_number == signal.SIGINT else signal.Signals(signal_number).name
        self._say(f"{name}: finishing the running piece, then saving. Once more leaves at once.")


def _to_stderr(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


@contextmanager
def requests(say: Callable[[str], None] = _to_stderr) -> Iterator[Request]:
    """Turn SIGINT and SIGTERM into a `Request` while the context lasts.

    Off the main thread, where Python allows no handlers, the request is simply never made.
    """
    request = Request(say)
    if threading.current_thread() is not threading.main_thread():
        yield request
        return
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    thread = threading.Thread(target=_listen, args=(reader, request), name="hotloop-signals", daemon=True)
    before = {number: signal.signal(number, _leave_to_the_thread) for number in SIGNALS}
    before_fd = signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    thread.start()
    try:
        yield request
    finally:
        signal.set_wakeup_fd(before_fd)
        for number, handler in before.items():
            signal.signal(number, handler)
        os.close(writer)  # ends the thread
        thread.join()
        os.close(reader)


def _leave_to_the_thread(*_: object) -> None:
    """The interpreter writes the signal's number to the pipe; there is nothing left to do here."""


def _listen(reader: int, request: Request) -> None:
    while number := os.read(reader, 1):
        if number[0] in SIGNALS:
            request.receive(number[0])
