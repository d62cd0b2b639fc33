"""An adapter merged into its base, shard by shard."""
