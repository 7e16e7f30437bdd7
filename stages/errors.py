"""The one error type that is meant for people."""


class UserError(Exception):
    """Input that the user can correct: printed as one message, exit code 2, no traceback.

    The message says what is wrong, where, and how to fix it.
    """


class StorageError(UserError):
    """What is stored cannot be read or written; the settings may be tried again."""
