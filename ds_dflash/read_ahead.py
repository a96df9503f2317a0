"""Reading ahead: a thread makes the next items of an iterator while the main thread works on the present one."""

import queue
import threading
from collections.abc import Iterator
from typing import TypeVar

Item = TypeVar("Item")

_END = object()


class ReadAhead(Iterator[Item]):
    """Iterates over `items`, at most `depth` of which are made before they are asked for.

    An exception of `items` is raised where its item would have come. `close` before the process ends.
    """

    def __init__(self, items: Iterator[Item], depth: int = 2) -> None:
        self._items = items
        self._made: queue.Queue = queue.Queue(maxsize=depth)
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="read-ahead", daemon=True)
        self._thread.start()

    def __next__(self) -> Item:
        made = self._made.get()
        if made is _END:
            self._made.put(_END)
            raise StopIteration
        if isinstance(made, BaseException):
            raise made
        return made

    def close(self) -> None:
        """End the thread; what it has made is dropped."""
        self._closed.set()
        while self._thread.is_alive():
            while not self._made.empty():
                self._made.get_nowait()
            self._thread.join(timeout=0.05)

    def _run(self) -> None:
        try:
            for item in self._items:
                self._made.put(item)
                if self._closed.is_set():
                    return
            self._made.put(_END)
        except Exception as error:  # whatever it is, it belongs to the thread that asked
            self._made.put(error)
