"""Hidden states from target ranks to drafter ranks, with back-pressure.

Both sides walk the same plan, so a message says nothing about what it is: a target rank sends its micro-batches in plan
order, and the drafter posts receives in that order. A target rank may have `depth` micro-batches that are not yet
acknowledged; the drafter acknowledges one when it takes it up. Memory in flight is bounded by that on both sides, and
what is received into or staged in is used again: after the first micro-batches nothing is allocated.
Waiting happens in one thread a side, because a wait inside gloo can neither be interrupted nor given up without
breaking the connection.

A micro-batch travels as a header (float64 [4]: its number between these two ranks, tokens, seconds the target waited,
seconds it worked) and the features of its real tokens [tokens, width]. Empty micro-batches do not travel.
"""

import queue
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ds_dflash.stopping import Stopper, wait_for

HEADER, PAYLOAD, ACKNOWLEDGEMENT = 1, 2, 3


@dataclass(frozen=True)
class Parcel:
    """A micro-batch on its way: the global rank it comes from, its real tokens."""

    source: int
    tokens: int


@dataclass(frozen=True, eq=False)
class Delivery:
    """features: [tokens, width] on the drafter's device, valid until the next is received; seconds that the target
    waited and worked for it.
    """

    features: Tensor
    target_waited: float
    target_worked: float


@dataclass(frozen=True)
class Bridge:
    """The group of all ranks and what carries the features over it.

    group: gloo, for headers and acknowledgements; carrier: for the features (the same group, or NCCL: not verified on
    GPUs).
    """

    group: dist.ProcessGroup
    carrier: dist.ProcessGroup
    device: torch.device

    @cached_property
    def _poster(self) -> ThreadPoolExecutor:
        return ThreadPoolExecutor(max_workers=1, thread_name_prefix="bridge")

    def post(self, operation: Callable[..., dist.Work], *arguments: Any) -> dist.Work:
        """Start a send or receive, in a thread of the bridge's own.

        gloo takes the state of torch's profiler along from the thread that starts an operation, and the process dies
        when a trace ends before the operation does: so it starts where nothing is ever traced. Raises ConnectionError
        where the peer is gone.
        """
        try:
            return self._poster.submit(operation, *arguments).result()
        except RuntimeError as error:
            raise ConnectionError(f"a connection to another rank broke: {str(error).splitlines()[0]}") from None

    def close(self) -> None:
        self._poster.shutdown()

    @property
    def stages_on_host(self) -> bool:
        return self.group is self.carrier

    @cached_property
    def _free(self) -> list[Tensor]:
        return []

    def take(self, count: int) -> Tensor:
        """Room for at least `count` bytes (uint8) where the carrier reads and writes; `give_back` it after use."""
        if not self.stages_on_host:
            return torch.empty(count, dtype=torch.uint8, device=self.device)
        room = self._free.pop() if self._free else torch.empty(0, dtype=torch.uint8)
        if len(room) < count:
            room = torch.empty(count, dtype=torch.uint8, pin_memory=self.device.type == "cuda")
        return room

    def give_back(self, room: Tensor) -> None:
        """Let `take` use the room again; a device's memory is left to torch, which knows what still runs on it."""
        if self.stages_on_host:
            self._free.append(room)


class _Waiter:
    """A thread that waits for the given works one after another and hands on what belongs to them."""

    def __init__(self, name: str) -> None:
        self.done: queue.SimpleQueue = queue.SimpleQueue()
        self._works: queue.SimpleQueue = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def add(self, works: list[dist.Work], item: object) -> None:
        self._works.put((works, item))

    def close(self) -> None:
        """End the thread, which must have nothing left to wait for."""
        self._works.put(None)
        self._thread.join()

    def _run(self) -> None:
        while (job := self._works.get()) is not None:
            works, item = job
            try:
                for work in works:
                    work.wait()
            except RuntimeError as error:  # gloo: a peer is gone or the timeout has passed
                item = error
            self.done.put(item)


def _take(waiter: _Waiter, stopper: Stopper, timeout: float, what: str) -> Any:
    taken: list[Any] = []

    def ready(seconds: float) -> bool:
        try:
            taken.append(waiter.done.get(timeout=seconds))
        except queue.Empty:
            return False
        return True

    wait_for(ready, stopper, timeout, what)
    if isinstance(taken[0], RuntimeError):
        raise ConnectionError(f"the connection broke while waiting for {what}: {taken[0]}")
    return taken[0]


