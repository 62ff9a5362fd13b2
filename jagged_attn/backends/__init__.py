"""The table of backends, in the order in which ``backend="auto"`` asks them. Importing it imports none of them."""

from typing import NamedTuple


class BackendEntry(NamedTuple):
    """Where a backend lives and who may choose it.

    Attributes:
        capability: module with ``supports`` and ``table_requests``; imports torch alone.
        launch: module with the operations; imported when the first operation executes.
        auto_devices: device types on which ``"auto"`` may choose it.
    """

    capability: str
    launch: str
    auto_devices: tuple[str, ...]


BACKENDS: dict[str, BackendEntry] = {
    "tlx_blackwell": BackendEntry("tlx_blackwell.capability", "tlx_blackwell.launch", ("cuda",)),
    "tlx_hopper": BackendEntry("tlx_hopper.capability", "tlx_hopper.launch", ("cuda",)),
    "triton": BackendEntry("triton.capability", "triton.launch", ("cuda",)),
    "eager": BackendEntry("eager", "eager", ("cpu",)),
    "reference": BackendEntry("reference", "reference", ()),
}
