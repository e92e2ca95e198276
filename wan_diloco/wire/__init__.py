"""Bytes: what crosses the network, and back into values.

Decoders are total: whatever bytes come in, they return a value or raise `DecodeError`. No I/O here, and
no decision.
"""
