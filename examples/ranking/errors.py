"""The one error that the command line turns into one line and exit code 2."""


class InputError(Exception):
    """Input that the user can correct: a file, an id, a number or an option. The message is one line that names it."""
