"""One streamed layer: its visit, its recomputation, and all that has to be as it was."""
