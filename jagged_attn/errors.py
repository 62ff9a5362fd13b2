"""The errors of this library that are not plain ``TypeError`` or ``ValueError``."""

from collections.abc import Sequence
from typing import NamedTuple


class BackendReport(NamedTuple):
    """What one backend says of one call.

    Attributes:
        backend: the backend's name.
        refusal: why it does not take the call; ``None`` where it does.
    """

    backend: str
    refusal: str | None

    @property
    def supported(self) -> bool:
        """Whether the backend takes the call."""
        return self.refusal is None

    def __str__(self) -> str:
        return f"{self.backend}: {self.refusal or 'supported'}"


class JaggedAttentionError(Exception):
    """Base class of the errors that this library defines."""


class UnsupportedError(JaggedAttentionError, NotImplementedError):
    """A valid call that no backend, or not the one asked for, can run, or that is made where none can.

    Attributes:
        refusals: one ``BackendReport`` for each backend that was asked, in the order of asking; empty where it does not
            depend on the backend, as inside a transform of ``torch.func``.
    """

    def __init__(self, message: str, refusals: Sequence[BackendReport]) -> None:
        self.refusals = tuple(refusals)
        super().__init__("\n".join([message, *(f"  {refusal}" for refusal in self.refusals)]))
