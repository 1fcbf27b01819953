"""Ctrl-C, SIGTERM and SIGHUP: what the first one does depends on where the process is, the second ends it at once.

While a command starts it leaves with one line (`leave_at_once`). While it works, `Stopped` is raised in the main
thread, so that records are closed and children ended (`raise_stops`). While a plan is driven it is a request, heard at
the end of a piece (`note_stops`). Signals are read by a thread, because Python's own handlers wait until the main
thread comes back from compiled code, and "at once" must not. A signal that the parent process ignores (nohup, a
background job) stays ignored. It imports next to nothing, since it is there before everything else.
"""

import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from functools import partial
from select import select
from typing import Any, Literal

from hotloop.errors import HotloopError

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
Answer = Literal["leave", "raise", "note"]
on_stop: list[Callable[[int], None]] = []
"""Told of the first signal: those who let other processes know of it."""
TOGETHER = 0.001
"""Seconds within which two signals are one: `timeout` sends SIGTERM to the process and, right after, to its group."""
PATIENCE = 1.0
"""Seconds after which a user who waits is told why nothing happens, and that printing before the end may take."""
SAME_STOP = 2.0
"""Seconds within which a signal that was passed on and one that came by itself are one: a terminal's goes to all."""


class Stopped(KeyboardInterrupt):
    """A signal asked the process to stop; the message says which."""

    def __init__(self, message: str, number: int = signal.SIGINT):
        super().__init__(message)
        self.number = number
        self.exit_status = 128 + number

    @classmethod
    def because_of(cls, error: KeyboardInterrupt, message: str) -> "Stopped":
        return cls(message, getattr(error, "number", signal.SIGINT))


class Interrupted(Stopped):
    """The run was asked to stop and did, at an update from which it can go on; the message says how."""

    def __init__(self, message: str, update: int, number: int = signal.SIGINT):
        super().__init__(message, number)
        self.update = update


@dataclass
class StopRequest:
    """The first signal that asked to stop; None as long as none did."""

    number: int | None = None


