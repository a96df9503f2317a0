"""The channel between target ranks and drafter ranks: everything arrives, in order, or it is said why not.

Ranks are threads with a gloo group each, but for a peer that dies, which is a process.
"""

import os
import random
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from ds_dflash.channel import Bridge, Parcel, Receiver, Sender
from ds_dflash.stopping import StopRequestedError

WIDTH = 3
DEADLINE = 20.0
MEETING_SECONDS = 120.0  # a peer that is a process imports first
CPU = torch.device("cpu")


class Stop:
    """A stop of the run that a test asks for."""

    requested = False

    def raise_if_requested(self) -> None:
        if self.requested:
            raise StopRequestedError


def open_bridge(store: dist.Store, rank: int, size: int) -> Bridge:
    group = dist.ProcessGroupGloo(dist.PrefixStore("bridge", store), rank, size, timedelta(seconds=MEETING_SECONDS))
    return Bridge(group, group, CPU)


def features_of(number: int, tokens: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(number)
    return torch.randn(tokens, WIDTH, generator=generator).bfloat16()


def new_receiver(bridge: Bridge, parcels: list[Parcel], depth: int, stop: Stop, timeout: float = DEADLINE) -> Receiver:
    return Receiver(bridge, parcels, depth, WIDTH, torch.bfloat16, stop, timeout)


@dataclass
class Plan:
    """Micro-batch t is of target t % targets and for drafter t % drafters, and has tokens[t] tokens, perhaps none.

    A rank sleeps up to its seconds in `slowness` before each send or receive.
    """

    targets: int
    drafters: int
    depth: int
    tokens: list[int]
    slowness: dict[int, float]
    sent: list[int] = field(init=False)
    begun: list[int] = field(init=False)
    most_in_flight: int = 0

    def __post_init__(self) -> None:
        self.sent, self.begun = [0] * self.targets, [0] * self.targets

    @classmethod
    def drawn(cls, seed: int, depth: int) -> "Plan":
        rng = random.Random(seed)
        targets, drafters = rng.randint(1, 3), rng.randint(1, 2)
        emptiness = rng.choice([0.0, 0.3, 0.8])
        tokens = [0 if rng.random() < emptiness else rng.randint(1, 400) for _ in range(rng.randint(0, 60))]
        slow = {rng.randrange(targets + drafters): 0.004} if rng.random() < 0.6 else {}
        return cls(targets, drafters, depth, tokens, slow)

    @property
    def size(self) -> int:
        return self.targets + self.drafters

    def sleep(self, rank: int) -> None:
        time.sleep(random.random() * self.slowness.get(rank, 0.0))

    def run(self, rank: int, bridge: Bridge) -> None:
        if rank < self.targets:
            self.send(rank, bridge)
        else:
            self.receive(rank, bridge)

    def send(self, rank: int, bridge: Bridge) -> None:
        sender = Sender(bridge, self.depth, Stop(), DEADLINE)
        for number in range(rank, len(self.tokens), self.targets):
            if self.tokens[number]:
                self.sleep(rank)
                sender.send(features_of(number, self.tokens[number]), self.targets + number % self.drafters)
                self.sent[rank] += 1
                self.most_in_flight = max(self.most_in_flight, self.sent[rank] - self.begun[rank])
        sender.finish()

    def receive(self, rank: int, bridge: Bridge) -> None:
        mine = [number for number in range(rank - self.targets, len(self.tokens), self.drafters) if self.tokens[number]]
        parcels = [Parcel(number % self.targets, self.tokens[number]) for number in mine]
        receiver = new_receiver(bridge, parcels, self.depth, Stop())
        for number, parcel in zip(mine, parcels, strict=True):
            self.sleep(rank)
            self.begun[parcel.source] += 1  # before it is acknowledged
            assert torch.equal(receiver.receive().features, features_of(number, parcel.tokens)), number
        receiver.finish()


def run_ranks(size: int, run: Callable[[int, Bridge], None]) -> None:
    """`run(rank, bridge)` on threads; fails when one raises, or is not done in time."""
    store, errors, bridges = dist.HashStore(), [], []

    def run_rank(rank: int) -> None:
        try:
            bridge = open_bridge(store, rank, size)
            bridges.append(bridge)  # kept to the end, as in a job: others may still be on their way to it
            run(rank, bridge)
        except Exception as error:  # for the main thread to raise
            errors.append(error)

    threads = [threading.Thread(target=run_rank, args=[rank], daemon=True) for rank in range(size)]
    for thread in threads:
        thread.start()
    deadline = time.monotonic() + DEADLINE
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))
    if errors:
        raise errors[0]
    assert not any(thread.is_alive() for thread in threads), "a deadlock"


