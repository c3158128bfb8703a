"""Where measured code runs: what it sees, for how long, and what is read of it afterwards."""