class _Listener(StopRequest):
    def __init__(self, answer: Answer, say: Callable[[str], None]):
        super().__init__()
        self.answer, self.say = answer, say
        self.stays = self.owes_json = False
        """Whether it listens until the process ends, which is then its own to end, and owes an object on leaving."""
        self.before_leaving: list[Callable[[], None]] = []
        self.raised = self._answered = False
        self.passed_on = -SAME_STOP
        """When another process's signal was made this one's."""
        self._echoes = 0

    def start(self) -> Callable[[], None]:
        """Listen from now on; the function that ends it."""
        reader, writer = os.pipe()
        os.set_blocking(writer, False)
        thread = threading.Thread(target=self._listen, args=(reader,), name="hotloop-signals", daemon=True)
        # None: a handler that Python did not install, of a program that we are embedded in.
        wanted = [number for number in SIGNALS if signal.getsignal(number) not in (signal.SIG_IGN, None)]
        before = {number: signal.signal(number, self._handle) for number in wanted}
        before_fd = signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
        thread.start()

        def end() -> None:
            signal.set_wakeup_fd(before_fd)
            for number, handler in before.items():
                signal.signal(number, handler)
            os.close(writer)  # ends the thread
            thread.join()
            os.close(reader)

        return end

    def _handle(self, number: int, frame: object) -> None:
        """In the main thread, when it comes back to Python; the thread gets the same signal by the pipe."""
        if self.number is None:
            self.number = number
        self.raise_if_due()

    def raise_if_due(self) -> None:
        """What came while the answer was another, and too late for it, is raised when the answer is to raise."""
        if self.answer == "raise":
            self.raise_once()

    def raise_once(self) -> None:
        """Raise `Stopped` if a signal came that has not been raised or noted yet."""
        if self.number is not None and not self.raised:
            self.raised = True
            raise Stopped(f"stopped by {name_of(self.number)}", self.number)

    def raise_again(self) -> None:
        """`Stopped` came where Python drops exceptions (a finaliser, a callback of the collector): once more."""
        self.raised = False
        self._echoes += 1
        main = threading.main_thread().ident
        assert main is not None
        # Late enough for the finaliser to have ended.
        again = threading.Timer(0.1, signal.pthread_kill, (main, self.number or signal.SIGINT))
        again.daemon = True
        again.start()

    def _listen(self, reader: int) -> None:
        while number := os.read(reader, 1):
            if number[0] not in SIGNALS:
                continue
            if not self._answered:
                self._answered, self.number = True, number[0]
                time.sleep(TOGETHER)
                while select([reader], [], [], 0)[0] and os.read(reader, 1):
                    pass
                for tell in on_stop:
                    _briefly(partial(tell, number[0]))
                if not self.raised:  # or the main thread was quicker, and may be elsewhere by now
                    self._answer_first(number[0], name_of(number[0]))
            elif self._echoes:
                self._echoes -= 1
            elif not self._is_same_stop(number[0]):
                self._leave(number[0])

    def _is_same_stop(self, number: int) -> bool:
        if time.monotonic() - self.passed_on < SAME_STOP:
            return True
        # A scheduler signals a launcher and each of its processes at times of its own, and may do so again before it
        # kills them; Ctrl-C is a person's.
        return _are_stops_shared and number != signal.SIGINT

    def _answer_first(self, number: int, name: str) -> None:
        again = "Ctrl-C" if _are_stops_shared and number != signal.SIGINT else "Once more"
        if self.answer == "leave":
            _briefly(lambda: print_to_stderr(f"hotloop: error: stopped by {name}"))
            if self.owes_json:
                _briefly(lambda: print(f'{{"error": "stopped by {name}"}}', flush=True))
            self._leave(number)
        elif self.answer == "note":
            text = f"{name}: finishing the running piece, then saving. {again} leaves at once."
            _briefly(lambda: self.say(text))
        else:

            def explain_waiting() -> None:
                if not self.raised:
                    self.say(f"{name}: stopping after what runs now. {again} leaves at once.")

            waiting = threading.Timer(PATIENCE, explain_waiting)
            waiting.daemon = True
            waiting.start()

    def _leave(self, number: int) -> None:
        for act in (*self.before_leaving, kill_workers):
            _briefly(act)
        os._exit(128 + number)  # the main thread may be inside compiled code: nothing gentler reaches it


def kill_workers() -> None:
    """End this process's children of `multiprocessing`, which would wait for work for ever once it is gone."""
    if module := sys.modules.get("multiprocessing.process"):
        for child in module.active_children():
            child.kill()


_is_left_behind = False
_at_work: list[Callable[[], bool]] = []


def leave_behind_while(is_at_work: Callable[[], bool]) -> None:
    """A command that ends while this is so does not wait for it."""
    _at_work.append(is_at_work)


def leave_threads_behind() -> None:
    """The command's process ends with its status although a thread computes, whose end nobody knows."""
    global _is_left_behind
    _is_left_behind = True


def leave_if_due(status: int) -> None:
    """The last thing that a command does: end the process at once if a thread would keep it, or break its end."""
    if _is_left_behind or any(is_at_work() for is_at_work in _at_work):
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def name_of(number: int) -> str:
    return "Ctrl-C" if number == signal.SIGINT else signal.Signals(number).name


def _briefly(act: Callable[[], None]) -> None:
    """Do something that might block for ever, such as writing to a pipe that is not read, but not for ever."""

    def unless_it_fails() -> None:
        with suppress(Exception):
            act()

    thread = threading.Thread(target=unless_it_fails, daemon=True)
    thread.start()
    thread.join(PATIENCE)


def print_to_stderr(text: str) -> None:
    """A line for people where standard output is for results."""
    print(text, file=sys.stderr, flush=True)


_listener: _Listener | None = None
_are_stops_shared = False
"""Whether this process is one of several that are told to stop together, or starts them."""
_passed_on: set[int] = set()
"""Signals of other processes that this one got where nobody listened."""


@contextmanager
def share_stops() -> Iterator[None]:
    """While the block runs: who asks this process to stop asks others as well, so that a SIGTERM or SIGHUP after the
    first is the same stop, and only Ctrl-C leaves at once."""
    global _are_stops_shared
    before, _are_stops_shared = _are_stops_shared, True
    try:
        yield
    finally:
        _are_stops_shared = before


