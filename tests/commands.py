"""Command lines, called in this process."""

from collections.abc import Callable, Sequence

import pytest


def exit_code(main: Callable[..., int | None], arguments: Sequence[str]) -> object:
    """The exit code, whether it is returned or raised."""
    try:
        return main(list(arguments))
    except SystemExit as stopped:
        return stopped.code


def refusal(
    main: Callable[[list[str]], int | None],
    arguments: Sequence[str],
    capsys: pytest.CaptureFixture,
    silent: bool = True,
) -> str:
    """The one line on standard error with which wrong arguments end; if silent, before anything else is printed."""
    capsys.readouterr()
    assert exit_code(main, arguments) == 2
    printed = capsys.readouterr()
    assert printed.err.count("\n") == 1, printed.err
    assert not (silent and printed.out)
    return printed.err
