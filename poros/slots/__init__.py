"""Device slots, who may change them, and the order in which blocks pass through them."""
