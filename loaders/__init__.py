"""Loaders: checkpoint bytes into host memory, without a detour over the GPU.

Imported as ``poros.loaders``; sees only layout, config, errors, host, nf4 and streams of poros.
"""
