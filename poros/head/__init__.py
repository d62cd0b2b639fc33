"""What surrounds the layers: matrices of the vocabulary, which stay in host memory."""
