"""The check of the first step on the user's machine, and comparing bits."""
