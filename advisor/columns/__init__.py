"""The columns of a trace as plain arrays, and what can be asked of them whatever wrote the trace."""
