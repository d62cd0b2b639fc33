"""Loaders: checkpoint bytes into host memory, without a detour over the GPU.

Imported as ``poros.loaders``. Whatever is wrong with a file is a ``CheckpointFormatError`` that
names it, an option that cannot be honoured a ``PolicyError``, and a store that cannot be written a
``StoreWriteError``, of which nothing is left. Docstrings name other errors alone.
"""
