"""Gates: what shows that a streamed run equals a resident one, bit for bit.

Imported as ``poros.gates``. A gate compares integer views of the bits, never values within a
tolerance, and has a negative control: a deliberate fault that it must report.
"""
