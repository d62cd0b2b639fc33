"""Reads files, writes them whole or not at all, and computes digests."""
