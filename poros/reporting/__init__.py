"""A page about a run, from the events that it has written."""
