"""Vocabulary matrices in host memory, and the loss in slices."""
