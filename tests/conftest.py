"""Every process computes on one thread, those that tests start included, and can be interrupted.

Tests run beside each other, as many as there are cores. Threads that wait for a core spin: with two to a process, small
tensors take many times as long. A test that wants more sets the variable itself.

Tests interrupt what they start. A shell without job control has that ignored in what it starts in the background, which
passes on to every process below, and then a test waits until what it started ends by itself.
"""

from __future__ import annotations

import os
import signal

os.environ.setdefault("OMP_NUM_THREADS", "1")  # read when torch is loaded, which no plugin does
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
