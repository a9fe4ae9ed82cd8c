"""Slots and turns of clients in a queue: none takes all of them, and one that comes later has its turn soon."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress

import pytest

from foresay.errors import QueueFullError
from foresay.server.queues import LONG, SENDER, Queue, Queues, Sender


class Greedy(Queue):
    """Has slots for the client that comes first."""

    @contextmanager
    def slot(self, count: int = 1) -> Iterator[None]:
        if self.open + count > self._slots:
            raise QueueFullError("full")
        self._taken[SENDER.get().client] += count
        yield


def taken(queue: Queue, clients: str, stack: ExitStack, most: int = 1000) -> dict[str, int]:
    """Slots that clients get who take turns and each want `most`."""
    found = dict.fromkeys(clients, 0)
    for _ in range(most):
        for client in clients:
            SENDER.set(Sender(client))
            with suppress(QueueFullError):
                stack.enter_context(queue.slot())
                found[client] += 1
    return found


def test_a_client_takes_as_many_slots_as_it_leaves() -> None:
    for clients, share in (("a", 12), ("ab", 8), ("abc", 6), ("abcde", 4)):
        with ExitStack() as stack:
            queue = Queue(24)
            assert set(taken(queue, clients, stack).values()) == {share}
            assert queue.open == share * len(clients)
            assert taken(queue, "z", stack)["z"] >= 1, "there is one for another"
        assert queue.open == 0
    with ExitStack() as stack:
        queue = Greedy(24)
        assert taken(queue, "a", stack) == {"a": 24} and taken(queue, "z", stack) == {"z": 0}, "control"


def test_several_slots_at_once_count_as_such() -> None:
    queue = Queue(8)
    SENDER.set(Sender("a"))
    with queue.slot(3):
        with pytest.raises(QueueFullError, match="3 requests are queued"), queue.slot(3):
            pass
        SENDER.set(Sender("b"))
        with queue.slot(3):
            assert queue.open == 6
    with pytest.raises(QueueFullError), queue.slot(9):
        pass


@pytest.mark.parametrize(("size", "share"), [(0, 4), (LONG, 2)])
def test_half_as_many_long_texts_of_a_client_are_read(size: int, share: int) -> None:
    queues = Queues(4, 2, 1)
    with ExitStack() as stack:
        SENDER.set(Sender("a", size))
        for _ in range(share):
            stack.enter_context(queues.texts.slot())
        with pytest.raises(QueueFullError):
            stack.enter_context(queues.texts.slot())
        SENDER.set(Sender("b", size))
        stack.enter_context(queues.texts.slot())
        assert queues.before_rows == share + 1


def test_a_client_that_comes_later_waits_for_one_turn_of_another() -> None:
    order: list[str] = []

    async def work(queue: Queue, client: str) -> None:
        SENDER.set(Sender(client))
        async with queue.turn():
            order.append(client)
            await asyncio.sleep(0)

    async def run() -> None:
        queue = Queue(100)
        first = [asyncio.ensure_future(work(queue, "a")) for _ in range(20)]
        await asyncio.sleep(0)
        await asyncio.gather(*first, work(queue, "b"))

    asyncio.run(run())
    assert order.index("b") <= 2 and len(order) == 21
