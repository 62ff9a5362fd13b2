"""One checkout's process in ``jagged_attn.bench.turns``: run as a file, it imports the package of its ``PYTHONPATH``.

It reads a job as a line of JSON and answers with one. ``{"case", "device", "backend", "small", "seed", "check"}`` makes
a problem and has the gate judge the checkout's result: a list of faults. ``{"phase", "passes"}`` times it: a list of
milliseconds; with ``"seconds"`` one figure, of calls without a pause for so long.

Only what all checkouts of some months have in common is used here.
"""

import json
import os
import sys
from collections.abc import Callable
from typing import Any

# Running a file puts its folder first, where modules of the package would stand in for others of the same name.
del sys.path[0]


class _Checkout:
    """The problem at hand, as this checkout solves it."""

    def pose(self, job: dict[str, Any]) -> list[str]:
        """Make the problem; what is wrong with the result."""
        import torch

        from jagged_attn.bench.contestants import Backend
        from jagged_attn.bench.gate import Gate
        from jagged_attn.bench.problem import make_problem
        from jagged_attn.bench.timing import make_clock
        from jagged_attn.bench.workloads import WORKLOADS

        device = torch.device(job["device"])
        workload = WORKLOADS[job["case"]]
        dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        problem = make_problem(workload.small() if job["small"] else workload, dtype, device, job["seed"])
        contestant = Backend(job["backend"])
        refusal = contestant.refusal(problem)
        if refusal:
            return [f"{job['backend']} refuses it: {refusal}"]
        self._attempt = contestant.attempt(problem)
        self._clock = make_clock(device)
        return list(Gate(problem, job["check"]).judge(self._attempt.solve()).faults)

    def time(self, job: dict[str, Any]) -> list[float]:
        """Milliseconds of each pass, or of a call among calls without a pause."""
        clock, call = self._clock, self._call(job["phase"])
        call()
        clock.wait()
        if "seconds" in job:
            call_ms = self._passes(call, 1)[0]
            calls = max(3, round(job["seconds"] * 1e3 / max(call_ms, 1e-3)))
            start = clock.mark()
            for _ in range(calls):
                call()
            end = clock.mark()
            clock.wait()
            return [clock.elapsed(start, end) / calls]
        return self._passes(call, job["passes"])

    def _passes(self, call: Callable[[], Any], passes: int) -> list[float]:
        clock = self._clock
        marks = []
        for _ in range(passes):
            clock.flush()
            start = clock.mark()
            call()
            marks.append((start, clock.mark()))
        clock.wait()
        return [clock.elapsed(start, end) for start, end in marks]

    def _call(self, phase: str) -> Callable[[], Any]:
        import torch

        attempt = self._attempt
        if phase == "forward":
            return attempt.forward
        out = attempt.forward()
        return lambda: torch.autograd.grad(out, attempt.leaves, attempt.dout, retain_graph=True)


def main() -> None:
    """Answer jobs until there are no more. Whatever is printed meanwhile goes to standard error."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    checkout = _Checkout()
    for line in sys.stdin:
        job = json.loads(line)
        try:
            answer: Any = checkout.pose(job) if "case" in job else checkout.time(job)
        except Exception as error:  # whatever a checkout raises is its answer
            answer = {"raised": f"{type(error).__name__}: {error}"}
        print(json.dumps(answer), file=answers)


if __name__ == "__main__":
    main()
