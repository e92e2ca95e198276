"""The laboratory: emulated wide-area links, and faults that befall real processes."""
