"""Merges an adapter into its base, shard by shard."""