def listen(*, json: bool = False) -> None:
    """Listen until the process ends, which is a command's own: the first thing it does. With `json` one that leaves
    at once prints the object of an error, as any other error does."""
    global _listener
    _listener = _Listener("leave", print_to_stderr)
    _listener.stays, _listener.owes_json = True, json
    _listener.start()

    def forget_in_child() -> None:  # its signals are not its parent's
        global _listener
        _listener = None
        signal.set_wakeup_fd(-1)
        for number in SIGNALS:
            if signal.getsignal(number) != signal.SIG_IGN:
                signal.signal(number, signal.SIG_DFL)

    os.register_at_fork(after_in_child=forget_in_child)
    listener, otherwise = _listener, sys.unraisablehook

    def hook(unraisable: Any) -> None:
        if issubclass(unraisable.exc_type, Stopped):
            listener.raise_again()
        else:
            otherwise(unraisable)

    sys.unraisablehook = hook


def pass_on(number: int) -> None:
    """A signal that another process of the same command has got, as if it were this one's; not if it has one."""
    if _listener is None:
        # Once: what ends the program by it would be broken off by it, again and again.
        if number not in _passed_on:
            _passed_on.add(number)
            os.kill(os.getpid(), number)
    elif _listener.number is None:
        _listener.passed_on = time.monotonic()
        os.kill(os.getpid(), number)


def was_raised() -> bool:
    """Whether the main thread has been stopped, and is on its way out."""
    return _listener is not None and _listener.raised


@contextmanager
def _answer_with(answer: Answer, say: Callable[[str], None] = print_to_stderr) -> Iterator[_Listener]:
    """The process's listener, which answers so for a while; a new one where there is none. Off the main thread, where
    Python allows no handlers, nothing is ever heard."""
    global _listener
    if threading.current_thread() is not threading.main_thread():
        yield _Listener(answer, say)
        return
    known = _listener
    listener = known or _Listener(answer, say)
    end = None if known else listener.start()
    _listener = listener
    before = listener.answer, listener.say
    listener.answer, listener.say = answer, say
    try:
        listener.raise_if_due()
        yield listener
    finally:
        listener.answer, listener.say = before
        if end is not None:
            end()
            _listener = None
    listener.raise_if_due()


@contextmanager
def note_stops(say: Callable[[str], None] = print_to_stderr) -> Iterator[StopRequest]:
    """Turn signals into a `StopRequest` while the context lasts; one that was not looked at is raised at its end."""
    with _answer_with("note", say) as listener:
        try:
            yield listener
        except BaseException:
            # Whoever was asked to stop does so, in words of their own.
            listener.raised = listener.number is not None
            raise
        listener.raise_once()


@contextmanager
def raise_stops() -> Iterator[None]:
    """Raise `Stopped` in the main thread at the first signal."""
    with _answer_with("raise") as listener:
        try:
            yield
        except Exception as error:
            # An error of others may be `Stopped` in other words: an import that it broke off, say.
            if listener.raised and not isinstance(error, HotloopError):
                assert listener.number is not None
                raise Stopped(f"stopped by {name_of(listener.number)}", listener.number) from error
            raise


def leave_at_once() -> AbstractContextManager[object]:
    """End the process at the first signal, if it is a command's own: nothing is open yet, and imports are fragile.
    Any other program is stopped at the end of the block: jax logs what broke off its search for plugins and goes on."""
    return _answer_with("leave") if _listener is not None and _listener.stays else hold_stops()


def hold_stops() -> AbstractContextManager[object]:
    """Let something be finished before `Stopped` is raised, where it would be."""
    raises = _listener is not None and _listener.answer == "raise"
    return _answer_with("note", lambda text: None) if raises else nullcontext()


@contextmanager
def before_leaving(act: Callable[[], None]) -> Iterator[None]:
    """Something quick that must happen even when a second signal ends the process, such as killing a child."""
    acts = [] if _listener is None else _listener.before_leaving
    acts.append(act)
    try:
        yield
    finally:
        acts.remove(act)
