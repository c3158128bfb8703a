"""From a region of a captured graph to the expressions of the source that computed it."""