@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("seed", range(12))
def test_any_mix_of_empty_micro_batches_arrives_bitwise_in_plan_order_with_at_most_depth_in_flight(seed, depth):
    plan = Plan.drawn(seed, depth)
    run_ranks(plan.size, plan.run)
    assert sum(plan.begun) == sum(plan.sent) == sum(count > 0 for count in plan.tokens)
    assert plan.most_in_flight <= depth


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_a_slow_drafter_holds_its_targets_back_at_the_depth(depth):
    plan = Plan(2, 1, depth, [20] * 24, {2: 0.02})
    run_ranks(plan.size, plan.run)
    assert plan.most_in_flight == depth


def test_a_target_that_has_nothing_to_send_holds_up_nobody():
    plan = Plan(3, 2, 1, [5, 0, 7, 6, 0, 8] * 5, {})
    run_ranks(plan.size, plan.run)
    assert plan.sent == [10, 0, 10]


# ------------------------------------------------------------------------------------------ waits that end


def send_more_than_taken(bridge: Bridge, peer: int, stop: Stop, timeout: float = DEADLINE) -> None:
    sender = Sender(bridge, 1, stop, timeout)
    for number in range(50):
        sender.send(features_of(number, 4), peer)


def receive_more_than_sent(bridge: Bridge, peer: int, stop: Stop, timeout: float = DEADLINE) -> None:
    receiver = new_receiver(bridge, [Parcel(peer, 4)] * 50, 1, stop, timeout)
    for _ in range(50):
        receiver.receive()


WAITS = pytest.mark.parametrize("wait", [send_more_than_taken, receive_more_than_sent])


@WAITS
def test_a_stop_ends_a_wait(wait):
    stop, raised = Stop(), []

    def run(rank: int, bridge: Bridge) -> None:
        if rank == 0:
            with pytest.raises(StopRequestedError):
                wait(bridge, 1, stop)
            raised.append(True)
        else:
            time.sleep(0.5)
            stop.requested = True
            while not raised:  # a peer that is there, and does nothing
                time.sleep(0.05)

    run_ranks(2, run)
    assert raised == [True]


@WAITS
def test_a_wait_that_lasts_too_long_ends_and_names_the_setting(wait):
    done = threading.Event()

    def run(rank: int, bridge: Bridge) -> None:
        if rank == 0:
            with pytest.raises(TimeoutError, match=r"waited 1 s for .*: see topology.timeout_seconds"):
                wait(bridge, 1, Stop(), timeout=1.0)
            done.set()
        else:
            assert done.wait(DEADLINE)

    run_ranks(2, run)


def be_a_peer(path: str, role: str) -> None:
    """A process that sends or takes up one micro-batch, says so, and waits for its end."""
    bridge = open_bridge(dist.FileStore(path, 2), 1, 2)
    if role == "drafter":
        peer = new_receiver(bridge, [Parcel(0, 4)] * 9, 1, Stop())
        peer.receive()
    else:
        peer = Sender(bridge, 1, Stop(), DEADLINE)
        peer.send(features_of(0, 4), 0)
    print("ready", flush=True)
    time.sleep(2 * DEADLINE)


@pytest.mark.parametrize("dies", ["before", "while"])
@pytest.mark.parametrize("role", ["target", "drafter"])
def test_a_peer_that_dies_is_an_error_of_the_connection_and_no_wait(tmp_path, role, dies):
    paths = [str(Path(__file__).parent), str(Path(__file__).parent.parent)]
    code = f"import sys, test_channel; test_channel.be_a_peer({str(tmp_path / 'store')!r}, {role!r})"
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths)}
    with subprocess.Popen([sys.executable, "-c", code], env=environment, stdout=subprocess.PIPE, text=True) as peer:
        try:
            bridge = open_bridge(dist.FileStore(str(tmp_path / "store"), 2), 0, 2)
            if role == "drafter":
                sender = Sender(bridge, 1, Stop(), DEADLINE)
                sender.send(features_of(0, 4), 1)

                def go_on():
                    for number in range(3):
                        sender.send(features_of(number, 4), 1)
            else:
                receiver = new_receiver(bridge, [Parcel(1, 4)] * 9, 1, Stop())
                receiver.receive()
                go_on = receiver.receive
            assert peer.stdout.readline() == "ready\n"
            killer = threading.Timer(0.0 if dies == "before" else 1.0, peer.kill)
            killer.start()
            if dies == "before":
                peer.wait(10)
                time.sleep(0.5)
            with pytest.raises(ConnectionError):
                go_on()
        finally:
            peer.kill()
