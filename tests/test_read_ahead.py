"""Items that a thread makes ahead come in order, so many ahead and no more, and errors come in their place."""

import threading
import time

import pytest

from ds_dflash.read_ahead import ReadAhead


def test_items_come_in_order_to_their_end():
    reader = ReadAhead(iter(range(100)), depth=3)
    assert list(reader) == list(range(100))
    assert next(reader, "nothing") == "nothing"
    reader.close()


def test_no_more_than_depth_items_are_made_ahead():
    made = []

    def items():
        for number in range(20):
            made.append(number)
            yield number

    reader = ReadAhead(items(), depth=2)
    for taken in range(5):
        assert next(reader) == taken
        time.sleep(0.05)
        assert len(made) <= taken + 1 + 2 + 1  # taken, waiting, and the one that is at the door
    reader.close()


def test_an_error_is_raised_where_its_item_would_have_come():
    def items():
        yield 1
        raise OSError("the disk is gone")

    reader = ReadAhead(items())
    assert next(reader) == 1
    with pytest.raises(OSError, match="the disk is gone"):
        next(reader)
    reader.close()


@pytest.mark.parametrize("taken", [0, 1, 7])
def test_closing_ends_the_thread_whatever_is_left(taken):
    before = threading.active_count()
    reader = ReadAhead(iter(range(10**9)), depth=1)
    for _ in range(taken):
        next(reader)
    reader.close()
    assert threading.active_count() == before
