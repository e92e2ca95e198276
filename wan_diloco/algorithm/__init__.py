"""Tensor maths: what a fragment is, how deltas are coded and merged, and how the result becomes weights."""
