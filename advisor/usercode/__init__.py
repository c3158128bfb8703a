"""What the user's source says, read without running it: loops, modules, values, what may be changed."""
