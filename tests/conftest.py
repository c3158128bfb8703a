"""Every process computes on one thread, those that tests start included.

Tests run beside each other, as many as there are cores. Threads that wait for a core spin: with two to a process, small
tensors take many times as long. A test that wants more sets the variable itself.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")  # read when torch is loaded, which no plugin does
