"""Draws a page about a run, from its event log."""
