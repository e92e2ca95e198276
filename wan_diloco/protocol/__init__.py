"""Decisions: pure state machines of the syncer and the learner.

Standard library only; no I/O, no clock, no tensors, and no randomness that isn't passed in.
"""
