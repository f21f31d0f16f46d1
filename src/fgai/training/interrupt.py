"""Ctrl-C that waits for the end of an epoch, so that what is saved is whole."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType


@contextmanager
def held_interrupt(hold: bool = True) -> Iterator[Callable[[], bool]]:
    """Hold the first Ctrl-C back inside the block; the caller asks for it when it suits.

    A second Ctrl-C interrupts at once. Outside the main thread, where Python delivers no signals, nothing is
    held.

    Args:
        hold: False leaves signals alone.

    Yields:
        A function that says whether Ctrl-C was pressed.

    Example:
        >>> with held_interrupt() as interrupted:
        ...     interrupted()
        False
    """
    pressed = threading.Event()
    if not hold or threading.current_thread() is not threading.main_thread():
        yield pressed.is_set
        return
    before = signal.getsignal(signal.SIGINT)

    def handler(number: int, frame: FrameType | None) -> None:
        pressed.set()
        signal.signal(signal.SIGINT, before)

    signal.signal(signal.SIGINT, handler)
    try:
        yield pressed.is_set
    finally:
        signal.signal(signal.SIGINT, before)
