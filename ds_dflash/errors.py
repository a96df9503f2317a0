"""The one exception for mistakes that a user can make and mend."""


class UserError(Exception):
    """What was wrong, where, and what would be right, in one sentence.

    Entry points print its text without a traceback and exit with `EXIT_CODE`; our own bugs are asserts.
    """

    EXIT_CODE = 2


def describe_os_error(error: OSError) -> str:
    """What the system refused and on which file, in one sentence."""
    return f"{error.filename or 'a file'}: {error.strerror or error}"