class Sender:
    """A target rank's end."""

    def __init__(self, bridge: Bridge, depth: int, stopper: Stopper, timeout: float) -> None:
        self._bridge = bridge
        self._depth = depth
        self._stopper = stopper
        self._timeout = timeout
        self._waiter = _Waiter("acknowledgements")
        self._in_flight = 0
        self._sequences: dict[int, int] = defaultdict(int)  # by drafter: a target may serve several
        self._last_sent = time.monotonic()

    def send(self, features: Tensor, drafter_rank: int) -> None:
        """Send features [tokens, width] to a global rank; waits for credit first.

        Raises StopRequestedError, TimeoutError, ConnectionError.
        """
        started = time.monotonic()
        worked = started - self._last_sent
        while self._in_flight >= self._depth:
            self._take_acknowledgement()
        self._last_sent = time.monotonic()
        sequence = self._sequences[drafter_rank]
        header = torch.tensor([sequence, len(features), self._last_sent - started, worked], dtype=torch.float64)
        payload, room = self._stage(features.contiguous().view(torch.uint8).flatten())
        group, carrier = self._bridge.group, self._bridge.carrier
        answer = torch.empty(1, dtype=torch.float64)
        works = [
            self._bridge.post(carrier.send, [payload], drafter_rank, PAYLOAD),
            self._bridge.post(group.send, [header], drafter_rank, HEADER),
            self._bridge.post(group.recv, [answer], drafter_rank, ACKNOWLEDGEMENT),
        ]
        self._waiter.add(works, (sequence, answer, room, header, payload))
        self._in_flight += 1
        self._sequences[drafter_rank] += 1

    def _stage(self, features: Tensor) -> tuple[Tensor, Tensor | None]:
        """(the bytes where the carrier can read them, the room they were copied to, if they had to be)"""
        if features.device.type == "cpu" or not self._bridge.stages_on_host:
            return features, None
        room = self._bridge.take(len(features))
        return room[: len(features)].copy_(features), room

    def finish(self) -> None:
        """Wait until everything sent is acknowledged; the last call."""
        while self._in_flight:
            self._take_acknowledgement()
        self._waiter.close()
        self._bridge.close()

    def _take_acknowledgement(self) -> None:
        what = "the drafter to take up a micro-batch"
        sequence, answer, room, *_ = _take(self._waiter, self._stopper, self._timeout, what)
        assert int(answer) == sequence, "acknowledgements out of order"
        if room is not None:
            self._bridge.give_back(room)
        self._in_flight -= 1


class Receiver:
    """A drafter rank's end: receives `parcels` in their order, up to `depth` ahead from every source.

    width, dtype: of the features as they travel.
    """

    def __init__(
        self,
        bridge: Bridge,
        parcels: Iterable[Parcel],
        depth: int,
        width: int,
        dtype: torch.dtype,
        stopper: Stopper,
        timeout: float,
    ) -> None:
        self._bridge = bridge
        self._parcels: Iterator[Parcel] = iter(parcels)
        self._next = next(self._parcels, None)
        self._depth = depth
        self._width, self._dtype = width, dtype
        self._stopper = stopper
        self._timeout = timeout
        self._waiter = _Waiter("features")
        self._posted: deque[Parcel] = deque()
        self._sequences: dict[int, int] = defaultdict(int)
        self._acknowledger = _Waiter("sent acknowledgements")
        self._unconfirmed = 0
        self._lent: Tensor | None = None

    def receive(self) -> Delivery:
        """The next micro-batch; the features of the last one are no longer valid.

        Raises StopRequestedError, TimeoutError, ConnectionError.
        """
        if self._lent is not None:
            self._bridge.give_back(self._lent)
            self._lent = None
        self._post()
        parcel = self._posted[0]
        what = f"features from rank {parcel.source}"
        header, room, work = _take(self._waiter, self._stopper, self._timeout, what)
        if work is not None:
            work.wait()
        sequence, tokens, waited, worked = header.tolist()
        expected = self._sequences[parcel.source]
        assert (sequence, tokens) == (expected, parcel.tokens), "the two roles do not walk the same plan"
        self._sequences[parcel.source] = expected + 1
        features = room[: self._bytes(parcel)].view(self._dtype).view(parcel.tokens, self._width)
        self._lent = room
        self._posted.popleft()
        self._acknowledge(parcel.source, sequence)
        self._post()
        return Delivery(features.to(self._bridge.device), waited, worked)

    def finish(self) -> None:
        """Wait until all acknowledgements are taken; the last call, after the last parcel."""
        while self._unconfirmed:
            _take(self._acknowledger, self._stopper, self._timeout, "acknowledgements to be taken")
            self._unconfirmed -= 1
        self._acknowledger.close()
        self._waiter.close()
        self._bridge.close()

    def _post(self) -> None:
        while self._next is not None and self._in_flight(self._next.source) < self._depth:
            parcel, self._next = self._next, next(self._parcels, None)
            header = torch.empty(4, dtype=torch.float64)
            room = self._bridge.take(self._bytes(parcel))
            payload = room[: self._bytes(parcel)]
            carried = self._bridge.post(self._bridge.carrier.recv, [payload], parcel.source, PAYLOAD)
            works = [self._bridge.post(self._bridge.group.recv, [header], parcel.source, HEADER)]
            if self._bridge.stages_on_host:
                works.append(carried)
            self._waiter.add(works, (header, room, None if self._bridge.stages_on_host else carried))
            self._posted.append(parcel)

    def _bytes(self, parcel: Parcel) -> int:
        return parcel.tokens * self._width * self._dtype.itemsize

    def _in_flight(self, source: int) -> int:
        return sum(parcel.source == source for parcel in self._posted)

    def _acknowledge(self, source: int, sequence: float) -> None:
        answer = torch.tensor([sequence], dtype=torch.float64)
        work = self._bridge.post(self._bridge.group.send, [answer], source, ACKNOWLEDGEMENT)
        self._acknowledger.add([work], answer)
        self._unconfirmed += 1
        while not self._acknowledger.done.empty():
            self._acknowledger.done.get()
            self._unconfirmed -= 1
