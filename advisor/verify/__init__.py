"""Stage 7: prove that a rewrite computes the same and measure whether it is faster."""
