"""Stage 1: run the user's script unedited in a child process and leave raw artifacts."""
