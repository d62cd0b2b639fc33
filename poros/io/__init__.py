"""Files: read, written whole or not at all, told apart by digests."""
