"""Formulas over the columns of a trace: what they say about steps, busy time, occupancy, floors and ranks."""
