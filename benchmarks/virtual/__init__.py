"""Virtual devices: models whose layers take declared times and leave the processor to other workers meanwhile.

So several workers on few cores overlap as accelerators would. Workers, messages, schedules, votes, losses and the
measurements of the trainer are real. What they cannot show: contention inside a GPU, memory bandwidth, real links.
"""

from .calibration import DEFAULT, Profile, UnitTimes, profile
from .device import Timed
from .model import data, model, units

__all__ = ["DEFAULT", "Profile", "Timed", "UnitTimes", "data", "model", "profile", "units"]
