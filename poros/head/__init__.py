"""What surrounds the layers: matrices of the vocabulary in host memory, and the loss in slices."""
