"""All micro-batches of an optimizer step go through a block before the next block comes."""
