"""Operators of our own: 4-bit products, LoRA, DoRA, SwiGLU, the softmax in slices.

Each is a function with a reference of the same name and ``_ref`` beside it, in plain PyTorch: that
is what it computes on a CPU, and what the tests compare the GPU's kernel with. The kernels, in
Triton, are in a file of the same name and ``_gpu``, imported when they are first called: Triton
comes with PyTorch's builds for CUDA. On the meta device an operator makes the tensors that its
kernel makes, so that a plan sees them.
"""
