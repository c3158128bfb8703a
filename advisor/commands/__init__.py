"""The commands that have a file of their own: options in, an exit status out."""
