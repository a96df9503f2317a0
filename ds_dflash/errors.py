"""The one exception for mistakes that a user can make and mend, and what the system refused in words."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


class UserError(Exception):
    """What was wrong, where, and what would be right, in one sentence.

    Entry points print its text without a traceback and exit with `EXIT_CODE`; our own bugs are asserts.
    """

    EXIT_CODE = 2


def describe_os_error(error: OSError) -> str:
    """What the system refused and on which file, in one sentence."""
    return f"{error.filename or 'a file'}: {error.strerror or error}"


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """An OSError of a write says on which file, which the system leaves out."""
    try:
        yield
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from None
