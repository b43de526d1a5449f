"""The laws that every transformation must keep, shipped for people who write their own.

check_laws(MyTransformation(), [(model, (inputs,))])
"""

from refold.testing.equivalence import as_float64, deviations
from refold.testing.faults import check_faults
from refold.testing.laws import LAWS, LawBroken, check_law, check_laws, check_new_process
from refold.testing.portrait import Portrait

__all__ = [
    "LAWS",
    "LawBroken",
    "Portrait",
    "as_float64",
    "check_faults",
    "check_law",
    "check_laws",
    "check_new_process",
    "deviations",
]
