"""Run TLX kernels on a CPU, with their concurrency, and report races, deadlocks and exceeded budgets.

See ``docs/emulator.md`` for what is modelled and what is not.
"""

from .checking import Hunt as Hunt
from .checking import KernelCase as KernelCase
from .checking import hunt as hunt
from .errors import EmulatorError as EmulatorError
from .errors import Verdict as Verdict
from .launches import emulated_launches as emulated_launches
from .parameters import HOUSE_RULES as HOUSE_RULES
from .parameters import NO_CHECKS as NO_CHECKS
from .parameters import Checks as Checks
from .run import Launch as Launch
from .run import Report as Report
from .run import emulate as emulate
from .schedules import Schedule as Schedule
from .schedules import standard_schedules as standard_schedules
