"""The command line. Each command has a file of its own; ``app`` puts them together.

Exit codes: 0 when everything that a command claims held, 1 when something did not, 2 for bad input.
Whatever is slow to import is imported inside the command that needs it.
"""
