"""Checks the first step on the user's machine, and compares bits."""
