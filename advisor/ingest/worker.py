"""What a process does that decodes chunks for another one (`python -m advisor.ingest.worker LIMIT EXACT`).

It imports no array library: it starts in a few hundredths of a second.
"""

from __future__ import annotations

import gc
import pickle
import sys

from advisor.ingest.decode import Decoder, decode
from advisor.workers import received


def main(limit: str, exact: str) -> None:
    """Decode what is sent, and go on taking it when that is of no use any more."""
    gc.disable()  # events hold no cycles, and looking for some takes a tenth of the time
    pieces = received(sys.stdin.buffer)
    part = decode(pieces, Decoder(int(limit), exact=bool(exact)))
    for _ in pieces:
        pass
    pickle.dump(part, sys.stdout.buffer, protocol=pickle.HIGHEST_PROTOCOL)


if __name__ == "__main__":
    main(*sys.argv[1:])
