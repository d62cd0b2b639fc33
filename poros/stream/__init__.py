"""The step: layers whose frozen tensors are streamed, in the graph of their forward."""
