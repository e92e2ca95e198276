"""Emulated wide-area links, for tests and measurements: they need root, and leave nothing behind."""
