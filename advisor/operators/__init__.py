"""What a recorded operator call computes and moves: floating-point operations and least bytes, by its inputs."""
