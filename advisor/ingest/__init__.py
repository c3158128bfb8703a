"""Stage 2: the artifacts of a run as typed values; nothing here needs torch."""
